"""Curve over A_max: one simulation per number of slots, and the reason for the plan's number.

The plan's number is compared with its neighbours and with the best number over paired seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final

from capplan.models.memory import kv_tokens
from capplan.planner.estimate import SEARCH_DURATION_S
from capplan.planner.evaluate import Evaluation, evaluate, known_value
from capplan.planner.parallel import parallel_map
from capplan.planner.problem import GRID, Assignment, Estimate, Problem, distinct_adapters
from capplan.planner.slots import best_slots, max_fitting_slots
from capplan.twin.paired import PAIRED_SEEDS, paired_difference

MAX_POINTS: Final = 8
"""Maximum number of simulations."""
_MAX_SLOTS: Final = 2**16
_COMPARED: Final = ("throughput_tok_s", "e2e_mean_s", "ttft_p99_s")
"""Values of a point that are compared over paired seeds."""


@dataclass(frozen=True)
class CurvePoint:
    """An instance with a number of slots; values are None if it does not start or served no request."""

    a_max: int
    """Adapter slots."""
    kv_tokens: int
    """Capacity of the KV cache beside them."""
    fits: bool
    """Whether the engine starts."""
    throughput_tok_s: float | None = None
    served_fraction: float | None = None
    ttft_p99_s: float | None = None
    e2e_mean_s: float | None = None
    itl_mean_ms: float | None = None
    """As in `capplan.twin.SimulationResult`."""
    loads_per_min: float | None = None
    """Adapters copied to the GPU per minute."""
    broken: tuple[str, ...] = ()
    """Broken bounds of the workload, as text."""
    paired: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Throughput, mean request time and TTFT p99 by name over paired seeds, of the chosen number, its
    neighbours and the best; empty for other numbers, and for a trace."""

    @property
    def holds(self) -> bool:
        """Whether it starts and keeps every bound."""
        return self.fits and not self.broken


@dataclass(frozen=True)
class SlotCurve:
    """An instance with different numbers of slots, all else equal."""

    points: tuple[CurvePoint, ...]
    """By ascending number of slots; the last may be the first of the grid that does not fit in memory."""
    chosen: int
    """Number of slots in the plan."""
    adapters: int
    """Adapters on the instance."""
    most_slots: int | None
    """Largest number of slots that fits in memory; None if memory is no limit."""
    scale: float
    """Simulated multiple of the planned load: 1 / (1 - headroom), as in the search."""
    offered_tok_s: float
    """Offered input and output tokens per second."""

    @property
    def chosen_point(self) -> CurvePoint:
        """Point of the plan."""
        return next(point for point in self.points if point.a_max == self.chosen)


def slot_curve(
    problem: Problem,
    assignment: Assignment,
    *,
    seed: int = 0,
    duration_s: float = SEARCH_DURATION_S,
    answered: Callable[[int], None] | None = None,
) -> SlotCurve:
    """Return the curve around the number of slots of an instance.

    `answered` is called with the number of simulations done.
    """
    values, unfit = _slot_numbers(problem, assignment)
    scale = 1.0 / (1.0 - problem.workload.headroom)

    def simulate(a_max: int) -> Evaluation:
        return evaluate(problem, replace(assignment, a_max=a_max), seed, duration_s, scale)

    evaluations = parallel_map(simulate, values, answered)
    points = [_point(*each) for each in zip(values, evaluations, strict=True)]
    points += [_unfit_point(problem, assignment, a_max) for a_max in unfit]
    points.sort(key=lambda point: point.a_max)
    if problem.workload.trace is None:
        points = _with_paired_seeds(
            points,
            assignment.a_max,
            lambda a_max, step: evaluate(
                problem, replace(assignment, a_max=a_max), seed + step, duration_s, scale
            ),
        )
    most = max_fitting_slots(problem, assignment, _MAX_SLOTS)
    return SlotCurve(
        points=tuple(points),
        chosen=assignment.a_max,
        adapters=distinct_adapters(assignment.shares),
        most_slots=None if most == _MAX_SLOTS else most,
        scale=scale,
        offered_tok_s=max((each.result.offered_tok_s for each in evaluations), default=0.0),
    )


