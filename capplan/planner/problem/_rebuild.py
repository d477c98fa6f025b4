"""Reconstruction of the placement problem from a plan and its workload."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import product

from capplan.datasets import list_profiles
from capplan.errors import InputError
from capplan.planner.problem._problem import AdapterShare, Assignment, KnobSearch, Problem
from capplan.planner.problem._settings import knobs_of
from capplan.planner.problem._setup import make_problem
from capplan.spec import Group, Plan, Profile, QueueConfig, Workload


@dataclass(frozen=True)
class RebuiltGroup:
    """One instance of a group."""

    group: Group
    """Group of the plan."""
    problem: Problem
    """Placement problem with the engine settings of the group, in the worst window of a trace."""
    assignment: Assignment
    """Shares and settings of one instance."""

    @property
    def kind(self) -> object:
        """Key that is equal for groups that perform alike in the twin."""
        workload = self.problem.workload
        lengths = {each.name: workload.lengths_of(each) for each in self.problem.traffic}
        traced = workload.trace is not None
        load = tuple(
            (share.rank, share.rate_rps, lengths[share.name], share.name if traced else None)
            for share in self.assignment.shares
        )
        return self.group.engine_args, self.assignment.pool, load


@dataclass(frozen=True)
class RebuiltPlan:
    """Placement problem of a plan."""

    problem: Problem
    """Placement problem; without pools, with the GPUs of the plan."""
    groups: tuple[RebuiltGroup, ...]
    """One instance of each group, in the order of the plan."""

    @property
    def shares(self) -> tuple[AdapterShare, ...]:
        """Shares of all instances, with a share for every replica."""
        return tuple(
            replace(share, number=share.number + replica)
            for each in self.groups
            for replica in range(each.group.replicas)
            for share in each.assignment.shares
        )

    @property
    def pools(self) -> tuple[int, ...]:
        """Index of the pool of every instance."""
        return tuple(each.assignment.pool for each in self.groups for _ in range(each.group.replicas))


def rebuild(plan: Plan, workload: Workload, profile: Profile | None, source: str) -> RebuiltPlan:
    """Return the placement problem of a plan.

    `profile` replaces the plan's if the workload has no pools. Errors call the workload `source`.

    Raises
    ------
    InputError
        If the workload or the profile is not the plan's.
    """
    problem = _rebuild_problem(plan, planned_workload(plan, workload, source), profile)
    knobs = KnobSearch.named(str(plan.provenance.get("knobs", KnobSearch.FITTED)))
    links = _number(plan, "gpus_per_link", 1)
    problem = replace(problem, knobs=knobs, robust=_quantile(plan), gpus_per_link=links)
    numbers: Counter[str] = Counter()
    window = dict(problem.windows).get(plan.verification.window_start_s or 0.0, problem)
    return RebuiltPlan(
        problem, tuple(_rebuild_group(window, plan, group, numbers, source) for group in plan.groups)
    )


def search_seed(plan: Plan) -> int:
    """Return the seed of the search; 0 if the plan has none."""
    return _number(plan, "seed", 0)


def _number(plan: Plan, key: str, least: int) -> int:
    """Return a whole number of the provenance; `least` without one, or for a smaller one."""
    value = plan.provenance.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else least


def _quantile(plan: Plan) -> float | None:
    """Return the quantile of the step times that the plan was made for; None for the fitted ones."""
    value = plan.provenance.get("robust")
    return value if isinstance(value, float) and 0.5 <= value < 1.0 else None


def planned_workload(plan: Plan, workload: Workload, source: str) -> Workload:
    """Return the planned workload: that of the file, or with the options of `capplan plan`.

    Raises
    ------
    InputError
        If the plan was made for another workload; located at `source`.
    """
    group = plan.groups[0]
    schedulers: list[dict[str, object]] = [
        {},
        {"queues": QueueConfig()},
        {"queues": None, "scheduler": group.scheduler},
    ]
    for scheduler, cache in product(schedulers, ({}, {"cache": group.cache})):
        names = ("router", "router_options", "rebalance")
        named = {name: getattr(plan, name) for name in names}
        candidate = workload.model_copy(update={**scheduler, **cache, **named})
        if candidate.digest() == plan.workload_digest:
            return candidate
    rule = f"must be the workload that the plan was made for, with digest {plan.workload_digest[:12]}..."
    raise InputError(rule, f"{workload.digest()[:12]}...", source)


def _rebuild_problem(plan: Plan, workload: Workload, profile: Profile | None) -> Problem:
    duration_s = None if workload.trace is not None else plan.verification.duration_s or None
    if workload.pools:
        problem = make_problem(workload, None, profile, duration_s)
    else:
        planned = plan.groups[0].profile
        selected = profile or (planned if planned in list_profiles() else workload.profile)
        problem = make_problem(workload, plan.totals.gpus, selected, duration_s)
    pools = {pool.name: pool for pool in problem.pools}
    for group in plan.groups:
        if group.pool not in pools:
            raise InputError("must be a pool of the workload", group.pool, f"groups: {group.id}.pool")
        used = pools[group.pool].profile.name
        if used != group.profile:
            raise InputError(f"must be {group.profile}, which the plan rests on", used, "profile")
    return problem


def _rebuild_group(
    problem: Problem, plan: Plan, group: Group, numbers: Counter[str], source: str
) -> RebuiltGroup:
    """Return one instance of a group; `numbers` counts the shares of each adapter so far."""
    fractions = {name: share / group.replicas for name, share in plan.shares_of(group).items() if share > 0}
    unknown = fractions.keys() - {each.name for each in problem.traffic}
    if unknown:
        raise InputError(f"must be an adapter of {source}", min(unknown), f"groups: {group.id}.adapters")
    # Copied without validation: ranks of other groups may exceed the slots of this one.
    args = group.engine_args
    fixed = {"max_lora_rank": args.max_lora_rank or None, "max_cpu_loras": args.max_cpu_loras}
    workload = problem.workload.model_copy(
        update={"engine": problem.workload.engine.model_copy(update=fixed)}
    )
    shares = []
    for adapter in problem.traffic:
        if adapter.name in fractions:
            shares.append(AdapterShare.of(adapter, fractions[adapter.name], numbers[adapter.name]))
            numbers[adapter.name] += group.replicas
    pool = [each.name for each in problem.pools].index(group.pool)
    assignment = Assignment(tuple(shares), args.max_loras, pool, knobs_of(args), group.queues)
    return RebuiltGroup(group, replace(problem, engine=args, workload=workload), assignment)
