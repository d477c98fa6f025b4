from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from capplan import Assignment, EngineConfig, InfeasibleError, Problem
from capplan.planner import SolverContext
from capplan.planner.problem import Estimator, whole_adapters
from capplan.planner.solvers import REGISTRY
from capplan.planner.splitting import split_hot_adapters
from capplan.testing import Capacity, example_problem


def ours(problem: Problem, estimator: Estimator) -> Sequence[Assignment]:
    return REGISTRY["capplan"].place(problem, SolverContext(estimator=estimator, twin=estimator))


@pytest.mark.parametrize("count", [2, 3, 7])
def test_an_adapter_too_hot_for_one_gpu_is_split_and_its_shares_sum_to_one(count: int) -> None:
    problem, estimator = example_problem(0, adapters=6, gpus=12), Capacity(rps=4.0)
    hot = problem.workload.adapters[0].replace(rate_rps=4.0 * count - 0.5)
    problem = with_adapter(problem, hot)
    shares = split_hot_adapters(problem, estimator)
    mine = [share for share in shares if share.name == hot.name]
    assert len(mine) == count
    assert sum(share.fraction for share in mine) == pytest.approx(1.0, abs=1e-12)
    answer = ours(replace(problem, shares=shares), estimator)
    assert sum(any(p.name == hot.name for p in a.shares) for a in answer) == count


def test_a_cold_adapter_of_a_costlier_kind_is_split_although_hotter_ones_are_not() -> None:
    """Load in tokens does not tell what is too hot: ranks and lengths count, too."""
    problem = example_problem(0, adapters=2, gpus=4)
    light = problem.workload.adapters[0].replace(rank=8, rate_rps=3.0)
    heavy = problem.workload.adapters[1].replace(rank=64, rate_rps=2.0)
    problem = with_adapter(with_adapter(problem, light), heavy)
    shares = split_hot_adapters(problem, Capacity(rps=4.0, rps_per_slot_of_rank_16=0.7))
    assert sorted(share.name for share in shares) == ["a0", "a1", "a1"]


def test_max_replicas_limits_the_shares() -> None:
    problem = example_problem(0, adapters=3, gpus=12)
    hot = problem.workload.adapters[0].replace(rate_rps=11.0, max_replicas=2)
    with pytest.raises(InfeasibleError, match="adapter a0") as error:
        split_hot_adapters(with_adapter(problem, hot), Capacity(rps=4.0))
    assert error.value.reason == "starvation"
    enough = hot.replace(max_replicas=3)
    assert len(split_hot_adapters(with_adapter(problem, enough), Capacity(rps=4.0))) == 5


def test_a_large_rank_that_no_fixed_number_of_slots_leaves_room_for_is_a_matter_of_memory() -> None:
    """Also when the adapter is cold, so that nobody would look at it for being hot."""
    problem = example_problem(0, adapters=6, gpus=12, engine=EngineConfig(max_loras=64))
    large = problem.workload.adapters[3].replace(rank=512, rate_rps=0.0)
    with pytest.raises(InfeasibleError, match="a3") as error:
        split_hot_adapters(with_adapter(problem, large), Capacity(rps=4.0))
    assert error.value.reason == "memory"


def with_adapter(problem: Problem, adapter: Any) -> Problem:
    """Return the problem with this adapter in place of the one of its name."""
    adapters = tuple(adapter if a.name == adapter.name else a for a in problem.workload.adapters)
    changed = replace(problem, workload=problem.workload.replace(adapters=adapters))
    return replace(changed, shares=whole_adapters(changed))
