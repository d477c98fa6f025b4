"""Curve over A_max: one simulation per number of slots, and the reason for the plan's number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from capplan.models.memory import kv_tokens
from capplan.planner.estimate import SEARCH_DURATION_S
from capplan.planner.evaluate import Evaluation, evaluate
from capplan.planner.parallel import parallel_map
from capplan.planner.problem import GRID, Assignment, Estimate, Problem, distinct_adapters
from capplan.planner.slots import best_slots

MAX_POINTS: Final = 8
"""Numbers of slots that the twin is asked about."""

_MAX_SLOTS: Final = 2**16


@dataclass(frozen=True)
class CurvePoint:
    """An instance with a number of slots; None where nothing is known, as without memory for a request.

    Attributes
    ----------
    a_max
        Adapter slots.
    kv_tokens
        Tokens that the KV cache holds beside them.
    fits
        Whether the engine would start.
    throughput_tok_s, served_fraction, ttft_p99_s, e2e_mean_s, itl_mean_ms
        As in `capplan.twin.SimulationResult`.
    loads_per_min
        Adapters copied to the GPU per minute.
    broken
        Bounds of the workload that it breaks, in words.
    """

    a_max: int
    kv_tokens: int
    fits: bool
    throughput_tok_s: float | None = None
    served_fraction: float | None = None
    ttft_p99_s: float | None = None
    e2e_mean_s: float | None = None
    itl_mean_ms: float | None = None
    loads_per_min: float | None = None
    broken: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether it starts and keeps every bound."""
        return self.fits and not self.broken


@dataclass(frozen=True)
class SlotCurve:
    """What an instance does with other numbers of slots, all else equal.

    Attributes
    ----------
    points
        By ascending number of slots; the last one may be the first of the grid that does not fit.
    chosen
        Number of slots in the plan.
    adapters
        Adapters on the instance: more slots than that stay empty.
    most_slots
        Largest number of slots that fits in memory; None when memory is no limit.
    scale
        Multiple of the planned load at which the twin was asked: 1 / (1 - headroom), as in the search.
    offered_tok_s
        Input and output tokens per second that the load asks for.
    """

    points: tuple[CurvePoint, ...]
    chosen: int
    adapters: int
    most_slots: int | None
    scale: float
    offered_tok_s: float

    @property
    def chosen_point(self) -> CurvePoint:
        """The point of the plan."""
        return next(point for point in self.points if point.a_max == self.chosen)


def slot_curve(
    problem: Problem,
    assignment: Assignment,
    *,
    seed: int = 0,
    duration_s: float = SEARCH_DURATION_S,
    answered: Callable[[int], None] | None = None,
) -> SlotCurve:
    """Return the curve around the number of slots that an instance has.

    Parameters
    ----------
    problem, assignment
        What the instance serves, and how it is set.
    seed, duration_s
        Of the simulations, one per number of slots; as in the search, so that its reasons can be seen.
    answered
        Called with the number of points so far.
    """
    values, beyond = _values(problem, assignment)
    scale = 1.0 / (1.0 - problem.workload.headroom)

    def ask(a_max: int) -> Evaluation:
        return evaluate(problem, replace(assignment, a_max=a_max), seed, duration_s, scale)

    evaluation = parallel_map(ask, values, answered)
    points = [_point(a_max, each) for a_max, each in zip(values, evaluation, strict=True)] + [
        _unfit(problem, assignment, a_max) for a_max in beyond
    ]
    return SlotCurve(
        points=tuple(sorted(points, key=lambda point: point.a_max)),
        chosen=assignment.a_max,
        adapters=distinct_adapters(assignment.shares),
        most_slots=_max_fitting_slots(problem, assignment),
        scale=scale,
        offered_tok_s=max((each.result.offered_tok_s for each in evaluation), default=0.0),
    )


def curve_size(problem: Problem, assignment: Assignment) -> int:
    """Return how many simulations the curve takes."""
    return len(_values(problem, assignment)[0])


