"""Reconstruction of the placement problem from a plan and its workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from capplan.datasets import list_profiles
from capplan.errors import InputError
from capplan.planner.problem import AdapterShare, Assignment, Problem, make_problem
from capplan.spec import Group, Plan, Profile, QueueConfig, Workload


@dataclass(frozen=True)
class RebuiltGroup:
    """One instance of a group, as the planner saw it.

    Attributes
    ----------
    group
        The group in the plan.
    problem
        What was asked, with the engine settings of the group.
    assignment
        What one instance of the group serves, and how it is set.
    """

    group: Group
    problem: Problem
    assignment: Assignment

    @property
    def likeness(self) -> object:
        """What decides on the twin's answers: equal for groups about which it says the same."""
        workload = self.problem.workload
        adapters = {adapter.name: adapter for adapter in workload.adapters}
        load = tuple(
            (
                share.rank,
                share.rate_rps,
                workload.lengths_of(adapters[share.name]),
                share.name if workload.trace is not None else None,
            )
            for share in self.assignment.shares
        )
        return self.group.engine_args, self.assignment.pool, load


@dataclass(frozen=True)
class RebuiltPlan:
    """A plan as the planner saw it.

    Attributes
    ----------
    problem
        What was asked; without pools, with the GPUs that the plan uses.
    groups
        In the order of the plan.
    """

    problem: Problem
    groups: tuple[RebuiltGroup, ...]

    @property
    def shares(self) -> tuple[AdapterShare, ...]:
        """What all instances serve: replicas have shares of their own, numbered on."""
        return tuple(
            replace(share, number=share.number + replica)
            for each in self.groups
            for replica in range(each.group.replicas)
            for share in each.assignment.shares
        )

    @property
    def pools(self) -> tuple[int, ...]:
        """The pool of every instance."""
        return tuple(each.assignment.pool for each in self.groups for _ in range(each.group.replicas))


def rebuild(plan: Plan, workload: Workload, profile: Profile | None, source: str) -> RebuiltPlan:
    """Return a plan as the planner saw it.

    Parameters
    ----------
    plan, workload
        They have to belong together.
    profile
        Instead of the plan's own, where the workload has no pools.
    source
        Of the workload, for errors.

    Raises
    ------
    InputError
        When the workload or the profile is not that of the plan.
    """
    wishes = _planned_workload(plan, workload, source)
    problem = _rebuild_problem(plan, wishes, profile)
    numbers: Counter[str] = Counter()
    groups = tuple(_rebuild_group(problem, group, numbers, source) for group in plan.groups)
    return RebuiltPlan(problem, groups)


def search_seed(plan: Plan) -> int:
    """Return the seed that the plan was searched with; 0 where it does not say."""
    seed = plan.provenance.get("seed")
    return seed if isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 else 0


def _planned_workload(plan: Plan, workload: Workload, source: str) -> Workload:
    """Return the workload as it was planned for: `capplan plan --queues` adds a wish to that of the file."""
    for candidate in (workload, workload.replace(queues=QueueConfig())):
        if candidate.digest() == plan.workload_digest:
            return candidate
    rule = f"must be the workload that the plan was made for, with digest {plan.workload_digest[:12]}..."
    raise InputError(rule, f"{workload.digest()[:12]}...", source)


def _rebuild_problem(plan: Plan, workload: Workload, profile: Profile | None) -> Problem:
    if workload.pools:
        problem = make_problem(workload, None, profile)
    else:
        of_plan = plan.groups[0].profile
        wanted = profile or (of_plan if of_plan in list_profiles() else workload.profile)
        problem = make_problem(workload, plan.totals.gpus, wanted)
    pools = {pool.name: pool for pool in problem.pools}
    for group in plan.groups:
        if group.pool not in pools:
            raise InputError("must be a pool of the workload", group.pool, f"groups: {group.id}.pool")
        used = pools[group.pool].profile.name
        if used != group.profile:
            raise InputError(f"must be {group.profile}, which the plan rests on", used, "profile")
    return problem


def _rebuild_group(problem: Problem, group: Group, numbers: Counter[str], source: str) -> RebuiltGroup:
    known = {adapter.name for adapter in problem.workload.adapters}
    strangers = sorted(adapter.name for adapter in group.adapters if adapter.name not in known)
    if strangers:
        rule = f"must be an adapter of {source}"
        raise InputError(rule, strangers[0], f"groups: {group.id}.adapters")
    pool = next(number for number, each in enumerate(problem.pools) if each.name == group.pool)
    own = _with_settings(problem, group)
    assignment = Assignment(
        _group_shares(own.workload, group, numbers),
        group.engine_args.max_loras,
        own.engine.max_num_seqs,
        pool,
    )
    return RebuiltGroup(group, own, assignment)


def _with_settings(problem: Problem, group: Group) -> Problem:
    """Return the problem with the engine as the group has it, whatever the defaults are by now."""
    args = group.engine_args
    # Not checked again: ranks on other groups may well exceed the slots of this one.
    fixed = problem.workload.engine.model_copy(
        update={"max_lora_rank": args.max_lora_rank, "max_cpu_loras": args.max_cpu_loras}
    )
    return replace(problem, engine=args, workload=problem.workload.model_copy(update={"engine": fixed}))


def _group_shares(workload: Workload, group: Group, numbers: Counter[str]) -> tuple[AdapterShare, ...]:
    """Return what one instance of a group serves, in the order of the workload, shares numbered on."""
    fraction: Mapping[str, float] = {each.name: each.share / group.replicas for each in group.adapters}
    shares = []
    for adapter in workload.adapters:
        if adapter.name in fraction:
            own = fraction[adapter.name]
            number = numbers[adapter.name]
            shares.append(AdapterShare(adapter.name, adapter.rank, adapter.rate_rps * own, own, number))
            numbers[adapter.name] += group.replicas
    return tuple(shares)
