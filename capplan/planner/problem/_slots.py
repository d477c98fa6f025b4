"""Choice of the number of adapter slots (A_max) of an instance."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

from capplan.planner.problem._problem import (
    GRID,
    AdapterShare,
    Assignment,
    Estimate,
    Estimator,
    Problem,
    distinct_adapters,
    estimate_all,
)

_TWIN_CANDIDATES = 4
"""Numbers of slots that the twin simulates per instance."""
_THROUGHPUT_TOLERANCE = 0.02
"""Relative difference in throughput below the resolution of the estimators."""
_TIME_TOLERANCE = 0.03
"""Relative difference in request time within which more slots are preferred, for bursts."""


def choose_slots(
    problem: Problem,
    shares: Sequence[AdapterShare],
    estimator: Estimator,
    twin: Estimator,
    pool: int = 0,
    like: Assignment | None = None,
) -> int | None:
    """Return the best number of slots with which an instance holds these shares; None if there is none.

    `like` is an instance with the other engine settings; None: the problem's.

    An instance that keeps up serves the offered load with any number of slots. Among those that serve as
    much, the shortest mean time from arrival to last token decides: with too few slots requests wait, with
    too many every step is slow.
    """
    promising = slot_candidates(problem, shares, estimator, pool, like)[:_TWIN_CANDIDATES]
    return best_slots(_estimates(_settings_of(shares, pool, like), promising, twin))


def best_slots(estimates: Mapping[int, Estimate]) -> int | None:
    """Return the best number of slots among those with which the instance holds; None if there is none."""
    holding = {value: estimate for value, estimate in estimates.items() if not estimate.starved}
    return _rank(holding)[0] if holding else None


def slot_candidates(
    problem: Problem,
    shares: Sequence[AdapterShare],
    estimator: Estimator,
    pool: int = 0,
    like: Assignment | None = None,
) -> list[int]:
    """Return the numbers of slots that fit in memory, best first; those that starve last.

    `like` is an instance with the other engine settings; None: the problem's.
    """
    return list(rank_slots(problem, shares, estimator, pool, like=like))


def rank_slots(
    problem: Problem,
    shares: Sequence[AdapterShare],
    estimator: Estimator,
    pool: int = 0,
    near: int | None = None,
    like: Assignment | None = None,
) -> dict[int, Estimate]:
    """Return the estimates of all numbers of slots that fit in memory, best first.

    With `near`, only of the neighbouring numbers: for shares that differ little from others with that number.
    `like` is an instance with the other engine settings; None: the problem's.
    """
    values = slot_grid(problem, shares) if near is None else neighbouring_slots(problem, shares, near)
    settings = _settings_of(shares, pool, like)
    fitting = [value for value in values if problem.fits_in_memory(replace(settings, a_max=value))]
    estimates = _estimates(settings, fitting, estimator)
    holding = {value: estimate for value, estimate in estimates.items() if not estimate.starved}
    starving = {value: estimate for value, estimate in estimates.items() if estimate.starved}
    return {value: estimates[value] for value in _rank(holding) + _rank(starving)}


def slot_grid(problem: Problem, shares: Sequence[AdapterShare]) -> list[int]:
    """Return the numbers of slots to try: the grid up to one per adapter, which is all without slots."""
    if problem.fixed_a_max is not None:
        return [problem.fixed_a_max]
    distinct = distinct_adapters(shares)
    if not problem.has_slots:
        return [distinct]
    return sorted({value for value in GRID if value < distinct} | {distinct})


def neighbouring_slots(problem: Problem, shares: Sequence[AdapterShare], slots: int) -> list[int]:
    """Return a number of slots, or the next larger in the grid, with its two neighbours."""
    values = slot_grid(problem, shares)
    at = bisect_left(values, slots)
    return values[max(0, at - 1) : at + 2] or values[-1:]


def _settings_of(shares: Sequence[AdapterShare], pool: int, like: Assignment | None) -> Assignment:
    """Return an instance of a pool with these shares and one slot."""
    return replace(like or Assignment((), 1), shares=tuple(shares), a_max=1, pool=pool)


def _estimates(settings: Assignment, values: Sequence[int], estimator: Estimator) -> dict[int, Estimate]:
    assignments = [replace(settings, a_max=value) for value in values]
    return dict(zip(values, estimate_all(estimator, assignments), strict=True))


def _rank(estimates: Mapping[int, Estimate]) -> list[int]:
    """Sort numbers of slots: those that serve most by request time, then the rest by throughput."""
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
    """Return the fixed number of slots, or one per adapter as far as memory allows, but not none."""
    if problem.fixed_a_max is not None:
        return problem.fixed_a_max
    distinct = distinct_adapters(shares)
    return max(min(1, distinct), max_fitting_slots(problem, Assignment(tuple(shares), 1), distinct))


def max_fitting_slots(problem: Problem, assignment: Assignment, limit: int) -> int:
    """Return the largest number of slots up to a limit that fits in memory; 0 if none does."""

    def is_too_large(a_max: int) -> bool:
        return not problem.fits_in_memory(replace(assignment, a_max=a_max))

    return bisect_left(range(1, limit + 1), True, key=is_too_large)
