"""Formulas of the step-latency forms."""

import numpy as np
import pytest

from capplan import errors
from capplan.models import (
    ADDITIVE,
    StepFeatures,
    StepRanks,
    coefficient_array,
    latency_code,
    latency_form,
    rank_ms,
    step_ms,
)
from capplan.models._step_latency import DIGITAL_TWIN, FORMS, TABLE, LatencyForm
from capplan.spec import Kernel
from tests.twin.examples import part

STEP = StepFeatures(
    tokens=600.0,
    requests=100.0,
    kv_tokens=30_000.0,
    adapters=10.0,
    a_max=32.0,
    s_max=40.0,
    waiting=2000.0,
    slots_per_adapter=0.25,
    adapters_served=128.0,
)


def test_every_coefficient_of_the_additive_form_adds_its_own_part() -> None:
    expected = {
        "base_ms": 1.0,
        "ms_per_ktoken": 0.6,
        "ms_per_kv_ktoken": 30.0,
        "ms_per_slot": 32.0,
        "ms_per_slot_ktoken": 32 * 0.6,
        "ms_per_slot_rank16": 32.0 * 2.5,
        "ms_per_adapter": 10.0,
        "ms_per_adapter_rank16": 10.0 * 2.5,
        "ms_per_adapter_small_rank16": 0.0,
        "ms_per_adapter_krequest": 10 * 0.1,
        "ms_per_adapter_queued": 10.0,
        "ms_per_waiting_krequest": 2 * 0.75,
        "ms_per_ktoken_beyond_graphs": 0.088,
    }
    assert set(expected) == set(ADDITIVE.coefficients)
    for at, name in enumerate(ADDITIVE.coefficients):
        one = np.zeros(len(ADDITIVE.coefficients))
        one[at] = 1.0
        assert step_ms(ADDITIVE.code, one, STEP) == pytest.approx(expected[name]), name


def milliseconds(**changes: float) -> float:
    return step_ms(ADDITIVE.code, np.ones(len(ADDITIVE.coefficients)), STEP._replace(**changes))


def test_an_empty_queue_costs_nothing_extra() -> None:
    assert milliseconds() - milliseconds(waiting=0.0) == pytest.approx(10 + 1.5)


def test_tokens_beyond_the_graphs_cost_more_each_and_no_step_jumps_there() -> None:
    each = 0.001 * (1 + 32)
    assert milliseconds(tokens=512.0) - milliseconds(tokens=511.0) == pytest.approx(each)
    assert milliseconds(tokens=513.0) - milliseconds(tokens=512.0) == pytest.approx(each + 0.001)


def test_adapters_cost_blocks_of_16_ranks_in_steps_of_few_tokens() -> None:
    drop = milliseconds(tokens=127.0) - milliseconds(tokens=128.0)
    assert drop == pytest.approx(10 * 3 - 0.001 * (1 + 32))


def test_the_digital_twin_form_is_the_papers_equation() -> None:
    k = np.array([0.01, 0.02, -0.003, 0.4, 5.0, 0.06, 1.0])
    scheduler = 0.01 * 100 + 0.02 * 2000 - 0.003 * 2000 * (10 / 128)
    expected = scheduler + (0.4 * 100 + 5.0) * (0.06 * 10 + 1.0)
    assert step_ms(DIGITAL_TWIN.code, k, STEP) == pytest.approx(expected)
    assert step_ms(DIGITAL_TWIN.code, k, STEP._replace(a_max=128.0)) == pytest.approx(expected)
    none = STEP._replace(adapters=0.0, a_max=0.0, adapters_served=0.0)
    assert step_ms(DIGITAL_TWIN.code, k, none) == pytest.approx(0.01 * 100 + 0.02 * 2000 + 45.0)


def test_coefficients_come_in_the_order_of_their_form() -> None:
    shuffled = {name: float(i) for i, name in reversed(list(enumerate(ADDITIVE.coefficients)))}
    assert coefficient_array(part("additive", **shuffled)).tolist() == list(range(len(shuffled)))


@pytest.mark.parametrize("kernel", Kernel)
@pytest.mark.parametrize("form", [each for each in FORMS if each is not TABLE], ids=lambda form: form.name)
def test_every_form_takes_time_under_every_kernel(form: LatencyForm, kernel: Kernel) -> None:
    """A form that the dispatch does not reach takes none."""
    code, k = latency_code(form.name, kernel), np.ones(len(form.coefficients))
    ranks = StepRanks(*np.ones(len(StepRanks._fields)))
    assert step_ms(code, k, STEP) + rank_ms(code, k, 16.0, ranks) > 1.0


def test_an_unknown_form_is_an_input_error_that_lists_the_known_ones() -> None:
    with pytest.raises(errors.InputError, match="additive, digital-twin"):
        latency_form("quadratic")


def test_a_coefficient_that_the_form_does_not_have_is_refused() -> None:
    model = part(
        "toppings-bgmv", decode_alpha=1.0, decode_beta=1.0, prefill_alpha=1.0, prefill_beta=1.0, base=1.0
    )
    with pytest.raises(errors.InputError, match=r"step_latency\.coefficients\.base"):
        coefficient_array(model)
