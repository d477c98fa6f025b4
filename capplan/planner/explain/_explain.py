"""`explain`: reasons for a plan, measured by the twin.

Reason for the number of slots of an instance, from its curve over A_max.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from capplan.planner.explain._curve import (
    CurvePoint,
    CurveRuns,
    SettingCurve,
    SlotCurve,
    knob_curves,
    slot_curve,
)
from capplan.planner.explain._headroom import Headroom, find_headroom
from capplan.planner.explain._loading import LoadingPoint, loading_points
from capplan.planner.explain._queue_gains import SizeGain, size_gains
from capplan.planner.explain._what_if import PlanOutcome, WhatIf, plan_outcome, what_if
from capplan.planner.problem._execution import Progress, no_progress, parallel_map
from capplan.planner.problem._settings import best_slots
from capplan.planner.problem._setup import RebuiltGroup, rebuild, search_seed
from capplan.planner.verification._verify import fresh_seeds
from capplan.spec import Displayed, Group, Plan, Profile, Workload
from capplan.twin.instance import paired_difference

_NOTABLE: Final = 0.02
"""Relative difference in throughput or request time that is reported."""
_LARGE: Final = 0.05
"""Relative difference in memory or TTFT p99 that is reported."""
_EQUAL: Final = 1.005
"""Ratio of times that look equal with three digits."""


SHARED: Final = "no slots: adapters and KV share the memory"
"""Reason under a scheduler or a cache of the workload."""


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


@dataclass(frozen=True)
class GroupExplanation:
    """Explanation of groups with equal load and settings."""

    ids: tuple[str, ...]
    """Names of the groups."""
    curve: SlotCurve
    """Simulations with other numbers of slots."""
    why_a_max: str
    """Reason for the number of slots, in one sentence."""
    room: Headroom
    """Utilization and headroom."""
    knobs: tuple[SettingCurve, ...] = ()
    """Simulations with other values of each engine knob that the planner may choose."""
    has_slots: bool = True
    """Whether there are adapter slots; else the curve over them has the plan's point alone."""
    loading: tuple[LoadingPoint, ...] = ()
    """Loading policies, the plan's first; empty with slots, or where there is one."""
    queues: tuple[SizeGain, ...] = ()
    """What the queues give to each size class; empty without queues."""


@dataclass(frozen=True, repr=False)
class Explanation(Displayed):
    """Explanation of a plan."""

    outcome: PlanOutcome
    """Predicted outcome of the whole plan."""
    groups: tuple[GroupExplanation, ...]
    """Explanations of its groups, equal ones together."""
    what_if: tuple[WhatIf, ...]
    """Plans with one instance fewer (unless there is only one) and one more; empty if groups were
    selected."""

    def display_facts(self) -> Mapping[str, object]:
        """Return the size of the plan, and the reasons for the slots of its first groups."""
        return {
            "gpus": self.outcome.gpus,
            "groups": len(self.groups),
            "what_if": len(self.what_if),
            "a_max": "; ".join(group.why_a_max for group in self.groups[:3]),
        }


def explain(
    plan: Plan,
    workload: Workload,
    *,
    profile: Profile | None = None,
    groups: Sequence[Group] = (),
    source: str = "workload",
    progress: Progress | None = None,
) -> Explanation:
    """Return the reasons for a plan, measured by the twin.

    Parameters
    ----------
    plan, workload
        Plan, and its workload.
    profile
        Profile of the plan, if it is neither a shipped one nor the workload's.
    groups
        Groups to explain, without other numbers of GPUs; empty: the whole plan.
    source
        Name of the workload in errors.
    progress
        Called with (stage, done, total).

    Raises
    ------
    InputError
        If the workload or the profile is not the plan's.
    InfeasibleError
        If an instance of the plan does not start, since the plan was edited.
    """
    rebuilt = rebuild(plan, workload, profile, source)
    report = progress or no_progress
    selected = {group.id for group in groups or plan.groups}
    chosen = [each for each in rebuilt.groups if each.group.id in selected]
    explained = _explain_groups(plan, chosen, report)
    others = () if groups else what_if(rebuilt, search_seed(plan), report)
    return Explanation(plan_outcome(plan), explained, others)


def _explain_groups(
    plan: Plan, groups: Sequence[RebuiltGroup], report: Progress
) -> tuple[GroupExplanation, ...]:
    alike: dict[object, list[RebuiltGroup]] = {}
    for each in groups:
        alike.setdefault(each.kind, []).append(each)
    firsts = [same[0] for same in alike.values()]
    seed = search_seed(plan)
    fresh = plan.verification.seeds[0] if plan.verification.seeds else fresh_seeds(seed, 1)[0]

    def headroom(each: RebuiltGroup) -> Headroom:
        load = each.group.predicted.load_over_capacity
        return find_headroom(each.problem, each.assignment, each.group.binds, load, fresh, seed)

    rooms = parallel_map(headroom, firsts, lambda done: report("what is in use", done, len(firsts)))
    runs = [CurveRuns(each.problem, each.assignment, seed) for each in firsts]
    slot_sizes = [len(each.slot_values()[0]) for each in runs]
    knob_sizes = [len(each.knob_values()) for each in runs]

    def simulated(stage: str, sizes: Sequence[int], number: int) -> Callable[[int], None]:
        return lambda done: report(stage, sum(sizes[:number]) + done, sum(sizes))

    explained = []
    for number, (same, room) in enumerate(zip(alike.values(), rooms, strict=True)):
        curve = slot_curve(runs[number], simulated("adapter slots", slot_sizes, number))
        knobs = knob_curves(runs[number], simulated("engine knobs", knob_sizes, number))
        solver = str(plan.provenance.get("solver", "its solver"))
        problem = same[0].problem
        fixed = problem.fixed_a_max is not None
        why = explain_slots(curve, solver, fixed=fixed) if problem.has_slots else SHARED
        names = tuple(each.group.id for each in same)
        loading = loading_points(problem.pessimistic, same[0].assignment, seed)
        load = same[0].group.predicted.load_over_capacity
        gains = size_gains(problem.pessimistic, same[0].assignment, load, seed)
        explained.append(GroupExplanation(names, curve, why, room, knobs, problem.has_slots, loading, gains))
    return tuple(explained)
