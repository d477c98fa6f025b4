"""Validation of a plan: one server per group under the requests that the twin simulates.

Predictions of the twin and of two baselines are compared with the measurement.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from capplan.errors import InputError
from capplan.models import ADDITIVE, with_step_times
from capplan.models.calibration import smape
from capplan.profiling.load._bench import BenchOptions, OnTick, bench
from capplan.profiling.load._preflight import ServerInfo, fetch_server_info
from capplan.profiling.load._requests import LoadSettings, Target, scaled, schedule_of
from capplan.profiling.load._result import BenchResult
from capplan.profiling.server._process import ServerCommand, engine_words, running_server
from capplan.spec import Coefficient, EngineArgs, Group, Plan, Profile, Workload
from capplan.twin import SimulationResult
from capplan.twin.instance import Run, chosen_rules, simulate_run

THROUGHPUT: Final = "throughput_tok_s"
ITL: Final = "itl_ms_mean"
KV_CAPACITY: Final = "kv_tokens"
_KV_TOLERANCE: Final = 0.05
_SHOWN_MODELS: Final = 3
_RELEASE: Final = re.compile(r"v?(\d+(?:\.\d+){1,2})")
KV_USED: Final = "kv_tokens_mean"
PROBES: Final = "speed_probes"
PROBE_S: Final = "speed_probe_s"

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
    """At the speed of the machine during the measurement, if it is known."""
    constant_step: float
    """Baseline: the twin with one time for all steps."""
    offered_load: float
    """Baseline: all requests are served."""
    tolerance: float | None = None
    """Largest SMAPE of agreement, in percent; None: any."""
    as_profiled: float = math.nan
    """Prediction at the speed of the machine of the profile."""

    @property
    def error(self) -> float:
        """SMAPE of the prediction, in percent."""
        return _error(self.predicted, self.measured)

    @property
    def as_profiled_error(self) -> float:
        """SMAPE of the prediction at the speed of the profile, in percent."""
        return _error(self.as_profiled, self.measured)

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
    slowdown: float | None = None
    """Time of the engine's speed probe over that of the profile; None: unknown."""
    mismatches: tuple[str, ...] = ()
    """Differences between the server and what the prediction assumes, and what the server does not report."""

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
    measured: Values, predictions: Mapping[str, Values], tolerances: Tolerances
) -> tuple[MetricComparison, ...]:
    """Return the measured metrics, and those with a tolerance.

    `predictions` are by field of `MetricComparison`: ``predicted``, ``constant_step``, ``offered_load`` and
    others.
    """
    limits = {THROUGHPUT: tolerances.throughput, ITL: tolerances.itl}
    return tuple(
        MetricComparison(
            name,
            measured=measured.get(name, math.nan),
            tolerance=limits.get(name),
            **{field: values.get(name, math.nan) for field, values in predictions.items()},
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


def slowdown_of(result: BenchResult, profile: Profile) -> float | None:
    """Return the mean time of the engine's speed probe over that of the profile; None if unknown."""
    reference_ms = profile.step_latency.fit.probe_ms
    known = [each.values for each in result.server if {PROBES, PROBE_S} <= each.values.keys()]
    if reference_ms is None or not known:
        return None
    taken, spent_s = (known[-1][name] - known[0][name] for name in (PROBES, PROBE_S))
    return 1e3 * spent_s / taken / reference_ms if taken > 0.0 else None


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


def mismatches_of(
    info: ServerInfo, base_model: str, profile: Profile, args: EngineArgs, assumed: SimulationResult
) -> tuple[str, ...]:
    """Return what a server reports otherwise than the prediction assumes, or not at all."""
    engine = profile.engine
    found = []
    unknown = []
    wrong_model = _other_model(info.models, base_model, profile.model.hf_ids)
    if wrong_model is None:
        unknown.append(f"its model ({base_model})")
    elif wrong_model:
        found.append(f"the server has the model {wrong_model}, the profile is of {base_model}")
    for what, reported, expected, equal in (
        ("GPU", info.device, profile.gpu.name, _equal_names),
        ("engine", info.engine, engine.name, str.__eq__),
        ("version", info.version, engine.version, _equal_versions),
    ):
        if reported is None:
            unknown.append(f"its {what} ({expected})")
        elif not equal(reported, expected):
            found.append(f"the server has the {what} {reported}, the profile is of {expected}")
    settings = info.settings
    for flag, value, given in (
        ("--max-loras", settings.a_max, args.max_loras),
        ("--max-model-len", info.max_model_len, args.max_model_len),
        ("--gpu-memory-utilization", settings.gpu_memory_utilization, args.gpu_memory_utilization),
        ("--block-size", settings.block_size, engine.block_size),
        ("--enable-prefix-caching", info.prefix_caching, args.enable_prefix_caching),
    ):
        if value is not None and given is not None and not math.isclose(value, given, rel_tol=1e-3):
            found.append(f"the server has {flag} {value}, the prediction assumes {given}")
    if info.replicas > 1:
        found.append(f"the server has {info.replicas} engines, the prediction is of one")
    tokens = settings.kv_tokens
    if tokens is not None and abs(tokens - assumed.kv_tokens) > _KV_TOLERANCE * assumed.kv_tokens:
        found.append(
            f"the server has {tokens:,} KV tokens, the prediction assumes {assumed.kv_tokens:,}: "
            "its GPU, memory or engine settings differ"
        )
    if unknown:
        found.append(f"the server does not report, so these are not compared: {', '.join(unknown)}")
    return tuple(found)


def _other_model(models: Mapping[str, str], base_model: str, known: Sequence[str]) -> str | None:
    """Return the name of another model than a base model; empty: none; None: not told.

    A model loaded from a folder of any name counts by the name that it is served under.
    """
    if not models:
        return None
    names = {base_model, *known}
    if base_model in models or set(models) & names:
        root = models.get(base_model, "")
        is_hub_name = root.count("/") == 1 and not root.startswith((".", "/", "~"))
        return root if is_hub_name and root not in names else ""
    return "" if set(models.values()) & names else ", ".join(list(models)[:_SHOWN_MODELS])


def _equal_names(reported: str, expected: str) -> bool:
    """Return whether one GPU name is part of the other, as ``H200`` of ``NVIDIA H200``."""
    first, second = reported.casefold(), expected.casefold()
    return first in second or second in first


def _equal_versions(reported: str, expected: str) -> bool:
    """Compare releases; builds of one release, such as ``0.8.5.post1``, are equal."""
    first, second = (_RELEASE.match(each) for each in (reported, expected))
    return reported == expected or (first is not None and second is not None and first[1] == second[1])


def predicted_values(result: SimulationResult) -> dict[str, float]:
    return {name: float(getattr(result, name)) for name in NAMES}


def offered_values(result: SimulationResult) -> dict[str, float]:
    """Return the values if all requests are served; no latency is among them."""
    return {THROUGHPUT: result.offered_tok_s, "served_fraction": 1.0}


def constant_step(profile: Profile, result: SimulationResult) -> Profile:
    """Return the profile with one time for all steps, the mean of a simulation."""
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
    """Return the groups to validate, in the plan's order."""
    for url in options.urls.values():
        Target(url)  # validates the address before anything is simulated
    known = [group.id for group in plan.groups]
    for flag, names in (("--group", options.groups), ("--url", options.urls)):
        for name in names:
            if name not in known:
                raise InputError(f"must be a group of the plan: {', '.join(known[:12])}", name, flag)
    return tuple(group for group in plan.groups if not options.groups or group.id in options.groups)


def group_workload(group: Group, workload: Workload, rate_scale: float) -> Workload:
    """Return the workload of one instance of a group."""
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
