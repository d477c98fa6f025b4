"""The solver `capplan`: the fewest or cheapest instances, by local search with confirmation by the twin.

Surrogates choose fleet sizes and improve placements. The twin confirms every instance; the placement is
improved again after each refusal. If all GPUs are used, the objective selects the shortest latency or the
highest load.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from capplan.errors import InfeasibleError, InfeasibleReason
from capplan.planner.problem._bound import lower_bound, lower_bound_gpus
from capplan.planner.problem._execution import OutOfTimeError, no_progress, parallel_map
from capplan.planner.problem._previous import previous_instances
from capplan.planner.problem._problem import Estimator, Problem, infeasible
from capplan.planner.problem._settings import has_open_knobs
from capplan.planner.search._local_search import (
    Evaluator,
    LocalSearch,
    MoveSearch,
    Placement,
    available_gpus,
    fleet_cost,
    fleet_gpus,
    fleet_size_of,
    fleet_sizes,
    frequent_settings,
)
from capplan.planner.search._placement import (
    INITIAL_SOLUTIONS,
    InitialSolution,
    PlacementState,
    SearchData,
    build_search_data,
    keep_shares,
    levelled_start,
    placement_of,
    relieved_start,
    split_heavy_adapters,
    warm_start,
)
from capplan.planner.solvers._base import (
    RequiredEstimator,
    Requirement,
    Solver,
    SolverContext,
    broken_when_spread,
)
from capplan.planner.solvers._greedy import solve_greedy
from capplan.spec import Objective

_SMALL_PLAN: Final = 16
"""Instances up to which the twin compares neighbouring numbers of slots at the end."""
_SHARE_FOR_MOVES: Final = 0.25
"""Share of the time limit that is kept to reduce the moves of the answer."""
_LOAD_STEPS: Final = 8
_MAX_LOAD: Final = 100.0
"""Largest multiple of the load."""


def _place(problem: Problem, context: SolverContext) -> Placement:
    deadline_s = time.monotonic() + context.time_limit_s
    try:
        return _place_until(problem, context, deadline_s)
    finally:
        if time.monotonic() > deadline_s:
            context.on_cut()


def _place_until(problem: Problem, context: SolverContext, deadline_s: float) -> Placement:
    objective = problem.workload.objective
    if objective is Objective.MAX_THROUGHPUT:
        if context.deadline.is_limited:
            _report_unchanged(problem, context, deadline_s)
        return _maximize_load(problem, context, deadline_s)
    if context.insufficient_gpus == 0 and objective is not Objective.MIN_LATENCY:
        _report_first(problem, context, deadline_s)
    place = _place_from_scratch if context.previous is None else _place_near
    # A twin with a large margin first; the one with a small margin is used if that fails.
    for twin in (context.conservative_twin or context.twin, context.twin):
        answer = place(problem, context, deadline_s, twin)
        if answer is not None:
            return answer
    raise _too_few_gpus(problem, context, deadline_s)


def _report_first(problem: Problem, context: SolverContext, deadline_s: float) -> None:
    """Report a placement on few GPUs, as the answer of a search that is ended.

    Fleets of as many GPUs as the lower bound, twice as many, and so on are placed at once, without
    improvements, until the twin confirms one; the largest fleet is searched if it refuses all.
    """
    data = build_search_data(problem)
    search = _local_search(data, context, deadline_s, context.twin, opens_knobs=False)
    fleets = fleet_sizes(problem, len(data.groups))
    least = lower_bound_gpus(problem)
    for number, fleet in enumerate(fleets):
        last = number == len(fleets) - 1
        if fleet_gpus(problem, fleet) < least and not last:
            continue
        least = 2 * fleet_gpus(problem, fleet)
        if search.timed_out or search.search_unchanged(fleet).confirmed is not None:
            return
        if last:
            search.search_fleet(fleet)


def _report_unchanged(problem: Problem, context: SolverContext, deadline_s: float) -> None:
    """Report the first placement on all GPUs that the twin confirms as it is, for a search that is ended."""
    data = build_search_data(problem)
    search = _local_search(data, context, deadline_s, context.twin, opens_knobs=False)
    (fleet,) = fleet_sizes(problem, len(data.groups))
    search.search_unchanged(fleet)


def _place_from_scratch(
    problem: Problem,
    context: SolverContext,
    deadline_s: float,
    twin: Estimator,
    known: Placement | None = None,
) -> Placement | None:
    """Return the best placement without regard to the plan in force; a known one if none costs less."""
    bound = max(lower_bound_gpus(problem), context.insufficient_gpus + 1)
    search_data = _search_data(problem)
    for opens_knobs in _knob_stages(problem):
        for data in search_data[-1:] if opens_knobs else search_data:
            search = _local_search(data, context, deadline_s, twin, opens_knobs)
            known = _search(search, bound, known)
    return known


def _place_near(
    problem: Problem, context: SolverContext, deadline_s: float, twin: Estimator
) -> Placement | None:
    """Return the placement of least cost with the price of its moves.

    The better one of the first placement near the plan in force and of the search from scratch is brought
    nearer to the plan in force.
    """
    near = _move_search(problem, context, deadline_s, twin)
    first = near.search(None)
    by_cost = problem.workload.objective in (Objective.MIN_GPUS, Objective.MIN_COST)
    scratch_s = deadline_s - _SHARE_FOR_MOVES * context.time_limit_s
    from_scratch = _place_from_scratch(problem, context, scratch_s, twin, first if by_cost else None)
    known = min((each for each in (first, from_scratch) if each is not None), key=near.cost, default=None)
    if known is not first:
        near = _move_search(problem, context, deadline_s, twin, known or ())
    answer = near.search(known)
    if answer is None:
        return None
    if by_cost:
        with suppress(OutOfTimeError):
            for other in near.alternatives(answer):
                context.on_alternative(_tune_slots(near.local, other))
    is_tuned = answer is from_scratch and answer is not first
    return answer if is_tuned else _tune_slots(near.local, answer)


def _knob_stages(problem: Problem) -> tuple[bool, ...]:
    """Return whether knobs are open in each stage of the search: first with the defaults, then open."""
    searched = any(has_open_knobs(problem, pool) for pool in range(len(problem.pools)))
    return (False, True) if searched else (False,)


def _search_data(problem: Problem) -> tuple[SearchData, ...]:
    """Return the data of the problem as given and, if adapters are heavy, with these in light shares.

    The base model is always in light shares: they cost no slot.
    """
    data = build_search_data(problem)
    if problem.workload.base is not None:
        data = build_search_data(split_heavy_adapters(data, only=problem.workload.base_model))
        problem = data.problem
    divided = split_heavy_adapters(data)
    return (data,) if divided is problem else (data, build_search_data(divided))


def _search(search: LocalSearch, bound: int, known: Placement | None) -> Placement | None:
    """Return a placement better than the known one, or the known one."""
    problem = search.data.problem
    order = fleet_sizes(problem, len(search.data.groups))
    if problem.workload.objective is Objective.MIN_LATENCY:
        if known is not None and search.evaluator.opens_knobs:
            return known
        found = search.min_latency(order[0])
        both = (each for each in (known, found) if each is not None)
        return min(both, key=search.mean_e2e_s, default=None)
    order = [fleet for fleet in order if fleet_gpus(problem, fleet) >= bound]
    if known is not None:
        best = fleet_cost(problem, fleet_size_of(problem, known))
        order = [fleet for fleet in order if fleet_cost(problem, fleet) < best]
    if not search.evaluator.opens_knobs:
        answer = search.search(order)
        return known if answer is None else _tune_slots(search, answer)
    answer = search.search(order) if known is None else search.shrink(order)
    return known if answer is None else tuple(parallel_map(search.evaluator.tune_knobs, answer))


def _tune_slots(search: LocalSearch, answer: Placement) -> Placement:
    return search.tune_slots(answer) if len(answer) <= _SMALL_PLAN else answer


def _local_search(
    data: SearchData, context: SolverContext, deadline_s: float, twin: Estimator, opens_knobs: bool
) -> LocalSearch:
    surrogate = context.surrogate or context.estimator
    greedy: InitialSolution = partial(_greedy_solution, surrogate)
    evaluator = Evaluator(data, surrogate, twin, opens_knobs, deadline=context.deadline)
    return LocalSearch(data, evaluator, deadline_s, (*INITIAL_SOLUTIONS, greedy), context.on_answer)


def _move_search(
    problem: Problem, context: SolverContext, deadline_s: float, twin: Estimator, answer: Placement = ()
) -> MoveSearch:
    """Return the search near the plan in force, with the engine settings of that plan and of an answer."""
    groups = () if context.previous is None else context.previous.groups
    old = () if context.previous is None else previous_instances(context.previous)
    engines = [*map(problem.engine_args, answer), *(group.engine_args for group in groups)]
    data = build_search_data(keep_shares(problem, old))
    surrogate = context.surrogate or context.estimator
    settings = frequent_settings(engines)
    evaluator = Evaluator(data, surrogate, twin, other_settings=settings, deadline=context.deadline)

    def holds(members: frozenset[int], pool: int) -> bool:
        return time.monotonic() < deadline_s and evaluator.holds(members, pool)

    relieved = relieved_start(old, holds, evaluator.is_mostly_overloaded)
    starts = (warm_start(old), relieved, levelled_start(old))
    return MoveSearch(problem, old, LocalSearch(data, evaluator, deadline_s, starts, context.on_answer))


def _greedy_solution(estimator: Estimator, data: SearchData, pools: Sequence[int]) -> PlacementState | None:
    """Return the placement of the greedy solver: instances of different ranks, unevenly full.

    None if it has no answer, breaks a constraint, or there are several pools.
    """
    problem = data.problem
    if len(problem.pools) > 1:
        return None
    pool = replace(problem.pools[0], instances=len(pools))
    try:
        answer = solve_greedy(replace(problem, pools=(pool,)), estimator)
    except InfeasibleError:
        return None
    number = {share: group for group, each in enumerate(data.groups) for share in each.shares}
    members = [{number[share] for share in assignment.shares} for assignment in answer]
    if sum(map(len, members)) != len(data.groups):
        return None  # a group is on two instances
    apart = all(data.conflicts.get(g, frozenset()).isdisjoint(groups) for groups in members for g in groups)
    return placement_of(data, [0] * len(members), members) if apart else None


def _maximize_load(problem: Problem, context: SolverContext, deadline_s: float) -> Placement:
    """Return the placement on all instances that holds at the highest multiple of the load, by bisection."""

    def search_at(headroom: float) -> tuple[LocalSearch, Placement] | None:
        workload = problem.workload.model_copy(update={"headroom": headroom})
        loaded = replace(problem, workload=workload)
        scaled = replace(context.for_problem(loaded), on_answer=no_progress)
        if context.previous is not None:
            near = _move_search(loaded, scaled, deadline_s, scaled.twin)
            answer = near.search(None)
            if answer is not None:
                return near.local, answer
        stages = itertools.product(_knob_stages(loaded), reversed(_search_data(loaded)))
        for opens_knobs, data in stages:
            (fleet,) = fleet_sizes(loaded, len(data.groups))
            search = _local_search(data, scaled, deadline_s, scaled.twin, opens_knobs)
            answer = search.search_fleet(fleet)
            if answer is not None:
                return search, answer
        return None

    holds = problem.load_with_headroom
    bound = lower_bound(problem).gpus
    best = search_at(problem.workload.headroom)
    if best is None:
        raise _too_few_gpus(problem, context, deadline_s)
    context.on_answer(best[1])
    fails = holds * min(_MAX_LOAD, available_gpus(problem) / bound if bound else _MAX_LOAD)
    for _ in range(_LOAD_STEPS):
        middle = math.sqrt(holds * fails)
        better = search_at(1.0 - 1.0 / middle) if time.monotonic() < deadline_s else None
        best, holds, fails = (best, holds, middle) if better is None else (better, middle, fails)
        context.on_answer(best[1])
    return _tune_slots(*best)


def _too_few_gpus(problem: Problem, context: SolverContext, deadline_s: float) -> InfeasibleError:
    """Return the error of a search without an answer, with the bound that breaks."""
    workload = problem.workload
    gpus = f"{available_gpus(problem)} GPU(s) with headroom {workload.headroom:g}"
    words = f"{len(workload.adapters)} adapters at {workload.total_rate_rps:g} req/s do not fit on {gpus}"
    reason: InfeasibleReason = "slo" if problem.bounds_latency else "gpus"
    if time.monotonic() > deadline_s:
        words, reason = f"no placement found in {context.time_limit_s:g} s on {gpus}", "time"
    bound = f"the lower bound is {lower_bound_gpus(problem)}"
    return infeasible(reason, "; ".join(filter(None, (words, broken_when_spread(problem), bound))))


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
