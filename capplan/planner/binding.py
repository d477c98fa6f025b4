"""What binds on a GPU: the load at which it would fail, and what has run out there."""

from __future__ import annotations

from capplan.planner.judging import Judged, judge
from capplan.planner.problem import Assignment, Problem, distinct_adapters
from capplan.spec import Binds

_SEED = 7
_DURATION_S = 600.0
_LARGEST_SCALE = 16.0
_BISECTIONS = 6
_FULL = 0.95
"""Share of a resource in use, averaged over time, from which it counts as exhausted."""


def find_binding(problem: Problem, assignment: Assignment) -> tuple[Binds | None, float | None]:
    """Return what keeps a GPU from serving more, and its load over the largest load that it holds.

    The load of every adapter is scaled up together until a bound breaks; what the twin then finds full is
    what binds. Nothing does when even the largest scale breaks no bound; idle adapters have no load at all.
    """
    if sum(part.rate_rps for part in assignment.parts) == 0.0:
        return None, None
    holds, fails = 0.0, 1.0
    failing = _at(problem, assignment, fails)
    while not failing.broken:
        holds, fails = fails, fails * 2.0
        if fails > _LARGEST_SCALE:
            return None, 1.0 / holds
        failing = _at(problem, assignment, fails)
    for _ in range(_BISECTIONS):
        middle = (holds + fails) / 2.0
        judged = _at(problem, assignment, middle)
        if judged.broken:
            fails, failing = middle, judged
        else:
            holds = middle
    load = 1.0 / max(holds, 1e-3)
    return _what_is_full(problem, assignment, failing, load), load


def _at(problem: Problem, assignment: Assignment, scale: float) -> Judged:
    return judge(problem, assignment, _SEED, _DURATION_S, scale)


def _what_is_full(problem: Problem, assignment: Assignment, judged: Judged, load: float) -> Binds:
    result = judged.result
    at = f"at {1.0 / load:.2f} x the planned load"
    if result.served_fraction >= problem.workload.slo.served_fraction:
        return Binds(resource="slo", value=load, note=f"{judged.broken[0]} {at}")
    kv_use = result.kv_tokens_mean / result.kv_tokens
    slot_use = result.adapters_mean / assignment.a_max
    distinct = distinct_adapters(assignment.parts)
    if kv_use >= _FULL or result.preemptions > 0.01 * result.completed:
        return Binds(
            resource="kv", value=kv_use, note=f"{kv_use:.0%} of {result.kv_tokens} KV tokens in use {at}"
        )
    if assignment.a_max < distinct and slot_use >= _FULL:
        words = f"{result.adapters_mean:.1f} of {assignment.a_max} adapter slots in use {at}"
        return Binds(resource="slots", value=slot_use, note=words)
    words = f"steps take all the time with {result.running_mean:.0f} requests running {at}"
    return Binds(resource="compute", value=result.busy_fraction, note=words)
