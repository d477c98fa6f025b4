"""The planning problem of a workload, with its pools, their numbers of instances and its engine settings.

It is made from a workload, or rebuilt from a plan and its workload.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product

from capplan.datasets import list_profiles, load_profile
from capplan.errors import InputError
from capplan.planner.problem._bound import lower_bound_instances
from capplan.planner.problem._problem import (
    OPEN_FACTOR,
    AdapterShare,
    Assignment,
    GpuPool,
    KnobSearch,
    Problem,
    whole_adapters,
)
from capplan.planner.problem._settings import knobs_of
from capplan.serving import VLLM_ENGINE, vllm_rank
from capplan.spec import (
    Group,
    Objective,
    Plan,
    Pool,
    Profile,
    ProfileEngine,
    QueueConfig,
    Workload,
    beyond,
    input_limits,
    require_adapter,
)


def make_problem(
    workload: Workload,
    gpus: int | None,
    profile: Profile | str | None,
    duration_s: float | None = None,
) -> Problem:
    """Return the problem of a workload; `gpus` and `profile` override those of the workload.

    A pool of an open number of GPUs gets `OPEN_FACTOR` times the lower bound of the load on this pool alone.
    Whatever is missing, invalid or contradictory in the workload is an `InputError`.
    """
    if workload.pools and (gpus is not None or profile is not None):
        rule = "does not go with pools: the workload says which GPUs there are"
        raise InputError(rule, location="gpus" if gpus is not None else "profile")
    pools = tuple(map(_read_pool, workload.pools)) or (_single_pool(workload, gpus, profile),)
    for pool in pools:
        pool.profile.require_model(workload.base_model)
    models = [pool.profile.model for pool in pools]
    engine = workload.engine.complete(max_model_len=min(model.default_max_model_len for model in models))
    for model in models:
        model.require_positions(engine.max_model_len, "engine.max_model_len")
    for pool in pools:
        _require_rank(workload.engine.max_lora_rank, pool.profile.engine)
    _require_fitting_prompts(workload, engine.max_model_len)
    problem = Problem(workload, pools, engine, (), simulated_s=duration_s)
    problem.constraints, problem.busiest_workload  # noqa: B018 - errors before anything is solved
    problem = replace(problem, shares=whole_adapters(problem))
    return replace(problem, pools=tuple(_with_instances(problem, pool) for pool in pools))


def _require_rank(rank: int | None, engine: ProfileEngine) -> None:
    if rank is not None and engine.name == VLLM_ENGINE and rank < (least := vllm_rank(rank, engine.version)):
        rule = f"must be at least {least}, the least that vLLM {engine.version} accepts"
        raise InputError(rule, rank, "engine.max_lora_rank")


def require_folders(problem: Problem) -> None:
    """Check adapters whose folders are on this machine against the workload and the models of its pools."""
    base_model = problem.workload.base_model
    for model in dict.fromkeys(pool.profile.model for pool in problem.pools):
        for adapter in problem.workload.adapters:
            facts = (adapter.path, adapter.rank, adapter.target_modules)
            require_adapter(*facts, base_model, f"adapter {adapter.name}", model)


def _with_instances(problem: Problem, pool: GpuPool) -> GpuPool:
    """Return the pool with a number of instances."""
    if not pool.is_open:
        return pool
    objective = problem.workload.objective
    if objective in (Objective.MIN_LATENCY, Objective.MAX_THROUGHPUT):
        rule = f"is required for objective {objective.value}, which uses all GPUs"
        raise InputError(rule, location="gpus" if pool.name is None else f"pools: {pool.name}.count")
    least = lower_bound_instances(replace(problem, pools=(pool,)))
    _require_few(least, "lower bound of the load")
    return replace(pool, instances=min(OPEN_FACTOR * least, input_limits().max_instances))


def _single_pool(workload: Workload, gpus: int | None, profile: Profile | str | None) -> GpuPool:
    count = gpus if gpus is not None else (workload.gpus.count if workload.gpus else None)
    if count is not None and count < 1:
        raise InputError("must be >= 1", count, "gpus")
    selected = profile if profile is not None else workload.profile
    if selected is None:
        raise InputError("is required: name a shipped profile or a profile JSON", location="profile")
    return _pool_of(None, _load_profile(selected), count, "gpus")


def _read_pool(pool: Pool) -> GpuPool:
    loaded = _load_profile(pool.profile)
    price = None if pool.usd_per_hour is None else pool.usd_per_hour * loaded.tp
    return _pool_of(pool.name, loaded, pool.count, f"pools: {pool.name}.count", price)


def _load_profile(profile: Profile | str) -> Profile:
    return load_profile(profile) if isinstance(profile, str | os.PathLike) else profile


def _pool_of(
    name: str | None, profile: Profile, gpus: int | None, location: str, price: float | None = None
) -> GpuPool:
    """Return a pool of GPUs, with one instance if their number is open."""
    if gpus is None:
        return GpuPool(name, profile, 1, price, is_open=True)
    if gpus < profile.tp:
        rule = f"must be at least the {profile.tp} GPUs of one instance of profile {profile.name}"
        raise InputError(rule, gpus, location)
    _require_few(gpus // profile.tp, location)
    return GpuPool(name, profile, gpus // profile.tp, price)


def _require_few(instances: int, location: str) -> None:
    most = input_limits().max_instances
    if instances > most:
        raise InputError(beyond(most, "instances", "--max-instances"), instances, location)


def _require_fitting_prompts(workload: Workload, max_model_len: int) -> None:
    """Refuse a trace with too many tokens in prompts longer than max_model_len."""
    trace = workload.trace
    if trace is None:
        return
    tokens = trace.prompt_tokens.astype(float) + trace.output_tokens
    too_long = trace.prompt_tokens >= max_model_len
    if tokens[too_long].sum() > (1.0 - workload.slo.served_fraction) * tokens.sum():
        rule = (
            f"must exceed the prompts of the trace: {int(too_long.sum())} of {too_long.size} do not fit, "
            f"the longest has {int(trace.prompt_tokens.max())} tokens"
        )
        raise InputError(rule, max_model_len, "engine.max_model_len")


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
        lengths = self.problem.lengths
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

    `profile` replaces the plan's if the workload has no pools. Errors call the workload `source`: it is an
    `InputError` if the workload or the profile is not the plan's.
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
