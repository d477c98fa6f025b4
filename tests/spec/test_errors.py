"""Errors carry what a caller branches on, and say it on one line."""

import pickle

import pytest

from capplan import InfeasibleError, InputError
from capplan.errors import CapplanError


def test_input_error_says_where_what_and_which_value_on_one_line():
    error = InputError("must be a finite number >= 0", -3, "workload.yaml:12: adapters[1].rate_rps")
    assert str(error) == "workload.yaml:12: adapters[1].rate_rps: must be a finite number >= 0 (got -3)"
    assert (error.rule, error.value, error.exit_code) == ("must be a finite number >= 0", -3, 2)


def test_a_given_none_is_shown_and_an_absent_value_is_not():
    assert str(InputError("must be text", None)) == "must be text (got None)"
    assert str(InputError("is required")) == "is required"


@pytest.mark.parametrize("value", ["a\nb", "x" * 10_000, ["\n"] * 50])
def test_no_value_breaks_the_line_or_floods_it(value):
    message = str(InputError("must be\n short", value, "f\n"))
    assert "\n" not in message
    assert len(message) < 130


@pytest.mark.parametrize("error", [InputError("x" * 1_000_000), InfeasibleError("x" * 1_000_000, "gpus")])
def test_no_name_in_a_rule_floods_the_message(error):
    assert len(str(error)) < 4_000


def test_errors_are_caught_as_value_errors_and_as_capplan_errors():
    assert issubclass(InputError, ValueError)
    assert issubclass(InputError, CapplanError)


def test_infeasibility_carries_its_reason():
    error = InfeasibleError("needs 5 GPUs,\n 4 given", "gpus")
    assert (error.reason, error.exit_code, str(error)) == ("gpus", 3, "needs 5 GPUs, 4 given")


def test_errors_survive_the_way_back_from_another_process():
    for error in (InputError("rule", 3, "here"), InputError("rule"), InfeasibleError("m", "slo")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