def _with_paired_seeds(
    points: Sequence[CurvePoint], chosen: int, simulate: Callable[[int, int], Evaluation]
) -> list[CurvePoint]:
    """Add paired seeds to the points that are compared; `simulate` takes slots and the step from the seed."""
    at = [point.a_max for point in points].index(chosen)
    best = best_slots({point.a_max: _estimate(point) for point in points if point.fits})
    near = {best, *(point.a_max for point in points[max(0, at - 1) : at + 2])}
    compared = [point.a_max for point in points if point.a_max in near and point.holds]
    if chosen not in compared or len(compared) == 1:
        return list(points)
    runs = [(a_max, step) for a_max in compared for step in range(1, PAIRED_SEEDS)]
    further = parallel_map(lambda run: _point(run[0], simulate(*run)), runs)
    paired = []
    for point in points:
        mine = [point, *(each for each in further if each.a_max == point.a_max)]
        values = {name: [getattr(each, name) for each in mine] for name in _COMPARED}
        known = {name: tuple(of) for name, of in values.items() if None not in of}
        paired.append(replace(point, paired=known) if point.a_max in compared else point)
    return paired


def curve_size(problem: Problem, assignment: Assignment) -> int:
    """Return the number of simulations of a curve."""
    return len(_slot_numbers(problem, assignment)[0])


def _slot_numbers(problem: Problem, assignment: Assignment) -> tuple[list[int], list[int]]:
    """Return the numbers of slots to simulate, and those on the curve that do not fit in memory."""
    distinct, chosen = distinct_adapters(assignment.shares), assignment.a_max
    grid = sorted({value for value in GRID if value < distinct} | {distinct, chosen})
    fitting = [value for value in grid if problem.fits_in_memory(replace(assignment, a_max=value))]
    unfit = [value for value in grid if value not in fitting]
    return _nearest(fitting, chosen), [value for value in unfit if value in (chosen, unfit[0])]


def _nearest(values: Sequence[int], chosen: int) -> list[int]:
    """Return the smallest, the largest, and the values nearest to the chosen one, at most `MAX_POINTS`."""
    always = {chosen, *values[:1], *values[-1:]}
    by_distance = sorted(
        values, key=lambda value: (value not in always, abs(math.log((value or 1) / (chosen or 1))))
    )
    return sorted(by_distance[:MAX_POINTS])


def _point(a_max: int, evaluation: Evaluation) -> CurvePoint:
    result = evaluation.result
    return CurvePoint(
        a_max=a_max,
        kv_tokens=result.kv_tokens,
        fits=True,
        throughput_tok_s=result.throughput_tok_s,
        served_fraction=result.served_fraction,
        ttft_p99_s=known_value(result.ttft_s_p99),
        e2e_mean_s=known_value(result.e2e_s_mean),
        itl_mean_ms=known_value(result.itl_ms_mean),
        loads_per_min=60.0 * result.adapter_loads / result.duration_s,
        broken=evaluation.violations,
    )


def _unfit_point(problem: Problem, assignment: Assignment, a_max: int) -> CurvePoint:
    tokens = kv_tokens(
        problem.pools[assignment.pool].profile,
        a_max,
        problem.s_max(assignment.shares),
        problem.engine.gpu_memory_utilization,
        problem.max_num_seqs(assignment),
    )
    return CurvePoint(a_max=a_max, kv_tokens=tokens, fits=False)


_NOTABLE: Final = 0.02
"""Relative difference in throughput or request time that is reported."""
_LARGE: Final = 0.05
"""Relative difference in memory or TTFT p99 that is reported."""
_EQUAL: Final = 1.005
"""Ratio of times that look equal with three digits."""


def explain_slots(curve: SlotCurve, solver: str, *, fixed: bool) -> str:
    """Return the reason for the number of slots by a solver, or `fixed` by the workload, in one sentence."""
    if curve.chosen == 0:
        return "no slots: the group serves the base model alone, on an engine without LoRA"
    best = best_slots({point.a_max: _estimate(point) for point in curve.points if point.fits})
    chosen, head = curve.chosen_point, f"A_max {curve.chosen}"
    memory = ""
    if curve.most_slots is not None and curve.most_slots <= 4 * curve.adapters:
        memory = f"memory has room for {curve.most_slots} at most"
    if fixed:
        parts = [f"{head}: fixed by the workload", _better_slots(curve, best), memory]
    elif not chosen.holds:
        why = f"breaks {chosen.broken[0]}" if chosen.fits else "does not fit in memory"
        other = "no other number tried holds" if best is None else f"{best} would hold"
        parts = [f"{head} {why} {_load(curve)}", other]
    elif best != curve.chosen:
        parts = [f"{head}: holds, chosen by {solver}", _better_slots(curve, best), memory]
    else:
        parts = [f"{head}: {_advantage(curve)}", *_neighbours(curve), memory]
    return "; ".join(part for part in parts if part)


