"""Choice of the number of adapter slots (A_max) of an instance."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from capplan.planner.parallel import estimate_all
from capplan.planner.problem import (
    GRID,
    AdapterShare,
    Assignment,
    Estimate,
    Estimator,
    Problem,
    distinct_adapters,
)

_TWIN_CANDIDATES = 4
"""Slot numbers per GPU that the exact estimator is asked about."""

_THROUGHPUT_TOLERANCE = 0.02
"""Relative difference of throughput that counts as none: less than estimators can tell."""

_TIME_TOLERANCE = 0.03
"""The same for the time of a request; more slots are then the better choice, since bursts need them."""


def choose_slots(
    problem: Problem, shares: Sequence[AdapterShare], quick: Estimator, exact: Estimator, pool: int = 0
) -> int | None:
    """Return the number of slots with which an instance holds these shares best; None if there is none.

    A GPU that keeps up serves the offered load whatever its slots, so among those that serve as much the
    shortest mean time from arrival to last token decides: with too few slots requests wait, with too many
    every step is slow.
    """
    promising = slot_candidates(problem, shares, quick, pool)[:_TWIN_CANDIDATES]
    return best_slots(_estimates(shares, promising, pool, exact))


def best_slots(estimates: Mapping[int, Estimate]) -> int | None:
    """Return the best number of slots among those with which the instance holds; None without any."""
    holding = {value: estimate for value, estimate in estimates.items() if not estimate.starved}
    return _rank(holding)[0] if holding else None


def slot_candidates(
    problem: Problem, shares: Sequence[AdapterShare], quick: Estimator, pool: int = 0
) -> list[int]:
    """Return the numbers of slots that fit in memory, best first; those with which the GPU starves last."""
    return list(rank_slots(problem, shares, quick, pool))


def rank_slots(
    problem: Problem, shares: Sequence[AdapterShare], quick: Estimator, pool: int = 0, near: int | None = None
) -> dict[int, Estimate]:
    """Return what the estimator says of every number of slots that fits in memory, best first.

    With `near`, only of the numbers next to that one: for shares that differ little from some that it suits.
    """
    values = slot_grid(problem, shares) if near is None else neighbouring_slots(problem, shares, near)
    everyone = tuple(shares)
    fitting = [v for v in values if problem.fits_in_memory(Assignment(everyone, v, pool=pool))]
    estimates = _estimates(shares, fitting, pool, quick)
    holding = {value: estimate for value, estimate in estimates.items() if not estimate.starved}
    starving = {value: estimate for value, estimate in estimates.items() if estimate.starved}
    return {value: estimates[value] for value in _rank(holding) + _rank(starving)}


def slot_grid(problem: Problem, shares: Sequence[AdapterShare]) -> list[int]:
    """Return the numbers of slots worth a try: the grid up to one for each adapter."""
    if problem.fixed_a_max is not None:
        return [problem.fixed_a_max]
    distinct = distinct_adapters(shares)
    return sorted({value for value in GRID if value < distinct} | {distinct})


def neighbouring_slots(problem: Problem, shares: Sequence[AdapterShare], slots: int) -> list[int]:
    """Return the numbers of slots next to one, and that one or the next larger."""
    values = slot_grid(problem, shares)
    at = bisect_left(values, slots)
    return values[max(0, at - 1) : at + 2] or values[-1:]


def _estimates(
    shares: Sequence[AdapterShare], values: Sequence[int], pool: int, estimator: Estimator
) -> dict[int, Estimate]:
    everyone = tuple(shares)
    assignments = [Assignment(everyone, value, pool=pool) for value in values]
    return dict(zip(values, estimate_all(estimator, assignments), strict=True))


def _rank(estimates: Mapping[int, Estimate]) -> list[int]:
    """Return numbers of slots: those that serve most, by their time; then the rest, by throughput."""
    if not estimates:
        return []
    most = max(estimate.throughput_tok_s for estimate in estimates.values())
    equal = [
        v
        for v, estimate in estimates.items()
        if estimate.throughput_tok_s >= most * (1.0 - _THROUGHPUT_TOLERANCE)
    ]
    shortest = min(estimates[v].e2e_s_mean for v in equal)

    def merit(value: int) -> tuple[bool, bool, float, int]:
        estimate = estimates[value]
        if value not in equal:
            return True, False, -estimate.throughput_tok_s, -value
        slow = estimate.e2e_s_mean > shortest * (1.0 + _TIME_TOLERANCE)
        return False, slow, estimate.e2e_s_mean if slow else 0.0, -value

    return sorted(estimates, key=merit)


def most_slots(problem: Problem, shares: Sequence[AdapterShare]) -> int:
    """Return the largest number of slots that fits in memory, at most the adapters there.

    A number that the workload fixes stays. Where not even one slot fits, the answer is 1 all the same.
    """
    if problem.fixed_a_max is not None:
        return problem.fixed_a_max
    everyone = tuple(shares)
    fits, most = 1, distinct_adapters(shares)
    while fits < most:
        middle = (fits + most + 1) // 2
        if problem.fits_in_memory(Assignment(everyone, middle)):
            fits = middle
        else:
            most = middle - 1
    return fits
