from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from capplan import Assignment, Problem, Workload, plan
from capplan.planner import SolverContext
from capplan.planner.problem import Estimate, Estimator
from capplan.planner.solvers import registry
from capplan.spec import Objective
from capplan.testing import Capacity, example_problem

Make = Callable[..., Workload]


def solved(problem: Problem, objective: Objective, estimator: Estimator) -> Sequence[Assignment]:
    changed = replace(problem, workload=problem.workload.replace(objective=objective))
    return registry()["capplan"].place(changed, SolverContext(estimator=estimator, twin=estimator))


def test_the_least_latency_uses_every_gpu() -> None:
    problem = example_problem(2, adapters=30, gpus=7)
    assert len(solved(problem, Objective.MIN_LATENCY, Capacity(rps=100.0))) == 7


def test_the_placement_with_the_least_latency_is_chosen() -> None:
    """Latency rises, or falls, with the number of ranks on an instance."""
    problem = example_problem(2, adapters=30, gpus=4)

    def ranks(assignment: Assignment) -> float:
        return float(len({share.rank for share in assignment.shares}))

    def mean_ranks(sign: float) -> float:
        answer = solved(
            problem, Objective.MIN_LATENCY, lambda a: Estimate(1.0, False, e2e_s_mean=10.0 + sign * ranks(a))
        )
        return sum(map(ranks, answer)) / len(answer)

    assert mean_ranks(1.0) < mean_ranks(-1.0)


@pytest.mark.long
def test_the_highest_throughput_leaves_the_most_headroom(workload: Make) -> None:
    adapters = tuple((f"a{i}", 8, 0.4) for i in range(16))
    spec = workload(*adapters, objective="max_throughput")
    spread = plan(spec, gpus=2, seeds=1)
    assert spread.totals.gpus == 2
    assert spread.verification.ok
    loads = [group.predicted.load_over_capacity for group in spread.groups]
    few = plan(workload(*adapters), gpus=2, seeds=1)
    assert max(load or 0.0 for load in loads) <= max(
        g.predicted.load_over_capacity or 0.0 for g in few.groups
    )


def test_max_throughput_compares_slots_with_the_twin() -> None:
    """The estimator prefers 2 slots, the twin 4."""

    def preferring(slots: int) -> Estimator:
        return lambda a: Estimate(1.0, False, e2e_s_mean=1.0 if a.a_max == slots else 1.1)

    problem = example_problem(2, adapters=8, gpus=1)
    changed = replace(problem, workload=problem.workload.replace(objective=Objective.MAX_THROUGHPUT))
    [chosen] = registry()["capplan"].place(
        changed, SolverContext(estimator=preferring(2), twin=preferring(4))
    )
    assert chosen.a_max == 4
