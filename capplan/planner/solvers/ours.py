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
from capplan.planner.previous import instances_of
from capplan.planner.problem import Assignment, Estimator, Problem
from capplan.planner.search.board import Board, placed
from capplan.planner.search.divide import divided
from capplan.planner.search.fleets import fleet_of, fleets, gpus_of, wanted
from capplan.planner.search.ground import Ground, survey
from capplan.planner.search.judge import Judge
from capplan.planner.search.kept import kept
from capplan.planner.search.seek import Seeker
from capplan.planner.search.starts import EVEN
from capplan.planner.solvers.description import Asks, Solver, Tools, Wish
from capplan.planner.solvers.greedy import solve_greedy
from capplan.spec import Objective

_SMALL: Final = 16
"""Instances up to which the twin compares numbers of slots once more."""
_LOAD_STEPS: Final = 8
_MOST_LOAD: Final = 100.0
"""Multiples of the load, beyond which nobody looks for the highest that holds."""


def _place(problem: Problem, tools: Tools) -> tuple[Assignment, ...]:
    until_s = time.monotonic() + tools.time_limit_s
    objective = problem.workload.objective
    if objective is Objective.MAX_THROUGHPUT:
        return _at_the_highest_load(problem, tools, until_s)
    bound, grounds = lower_bound_gpus(problem), _grounds(problem)
    for exact in (tools.careful, tools.exact):  # at the edge only where nothing else is to be had
        answer = None
        for ground in grounds:
            seeker = _seeker(ground, tools, until_s, exact or tools.exact)
            answer = _sought(seeker, bound, answer)
        if answer is not None:
            return answer
    raise _too_few(problem, bound, late=time.monotonic() > until_s)


def _grounds(problem: Problem) -> tuple[Ground, ...]:
    """Return what is placed: adapters as they come; then, where some are heavy, those in lighter shares."""
    ground = survey(problem)
    lighter = divided(ground)
    return (ground,) if lighter is problem else (ground, survey(lighter))


def _sought(
    seeker: Seeker, bound: int, known: tuple[Assignment, ...] | None
) -> tuple[Assignment, ...] | None:
    """Return the placement on the most wanted fleet, or the fastest on the only one; else the known one."""
    problem = seeker.ground.problem
    objective = problem.workload.objective
    order = fleets(problem, len(seeker.ground.units), objective)
    if objective is Objective.MIN_LATENCY:
        found = seeker.fastest(order[0])
        return min((each for each in (known, found) if each is not None), key=seeker.mean_s, default=None)
    order = [fleet for fleet in order if gpus_of(problem, fleet) >= bound]
    if known is not None:
        best = wanted(problem, fleet_of(problem, known), objective)
        order = [fleet for fleet in order if wanted(problem, fleet, objective) < best]
    answer = seeker.seek(order)
    return known if answer is None else _polished(seeker, answer)


def _polished(seeker: Seeker, answer: tuple[Assignment, ...]) -> tuple[Assignment, ...]:
    return seeker.polished(answer) if len(answer) <= _SMALL else answer


def _seeker(ground: Ground, tools: Tools, until_s: float, exact: Estimator) -> Seeker:
    judge = Judge(ground, tools.hint or tools.quick, exact)
    first = () if tools.previous is None else (kept(instances_of(tools.previous)),)
    return Seeker(ground, judge, until_s, (*first, *EVEN, partial(_packed, judge.quick)))


def _packed(estimator: Estimator, ground: Ground, pools: Sequence[int]) -> Board | None:
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
    number = {part: unit for unit, each in enumerate(ground.units) for part in each.parts}
    members = [{number[part] for part in assignment.parts} for assignment in answer]
    if sum(map(len, members)) != len(ground.units):
        return None
    apart = all(ground.foes.get(u, frozenset()).isdisjoint(units) for units in members for u in units)
    return placed(ground, [0] * len(members), members) if apart else None


def _at_the_highest_load(problem: Problem, tools: Tools, until_s: float) -> tuple[Assignment, ...]:
    """Return the placement on all instances that holds at the highest multiple of the load: by bisection.

    There the twin compares numbers of slots: whatever holds at a lower load, this is where they differ.
    """

    def at(headroom: float) -> tuple[Seeker, tuple[Assignment, ...]] | None:
        workload = problem.workload.model_copy(update={"headroom": headroom})
        loaded = replace(problem, workload=workload)
        asked = tools.asking_about(loaded)
        for ground in reversed(_grounds(loaded)):
            (fleet,) = fleets(loaded, len(ground.units), Objective.MAX_THROUGHPUT)
            seeker = _seeker(ground, asked, until_s, asked.exact)
            answer = seeker.attempt(fleet)
            if answer is not None:
                return seeker, answer
        return None

    holds = 1.0 / (1.0 - problem.workload.headroom)
    bound = lower_bound(problem).gpus
    best = at(problem.workload.headroom)
    if best is None:
        raise _too_few(problem, lower_bound_gpus(problem), late=time.monotonic() > until_s)
    fails = holds * min(_MOST_LOAD, _gpus(problem) / bound if bound else _MOST_LOAD)
    for _ in range(_LOAD_STEPS):
        middle = math.sqrt(holds * fails)
        better = at(1.0 - 1.0 / middle) if time.monotonic() < until_s else None
        best, holds, fails = (best, holds, middle) if better is None else (better, middle, fails)
    return _polished(*best)


def _gpus(problem: Problem) -> int:
    """Return how many GPUs there are."""
    return gpus_of(problem, tuple(pool.instances for pool in problem.pools))


def _too_few(problem: Problem, bound: int, *, late: bool) -> InfeasibleError:
    workload = problem.workload
    words = (
        "no placement found within the time limit on"
        if late
        else f"{len(workload.adapters)} adapters at {workload.total_rate_rps:g} req/s do not fit on"
    )
    gpus = _gpus(problem)
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
    asks=Asks.TWIN,
    splits_hot=True,
    confirms=True,
    divides=True,
    honours=frozenset(Wish),
)
