"""The curve of A_max: what an instance does with fewer and with more adapter slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from capplan.models.memory import kv_tokens
from capplan.planner.estimators import SEARCH_DURATION_S
from capplan.planner.judging import Judged, judge
from capplan.planner.parallel import in_parallel
from capplan.planner.problem import GRID, Assignment, Problem, distinct_adapters

MOST_POINTS: Final = 8
"""Numbers of slots that the twin is asked about."""
_MOST_SLOTS: Final = 2**16


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

    def ask(a_max: int) -> Judged:
        return judge(problem, replace(assignment, a_max=a_max), seed, duration_s, scale)

    judged = in_parallel(ask, values, answered)
    points = [_point(a_max, each) for a_max, each in zip(values, judged, strict=True)] + [
        _unfit(problem, assignment, a_max) for a_max in beyond
    ]
    return SlotCurve(
        points=tuple(sorted(points, key=lambda point: point.a_max)),
        chosen=assignment.a_max,
        adapters=distinct_adapters(assignment.parts),
        most_slots=_most_slots(problem, assignment),
        scale=scale,
        offered_tok_s=max((each.result.offered_tok_s for each in judged), default=0.0),
    )


def points_asked(problem: Problem, assignment: Assignment) -> int:
    """Return how many simulations the curve takes."""
    return len(_values(problem, assignment)[0])


def _values(problem: Problem, assignment: Assignment) -> tuple[list[int], list[int]]:
    """Return the numbers of slots to ask about, and those that do not fit and are shown all the same."""
    distinct, chosen = distinct_adapters(assignment.parts), assignment.a_max
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

    return sorted(sorted(values, key=distance)[:MOST_POINTS])


def _point(a_max: int, judged: Judged) -> CurvePoint:
    result = judged.result
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
        broken=judged.broken,
    )


def _unfit(problem: Problem, assignment: Assignment, a_max: int) -> CurvePoint:
    tokens = kv_tokens(
        problem.pools[assignment.pool].profile,
        a_max,
        problem.s_max(assignment.parts),
        problem.engine.gpu_memory_utilization,
        problem.max_num_seqs(assignment),
    )
    return CurvePoint(a_max=a_max, kv_tokens=tokens, fits=False)


def _most_slots(problem: Problem, assignment: Assignment) -> int | None:
    """Return the largest number of slots that fits, by bisection: more slots never need less memory."""

    def fits(a_max: int) -> bool:
        return problem.fits_in_memory(replace(assignment, a_max=a_max))

    if fits(_MOST_SLOTS):
        return None
    low, high = 0, _MOST_SLOTS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _known(value: float) -> float | None:
    """Return a latency; None where no request had any."""
    return None if math.isnan(value) else float(value)
