"""`explain`: reasons for a plan, measured by the twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from capplan.planner.estimate import SEARCH_DURATION_S
from capplan.planner.explain.headroom import Headroom, find_headroom
from capplan.planner.explain.rebuild import RebuiltGroup, rebuild, search_seed
from capplan.planner.explain.slot_curve import SlotCurve, curve_size, explain_slots, slot_curve
from capplan.planner.explain.what_if import PlanOutcome, Progress, WhatIf, plan_outcome, what_if
from capplan.planner.parallel import parallel_map
from capplan.planner.verify import fresh_seeds
from capplan.spec import Group, Plan, Profile, Workload
from capplan.spec.display import Displayed


@dataclass(frozen=True)
class GroupExplanation:
    """Why groups are as they are.

    Attributes
    ----------
    ids
        Groups of which all this is true, because they serve adapters alike with settings alike.
    curve
        What other numbers of slots would do.
    why_a_max
        Why it is what it is, in a sentence.
    room
        How much of everything is in use, and what is left.
    """

    ids: tuple[str, ...]
    curve: SlotCurve
    why_a_max: str
    room: Headroom


@dataclass(frozen=True, repr=False)
class Explanation(Displayed):
    """Why a plan is as it is.

    Attributes
    ----------
    outcome
        What the plan as a whole does, as it says itself.
    groups
        Group by group, those that are alike together.
    what_if
        One instance fewer (unless there is only one) and one more; empty when groups were asked for by name.
    """

    outcome: PlanOutcome
    groups: tuple[GroupExplanation, ...]
    what_if: tuple[WhatIf, ...]

    def display_facts(self) -> Mapping[str, object]:
        """Return the size of the plan, and the reason for each group's slots."""
        reasons = {"a_max": "; ".join(group.why_a_max for group in self.groups[:3])}
        return {
            "gpus": self.outcome.gpus,
            "groups": len(self.groups),
            "what_if": len(self.what_if),
            **reasons,
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
    """Ask the twin why a plan is as it is.

    Parameters
    ----------
    plan, workload
        The plan, and the workload that it was made for.
    profile
        The one that the plan rests on, where it is neither a shipped one nor the workload's.
    groups
        Groups of the plan to explain, without a look at other numbers of GPUs; empty: everything.
    source
        What errors call the workload.
    progress
        Called with (stage, done, total).

    Raises
    ------
    InputError
        When the workload or the profile is not the plan's.
    InfeasibleError
        When an instance of the plan would not start: then somebody changed it.
    """
    rebuilt = rebuild(plan, workload, profile, source)
    report = progress or _silent
    wanted = {group.id for group in groups}
    asked = [each for each in rebuilt.groups if not wanted or each.group.id in wanted]
    explained = _explain_groups(plan, asked, report)
    others = () if groups else what_if(rebuilt, search_seed(plan), report)
    return Explanation(plan_outcome(plan), explained, others)


def _explain_groups(
    plan: Plan, asked: Sequence[RebuiltGroup], report: Progress
) -> tuple[GroupExplanation, ...]:
    alike: dict[object, list[RebuiltGroup]] = {}
    for each in asked:
        alike.setdefault(each.likeness, []).append(each)
    firsts = [same[0] for same in alike.values()]
    rooms = _headrooms(plan, firsts, report)
    total = sum(curve_size(each.problem, each.assignment) for each in firsts)
    seed, done = search_seed(plan), 0
    answers = []
    for same, room in zip(alike.values(), rooms, strict=True):
        first = same[0]
        answered = partial(_report_points, report, done, total)
        curve = slot_curve(first.problem, first.assignment, seed=seed, answered=answered)
        done += curve_size(first.problem, first.assignment)
        why = explain_slots(curve, _solver_name(plan), fixed=first.problem.fixed_a_max is not None)
        answers.append(GroupExplanation(tuple(each.group.id for each in same), curve, why, room))
    return tuple(answers)


def _report_points(report: Progress, before: int, total: int, done: int) -> None:
    report("adapter slots", before + done, total)


def _headrooms(plan: Plan, firsts: Sequence[RebuiltGroup], report: Progress) -> list[Headroom]:
    seed = search_seed(plan)
    fresh = plan.verification.seeds[0] if plan.verification.seeds else fresh_seeds(seed, 1)[0]
    duration_s = plan.verification.duration_s or SEARCH_DURATION_S

    def room(each: RebuiltGroup) -> Headroom:
        load = each.group.predicted.load_over_capacity
        return find_headroom(each.problem, each.assignment, each.group.binds, load, fresh, duration_s)

    return parallel_map(room, firsts, lambda done: report("what is in use", done, len(firsts)))


def _solver_name(plan: Plan) -> str:
    return str(plan.provenance.get("solver", "its solver"))


def _silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""
