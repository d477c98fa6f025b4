from collections.abc import Callable, Sequence
from dataclasses import replace

from capplan import Assignment, Problem, Workload, plan
from capplan.planner import SolverContext
from capplan.planner.problem import Estimate, Estimator
from capplan.planner.solvers import REGISTRY
from capplan.spec import Objective
from capplan.testing import Capacity, example_problem

Make = Callable[..., Workload]


def solved(problem: Problem, objective: Objective, estimator: Estimator) -> Sequence[Assignment]:
    wished = replace(problem, workload=problem.workload.replace(objective=objective))
    return REGISTRY["capplan"].place(wished, SolverContext(estimator=estimator, twin=estimator))


def test_the_least_latency_uses_every_gpu() -> None:
    problem = example_problem(2, adapters=30, gpus=7)
    assert len(solved(problem, Objective.MIN_LATENCY, Capacity(rps=100.0))) == 7


def test_of_the_placements_tried_the_one_with_the_least_latency_is_taken() -> None:
    """Here an instance is the slower, the more ranks it mixes, or the other way round."""
    problem = example_problem(2, adapters=30, gpus=4)

    def ranks(assignment: Assignment) -> float:
        return float(len({share.rank for share in assignment.shares}))

    def mean_ranks(sign: float) -> float:
        answer = solved(
            problem, Objective.MIN_LATENCY, lambda a: Estimate(1.0, False, e2e_s_mean=10.0 + sign * ranks(a))
        )
        return sum(map(ranks, answer)) / len(answer)

    assert mean_ranks(1.0) < mean_ranks(-1.0)


def test_the_highest_throughput_leaves_the_most_headroom(workload: Make) -> None:
    """A plan for the highest load holds with far more headroom than one for the fewest GPUs."""
    adapters = tuple((f"a{i}", 8, 0.4) for i in range(16))
    wishes = workload(*adapters, objective="max_throughput")
    spread = plan(wishes, gpus=2, seeds=1)
    assert spread.totals.gpus == 2
    assert spread.verification.ok
    loads = [group.predicted.load_over_capacity for group in spread.groups]
    few = plan(workload(*adapters), gpus=2, seeds=1)
    assert max(load or 0.0 for load in loads) <= max(
        g.predicted.load_over_capacity or 0.0 for g in few.groups
    )


def test_at_the_highest_load_the_twin_compares_numbers_of_slots() -> None:
    """A guess prefers 2 slots; the twin, with 4 as the faster, has the last word."""

    def preferring(slots: int) -> Estimator:
        return lambda a: Estimate(1.0, False, e2e_s_mean=1.0 if a.a_max == slots else 1.1)

    problem = example_problem(2, adapters=8, gpus=1)
    wished = replace(problem, workload=problem.workload.replace(objective=Objective.MAX_THROUGHPUT))
    [chosen] = REGISTRY["capplan"].place(wished, SolverContext(estimator=preferring(2), twin=preferring(4)))
    assert chosen.a_max == 4
