"""How many adapter slots a GPU gets once its adapters are known."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from capplan.planner.parallel import ask_all
from capplan.planner.problem import GRID, Assignment, Estimate, Estimator, Part, Problem, distinct_adapters

_CONFIRMED = 4
"""Slot numbers per GPU that the exact estimator is asked about."""
_SAME = 0.02
"""Relative difference of throughput that counts as none: less than estimators can tell."""
_SAME_TIME = 0.03
"""The same for the time of a request; more slots are then the better choice, since bursts need them."""


def choose_slots(
    problem: Problem, parts: Sequence[Part], quick: Estimator, exact: Estimator, pool: int = 0
) -> int | None:
    """Return the number of slots with which an instance holds these parts best; None if there is none.

    A GPU that keeps up serves the offered load whatever its slots, so among those that serve as much the
    shortest mean time from arrival to last token decides: with too few slots requests wait, with too many
    every step is slow.
    """
    promising = slot_candidates(problem, parts, quick, pool)[:_CONFIRMED]
    return best_slots(_asked(parts, promising, pool, exact))


def best_slots(estimates: Mapping[int, Estimate]) -> int | None:
    """Return the best number of slots among those with which the instance holds; None without any."""
    holding = {value: estimate for value, estimate in estimates.items() if not estimate.starved}
    return _by_merit(holding)[0] if holding else None


def slot_candidates(problem: Problem, parts: Sequence[Part], quick: Estimator, pool: int = 0) -> list[int]:
    """Return the numbers of slots that fit in memory, best first; those with which the GPU starves last."""
    return list(ranked_slots(problem, parts, quick, pool))


def ranked_slots(
    problem: Problem, parts: Sequence[Part], quick: Estimator, pool: int = 0, near: int | None = None
) -> dict[int, Estimate]:
    """Return what the estimator says of every number of slots that fits in memory, best first.

    With `near`, only of the numbers next to that one: for parts that differ little from some that it suits.
    """
    values = slot_numbers(problem, parts) if near is None else slots_near(problem, parts, near)
    everyone = tuple(parts)
    fitting = [v for v in values if problem.fits_in_memory(Assignment(everyone, v, pool=pool))]
    estimates = _asked(parts, fitting, pool, quick)
    holding = {value: estimate for value, estimate in estimates.items() if not estimate.starved}
    starving = {value: estimate for value, estimate in estimates.items() if estimate.starved}
    return {value: estimates[value] for value in _by_merit(holding) + _by_merit(starving)}


def slot_numbers(problem: Problem, parts: Sequence[Part]) -> list[int]:
    """Return the numbers of slots worth a try: the grid up to one for each adapter."""
    if problem.fixed_a_max is not None:
        return [problem.fixed_a_max]
    distinct = distinct_adapters(parts)
    return sorted({value for value in GRID if value < distinct} | {distinct})


def slots_near(problem: Problem, parts: Sequence[Part], slots: int) -> list[int]:
    """Return the numbers of slots next to one, and that one or the next larger."""
    values = slot_numbers(problem, parts)
    at = bisect_left(values, slots)
    return values[max(0, at - 1) : at + 2] or values[-1:]


def _asked(
    parts: Sequence[Part], values: Sequence[int], pool: int, estimator: Estimator
) -> dict[int, Estimate]:
    everyone = tuple(parts)
    assignments = [Assignment(everyone, value, pool=pool) for value in values]
    return dict(zip(values, ask_all(estimator, assignments), strict=True))


def _by_merit(estimates: Mapping[int, Estimate]) -> list[int]:
    """Return numbers of slots: those that serve most, by their time; then the rest, by throughput."""
    if not estimates:
        return []
    most = max(estimate.throughput_tok_s for estimate in estimates.values())
    equal = [v for v, estimate in estimates.items() if estimate.throughput_tok_s >= most * (1.0 - _SAME)]
    shortest = min(estimates[v].e2e_s_mean for v in equal)

    def merit(value: int) -> tuple[bool, bool, float, int]:
        estimate = estimates[value]
        if value not in equal:
            return True, False, -estimate.throughput_tok_s, -value
        slow = estimate.e2e_s_mean > shortest * (1.0 + _SAME_TIME)
        return False, slow, estimate.e2e_s_mean if slow else 0.0, -value

    return sorted(estimates, key=merit)
