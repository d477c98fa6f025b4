"""How many adapter slots a GPU gets once its adapters are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from capplan.planner.parallel import in_parallel
from capplan.planner.problem import GRID, Estimate, Estimator, Part, Problem, distinct_adapters

_CONFIRMED = 4
"""Slot numbers per GPU that the exact estimator is asked about."""
_SAME = 0.02
"""Relative difference of throughput that counts as none: less than estimators can tell."""
_SAME_WAIT = 0.1
"""The same for the wait; more slots are then the better choice, since bursts need them."""


def choose_slots(problem: Problem, parts: Sequence[Part], quick: Estimator, exact: Estimator) -> int | None:
    """Return the number of slots with which a GPU holds these parts best; None if there is none.

    A GPU that keeps up serves the offered load whatever its slots, so among those that serve as much the
    shortest wait for the first token decides.
    """
    promising = slot_candidates(problem, parts, quick)[:_CONFIRMED]
    estimates = dict(zip(promising, in_parallel(partial(exact, parts), promising), strict=True))
    holding = {value: estimate for value, estimate in estimates.items() if not estimate.starved}
    return _by_merit(holding)[0] if holding else None


def slot_candidates(problem: Problem, parts: Sequence[Part], quick: Estimator) -> list[int]:
    """Return the numbers of slots that fit in memory, best first; those with which the GPU starves last."""
    distinct = distinct_adapters(parts)
    if problem.fixed_a_max is not None:
        values = [problem.fixed_a_max]
    else:
        values = sorted({value for value in GRID if value < distinct} | {distinct})
    fitting = [value for value in values if problem.fits_in_memory(parts, value)]
    estimates = dict(zip(fitting, in_parallel(partial(quick, parts), fitting), strict=True))
    holding = {value: estimate for value, estimate in estimates.items() if not estimate.starved}
    starving = {value: estimate for value, estimate in estimates.items() if estimate.starved}
    return _by_merit(holding) + _by_merit(starving)


def _by_merit(estimates: Mapping[int, Estimate]) -> list[int]:
    """Return numbers of slots: those that serve most, by their wait; then the rest, by throughput."""
    if not estimates:
        return []
    most = max(estimate.throughput_tok_s for estimate in estimates.values())
    equal = [v for v, estimate in estimates.items() if estimate.throughput_tok_s >= most * (1.0 - _SAME)]
    shortest = min(estimates[v].ttft_s_p99 for v in equal)

    def merit(value: int) -> tuple[bool, bool, float, int]:
        estimate = estimates[value]
        if value not in equal:
            return True, False, -estimate.throughput_tok_s, -value
        waits = estimate.ttft_s_p99 > shortest * (1.0 + _SAME_WAIT)
        return False, waits, estimate.ttft_s_p99 if waits else 0.0, -value

    return sorted(estimates, key=merit)
