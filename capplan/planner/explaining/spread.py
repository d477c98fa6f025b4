"""What breaks when the load of a plan is spread evenly over other instances, whether they hold it or not."""

from __future__ import annotations

from dataclasses import replace
from statistics import median_low
from typing import Final

from capplan.planner.estimators import SEARCH_DURATION_S, TwinEstimator
from capplan.planner.explaining.fleet import Fleet
from capplan.planner.explaining.rebuild import RebuiltPlan
from capplan.planner.judging import Judged, judge
from capplan.planner.parallel import in_parallel
from capplan.planner.problem import Assignment, Problem
from capplan.planner.search.ground import survey
from capplan.planner.search.starts import mixed
from capplan.planner.slots import ranked_slots

MOST_INSTANCES: Final = 16
"""Beyond, it takes too many simulations for what it tells."""


def even_spread(rebuilt: RebuiltPlan, fleet: Fleet, seed: int) -> str:
    """Return in words what breaks with the load of a plan on a fleet; empty where it cannot be spread.

    Every instance gets the number of slots that the twin likes best, of those near the plan's.
    """
    if len(fleet.pools) > MOST_INSTANCES:
        return ""
    problem = replace(rebuilt.problem, parts=rebuilt.parts)
    near = median_low(each.assignment.a_max for each in rebuilt.groups)
    assignments = _spread(problem, fleet, near, seed)
    if not assignments:
        return ""
    return _in_words(in_parallel(lambda each: judge(problem, each, seed, SEARCH_DURATION_S), assignments))


def _spread(problem: Problem, fleet: Fleet, near: int, seed: int) -> list[Assignment]:
    """Return the instances of an even spread; none where an adapter or the slots find no place."""
    ground = survey(problem)
    board = mixed(ground, fleet.pools)
    if board is None:
        return []
    twin = TwinEstimator(problem, seed)
    assignments = []
    for members, pool in zip(board.members, fleet.pools, strict=True):
        if not members:
            continue
        parts = ground.parts(frozenset(members))
        ranked = ranked_slots(problem, parts, twin, pool, near=near)
        if not ranked:
            return []
        assignments.append(Assignment(parts, next(iter(ranked)), pool=pool))
    return assignments


def _in_words(judged: list[Judged]) -> str:
    failing = [each for each in judged if each.broken]
    if not failing:
        return "spread evenly, the planned load holds on one seed, but not over (1 - headroom)"
    worst = min(failing, key=lambda each: each.result.served_fraction)
    return (
        f"spread evenly, {len(failing)} of {len(judged)} break at the planned load, at worst "
        f"{' and '.join(worst.broken)}"
    )
