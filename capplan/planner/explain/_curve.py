"""Curves over engine settings: one simulation per value, all else as in the plan.

The curve over A_max compares the plan's number of slots with its neighbours and the best over paired seeds,
which gives the reason for that number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final

from capplan.models import kv_budget
from capplan.planner.problem._evaluate import Evaluation, evaluate, known_value
from capplan.planner.problem._execution import parallel_map
from capplan.planner.problem._problem import GRID, Assignment, Estimate, Problem, distinct_adapters
from capplan.planner.problem._settings import KNOBS, best_slots, knob_variants, max_fitting_slots, with_knob
from capplan.twin.instance import PAIRED_SEEDS, paired_difference

MAX_POINTS: Final = 8
"""Maximum number of simulations over A_max."""
_SLOTS: Final = "a_max"
_MAX_SLOTS: Final = 2**16
_COMPARED: Final = ("throughput_tok_s", "e2e_mean_s", "ttft_p99_s")
"""Values of a point that are compared over paired seeds."""


@dataclass(frozen=True)
class CurvePoint:
    """An instance with a value of a setting; results are None if it does not start or served no request."""

    value: int
    """Value of the setting."""
    kv_tokens: int
    """Capacity of the KV cache."""
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
    tpot_p99_ms: float | None = None
    itl_p99_ms: float | None = None
    """As in `capplan.twin.SimulationResult`."""
    paired: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Throughput, mean request time and TTFT p99 by name over paired seeds, of the chosen number of slots,
    its neighbours and the best; empty for other numbers, other settings, and for a trace."""

    @property
    def holds(self) -> bool:
        """Whether it starts and keeps every bound."""
        return self.fits and not self.broken

    @property
    def estimate(self) -> Estimate:
        """Results as an estimate of the instance."""
        return Estimate(self.throughput_tok_s or 0.0, bool(self.broken), e2e_s_mean=self.e2e_mean_s or 0.0)


@dataclass(frozen=True)
class SettingCurve:
    """An instance with different values of one engine setting, all else equal."""

    setting: str
    """``a_max``, or the name of an engine knob."""
    points: tuple[CurvePoint, ...]
    """By ascending value; the last may be the first of the grid that does not fit in memory."""
    chosen: int
    """Value in the plan."""
    scale: float
    """Simulated multiple of the planned load: 1 / (1 - headroom), as in the search."""
    offered_tok_s: float
    """Offered input and output tokens per second."""
    robust: float | None = field(default=None, kw_only=True)
    """Quantile of the simulated step times, as in the search; None: the fitted ones."""

    @property
    def chosen_point(self) -> CurvePoint:
        """Point of the plan."""
        return next(point for point in self.points if point.value == self.chosen)


@dataclass(frozen=True)
class SlotCurve(SettingCurve):
    """Curve over the number of adapter slots."""

    adapters: int
    """Adapters on the instance."""
    most_slots: int | None
    """Largest number of slots that fits in memory; None if memory is no limit."""


@dataclass(frozen=True)
class CurveRuns:
    """Simulations of an instance with other settings, as the search makes them.

    They are at the planned load over (1 - headroom), with the step times of `Problem.robust`.
    """

    problem: Problem
    assignment: Assignment
    seed: int = 0

    @property
    def scale(self) -> float:
        """Simulated multiple of the planned load."""
        return self.problem.load_with_headroom

    def slot_values(self) -> tuple[list[int], list[int]]:
        """Return the numbers of slots to simulate, and those on the curve that do not fit in memory."""
        distinct, chosen = distinct_adapters(self.assignment.shares), self.assignment.a_max
        if not self.problem.has_slots:
            return [chosen], []
        grid = sorted({value for value in GRID if value < distinct} | {distinct, chosen})
        fitting = [value for value in grid if self.problem.fits_in_memory(self._with(_SLOTS, value))]
        unfit = [value for value in grid if value not in fitting]
        return _nearest(fitting, chosen), [value for value in unfit if value in (chosen, unfit[0])]

    def knob_values(self) -> list[tuple[str, int]]:
        """Return the knobs and values to simulate: those of open knobs with which the instance starts."""
        found: list[tuple[str, int]] = []
        for knob in KNOBS:
            variants = knob_variants(self.problem, self.assignment, knob)
            values = {getattr(self.problem.engine_args(each), knob) for each in (self.assignment, *variants)}
            found += [(knob, value) for value in sorted(values) if variants]
        return found

    def evaluate(self, setting: str, value: int, step: int = 0) -> Evaluation:
        """Simulate a value of a setting; `step` is added to the seed."""
        changed = self._with(setting, value)
        return evaluate(self.problem.pessimistic, changed, self.seed + step, self.scale)

    def _with(self, setting: str, value: int) -> Assignment:
        if setting == _SLOTS:
            return replace(self.assignment, a_max=value)
        return with_knob(self.assignment, setting, value)


def slot_curve(runs: CurveRuns, answered: Callable[[int], None] | None = None) -> SlotCurve:
    """Return the curve around the number of slots of an instance.

    `answered` is called with the number of simulations done.
    """
    assignment = runs.assignment
    values, unfit = runs.slot_values()
    evaluations = parallel_map(lambda a_max: runs.evaluate(_SLOTS, a_max), values, answered)
    points = [_point(*each) for each in zip(values, evaluations, strict=True)]
    points += [_unfit_point(runs.problem, assignment, a_max) for a_max in unfit]
    points.sort(key=lambda point: point.value)
    if runs.problem.workload.trace is None:
        points = _with_paired_seeds(points, runs)
    most = max_fitting_slots(runs.problem, assignment, _MAX_SLOTS)
    return SlotCurve(
        setting=_SLOTS,
        points=tuple(points),
        chosen=assignment.a_max,
        scale=runs.scale,
        offered_tok_s=_offered_tok_s(evaluations),
        robust=runs.problem.robust,
        adapters=distinct_adapters(assignment.shares),
        most_slots=None if most == _MAX_SLOTS else most,
    )


