"""Rules that every placement keeps."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from capplan import Adapter, Assignment, InputError, Problem, Workload, plan
from capplan.planner import Solver
from capplan.planner.problem import AdapterShare
from capplan.planner.problem._problem import broken_rules
from capplan.planner.problem._setup import make_problem
from tests.planner.conftest import PROFILE

Make = Callable[..., Workload]
Shares = Sequence[AdapterShare]

POOLS = tuple({"name": name, "profile": PROFILE, "count": 1} for name in ("first", "second"))


def together(shares: Shares) -> list[Shares]:
    return [shares]


def one_each(shares: Shares) -> list[Shares]:
    return [[share] for share in shares]


def without_the_last(shares: Shares) -> list[Shares]:
    return [shares[:-1]]


def twice(shares: Shares) -> list[Shares]:
    return [shares, shares]


def halved(shares: Shares) -> list[Shares]:
    half = [replace(share, fraction=0.5, rate_rps=share.rate_rps / 2) for share in shares]
    return [half, half]


def foreign(shares: Shares) -> list[Shares]:
    return [[*shares, AdapterShare("b", 8, 0.1)]]


@pytest.mark.parametrize(
    ("placed", "constraint", "words"),
    [
        (together, {}, None),
        (one_each, {}, None),
        (halved, {"max_replicas": 2}, None),
        (without_the_last, {}, "0 of the requests of a1 are placed"),
        (twice, {}, "2 of the requests of a0 are placed"),
        (foreign, {}, "b is not in the workload"),
        (together, {"apart_from": ("a0",)}, "a0 is with an adapter that it is apart_from"),
        (one_each, {"together_with": ("a0",)}, "a1 is not with a0, together_with it"),
        (halved, {"max_replicas": 1}, "a1 is on 2 instances, more than max_replicas"),
        (together, {"pool": "second"}, "a1 is in pool first, pinned to second"),
    ],
)
def test_the_first_broken_rule_is_named(
    workload: Make,
    placed: Callable[[Shares], list[Shares]],
    constraint: dict[str, object],
    words: str | None,
) -> None:
    adapters = (Adapter(name="a0", rank=8, rate_rps=0.1), Adapter(name="a1", rank=8, rate_rps=0.1))
    given = workload(profile=None, gpus=None, pools=POOLS, adapters=(adapters[0],))
    given = given.replace(adapters=(adapters[0], adapters[1].replace(**constraint)))
    problem = make_problem(given, None, None)
    # Instances fill the pools in their order.
    assignments = [Assignment(tuple(s), 1, pool=i) for i, s in enumerate(placed(problem.shares))]
    assert next(broken_rules(problem, assignments), None) == words


def test_more_instances_than_a_pool_has_break_a_rule(workload: Make) -> None:
    problem = make_problem(workload(("a0", 8, 0.1), ("a1", 8, 0.1), gpus={"count": 1}), None, None)
    assignments = [Assignment((share,), 1) for share in problem.shares]
    assert list(broken_rules(problem, assignments)) == ["2 instances of pool 0, which has 1"]


def test_a_solver_that_leaves_an_adapter_out_is_refused(workload: Make) -> None:
    """A single instance is simulated alone: that it lacks an adapter would not show."""

    def first_only(problem: Problem, *_: object) -> tuple[Assignment, ...]:
        return (Assignment(problem.shares[:1], 1),)

    solver = Solver("forgetful", "the first adapter only", "a test", first_only)
    with pytest.raises(InputError, match="solver forgetful: must return a valid placement: 0 of the"):
        plan(workload(("a0", 8, 0.1), ("a1", 8, 0.1)), solver=solver, seeds=1)
