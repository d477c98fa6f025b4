"""The yardstick: as few GPUs as an exhaustive search finds, and never more than a heuristic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import Assignment, InfeasibleError, InputError, Problem
from capplan.planner import SolverContext
from capplan.planner.problem import AdapterShare, Estimator
from capplan.planner.problem._settings import choose_slots
from capplan.planner.solvers import registry
from capplan.testing import Capacity, example_problem


def placed(problem: Problem, estimator: Estimator, time_limit_s: float = 60.0) -> Sequence[Assignment]:
    return registry()["milp"].place(
        problem, SolverContext(estimator=estimator, twin=estimator, time_limit_s=time_limit_s)
    )


def gpus_needed(problem: Problem, estimator: Estimator) -> int | None:
    """Return the fewest GPUs over all divisions of the shares; None if none holds."""

    def search(left: Sequence[AdapterShare], gpus: list[list[AdapterShare]], fewest: int) -> int:
        if len(gpus) >= fewest:
            return fewest
        if not left:
            holds = all(choose_slots(problem, shares, estimator, estimator) is not None for shares in gpus)
            return len(gpus) if holds else fewest
        share, rest = left[0], left[1:]
        for at in range(len(gpus)):
            fewest = search(rest, [*gpus[:at], [*gpus[at], share], *gpus[at + 1 :]], fewest)
        return search(rest, [*gpus, [share]], fewest)

    found = search(problem.shares, [], problem.gpus + 1)
    return found if found <= problem.gpus else None


@settings(max_examples=25, derandomize=True)  # a proof may take long
@given(
    seed=st.integers(0, 10_000),
    adapters=st.integers(1, 6),
    rps=st.floats(1.0, 3.0),
    slot_rps=st.floats(0.0, 0.2),
    per_slot=st.sampled_from([1.0, 2.0]),
)
def test_uses_the_fewest_gpus_of_all_divisions(
    seed: int, adapters: int, rps: float, slot_rps: float, per_slot: float
) -> None:
    problem, estimator = example_problem(seed, adapters, gpus=3), Capacity(rps, slot_rps, per_slot)
    needed = gpus_needed(problem, estimator)
    if needed is None:
        with pytest.raises(InfeasibleError, match="by exhaustion"):
            placed(problem, estimator)
    else:
        assert len(placed(problem, estimator)) == needed


@pytest.mark.parametrize("seed", range(12))
def test_never_needs_more_gpus_than_a_heuristic(seed: int) -> None:
    problem, estimator = example_problem(seed, adapters=2 * seed + 2, gpus=4), Capacity(4.5, 0.02)
    ours = registry()["capplan"].place(problem, SolverContext(estimator=estimator, twin=estimator))
    assert len(placed(problem, estimator)) <= len(ours)


@pytest.mark.parametrize(("adapters", "gpus"), [(25, 2), (3, 5)])
def test_larger_cases_are_rejected_in_one_line(adapters: int, gpus: int) -> None:
    with pytest.raises(InputError, match=r"solver: milp solves at most 24 adapters") as error:
        placed(example_problem(0, adapters, gpus), Capacity(rps=4.0))
    assert len(str(error.value).splitlines()) == 1


def test_the_time_limit_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="within 0 s") as error:
        placed(example_problem(0, adapters=12, gpus=3), Capacity(rps=3.0), time_limit_s=0.0)
    assert error.value.reason == "time"


def test_shares_of_one_adapter_are_on_different_gpus() -> None:
    problem = example_problem(0, adapters=2, gpus=4)
    shares = tuple(AdapterShare("a0", 8, 0.1, 0.5, number) for number in range(2))
    answer = placed(replace(problem, shares=shares), Capacity(rps=4.0))
    assert [len(a.shares) for a in answer] == [1, 1]
