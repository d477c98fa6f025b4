"""Validation of a plan: one server per group under the requests that the twin simulates.

Predictions of the twin and of two baselines are compared with the measurement.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from capplan.errors import InputError
from capplan.models import with_step_times
from capplan.profiling.load._bench import BenchOptions, OnTick, bench
from capplan.profiling.load._preflight import ServerInfo, fetch_server_info
from capplan.profiling.load._requests import LoadSettings, Target, scaled, schedule_of
from capplan.profiling.load._result import BenchResult
from capplan.profiling.server._process import ServerCommand, engine_words, running_server
from capplan.profiling.validation._compare import (
    GroupValidation,
    Tolerances,
    compared,
    constant_step,
    faults_of,
    measured_values,
    mismatches_of,
    offered_values,
    predicted_values,
    slowdown_of,
)
from capplan.spec import Group, Plan, Profile, Workload
from capplan.twin.instance import Run, chosen_rules, simulate_run

_DRAIN_S: Final = 1.0
_MORE_CONNECTIONS: Final = 64
"""Beyond one per request, for metrics and the like."""
_METRICS_INTERVAL_S: Final = 2.0
"""Long, since vLLM writes metrics in the loop that streams tokens."""


@dataclass(frozen=True)
class ValidationOptions:
    """Options of a validation."""

    duration_s: float = 120.0
    """Measured time and the twin's horizon; both start with an empty engine."""
    rate_scale: float = 1.0
    """Factor of all rates."""
    seed: int = 0
    """Seed of arrivals and lengths, for server and twin."""
    groups: tuple[str, ...] = ()
    """Groups to validate; empty: all."""
    urls: Mapping[str, str] = field(default_factory=dict)
    """Running servers by group; a server is started for every other group."""
    model: str | None = None
    """Model of started servers, as for `capplan serve`; None: the plan's base model."""
    dtype: str = "auto"
    device: str = "cpu"
    threads: int = 1
    lora_kernel: str | None = None
    """None: the default of started servers."""
    cpu_affinity: str = "auto"
    """CPUs of the engine cores of started servers, as for `capplan serve`."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Engine settings that override the plan's, for predictions and started servers."""
    rules: str | None = None
    """Serving rules instead of the profile's."""
    api_key: str | None = field(default=None, repr=False)
    """API key of running servers."""
    tolerances: Tolerances = field(default_factory=Tolerances)

    def __post_init__(self) -> None:
        for name in ("duration_s", "rate_scale"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise InputError("must be a finite number above 0", getattr(self, name), name)


def chosen_groups(plan: Plan, options: ValidationOptions) -> tuple[Group, ...]:
    """Return the groups to validate, in the plan's order.

    Raises
    ------
    InputError
        For an unknown group.
    """
    for url in options.urls.values():
        Target(url)  # validates the address before anything is simulated
    known = [group.id for group in plan.groups]
    for flag, names in (("--group", options.groups), ("--url", options.urls)):
        for name in names:
            if name not in known:
                raise InputError(f"must be a group of the plan: {', '.join(known[:12])}", name, flag)
    return tuple(group for group in plan.groups if not options.groups or group.id in options.groups)


def group_workload(group: Group, workload: Workload, rate_scale: float) -> Workload:
    """Return the workload of one instance of a group.

    Raises
    ------
    InputError
        If the plan serves adapters that the workload does not have.
    """
    known = {adapter.name for adapter in workload.adapters}
    for adapter in group.adapters:
        if adapter.name not in known:
            raise InputError("must be an adapter of the workload", adapter.name, f"group {group.id}")
    shares = {adapter.name: adapter.share / group.replicas for adapter in group.adapters}
    if group.base is not None:
        if workload.base is None:
            raise InputError(
                "must be traffic of the workload", group.base.rate_rps, f"group {group.id}: base"
            )
        shares[workload.base_model] = group.base.share / group.replicas
    return scaled(workload.subset(shares, shares), rate_scale)


def server_command(
    plan: Plan,
    group: Group,
    profile: Profile,
    workload: Workload,
    kv_tokens: int,
    requests: int,
    options: ValidationOptions,
) -> ServerCommand:
    """Return the server command of one instance that gets a workload of `requests` requests."""
    block_size = profile.engine.block_size
    more = {
        "--served-model-name": plan.base_model,
        **_scheduling_flags(plan, group, options.rules),
        "--block-size": block_size,
        "--dtype": options.dtype,
        "--device": options.device,
        "--tensor-parallel-size": group.tp if group.tp > 1 else None,
        "--lora-kernel": options.lora_kernel,
        "--shared-prefix-tokens": workload.shared_prefix_tokens or None,
        "--cpu-affinity": options.cpu_affinity,
        "--max-queue": requests + 1,
        "--max-connections": requests + _MORE_CONNECTIONS,
        "--drain-timeout-s": 0,
        "--num-kv-blocks": None if options.device.startswith("cuda") else kv_tokens // block_size,
    }
    words = engine_words(group.engine_args.replace(**options.engine_args), more)
    return ServerCommand(options.model or plan.base_model, _sources(group), words, options.threads)


def _scheduling_flags(plan: Plan, group: Group, rules: str | None) -> dict[str, str | None]:
    """Return the flags of a group's rules, or of its scheduler, cache and queues."""
    if group.scheduling is None:
        return {"--rules": rules or plan.engine_of(group).rules}
    parts = zip(("--scheduler", "--cache", "--queues"), (*group.scheduling, group.queues), strict=True)
    return {flag: None if part is None else part.model_dump_json() for flag, part in parts}


def _run(plan: Plan, group: Group, options: ValidationOptions) -> Run:
    """Return the simulation of the same."""
    if group.scheduling is None:
        return Run(options.duration_s, options.seed, rules=options.rules or plan.engine_of(group).rules)
    scheduler, cache = group.scheduling
    return Run(options.duration_s, options.seed, scheduler=scheduler, cache=cache, queues=group.queues)


def _sources(group: Group) -> Mapping[str, str | int]:
    """Return adapter folders if present, otherwise ranks of random adapters."""
    return {
        adapter.name: adapter.path if adapter.path and Path(adapter.path).is_dir() else adapter.rank
        for adapter in group.adapters
    }


@dataclass(frozen=True)
class Validation:
    """Validation of all groups of a plan."""

    groups: tuple[GroupValidation, ...]
    results: Mapping[str, BenchResult]
    """Load-test results by group."""

    @property
    def agrees(self) -> bool:
        """Whether every group agrees."""
        return all(group.agrees for group in self.groups)

    @property
    def partial(self) -> bool:
        """Whether the validation was interrupted; groups may be missing."""
        return any(result.partial for result in self.results.values())


def validate(
    plan: Plan,
    workload: Workload,
    profiles: Mapping[str, Profile],
    options: ValidationOptions | None = None,
    on_group: Callable[[str], None] = lambda _: None,
    on_tick: OnTick | None = None,
) -> Validation:
    """Measure one instance of every group under the twin's requests, and compare.

    An interrupt (Ctrl-C) in the main thread ends the validation; the interrupted group is void.

    Parameters
    ----------
    plan, workload
        The plan, and the workload that it was made for.
    profiles
        Profiles by the names in the plan's groups.
    on_group
        Called with each group before its measurement.
    on_tick
        Called four times a second under load.

    Raises
    ------
    InputError
        If plan, workload and servers do not match.
    InfeasibleError
        If an instance cannot start.
    """
    chosen = options or ValidationOptions()
    groups, results = [], {}
    selected = chosen_groups(plan, chosen)
    for group in selected:
        args, model = group.engine_args.replace(**chosen.engine_args), profiles[group.profile].model
        model.require_positions(args.max_model_len, f"plan: group {group.id}: max_model_len")
    for group in selected:
        on_group(group.id)
        validated, result = _validate_group(plan, group, workload, profiles[group.profile], chosen, on_tick)
        results[group.id] = result
        groups.append(validated)
        if result.partial:
            break
    return Validation(tuple(groups), results)


def _measured(
    plan: Plan,
    group: Group,
    offered: Workload,
    profile: Profile,
    kv_tokens: int,
    options: ValidationOptions,
    on_tick: OnTick | None,
) -> tuple[ServerInfo, BenchResult]:
    """Load one instance of a group; return its account of itself and the result."""
    max_model_len = group.engine_args.replace(**options.engine_args).max_model_len
    schedule = schedule_of(offered, options.duration_s, options.seed, max_model_len, profile=profile)
    running = options.urls.get(group.id)
    started = server_command(plan, group, profile, offered, kv_tokens, len(schedule), options)
    with running_server(started) if running is None else nullcontext(running) as url:
        target = Target(url, options.api_key, plan.base_model)
        reported = asyncio.run(fetch_server_info(target))
        result = bench(
            offered,
            target,
            LoadSettings(options.duration_s, drain_s=_DRAIN_S, metrics_interval_s=_METRICS_INTERVAL_S),
            BenchOptions(seed=options.seed, profile=profile, max_model_len=max_model_len),
            on_tick=on_tick,
        )
    return reported, result


def _validate_group(
    plan: Plan,
    group: Group,
    workload: Workload,
    profile: Profile,
    options: ValidationOptions,
    on_tick: OnTick | None,
) -> tuple[GroupValidation, BenchResult]:
    """Simulate and load one instance of a group; compare with the twin and the baselines."""
    args = group.engine_args.replace(**options.engine_args)
    offered, planned = (group_workload(group, workload, rate) for rate in (options.rate_scale, 1.0))
    simulated = _run(plan, group, options)
    as_profiled = simulate_run(offered, profile, args, simulated)
    server, result = _measured(plan, group, offered, profile, as_profiled.kv_tokens, options, on_tick)
    slowdown = slowdown_of(result, profile)
    now, predicted = profile, as_profiled
    if slowdown is not None:
        now = with_step_times(profile, slowdown)
        predicted = simulate_run(offered, now, args, simulated)
    constant = constant_step(now, simulate_run(planned, now, args, simulated))
    baseline = simulate_run(offered, constant, args, simulated)
    predictions = {
        "predicted": predicted_values(predicted),
        "as_profiled": predicted_values(as_profiled),
        "constant_step": predicted_values(baseline),
        "offered_load": offered_values(predicted),
    }
    caching = chosen_rules(profile, simulated.rules, args.enable_prefix_caching).prefix_caching
    known = args.replace(enable_prefix_caching=caching)
    measured = measured_values(result, profile, server.settings.kv_tokens, predicted.kv_tokens)
    validated = GroupValidation(
        group=group.id,
        rate_scale=options.rate_scale,
        duration_s=options.duration_s,
        seed=options.seed,
        requests=predicted.submitted,
        comparisons=compared(measured, predictions, options.tolerances),
        starved=result.overall.starved,
        predicted_starved=predicted.starved,
        constant_step_starved=baseline.starved,
        faults=faults_of(result, predicted.submitted),
        slowdown=slowdown,
        mismatches=mismatches_of(server, plan.base_model, profile, known, as_profiled),
    )
    return validated, result
