from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.errors import InfeasibleError
from capplan.planner.parts import equal_shares, split_hot
from capplan.planner.problem import Assignment, Estimate, Estimator, Part, Problem, distinct_adapters
from capplan.planner.slots import choose_slots
from capplan.planner.solvers.balanced import solve_balanced, spread_by_rank, spread_mixed
from capplan.planner.solvers.greedy import solve_greedy
from capplan.spec import EngineConfig
from capplan.testing import Capacity, example_problem


def balanced(problem: Problem, estimator: Estimator) -> Sequence[Assignment]:
    return solve_balanced(problem, estimator, estimator)


@pytest.mark.parametrize("spread", [spread_by_rank, spread_mixed])
@given(seed=st.integers(0, 10_000), adapters=st.integers(1, 80), gpus=st.integers(1, 20))
def test_a_spread_places_every_part_once_and_keeps_shares_apart(
    spread: Any, seed: int, adapters: int, gpus: int
) -> None:
    problem = example_problem(seed, adapters, gpus)
    shares = min(gpus, 1 + seed % 4)
    parts = (*equal_shares(problem.parts[0], shares), *problem.parts[1:])
    loads = spread(replace(problem, parts=parts), gpus)
    placed = [part for load in loads for part in load]
    assert sorted(placed, key=lambda p: (p.name, p.number)) == sorted(parts, key=lambda p: (p.name, p.number))
    assert all(distinct_adapters(load) == len(load) for load in loads)


@given(seed=st.integers(0, 10_000), gpus=st.integers(1, 8))
def test_mixed_loads_differ_by_at_most_the_heaviest_part(seed: int, gpus: int) -> None:
    problem = example_problem(seed, 40, gpus)
    loads = [sum(map(problem.offered_tok_s, load)) for load in spread_mixed(problem, gpus)]
    assert max(loads) - min(loads) <= max(map(problem.offered_tok_s, problem.parts)) + 1e-9


@given(
    seed=st.integers(0, 10_000),
    adapters=st.integers(1, 120),
    rps=st.floats(1.5, 20.0),
    slot_rps=st.floats(0.0, 0.05),
)
def test_never_uses_more_gpus_than_the_greedy_algorithm(
    seed: int, adapters: int, rps: float, slot_rps: float
) -> None:
    problem, estimator = example_problem(seed, adapters, gpus=60), Capacity(rps, slot_rps)
    try:
        greedy = solve_greedy(problem, estimator)
    except InfeasibleError:
        return
    assert len(balanced(problem, estimator)) <= len(greedy)


@pytest.mark.parametrize("shares", [2, 3, 7])
def test_an_adapter_too_hot_for_one_gpu_is_split_and_its_shares_sum_to_one(shares: int) -> None:
    problem, estimator = example_problem(0, adapters=6, gpus=12), Capacity(rps=4.0)
    hot = problem.workload.adapters[0].replace(rate_rps=4.0 * shares - 0.5)
    problem = with_adapter(problem, hot)
    parts = split_hot(problem, estimator)
    mine = [part for part in parts if part.name == hot.name]
    assert len(mine) == shares
    assert sum(part.share for part in mine) == pytest.approx(1.0, abs=1e-12)
    answer = balanced(replace(problem, parts=parts), estimator)
    assert sum(any(p.name == hot.name for p in a.parts) for a in answer) == shares


def test_a_cold_adapter_of_a_costlier_kind_is_split_although_hotter_ones_are_not() -> None:
    """Load in tokens does not tell what is too hot: ranks and lengths count, too."""
    problem = example_problem(0, adapters=2, gpus=4)
    light = problem.workload.adapters[0].replace(rank=8, rate_rps=3.0)
    heavy = problem.workload.adapters[1].replace(rank=64, rate_rps=2.0)
    problem = with_adapter(with_adapter(problem, light), heavy)
    parts = split_hot(problem, Capacity(rps=4.0, rps_per_slot_of_rank_16=0.7))
    assert sorted(part.name for part in parts) == ["a0", "a1", "a1"]


def test_max_replicas_limits_the_shares() -> None:
    problem = example_problem(0, adapters=3, gpus=12)
    hot = problem.workload.adapters[0].replace(rate_rps=11.0, max_replicas=2)
    with pytest.raises(InfeasibleError, match="adapter a0") as error:
        split_hot(with_adapter(problem, hot), Capacity(rps=4.0))
    assert error.value.reason == "starvation"
    enough = hot.replace(max_replicas=3)
    assert len(split_hot(with_adapter(problem, enough), Capacity(rps=4.0))) == 5


def test_a_large_rank_that_no_fixed_number_of_slots_leaves_room_for_is_a_matter_of_memory() -> None:
    """Also when the adapter is cold, so that nobody would look at it for being hot."""
    problem = example_problem(0, adapters=6, gpus=12, engine=EngineConfig(max_loras=64))
    large = problem.workload.adapters[3].replace(rank=512, rate_rps=0.0)
    with pytest.raises(InfeasibleError, match="a3") as error:
        split_hot(with_adapter(problem, large), Capacity(rps=4.0))
    assert error.value.reason == "memory"


def with_adapter(problem: Problem, adapter: Any) -> Problem:
    """Return the problem with this adapter in place of the one of its name."""
    from capplan.planner.parts import whole_parts

    adapters = tuple(adapter if a.name == adapter.name else a for a in problem.workload.adapters)
    changed = replace(problem, workload=problem.workload.replace(adapters=adapters))
    return replace(changed, parts=whole_parts(changed))


def test_of_slots_that_serve_as_much_those_with_the_shortest_wait_are_taken() -> None:
    """A nearly idle GPU serves its whole load with any number of slots; the wait tells them apart."""
    problem = example_problem(0, 7, 1)

    def estimator(parts: Sequence[Part], a_max: int) -> Estimate:
        return Estimate(
            1000.0 + 5.0 * (a_max == 4), starved=False, ttft_s_p99={4: 12.0, 7: 0.09}.get(a_max, 90.0)
        )

    assert choose_slots(problem, problem.parts, estimator, estimator) == 7


def test_more_throughput_beats_a_shorter_wait() -> None:
    problem = example_problem(0, 7, 1)

    def estimator(parts: Sequence[Part], a_max: int) -> Estimate:
        return Estimate(1000.0 if a_max == 2 else 900.0, starved=False, ttft_s_p99=5.0 if a_max == 2 else 0.1)

    assert choose_slots(problem, problem.parts, estimator, estimator) == 2
