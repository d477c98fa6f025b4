"""The planning problem of a workload, with its pools, their numbers of instances and its engine settings."""

from __future__ import annotations

import os
from dataclasses import replace

from capplan.datasets import load_profile
from capplan.errors import InputError
from capplan.planner.problem._bound import lower_bound_instances
from capplan.planner.problem._problem import OPEN_FACTOR, GpuPool, Problem, whole_adapters
from capplan.serving import VLLM_ENGINE, vllm_rank
from capplan.spec import (
    Objective,
    Pool,
    Profile,
    ProfileEngine,
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

    Raises
    ------
    InputError
        If one of them is missing or invalid, or constraints contradict each other.
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
    """Check the adapters whose folders are on this machine against the workload and the models of its pools.

    Raises
    ------
    InputError
        As `capplan.spec._peft_folder.require_adapter`.
    """
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