def _values(problem: Problem, assignment: Assignment) -> tuple[list[int], list[int]]:
    """Return the numbers of slots to ask about, and those that do not fit and are shown all the same."""
    distinct, chosen = distinct_adapters(assignment.shares), assignment.a_max
    grid = sorted({value for value in GRID if value < distinct} | {distinct, chosen})
    fitting = [value for value in grid if problem.fits_in_memory(replace(assignment, a_max=value))]
    unfit = [value for value in grid if value not in fitting]
    beyond = {value for value in unfit if value == chosen or value == min(unfit)}
    return _nearest(fitting, chosen), sorted(beyond)


def _nearest(values: Sequence[int], chosen: int) -> list[int]:
    """Return the ends and those next to the chosen one, at most so many."""
    ends = {values[0], values[-1]} if values else set()

    def distance(value: int) -> tuple[bool, float]:
        return value not in ends and value != chosen, abs(math.log(value / chosen))

    return sorted(sorted(values, key=distance)[:MAX_POINTS])


def _point(a_max: int, evaluation: Evaluation) -> CurvePoint:
    result = evaluation.result
    return CurvePoint(
        a_max=a_max,
        kv_tokens=result.kv_tokens,
        fits=True,
        throughput_tok_s=result.throughput_tok_s,
        served_fraction=result.served_fraction,
        ttft_p99_s=_known(result.ttft_s_p99),
        e2e_mean_s=_known(result.e2e_s_mean),
        itl_mean_ms=_known(result.itl_ms_mean),
        loads_per_min=60.0 * result.adapter_loads / result.duration_s,
        broken=evaluation.violations,
    )


def _unfit(problem: Problem, assignment: Assignment, a_max: int) -> CurvePoint:
    tokens = kv_tokens(
        problem.pools[assignment.pool].profile,
        a_max,
        problem.s_max(assignment.shares),
        problem.engine.gpu_memory_utilization,
        problem.max_num_seqs(assignment),
    )
    return CurvePoint(a_max=a_max, kv_tokens=tokens, fits=False)


def _max_fitting_slots(problem: Problem, assignment: Assignment) -> int | None:
    """Return the largest number of slots that fits, by bisection: more slots never need less memory."""

    def fits(a_max: int) -> bool:
        return problem.fits_in_memory(replace(assignment, a_max=a_max))

    if fits(_MAX_SLOTS):
        return None
    low, high = 0, _MAX_SLOTS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _known(value: float) -> float | None:
    """Return a latency; None where no request had any."""
    return None if math.isnan(value) else float(value)


_NOTABLE: Final = 0.02
"""Relative difference of what is served, and of the time of a request."""

_LARGE: Final = 0.05
"""The same, of memory and of TTFT p99."""

_EQUAL: Final = 1.005
"""Ratio of times that three figures hardly tell apart."""


def explain_slots(curve: SlotCurve, solver: str, *, fixed: bool) -> str:
    """Return why the plan has this number of slots.

    Parameters
    ----------
    curve
        What the twin says of this number and of others.
    solver
        Who made the plan.
    fixed
        Whether the workload fixes the number.
    """
    best = best_slots({p.a_max: _estimate(p) for p in curve.points if p.fits})
    chosen = curve.chosen_point
    head = f"A_max {curve.chosen}"
    if fixed:
        words = f"{head}: fixed by the workload"
        return _sentence(words, _better(curve, best), _memory(curve))
    if not chosen.holds:
        why = f"breaks {chosen.broken[0]}" if chosen.fits else "does not fit in memory"
        other = "no other number tried holds" if best is None else f"{best} would hold"
        return _sentence(f"{head} {why} {_load_words(curve)}", other)
    if best != curve.chosen:
        words = f"{head}: holds, chosen by {solver}"
        return _sentence(words, _better(curve, best), _memory(curve))
    return _sentence(f"{head}: {_merit(curve)}", *_neighbours(curve), _memory(curve))


def _merit(curve: SlotCurve) -> str:
    """Return what puts the chosen number, which is the best, before all others."""
    holding = [point for point in curve.points if point.holds]
    if len(holding) == 1 and len(curve.points) > 1:
        merit = f"the only number tried with which every bound holds {_load_words(curve)}"
    else:
        most = max(point.throughput_tok_s or 0.0 for point in holding)
        serving = (p for p in holding if (p.throughput_tok_s or 0.0) >= most * (1.0 - _NOTABLE))
        shortest = min(point.e2e_mean_s or 0.0 for point in serving)
        own = curve.chosen_point.e2e_mean_s or 0.0
        merit = "of those that serve most, " + (
            f"the shortest mean time from arrival to last token, {own:.3g} s"
            if own <= shortest * _EQUAL
            else f"more slots for bursts, with {own:.3g} s from arrival to last token on average, where the "
            f"shortest is {shortest:.3g} s"
        )
    all_have_one = curve.chosen == curve.adapters
    return f"a slot for each adapter, so that none is loaded twice; {merit}" if all_have_one else merit


