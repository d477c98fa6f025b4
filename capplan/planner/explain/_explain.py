"""`explain`: reasons for a plan, measured by the twin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from capplan.planner.explain._curve import (
    CurveRuns,
    SettingCurve,
    SlotCurve,
    explain_slots,
    knob_curves,
    slot_curve,
)
from capplan.planner.explain._headroom import Headroom, find_headroom
from capplan.planner.explain._loading import LoadingPoint, loading_points
from capplan.planner.explain._queue_gains import SizeGain, size_gains
from capplan.planner.explain._what_if import PlanOutcome, WhatIf, plan_outcome, what_if
from capplan.planner.problem._execution import Progress, no_progress, parallel_map
from capplan.planner.problem._setup import RebuiltGroup, rebuild, search_seed
from capplan.planner.verification._verify import fresh_seeds
from capplan.spec import Displayed, Group, Plan, Profile, Workload

SHARED: Final = "no slots: adapters and KV share the memory"
"""Reason under a scheduler or a cache of the workload."""


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
