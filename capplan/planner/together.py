"""All instances of a plan under one clock: the cluster twin routes every request by the plan's shares."""

from __future__ import annotations

from collections.abc import Sequence

from capplan.planner.judging import Judged, broken_bounds, twin_settings
from capplan.planner.problem import Assignment, Problem, replayed_s
from capplan.twin.cluster import Instance, simulate_cluster


def judge_together(
    problem: Problem, assignments: Sequence[Assignment], seed: int, duration_s: float
) -> list[Judged]:
    """Simulate the whole plan once, and return what the twin says of every instance.

    Parameters
    ----------
    problem, assignments
        The plan.
    seed
        Of the requests, and of who gets each of them.
    duration_s
        Simulated seconds; a trace is replayed as a whole.

    Raises
    ------
    InfeasibleError
        When an instance would not start.
    """
    workload = problem.workload
    instances = [_instance(problem, assignment) for assignment in assignments]
    length_s = replayed_s(workload, duration_s)
    cluster = simulate_cluster(workload, instances, router="plan-shares", duration_s=length_s, seed=seed)
    return [Judged(result, broken_bounds(workload.slo, result)) for result in cluster.instances]


def _instance(problem: Problem, assignment: Assignment) -> Instance:
    settings = twin_settings(problem, assignment, problem.workload)
    return Instance(problem.pools[assignment.pool].profile, adapters=assignment.shares, **settings)
