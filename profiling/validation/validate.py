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
from capplan.models.calibration.least_squares import smape
from capplan.profiling.load.bench import BenchOptions, OnTick, bench
from capplan.profiling.load.preflight import fetch_engine_info
from capplan.profiling.load.requests import LoadSettings, Target, scaled, schedule_of
from capplan.profiling.load.result import BenchResult
from capplan.profiling.server.process import ServerCommand, engine_words, running_server
from capplan.spec import Group, Plan, Profile, Workload
from capplan.twin import SimulationResult, simulate
from capplan.twin.simulate import keywords_of

THROUGHPUT: Final = "throughput_tok_s"

ITL: Final = "itl_ms_mean"

KV_CAPACITY: Final = "kv_tokens"

KV_USED: Final = "kv_tokens_mean"

NAMES: Final = (
    THROUGHPUT,
    "output_tok_s",
    "ttft_s_mean",
    "ttft_s_p50",
    "ttft_s_p99",
    ITL,
    "tpot_ms_mean",
    "e2e_s_mean",
    "served_fraction",
    KV_CAPACITY,
    KV_USED,
)

"""Compared metrics, named as in `SimulationResult`."""

Values = Mapping[str, float]


@dataclass(frozen=True)
class Tolerances:
    """Largest SMAPE of agreement, in percent."""

    throughput: float = 3.0
    itl: float = 8.0

    def __post_init__(self) -> None:
        for name in ("throughput", "itl"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise InputError("must be a number >= 0", getattr(self, name), name)


@dataclass(frozen=True)
class MetricComparison:
    """One metric of one group; NaN if unknown."""

    name: str
    measured: float
    predicted: float
    constant_step: float
    """Baseline: the twin with one time for all steps."""
    offered_load: float
    """Baseline: all requests are served."""
    tolerance: float | None = None
    """Largest SMAPE of agreement, in percent; None: any."""

    @property
    def error(self) -> float:
        """SMAPE of the prediction, in percent."""
        return _error(self.predicted, self.measured)

    @property
    def constant_step_error(self) -> float:
        """SMAPE of the baseline, in percent."""
        return _error(self.constant_step, self.measured)

    @property
    def offered_load_error(self) -> float:
        """SMAPE of the baseline, in percent."""
        return _error(self.offered_load, self.measured)

    @property
    def agrees(self) -> bool:
        """Whether the error is within the tolerance, if any."""
        if self.tolerance is None or (math.isnan(self.measured) and math.isnan(self.predicted)):
            return True
        return self.error <= self.tolerance


@dataclass(frozen=True)
class GroupValidation:
    """Measurement and prediction of one instance of a group; the offered load is never starved."""

    group: str
    rate_scale: float
    duration_s: float
    seed: int
    requests: int
    comparisons: tuple[MetricComparison, ...]
    starved: bool
    predicted_starved: bool
    constant_step_starved: bool
    faults: tuple[str, ...] = ()
    """Reasons for which the measurement is void."""

    @property
    def agrees(self) -> bool:
        """Whether all metrics and the starvation verdict agree, and the measurement is sound."""
        verdict = self.starved == self.predicted_starved
        return verdict and not self.faults and all(each.agrees for each in self.comparisons)

    def metric(self, name: str) -> MetricComparison:
        """Return a metric by name."""
        return next(each for each in self.comparisons if each.name == name)


def _error(predicted: float, measured: float) -> float:
    if math.isnan(predicted) or math.isnan(measured):
        return math.nan
    return 0.0 if predicted == measured else smape([predicted], [measured])


def compared(
    measured: Values, predicted: Values, constant_step: Values, offered: Values, tolerances: Tolerances
) -> tuple[MetricComparison, ...]:
    """Return the measured metrics, and those with a tolerance."""
    limits = {THROUGHPUT: tolerances.throughput, ITL: tolerances.itl}
    return tuple(
        MetricComparison(
            name,
            measured=measured.get(name, math.nan),
            predicted=predicted.get(name, math.nan),
            constant_step=constant_step.get(name, math.nan),
            offered_load=offered.get(name, math.nan),
            tolerance=limits.get(name),
        )
        for name in NAMES
        if name in limits or not math.isnan(measured.get(name, math.nan))
    )


def measured_values(
    result: BenchResult, profile: Profile, reported_kv_tokens: int | None, kv_tokens: int
) -> dict[str, float]:
    """Return measured values by the twin's names.

    ITL is the time from first to last token over their number, as in the twin; for a profile with
    ``client_itl_factor``, the mean gap at the client.
    """
    overall = result.overall
    itl = overall.token_gap_ms_mean
    if itl is None or profile.host.value("client_itl_factor") != 1.0:
        itl = overall.itl_ms.mean
    shares = [
        sample.values["kv_used"]
        for sample in result.server
        if "kv_used" in sample.values and sample.values.get("running", 0.0) > 0.0
    ]
    values = {
        THROUGHPUT: overall.throughput_tok_s,
        "output_tok_s": overall.output_tok_s,
        "ttft_s_mean": overall.ttft_s.mean,
        "ttft_s_p50": overall.ttft_s.p50,
        "ttft_s_p99": overall.ttft_s.p99,
        ITL: itl,
        "tpot_ms_mean": overall.tpot_ms.mean,
        "e2e_s_mean": overall.e2e_s.mean,
        "served_fraction": overall.served_fraction,
        KV_CAPACITY: reported_kv_tokens,
        KV_USED: sum(shares) / len(shares) * (reported_kv_tokens or kv_tokens) if shares else None,
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def faults_of(result: BenchResult, drawn: int | None = None) -> tuple[str, ...]:
    """Return the faults that make a measurement void."""
    overall, faults = result.overall, []
    if result.partial:
        faults.append("stopped before its time")
    if overall.failed or overall.rejected:
        kinds = [f"{each.kind} {each.requests} ({each.message})" for each in result.failures]
        counts = f"{overall.failed} requests failed, {overall.rejected} were rejected"
        faults.append(": ".join((counts, ", ".join(kinds))) if kinds else counts)
    if result.client.kept_up is False:
        lag = result.client.lag_ms.p99 or 0.0
        faults.append(f"the client could not keep up: p99 of its lag {lag:.0f} ms")
    if drawn is not None and overall.submitted != drawn and not result.partial:
        faults.append(f"{overall.submitted} requests were sent, {drawn} simulated")
    return tuple(faults)


def predicted_values(result: SimulationResult) -> dict[str, float]:
    """Return predicted values."""
    return {name: float(getattr(result, name)) for name in NAMES}


def offered_values(result: SimulationResult) -> dict[str, float]:
    """Return the values if all requests are served; no latency is among them."""
    return {THROUGHPUT: result.offered_tok_s, "served_fraction": 1.0}


def constant_step(profile: Profile, result: SimulationResult) -> Profile:
    """Return the profile with one time for all steps, the mean of a simulation."""
    from capplan.models.step_latency import ADDITIVE
    from capplan.spec import Coefficient

    steps_s = result.busy_fraction * result.duration_s - result.load_s
    mean_ms = 1e3 * max(steps_s, 0.0) / max(1, result.steps)
    values = dict.fromkeys(ADDITIVE.coefficients, 0.0) | {"base_ms": mean_ms}
    step = profile.step_latency.replace(
        form=ADDITIVE.name,
        coefficients={name: Coefficient(value=value) for name, value in values.items()},
        tables={},
    )
    return profile.replace(step_latency=step)


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
    """Engine settings that override the plan's."""
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
        **_scheduling_flags(plan, group),
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


def _scheduling_flags(plan: Plan, group: Group) -> dict[str, str | None]:
    """Return the flags of a group's rules, or of its scheduler, cache and queues."""
    if group.scheduling is None:
        return {"--rules": plan.engine_of(group).rules}
    parts = zip(("--scheduler", "--cache", "--queues"), (*group.scheduling, group.queues), strict=True)
    return {flag: None if part is None else part.model_dump_json() for flag, part in parts}


def _scheduling_fields(plan: Plan, group: Group) -> dict[str, Any]:
    """Return the settings of a simulation for the same."""
    if group.scheduling is None:
        return {"rules": plan.engine_of(group).rules}
    scheduler, cache = group.scheduling
    return {"scheduler": scheduler, "cache": cache, "queues": group.queues}


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
    scaled_requests, planned = (group_workload(group, workload, rate) for rate in (options.rate_scale, 1.0))
    fields: dict[str, Any] = {**keywords_of(args), **_scheduling_fields(plan, group)}
    fields |= {"duration_s": options.duration_s, "seed": options.seed}
    predicted = simulate(scaled_requests, profile, **fields)
    schedule = schedule_of(
        scaled_requests, options.duration_s, options.seed, args.max_model_len, profile=profile
    )
    running = options.urls.get(group.id)
    started = server_command(
        plan, group, profile, scaled_requests, predicted.kv_tokens, len(schedule), options
    )
    with running_server(started) if running is None else nullcontext(running) as url:
        target = Target(url, options.api_key, plan.base_model)
        kv_tokens = asyncio.run(fetch_engine_info(target)).kv_tokens
        result = bench(
            scaled_requests,
            target,
            LoadSettings(options.duration_s, drain_s=_DRAIN_S, metrics_interval_s=_METRICS_INTERVAL_S),
            BenchOptions(seed=options.seed, profile=profile, max_model_len=args.max_model_len),
            on_tick=on_tick,
        )
    plain = constant_step(profile, simulate(planned, profile, **fields))
    baseline = simulate(scaled_requests, plain, **fields)
    validated = GroupValidation(
        group=group.id,
        rate_scale=options.rate_scale,
        duration_s=options.duration_s,
        seed=options.seed,
        requests=predicted.submitted,
        comparisons=compared(
            measured_values(result, profile, kv_tokens, predicted.kv_tokens),
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
    return validated, result