def _neighbours(curve: SlotCurve) -> list[str]:
    """Return what speaks against the next number below, and the next above."""
    at = [point.a_max for point in curve.points].index(curve.chosen)
    words = []
    if at > 0:
        words.append(_compare_neighbour(curve, curve.points[at - 1]))
    if at + 1 < len(curve.points):
        words.append(_compare_neighbour(curve, curve.points[at + 1]))
    elif curve.chosen == curve.adapters:
        words.append("more would stay empty")
    return words


def _compare_neighbour(curve: SlotCurve, other: CurvePoint) -> str:
    """Return what speaks against another number of slots."""
    slots = "1 slot" if other.a_max == 1 else f"{other.a_max} slots"
    if not other.fits:
        return f"{slots} do not fit in memory"
    chosen = curve.chosen_point
    words = []
    lost = 1.0 - other.kv_tokens / max(chosen.kv_tokens, 1)
    if lost >= _LARGE:
        words.append(f"{_percent(lost)} fewer KV tokens")
    if (other.loads_per_min or 0.0) - (chosen.loads_per_min or 0.0) >= 1.0:
        words.append(f"{other.loads_per_min:,.0f} loads a minute")
    return f"{slots}: {', '.join([*words, _outcome(chosen, other)])}"


def _outcome(chosen: CurvePoint, other: CurvePoint) -> str:
    if other.broken:
        return f"breaks {other.broken[0]}"
    served = (other.throughput_tok_s or 0.0) / max(chosen.throughput_tok_s or 0.0, 1e-9)
    if served < 1.0 - _NOTABLE:
        return f"serves {_percent(1.0 - served)} less"
    for what, here, there, much in (
        ("s from arrival to last token", chosen.e2e_mean_s, other.e2e_mean_s, _NOTABLE),
        ("s of TTFT p99", chosen.ttft_p99_s, other.ttft_p99_s, _LARGE),
    ):
        if here and there and there > here * (1.0 + much):
            return f"{there:.3g} {what} instead of {here:.3g}"
    return "does as well, with less to spare in bursts" if other.a_max < chosen.a_max else "does no better"


def _better(curve: SlotCurve, best: int | None) -> str:
    """Return what the curve says for another number than the plan's."""
    chosen = curve.chosen_point
    if best is None:
        return f"no number tried holds {_load_words(curve)}"
    if best == curve.chosen:
        return "no other number tried does better"
    other = next(point for point in curve.points if point.a_max == best)
    if not chosen.fits:
        return f"it does not fit in memory, {best} would"
    if chosen.broken:
        return f"it breaks {chosen.broken[0]} {_load_words(curve)}, {best} would hold"
    gain = (other.throughput_tok_s or 0.0) / max(chosen.throughput_tok_s or 0.0, 1e-9) - 1.0
    if gain > _NOTABLE:
        return f"on this curve {best} serves {_percent(gain)} more"
    return (
        f"on this curve {best} does as well or better ({other.e2e_mean_s or 0.0:.3g} s from arrival to last "
        f"token, here {chosen.e2e_mean_s or 0.0:.3g} s)"
    )


def _memory(curve: SlotCurve) -> str:
    most = curve.most_slots
    return "" if most is None or most > 4 * curve.adapters else f"memory has room for {most} at most"


def _load_words(curve: SlotCurve) -> str:
    return "at the planned load" if curve.scale == 1.0 else f"at {curve.scale:.2f} x the planned load"


def _percent(share: float) -> str:
    return f"{100.0 * share:.0f} %"


def _estimate(point: CurvePoint) -> Estimate:
    return Estimate(point.throughput_tok_s or 0.0, bool(point.broken), e2e_s_mean=point.e2e_mean_s or 0.0)


def _sentence(*words: str) -> str:
    return "; ".join(word for word in words if word)
