"""From a workload to a problem: pools with their profiles, complete engine settings, one part per adapter."""

from __future__ import annotations

import os
from dataclasses import replace

from capplan.datasets import load_profile
from capplan.errors import InputError
from capplan.planner.parts import whole_parts
from capplan.planner.problem import GpuPool, Problem, complete_engine
from capplan.spec import Pool, Profile, Workload


def make_problem(workload: Workload, gpus: int | None, profile: Profile | str | None) -> Problem:
    """Return the problem of a workload; `gpus` and `profile` win over what it says itself.

    Raises
    ------
    InputError
        When one of them is missing or does not fit, or wishes contradict each other.
    """
    if workload.pools and (gpus is not None or profile is not None):
        rule = "does not go with pools: the workload says which GPUs there are"
        raise InputError(rule, location="gpus" if gpus is not None else "profile")
    pools = tuple(map(_pool, workload.pools)) or (_only_pool(workload, gpus, profile),)
    for pool in pools:
        pool.profile.require_model(workload.base_model)
    engine = complete_engine(workload.engine)
    _require_prompts_that_fit(workload, engine.max_model_len)
    problem = Problem(workload, pools, engine, ())
    problem.constraints  # noqa: B018 - contradictions are found here, before anything is solved
    return replace(problem, parts=whole_parts(problem))


def _only_pool(workload: Workload, gpus: int | None, profile: Profile | str | None) -> GpuPool:
    """Return the GPUs of a workload without pools."""
    count = gpus if gpus is not None else (workload.gpus.count if workload.gpus else None)
    if count is None:
        rule = "is required: say how many GPUs a plan may use (gpus: {count: N} in the workload, or --gpus N)"
        raise InputError(rule, location="gpus")
    if count < 1:
        raise InputError("must be >= 1", count, "gpus")
    wanted = profile if profile is not None else workload.profile
    if wanted is None:
        raise InputError("is required: name a shipped profile or a profile JSON", location="profile")
    loaded = _loaded(wanted)
    return GpuPool(None, loaded, _instances(loaded, count, "gpus"))


def _pool(pool: Pool) -> GpuPool:
    loaded = _loaded(pool.profile)
    price = None if pool.usd_per_hour is None else pool.usd_per_hour * loaded.tp
    return GpuPool(pool.name, loaded, _instances(loaded, pool.count, f"pools: {pool.name}.count"), price)


def _loaded(profile: Profile | str) -> Profile:
    return load_profile(profile) if isinstance(profile, str | os.PathLike) else profile


def _instances(profile: Profile, gpus: int, location: str) -> int:
    """Return how many instances so many GPUs make."""
    if gpus < profile.tp:
        rule = f"must be at least the {profile.tp} GPUs of one instance of profile {profile.name}"
        raise InputError(rule, gpus, location)
    return gpus // profile.tp


def _require_prompts_that_fit(workload: Workload, max_model_len: int) -> None:
    """Refuse a trace of which so much is too long for the engine that no number of GPUs would do."""
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
