"""LoRAServe's placement (section IV-A) as a solver: demand and assignments.

All servers are used, with the demand spread evenly over them. Operating points of the ranks, measured by the
twin, convert tokens per second into servers. The demand is the declared one, since a plan has no history.
Every adapter on a server has a slot if memory allows. With a plan in force, servers are labelled so that the
fewest bytes of adapters are copied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from capplan.planner.problem._operating_points import OperatingPoints, adapter_demand
from capplan.planner.problem._previous import previous_instances
from capplan.planner.problem._problem import AdapterShare, Assignment, Problem, infeasible
from capplan.planner.problem._settings import most_slots
from capplan.planner.solvers._base import RequiredEstimator, Requirement, Solver, SolverContext
from capplan.serving.rebalancing import place
from capplan.spec import Plan


def _place(problem: Problem, context: SolverContext) -> tuple[Assignment, ...]:
    points = OperatingPoints(problem, context.seed, context.deadline)
    ranks = [adapter.rank for adapter in problem.traffic]
    return solve_loraserve(problem, points(ranks), _stored_adapters(context.previous, problem.gpus))


def _stored_adapters(previous: Plan | None, servers: int) -> list[frozenset[str]]:
    """Return the adapters of each instance of the plan in force; further servers store nothing."""
    held = [] if previous is None else [frozenset(each.fractions) for each in previous_instances(previous)]
    return (held + [frozenset[str]()] * servers)[:servers]


def solve_loraserve(
    problem: Problem,
    operating_points: Mapping[int, float],
    stored: Sequence[Collection[str]] | None = None,
) -> tuple[Assignment, ...]:
    """Place all adapters on all instances of a problem with one pool; other parameters as for `place`."""
    demands = [adapter_demand(problem, adapter) for adapter in problem.traffic]
    placement = place(demands, operating_points, problem.gpus, stored=stored)
    if placement.target > 1.0:
        demand, headroom = placement.target * problem.gpus, problem.workload.headroom
        raise infeasible(
            "gpus",
            f"the demand is what {demand:.2f} instances sustain at their operating points, and there are "
            f"{problem.gpus}; with headroom {headroom:g} it takes {math.ceil(demand / (1.0 - headroom))}",
        )
    numbers: Counter[str] = Counter()
    assignments = []
    for fractions in placement.shares:  # servers without adapters are left out
        adapters = [adapter for adapter in problem.traffic if adapter.name in fractions]
        shares = tuple(AdapterShare.of(a, fractions[a.name], numbers[a.name]) for a in adapters)
        numbers.update(fractions.keys())
        if shares:
            assignments.append(Assignment(shares, most_slots(problem, shares)))
    return tuple(assignments)


LORASERVE = Solver(
    name="loraserve",
    summary="servers for each rank by their operating points, adapters packed on them in shares",
    source="LoRAServe, section IV-A, Algorithm 1",
    place=_place,
    uses_all_gpus=True,
    required_estimator=RequiredEstimator.TWIN,
    divides=True,
    estimator="twin",
    supports=frozenset({Requirement.MAX_REPLICAS, Requirement.PREVIOUS_PLAN}),
)
