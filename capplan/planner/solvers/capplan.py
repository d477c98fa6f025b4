"""Our solver: the fewest or cheapest instances, found by guesses that the twin confirms.

Surrogates, or the fluid estimate's features where they know nothing of latency bounds, guess which fleet may
do and mend placements on it; the twin then decides instance by instance, and what it refuses is mended again.
With all GPUs to be used, the placement with the shortest latency is taken, or the one that holds at the
highest load.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Literal

from capplan.errors import InfeasibleError
from capplan.planner.bound import lower_bound, lower_bound_gpus
from capplan.planner.previous import previous_instances
from capplan.planner.problem import Assignment, Estimator, Problem
from capplan.planner.search.data import SearchData, build_search_data, split_heavy_adapters
from capplan.planner.search.evaluator import Evaluator
from capplan.planner.search.local_search import (
    LocalSearch,
    fleet_cost,
    fleet_gpus,
    fleet_size_of,
    fleet_sizes,
)
from capplan.planner.search.placement import INITIAL_SOLUTIONS, PlacementState, placement_of, warm_start
from capplan.planner.solvers.base import RequiredEstimator, Requirement, Solver, SolverContext
from capplan.planner.solvers.greedy import solve_greedy
from capplan.spec import Objective

_SMALL_PLAN: Final = 16

"""Instances up to which the twin compares numbers of slots once more."""

_LOAD_STEPS: Final = 8

_MAX_LOAD: Final = 100.0

"""Multiples of the load, beyond which nobody looks for the highest that holds."""


def _place(problem: Problem, context: SolverContext) -> tuple[Assignment, ...]:
    until_s = time.monotonic() + context.time_limit_s
    objective = problem.workload.objective
    if objective is Objective.MAX_THROUGHPUT:
        return _maximize_load(problem, context, until_s)
    bound, grounds = lower_bound_gpus(problem), _search_data(problem)
    for exact in (
        context.conservative_twin,
        context.twin,
    ):  # at the edge only where nothing else is to be had
        answer = None
        for ground in grounds:
            seeker = _local_search(ground, context, until_s, exact or context.twin)
            answer = _search(seeker, bound, answer)
        if answer is not None:
            return answer
    raise _too_few_gpus(problem, bound, late=time.monotonic() > until_s)


def _search_data(problem: Problem) -> tuple[SearchData, ...]:
    """Return what is placed: adapters as they come; then, where some are heavy, those in lighter shares."""
    ground = build_search_data(problem)
    lighter = split_heavy_adapters(ground)
    return (ground,) if lighter is problem else (ground, build_search_data(lighter))


def _search(
    seeker: LocalSearch, bound: int, known: tuple[Assignment, ...] | None
) -> tuple[Assignment, ...] | None:
    """Return the placement on the most wanted fleet, or the fastest on the only one; else the known one."""
    problem = seeker.ground.problem
    objective = problem.workload.objective
    order = fleet_sizes(problem, len(seeker.ground.units), objective)
    if objective is Objective.MIN_LATENCY:
        found = seeker.fastest(order[0])
        return min((each for each in (known, found) if each is not None), key=seeker.mean_s, default=None)
    order = [fleet for fleet in order if fleet_gpus(problem, fleet) >= bound]
    if known is not None:
        best = fleet_cost(problem, fleet_size_of(problem, known), objective)
        order = [fleet for fleet in order if fleet_cost(problem, fleet, objective) < best]
    answer = seeker.seek(order)
    return known if answer is None else _tune_slots(seeker, answer)


def _tune_slots(seeker: LocalSearch, answer: tuple[Assignment, ...]) -> tuple[Assignment, ...]:
    return seeker.polished(answer) if len(answer) <= _SMALL_PLAN else answer


def _local_search(
    ground: SearchData, context: SolverContext, until_s: float, exact: Estimator
) -> LocalSearch:
    judge = Evaluator(ground, context.surrogate or context.estimator, exact)
    first = () if context.previous is None else (warm_start(previous_instances(context.previous)),)
    return LocalSearch(
        ground, judge, until_s, (*first, *INITIAL_SOLUTIONS, partial(_greedy_solution, judge.quick))
    )


def _greedy_solution(estimator: Estimator, ground: SearchData, pools: Sequence[int]) -> PlacementState | None:
    """Return what the greedy algorithm makes of a fleet: instances of different ranks, filled unevenly.

    None where it finds nothing, and where it does not apply: for several pools, and for units that must not
    meet but do, or should but do not.
    """
    problem = ground.problem
    if len(problem.pools) > 1:
        return None
    only = replace(problem.pools[0], instances=len(pools))
    try:
        answer = solve_greedy(replace(problem, pools=(only,)), estimator)
    except InfeasibleError:
        return None
    number = {share: unit for unit, each in enumerate(ground.units) for share in each.shares}
    members = [{number[share] for share in assignment.shares} for assignment in answer]
    if sum(map(len, members)) != len(ground.units):
        return None
    apart = all(ground.foes.get(u, frozenset()).isdisjoint(units) for units in members for u in units)
    return placement_of(ground, [0] * len(members), members) if apart else None


def _maximize_load(problem: Problem, context: SolverContext, until_s: float) -> tuple[Assignment, ...]:
    """Return the placement on all instances that holds at the highest multiple of the load: by bisection.

    There the twin compares numbers of slots: whatever holds at a lower load, this is where they differ.
    """

    def at(headroom: float) -> tuple[LocalSearch, tuple[Assignment, ...]] | None:
        workload = problem.workload.model_copy(update={"headroom": headroom})
        loaded = replace(problem, workload=workload)
        asked = context.for_problem(loaded)
        for ground in reversed(_search_data(loaded)):
            (fleet,) = fleet_sizes(loaded, len(ground.units), Objective.MAX_THROUGHPUT)
            seeker = _local_search(ground, asked, until_s, asked.exact)
            answer = seeker.attempt(fleet)
            if answer is not None:
                return seeker, answer
        return None

    holds = 1.0 / (1.0 - problem.workload.headroom)
    bound = lower_bound(problem).gpus
    best = at(problem.workload.headroom)
    if best is None:
        raise _too_few_gpus(problem, lower_bound_gpus(problem), late=time.monotonic() > until_s)
    fails = holds * min(_MAX_LOAD, _available_gpus(problem) / bound if bound else _MAX_LOAD)
    for _ in range(_LOAD_STEPS):
        middle = math.sqrt(holds * fails)
        better = at(1.0 - 1.0 / middle) if time.monotonic() < until_s else None
        best, holds, fails = (best, holds, middle) if better is None else (better, middle, fails)
    return _tune_slots(*best)


def _available_gpus(problem: Problem) -> int:
    """Return how many GPUs there are."""
    return fleet_gpus(problem, tuple(pool.instances for pool in problem.pools))


def _too_few_gpus(problem: Problem, bound: int, *, late: bool) -> InfeasibleError:
    workload = problem.workload
    words = (
        "no placement found within the time limit on"
        if late
        else f"{len(workload.adapters)} adapters at {workload.total_rate_rps:g} req/s do not fit on"
    )
    gpus = _available_gpus(problem)
    reason: Literal["slo", "gpus"] = "slo" if workload.slo.latency_bounds() else "gpus"
    return InfeasibleError(
        f"{'time' if late else reason}: {words} {gpus} GPU(s) with headroom {workload.headroom:g}; the lower "
        f"bound is {bound}",
        reason="gpus" if late else reason,
    )


CAPPLAN = Solver(
    name="capplan",
    summary="the fewest or cheapest GPUs on which the twin confirms every one, or the least latency on all",
    source="ours",
    place=_place,
    required_estimator=RequiredEstimator.TWIN,
    splits_hot=True,
    confirms=True,
    divides=True,
    supports=frozenset(Requirement),
)
