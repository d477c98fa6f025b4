"""Verification of a plan as a deployment target serves it.

Engines lack the plan's scheduler, cache and re-balancing; targets may route otherwise, or load every adapter
everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from capplan.planner.document._assemble import build_plan
from capplan.planner.problem._estimate import TwinEstimator, make_estimator
from capplan.planner.problem._execution import Progress, no_progress
from capplan.planner.problem._problem import AdapterShare, Assignment, Estimator, Problem
from capplan.planner.problem._settings import choose_slots, most_slots
from capplan.planner.problem._setup import rebuild, search_seed
from capplan.planner.verification._verify import FRESH_SEEDS, RepairResult, make_verifier
from capplan.spec import BY_SHARES, Plan, Profile, RouterOptions, Workload, stores_everywhere


def verify_as_served(
    plan: Plan,
    workload: Workload,
    *,
    router: str | None = None,
    everywhere: bool = False,
    profile: Profile | None = None,
    source: str = "workload",
    progress: Progress | None = None,
) -> Plan:
    """Return a plan with its placement and verification for servers without its scheduler and re-balancing.

    Engines without the scheduler, its queues and its cache have adapter slots: each instance gets the best
    number of slots by the twin. So it does if it gets other adapters than planned.

    Parameters
    ----------
    plan, workload
        Plan, and the workload that it was made for.
    router
        Router in front of the servers, a name in `capplan.serving.routers.ROUTERS`; None: that of the plan.
    everywhere
        Whether every server loads every adapter and gets an equal part of all traffic.
    profile
        Profile of the plan, if it is neither a shipped one nor the workload's.
    source
        Name of the workload in errors.
    progress
        Called with (stage, done, total).

    Raises
    ------
    InputError
        If the workload or the profile is not the plan's, or there is no such router.
    InfeasibleError
        If an instance does not start with slots.
    """
    report = progress or no_progress
    rebuilt = rebuild(plan, workload, profile, source)
    served = rebuilt.problem.workload.model_copy(update=_served(plan, router))
    problem = replace(rebuilt.problem, workload=served)
    needs_slots = everywhere or rebuilt.problem.workload.scheduling is not None
    seed = search_seed(plan)
    twin = TwinEstimator(problem, seed)
    estimator = make_estimator(problem, "auto", twin)
    instances = [each.assignment for each in rebuilt.groups for _ in range(each.group.replicas)]
    if everywhere:
        equal = tuple(AdapterShare.of(each, 1.0 / len(instances)) for each in problem.traffic)
        instances = [replace(each, shares=equal) for each in instances]
    assignments = []
    for number, instance in enumerate(instances):
        report("adapter slots", number, len(instances))
        assignments.append(_with_slots(problem, instance, estimator, twin) if needs_slots else instance)
    count = len(plan.verification.seeds) or FRESH_SEEDS
    verifier = make_verifier(problem, twin, seed, count=count)
    verifications = verifier.whole(assignments, lambda done, total: report("verifying", done, total))
    made = build_plan(
        verifier,
        RepairResult(tuple(assignments), tuple(verifications), ()),
        verified=True,
        previous=plan,
        notes={name: value for name, value in plan.provenance.items() if name in _KEPT},
    )
    # The plan gives the names of the groups; it is not in force, so there is nothing to move from it.
    kept = {name: value for name, value in made.provenance.items() if not name.startswith("moved_")}
    return made.replace(moves=(), provenance=kept)


_KEPT = ("solver", "estimator", "seed", "knobs", "command")
"""Notes of the plan on its placement."""


def _served(plan: Plan, router: str | None) -> dict[str, Any]:
    """Return the settings of the plan's workload that are others as served."""
    left_out: dict[str, Any] = {"scheduler": None, "cache": None, "queues": None, "rebalance": None}
    if router in (None, plan.router):
        return left_out
    # Parameters are those of the plan's router. Servers still store what the plan says, unless shares of 0
    # keep the new router from it.
    stores_all = stores_everywhere(plan.router_options) and router not in BY_SHARES
    options = RouterOptions(holders="all") if stores_all else None
    return {**left_out, "router": router, "router_options": options}


def _with_slots(
    problem: Problem, instance: Assignment, estimator: Estimator, twin: TwinEstimator
) -> Assignment:
    """Return an instance with the best number of slots, or the largest if it holds with none."""
    bare = replace(instance, queues=None)
    slots = choose_slots(problem, bare.shares, estimator, twin, bare.pool, bare)
    return replace(bare, a_max=most_slots(problem, bare.shares) if slots is None else slots)
