"""Choices beside a plan from a plan in force: verified placements that move fewer adapters and cost more."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from pydantic import JsonValue

from capplan.errors import InfeasibleError
from capplan.planner.document._assemble import fleet_totals, move_sizes
from capplan.planner.problem._execution import OutOfTimeError, Progress
from capplan.planner.problem._previous import PreviousInstance, count_moves, name_groups
from capplan.planner.problem._problem import Assignment
from capplan.planner.search._local_search import fleet_cost, fleet_size_of
from capplan.planner.verification._verify import Verifier

_DIGITS: Final = 3
"""Digits of a price per move."""


def verified_choices(
    verifier: Verifier,
    plan: Sequence[Assignment],
    alternatives: Iterable[Sequence[Assignment]],
    old: Sequence[PreviousInstance],
    progress: Progress,
) -> list[JsonValue]:
    """Return the alternatives to a plan that are verified, cheapest first, as documents.

    ``move_cost`` of an alternative is the price of a move from which it costs less than the plan. One that is
    never the cheapest is left out.

    Parameters
    ----------
    verifier
        Verifier of the plan.
    plan, alternatives
        Placement of the plan, and placements with fewer moves, cheapest first.
    old
        Instances of the plan in force.
    progress
        Called with (stage, done, total).
    """
    problem = verifier.problem

    def cost(placement: Sequence[Assignment]) -> float:
        return fleet_cost(problem, fleet_size_of(problem, placement), problem.workload.objective)[0]

    moved, least = count_moves(problem, plan, old), cost(plan)
    found: list[tuple[float, Sequence[Assignment]]] = []
    for number, placement in enumerate(alternatives):
        progress("verifying fewer moves", number, number + 1)
        saved = moved - count_moves(problem, placement, old)
        extra = cost(placement) - least
        if saved > 0 and extra > 0.0 and _is_verified(verifier, placement):
            found = [*(each for each in found if each[0] < extra / saved), (extra / saved, placement)]
    return [
        {
            **fleet_totals(problem, placement).model_dump(exclude_none=True, exclude={"lower_bound_gpus"}),
            **move_sizes(problem, name_groups(problem, placement, old)[1], old),
            "move_cost": _rounded_up(price),
        }
        for price, placement in found
    ]


def _is_verified(verifier: Verifier, placement: Sequence[Assignment]) -> bool:
    try:
        return verifier.verdict(verifier.whole(placement)).verdict == "verified"
    except (InfeasibleError, OutOfTimeError):
        return False


def _rounded_up(price: float) -> float:
    """Return the least number of few digits above a price."""
    unit = 10.0 ** (math.floor(math.log10(price)) + 1 - _DIGITS)
    return float(f"{(math.floor(price / unit) + 1) * unit:.{_DIGITS}g}")
