"""Validation of a plan: one server per group under the requests that the twin simulates."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from capplan.errors import InputError
from capplan.profiling.load.bench import BenchOptions, bench
from capplan.profiling.load.preflight import fetch_engine_info
from capplan.profiling.load.requests import LoadSettings, Target, scaled, schedule_of
from capplan.profiling.load.result import BenchResult
from capplan.profiling.load.run import OnTick
from capplan.profiling.server.process import ServerCommand, engine_words, running_server
from capplan.profiling.validation.compare import (
    GroupValidation,
    Tolerances,
    compared,
    constant_step,
    faults_of,
    measured_values,
    offered_values,
    predicted_values,
)
from capplan.spec import Group, Plan, Profile, Workload
from capplan.twin import SimulationResult, simulate
from capplan.twin.simulate import EngineKeywords, keywords_of

_DRAIN_S: Final = 1.0
_LOOKS_S: Final = 2.0
"""Interval of metric samples; long, since vLLM writes them in the loop that hands out tokens."""


@dataclass(frozen=True)
class ValidationOptions:
    """Options of a validation.

    Attributes
    ----------
    duration_s
        Measured time and the twin's horizon; both start with an empty engine.
    rate_scale
        Factor of all rates.
    seed
        Seed of arrivals and lengths, for server and twin.
    groups
        Groups to validate; empty: all.
    urls
        Running servers by group; a server is started for every other group.
    model
        Model of started servers, as for `capplan serve`; None: the plan's base model.
    dtype, device, threads, lora_kernel
        Settings of started servers; None: the server's default.
    engine_args
        Engine settings that override the plan's.
    api_key
        API key of running servers.
    tolerances
        Limits of agreement.
    """

    duration_s: float = 120.0
    rate_scale: float = 1.0
    seed: int = 0
    groups: tuple[str, ...] = ()
    urls: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    threads: int = 1
    lora_kernel: str | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
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
        Target(url)  # said before anything is simulated
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
    return scaled(workload.subset(shares, shares), rate_scale)


def twin_settings(group: Group, options: ValidationOptions) -> EngineKeywords:
    """Return the twin's engine settings of a group."""
    return keywords_of(group.engine_args.replace(**options.engine_args))


def server_command(
    plan: Plan, group: Group, profile: Profile, kv_tokens: int, requests: int, options: ValidationOptions
) -> ServerCommand:
    """Return the server command of one instance."""
    block_size = profile.engine.block_size
    more = {
        "--served-model-name": plan.base_model,
        "--rules": plan.engine.rules,
        "--block-size": block_size,
        "--dtype": options.dtype,
        "--device": options.device,
        "--lora-kernel": options.lora_kernel,
        "--max-queue": requests + 1,
        "--drain-timeout-s": 0,
        "--num-kv-blocks": None if options.device.startswith("cuda") else kv_tokens // block_size,
    }
    words = engine_words(group.engine_args.replace(**options.engine_args), more)
    return ServerCommand(options.model or plan.base_model, _sources(group), words, options.threads)


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
    options
        Options of the validation.
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
    for group in chosen_groups(plan, chosen):
        on_group(group.id)
        one = _OneGroup(plan, group, workload, profiles[group.profile], chosen)
        result = one.measure(on_tick)
        results[group.id] = result
        groups.append(one.judged(result))
        if result.partial:
            break
    return Validation(tuple(groups), results)


class _OneGroup:
    """One instance of a group, simulated and served."""

    def __init__(
        self, plan: Plan, group: Group, workload: Workload, profile: Profile, options: ValidationOptions
    ) -> None:
        self._plan, self._group, self._profile, self._options = plan, group, profile, options
        self._settings = twin_settings(group, options)
        self._workload = group_workload(group, workload, options.rate_scale)
        self._planned = group_workload(group, workload, 1.0)
        self._predicted = self._simulate(self._workload, profile)
        self._reported_kv_tokens: int | None = None

    def _simulate(self, workload: Workload, profile: Profile) -> SimulationResult:
        fields: dict[str, Any] = {**self._settings, "rules": self._plan.engine.rules}
        options = self._options
        return simulate(workload, profile, duration_s=options.duration_s, seed=options.seed, **fields)

    def measure(self, on_tick: OnTick | None) -> BenchResult:
        """Load the instance with the twin's requests."""
        options, model_len = self._options, int(self._settings["max_model_len"])
        known = {"profile": self._profile, "max_model_len": model_len}
        schedule = schedule_of(
            self._workload, options.duration_s, options.seed, model_len, profile=self._profile
        )
        with self._server(len(schedule)) as url:
            info = asyncio.run(fetch_engine_info(Target(url, options.api_key)))
            self._reported_kv_tokens = info.kv_tokens
            return bench(
                self._workload,
                Target(url, options.api_key, self._plan.base_model),
                LoadSettings(options.duration_s, drain_s=_DRAIN_S, metrics_interval_s=_LOOKS_S),
                BenchOptions(seed=options.seed, **known),  # type: ignore[arg-type]
                on_tick=on_tick,
            )

    @contextlib.contextmanager
    def _server(self, requests: int) -> Iterator[str]:
        url = self._options.urls.get(self._group.id)
        if url is not None:
            yield url
            return
        command = server_command(
            self._plan, self._group, self._profile, self._predicted.kv_tokens, requests, self._options
        )
        with running_server(command) as address:
            yield address

    def judged(self, result: BenchResult) -> GroupValidation:
        """Compare the measurement with the twin and the baselines."""
        options, predicted = self._options, self._predicted
        plain = constant_step(self._profile, self._simulate(self._planned, self._profile))
        baseline = self._simulate(self._workload, plain)
        return GroupValidation(
            group=self._group.id,
            rate_scale=options.rate_scale,
            duration_s=options.duration_s,
            seed=options.seed,
            requests=predicted.submitted,
            comparisons=compared(
                measured_values(result, self._profile, self._reported_kv_tokens, predicted.kv_tokens),
                predicted_values(predicted),
                predicted_values(baseline),
                offered_values(predicted),
                options.tolerances,
            ),
            starved=result.overall.starved,
            predicted_starved=predicted.starved,
            constant_step_starved=baseline.starved,
            faults=faults_of(result, predicted.submitted),
        )