def _advantage(curve: SlotCurve) -> str:
    """Return the advantage of the chosen number, which is the best."""
    holding = [_estimate(point) for point in curve.points if point.holds]
    if len(holding) == 1 and len(curve.points) > 1:
        words = f"the only number tried with which every bound holds {_load(curve)}"
    else:
        most = max(each.throughput_tok_s for each in holding)
        serving = (each for each in holding if each.throughput_tok_s >= most * (1.0 - _NOTABLE))
        shortest = min(each.e2e_s_mean for each in serving)
        own = _estimate(curve.chosen_point).e2e_s_mean
        words = "of those that serve most, " + (
            f"the shortest mean time from arrival to last token, {own:.3g} s"
            if own <= shortest * _EQUAL
            else f"more slots for bursts, with {own:.3g} s from arrival to last token on average, where the "
            f"shortest is {shortest:.3g} s"
        )
    all_have_one = curve.chosen == curve.adapters
    return f"a slot for each adapter, so that none is loaded twice; {words}" if all_have_one else words


def _neighbours(curve: SlotCurve) -> list[str]:
    """Return the disadvantages of the next smaller and the next larger number."""
    at = [point.a_max for point in curve.points].index(curve.chosen)
    neighbours = (*curve.points[max(0, at - 1) : at], *curve.points[at + 1 : at + 2])
    words = [_disadvantage(curve.chosen_point, point) for point in neighbours]
    if curve.chosen_point is curve.points[-1] and curve.chosen == curve.adapters:
        words.append("more would stay empty")
    return words


def _disadvantage(chosen: CurvePoint, other: CurvePoint) -> str:
    slots = "1 slot" if other.a_max == 1 else f"{other.a_max} slots"
    if not other.fits:
        return f"{slots} do not fit in memory"
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
    served = _throughput_ratio(other, chosen)
    if served < 1.0 - _NOTABLE:
        return f"serves {_percent(1.0 - served)} less{_doubt(other, chosen, 'throughput_tok_s')}"
    for what, name, tolerance in (
        ("s from arrival to last token", "e2e_mean_s", _NOTABLE),
        ("s of TTFT p99", "ttft_p99_s", _LARGE),
    ):
        here, there = _value(chosen, name), _value(other, name)
        if here and there > here * (1.0 + tolerance):
            return f"{there:.3g} {what} instead of {here:.3g}{_doubt(other, chosen, name)}"
    return "does as well, with less to spare in bursts" if other.a_max < chosen.a_max else "does no better"


def _better_slots(curve: SlotCurve, best: int | None) -> str:
    """Return the advantage of the best number over the plan's."""
    chosen = curve.chosen_point
    if best is None:
        return f"no number tried holds {_load(curve)}"
    if best == curve.chosen:
        return "no other number tried does better"
    if not chosen.fits:
        return f"it does not fit in memory, {best} would"
    if chosen.broken:
        return f"it breaks {chosen.broken[0]} {_load(curve)}, {best} would hold"
    other = next(point for point in curve.points if point.a_max == best)
    gain = _throughput_ratio(other, chosen) - 1.0
    if gain > _NOTABLE:
        return f"on this curve {best} serves {_percent(gain)} more{_doubt(other, chosen, 'throughput_tok_s')}"
    there, here = _value(other, "e2e_mean_s"), _value(chosen, "e2e_mean_s")
    return (
        f"on this curve {best} does as well or better ({there:.3g} s from arrival to last "
        f"token, here {here:.3g} s){_doubt(other, chosen, 'e2e_mean_s')}"
    )


def _throughput_ratio(one: CurvePoint, other: CurvePoint) -> float:
    return _value(one, "throughput_tok_s") / max(_value(other, "throughput_tok_s"), 1e-9)


def _value(point: CurvePoint, name: str) -> float:
    """Return a value, the mean over paired seeds if there are any; 0 if unknown."""
    paired = point.paired.get(name)
    return fmean(paired) if paired else float(getattr(point, name) or 0.0)


def _doubt(one: CurvePoint, other: CurvePoint, name: str) -> str:
    """Return words for a difference that paired seeds do not decide, else none."""
    here, there = one.paired.get(name, ()), other.paired.get(name, ())
    if not (here and there) or paired_difference(here, there).decided:
        return ""
    return f" (undecided: within two standard errors over {len(here)} seeds)"


def _load(curve: SlotCurve) -> str:
    return "at the planned load" if curve.scale == 1.0 else f"at {curve.scale:.2f} x the planned load"


def _percent(share: float) -> str:
    return f"{100.0 * share:.0f} %"


def _estimate(point: CurvePoint) -> Estimate:
    return Estimate(point.throughput_tok_s or 0.0, bool(point.broken), e2e_s_mean=point.e2e_mean_s or 0.0)