def knob_curves(runs: CurveRuns, answered: Callable[[int], None] | None = None) -> tuple[SettingCurve, ...]:
    """Return the curve of each knob that the planner may choose.

    `answered` is called with the number of simulations done.
    """
    values = runs.knob_values()
    simulated = parallel_map(lambda each: runs.evaluate(*each), values, answered)
    curves = []
    for knob in dict.fromkeys(knob for knob, _ in values):
        mine = {value: at for (name, value), at in zip(values, simulated, strict=True) if name == knob}
        curves.append(
            SettingCurve(
                setting=knob,
                points=tuple(_point(*each) for each in mine.items()),
                chosen=getattr(runs.problem.engine_args(runs.assignment), knob),
                scale=runs.scale,
                offered_tok_s=_offered_tok_s(list(mine.values())),
                robust=runs.problem.robust,
            )
        )
    return tuple(curves)


def _with_paired_seeds(points: Sequence[CurvePoint], runs: CurveRuns) -> list[CurvePoint]:
    """Add paired seeds to the numbers of slots that are compared."""
    chosen = runs.assignment.a_max
    at = [point.value for point in points].index(chosen)
    best = best_slots({point.value: point.estimate for point in points if point.fits})
    near = {best, *(point.value for point in points[max(0, at - 1) : at + 2])}
    compared = [point.value for point in points if point.value in near and point.holds]
    if chosen not in compared or len(compared) == 1:
        return list(points)
    pairs = [(a_max, step) for a_max in compared for step in range(1, PAIRED_SEEDS)]
    further = parallel_map(lambda pair: _point(pair[0], runs.evaluate(_SLOTS, *pair)), pairs)
    paired = []
    for point in points:
        mine = [point, *(each for each in further if each.value == point.value)]
        values = {name: [getattr(each, name) for each in mine] for name in _COMPARED}
        known = {name: tuple(of) for name, of in values.items() if None not in of}
        paired.append(replace(point, paired=known) if point.value in compared else point)
    return paired


def _nearest(values: Sequence[int], chosen: int) -> list[int]:
    """Return the smallest, the largest, and the values nearest to the chosen one, at most `MAX_POINTS`."""
    always = {chosen, *values[:1], *values[-1:]}
    by_distance = sorted(
        values, key=lambda value: (value not in always, abs(math.log((value or 1) / (chosen or 1))))
    )
    return sorted(by_distance[:MAX_POINTS])


def _offered_tok_s(evaluations: Sequence[Evaluation]) -> float:
    return max((each.result.offered_tok_s for each in evaluations), default=0.0)


def _point(value: int, evaluation: Evaluation) -> CurvePoint:
    result = evaluation.result
    return CurvePoint(
        value=value,
        kv_tokens=result.kv_tokens,
        fits=True,
        throughput_tok_s=result.throughput_tok_s,
        served_fraction=result.served_fraction,
        ttft_p99_s=known_value(result.ttft_s_p99),
        e2e_mean_s=known_value(result.e2e_s_mean),
        itl_mean_ms=known_value(result.itl_ms_mean),
        loads_per_min=60.0 * result.adapter_loads / result.duration_s,
        broken=evaluation.violations,
        tpot_p99_ms=known_value(result.tpot_ms_p99),
        itl_p99_ms=known_value(result.itl_ms_p99),
    )


def _unfit_point(problem: Problem, assignment: Assignment, a_max: int) -> CurvePoint:
    args = problem.engine_args(assignment)
    budget = kv_budget(problem.pools[assignment.pool].profile, args.gpu_memory_utilization)
    return CurvePoint(value=a_max, kv_tokens=budget.tokens(args, a_max), fits=False)


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
    best = best_slots({point.value: point.estimate for point in curve.points if point.fits})
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
    holding = [point.estimate for point in curve.points if point.holds]
    if len(holding) == 1 and len(curve.points) > 1:
        words = f"the only number tried with which every bound holds {_load(curve)}"
    else:
        most = max(each.throughput_tok_s for each in holding)
        serving = (each for each in holding if each.throughput_tok_s >= most * (1.0 - _NOTABLE))
        shortest = min(each.e2e_s_mean for each in serving)
        own = curve.chosen_point.estimate.e2e_s_mean
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
    at = [point.value for point in curve.points].index(curve.chosen)
    neighbours = (*curve.points[max(0, at - 1) : at], *curve.points[at + 1 : at + 2])
    words = [_disadvantage(curve.chosen_point, point) for point in neighbours]
    if curve.chosen_point is curve.points[-1] and curve.chosen == curve.adapters:
        words.append("more would stay empty")
    return words


def _disadvantage(chosen: CurvePoint, other: CurvePoint) -> str:
    slots = "1 slot" if other.value == 1 else f"{other.value} slots"
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
    return "does as well, with less to spare in bursts" if other.value < chosen.value else "does no better"


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
    other = next(point for point in curve.points if point.value == best)
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
    load = "at the planned load" if curve.scale == 1.0 else f"at {curve.scale:.2f} x the planned load"
    return load if curve.robust is None else f"{load} and step times at their quantile {curve.robust:g}"


def _percent(share: float) -> str:
    return f"{100.0 * share:.0f} %"
