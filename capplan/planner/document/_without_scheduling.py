"""Verification of a plan on engines without its scheduler, cache and re-balancing."""

from __future__ import annotations

from dataclasses import replace

from capplan.planner.document._assemble import build_plan
from capplan.planner.problem._estimate import TwinEstimator, make_estimator
from capplan.planner.problem._parallel import Progress, no_progress
from capplan.planner.problem._problem import Assignment, Estimator, Problem
from capplan.planner.problem._rebuild import rebuild, search_seed
from capplan.planner.problem._slots import choose_slots, most_slots
from capplan.planner.verification._repair import RepairResult
from capplan.planner.verification._verify import FRESH_SEEDS, make_verifier
from capplan.spec import Plan, Profile, Workload


def verify_without_scheduling(
    plan: Plan,
    workload: Workload,
    *,
    profile: Profile | None = None,
    source: str = "workload",
    progress: Progress | None = None,
) -> Plan:
    """Return a plan with its placement and verification for engines without its scheduler and re-balancing.

    Engines without the scheduler, its queues and its cache have adapter slots: each instance gets the best
    number of slots by the twin.

    Parameters
    ----------
    plan, workload
        Plan, and the workload that it was made for.
    profile
        Profile of the plan, if it is neither a shipped one nor the workload's.
    source
        Name of the workload in errors.
    progress
        Called with (stage, done, total).

    Raises
    ------
    InputError
        If the workload or the profile is not the plan's.
    InfeasibleError
        If an instance does not start with slots.
    """
    report = progress or no_progress
    rebuilt = rebuild(plan, workload, profile, source)
    left_out = {"scheduler": None, "cache": None, "queues": None, "rebalance": None}
    problem = replace(rebuilt.problem, workload=rebuilt.problem.workload.model_copy(update=left_out))
    needs_slots = rebuilt.problem.workload.scheduling is not None
    seed = search_seed(plan)
    twin = TwinEstimator(problem, seed)
    estimator = make_estimator(problem, "auto", twin)
    instances = [each.assignment for each in rebuilt.groups for _ in range(each.group.replicas)]
    assignments = []
    for number, instance in enumerate(instances):
        report("adapter slots", number, len(instances))
        assignments.append(_with_slots(problem, instance, estimator, twin) if needs_slots else instance)
    count = len(plan.verification.seeds) or FRESH_SEEDS
    verifier = make_verifier(problem, twin, seed, count=count)
    verifications = verifier.whole(assignments, lambda done, total: report("verifying", done, total))
    return build_plan(
        verifier,
        RepairResult(tuple(assignments), tuple(verifications), ()),
        verified=True,
        previous=plan,
        notes={name: value for name, value in plan.provenance.items() if name in _KEPT},
    )


_KEPT = ("solver", "estimator", "seed", "knobs", "command")
"""Notes of the plan on its placement."""


def _with_slots(
    problem: Problem, instance: Assignment, estimator: Estimator, twin: TwinEstimator
) -> Assignment:
    """Return an instance with the best number of slots, or the largest if it holds with none."""
    bare = replace(instance, queues=None)
    slots = choose_slots(problem, bare.shares, estimator, twin, bare.pool, bare)
    return replace(bare, a_max=most_slots(problem, bare.shares) if slots is None else slots)
