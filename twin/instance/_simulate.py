"""`simulate`: one GPU that serves a workload."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Required, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from capplan.datasets import load_profile
from capplan.spec import (
    DEFAULT_GPU_MEMORY_UTILIZATION,
    DEFAULT_MAX_MODEL_LEN,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    EngineArgs,
    Plotted,
    Profile,
    Queues,
    Workload,
    allowed_lora_rank,
)
from capplan.twin.instance._core import run
from capplan.twin.instance._details import (
    FINISHED,
    LOST,
    REJECTED,
    Attainment,
    GroupMetrics,
    RequestTable,
    TimeSeries,
    attainment,
    bucket_count,
    group_metrics,
    isolated_s,
    request_status,
    request_table,
    time_series,
)
from capplan.twin.instance._metrics import SimulationResult, client_itl_factor, reduce_trace, summarize
from capplan.twin.instance._scenario import (
    NS_PER_S,
    CacheLike,
    Run,
    Scenario,
    SchedulerLike,
    build_scenario,
    on_shared_link,
    require_documents,
    require_engine_settings,
)
from capplan.twin.instance._trace import TwinTrace

if TYPE_CHECKING:
    import pandas as pd


class SimulateSettings(TypedDict, total=False):
    """The settings of `simulate`."""

    a_max: Required[int]
    s_max: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_cpu_loras: int | None
    max_model_len: int | None
    gpu_memory_utilization: float
    prefix_caching: bool | None
    duration_s: float
    seed: int
    max_in_flight: int | None
    rules: str | None
    gpus_per_link: int
    scheduler: SchedulerLike | None
    cache: CacheLike | None
    queues: Queues | None


def simulate(
    workload: Workload,
    profile: Profile | str,
    *,
    a_max: int,
    s_max: int | None = None,
    duration_s: float = 3600.0,
    seed: int = 0,
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS,
    max_cpu_loras: int | None = None,
    max_model_len: int | None = None,
    gpu_memory_utilization: float = DEFAULT_GPU_MEMORY_UTILIZATION,
    max_in_flight: int | None = None,
    rules: str | None = None,
    prefix_caching: bool | None = None,
    gpus_per_link: int = 1,
    scheduler: SchedulerLike | None = None,
    cache: CacheLike | None = None,
    queues: Queues | None = None,
) -> SimulationResult:
    """Simulate one GPU that serves all adapters of `workload`, and its traffic of the base model.

    Parameters
    ----------
    workload
        Adapters, rates and request lengths.
    profile
        GPU, model and engine, or the name of a shipped profile, or the path of a profile file.
    a_max
        Adapter slots (vLLM ``--max-loras``); 0, for a workload without adapters: an engine without LoRA.
    s_max
        Rank of the slots (``--max-lora-rank``), at least the largest adapter rank, 0 without slots; None: the
        smallest that vLLM allows.
    duration_s
        Horizon in seconds.
    seed
        Seed of arrivals and lengths.
    max_num_seqs, max_num_batched_tokens, gpu_memory_utilization
        As vLLM's flags of the same names.
    max_model_len
        The same, at most the positions of the model; None: 8192, or the positions if they are fewer.
    max_cpu_loras
        Adapters in host memory; None: all of them.
    max_in_flight
        Maximum of requests running and waiting, beyond which arrivals are rejected; None: no limit.
    rules
        Name of the serving rules; None: those of the profile.
    prefix_caching
        Whether KV of shared prefixes is reused; None: as in the profile, or as the rules define.
    gpus_per_link
        GPUs of this instance that share a link to host memory, over which copies of adapters follow each
        other.
    scheduler, cache
        Order and admission of requests, and idle adapters in the memory of KV: names or settings. None: those
        of the workload; without any, the rules of the engine. With one of them, `a_max` has no
        effect.
    queues
        Queues by request size at the start; None: one, until the first refresh.

    Returns
    -------
    SimulationResult
        Metrics by the definitions of ARCHITECTURE section 4.

    Raises
    ------
    InfeasibleError
        With reason ``memory`` if slots and one request of `max_model_len` exceed the memory.
    InputError
        For an invalid setting.
    """
    settings: SimulateSettings = {
        "a_max": a_max,
        "s_max": s_max,
        "duration_s": duration_s,
        "seed": seed,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_cpu_loras": max_cpu_loras,
        "max_model_len": max_model_len,
        "gpu_memory_utilization": gpu_memory_utilization,
        "max_in_flight": max_in_flight,
        "rules": rules,
        "prefix_caching": prefix_caching,
        "gpus_per_link": gpus_per_link,
        "scheduler": scheduler,
        "cache": cache,
        "queues": queues,
    }
    started = time.perf_counter()
    used = _loaded(profile)
    result = simulate_run(workload, used, *typed_settings(workload, used, settings))
    return replace(result, wall_s=time.perf_counter() - started)


def simulate_detailed(
    workload: Workload, profile: Profile | str, **settings: Unpack[SimulateSettings]
) -> DetailedResult:
    """Simulate as `simulate` does, with metrics by request, rank and adapter, and a time series.

    It takes several times as long: finished requests are simulated again, each alone, for their slowdown.

    Parameters
    ----------
    workload, profile, **settings
        As for `simulate`.

    Returns
    -------
    DetailedResult
        The result of `simulate` with its details; `requests.to_parquet` writes one row per request.

    Raises
    ------
    InfeasibleError, InputError
        As `simulate`.
    """
    started = time.perf_counter()
    used = _loaded(profile)
    scenario = with_buckets(scenario_of(workload, used, *typed_settings(workload, used, settings)))
    trace = run(scenario)
    result = replace(result_of(used, scenario, trace), wall_s=time.perf_counter() - started)
    return detailed_result(workload, used, scenario, trace, result)


def simulate_run(workload: Workload, profile: Profile, args: EngineArgs, options: Run) -> SimulationResult:
    """Simulate as `simulate` does, with the engine settings of a plan."""
    scenario = scenario_of(workload, profile, args, options)
    return result_of(profile, scenario, run(scenario))


def scenario_of(workload: Workload, profile: Profile, args: EngineArgs, options: Run) -> Scenario:
    """Return what `simulate` simulates."""
    scenario = build_scenario(
        workload,
        profile,
        args,
        duration_s=options.duration_s,
        seed=options.seed,
        max_in_flight=options.max_in_flight,
        policies=options.policies(workload, profile, args.enable_prefix_caching),
    )
    return on_shared_link(scenario, profile.tp, options.gpus_per_link)


def result_of(profile: Profile, scenario: Scenario, trace: TwinTrace) -> SimulationResult:
    """Return the metrics of a simulated scenario."""
    itl_factor = client_itl_factor(profile.host, scenario, trace)
    return summarize(scenario, trace, profile.host.value("request_ms"), itl_factor)


def typed_settings(
    workload: Workload, profile: Profile, settings: SimulateSettings
) -> tuple[EngineArgs, Run]:
    """Return the settings of `simulate` as those of the engine and of the run, checked."""
    if unknown := settings.keys() - SimulateSettings.__annotations__.keys():
        raise TypeError(f"not a setting of simulate: {', '.join(sorted(unknown))}")
    require_documents(workload, profile)
    own = {field.name for field in fields(Run)}
    require_engine_settings(workload, {name: each for name, each in settings.items() if name not in own})
    options = Run(**{name: each for name, each in settings.items() if name in own})  # type: ignore[arg-type]
    return engine_args(workload, settings, profile), options


def engine_args(workload: Workload, settings: SimulateSettings, profile: Profile | None = None) -> EngineArgs:
    """Return the engine settings of `simulate` with its defaults, which fit the model of a profile."""
    longest = DEFAULT_MAX_MODEL_LEN if profile is None else profile.model.default_max_model_len
    a_max, s_max = settings["a_max"], settings.get("s_max")
    if s_max is None:
        s_max = allowed_lora_rank(max((a.rank for a in workload.adapters), default=1)) if a_max else 0
    return EngineArgs(
        max_loras=a_max,
        max_lora_rank=s_max,
        max_cpu_loras=settings.get("max_cpu_loras"),
        max_num_seqs=settings.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS),
        max_num_batched_tokens=settings.get("max_num_batched_tokens", DEFAULT_MAX_NUM_BATCHED_TOKENS),
        gpu_memory_utilization=settings.get("gpu_memory_utilization", DEFAULT_GPU_MEMORY_UTILIZATION),
        max_model_len=settings.get("max_model_len") or longest,
        enable_prefix_caching=settings.get("prefix_caching"),
    )


def _loaded(profile: Profile | str) -> Profile:
    return load_profile(profile) if isinstance(profile, str) else profile


@dataclass(frozen=True, repr=False)
class DetailedResult(Plotted):
    """A simulation with details."""

    result: SimulationResult
    """Result of `simulate`."""
    requests: RequestTable
    overall: GroupMetrics
    by_rank: Mapping[int, GroupMetrics]
    """In ascending order of rank."""
    by_adapter: Mapping[str, GroupMetrics]
    """In the order of the workload."""
    slo: tuple[Attainment, ...]
    """One per latency bound of the workload's SLO, all together last; empty without bounds."""
    series: TimeSeries

    def display_facts(self) -> Mapping[str, object]:
        """Return the facts of the result."""
        return self.result.display_facts()

    def to_pandas(self) -> pd.DataFrame:
        """Return the table of requests, one row each."""
        frame: pd.DataFrame = self.requests.to_arrow().to_pandas()
        return frame


def with_buckets(scenario: Scenario) -> Scenario:
    """Return the scenario of a detailed run."""
    return scenario._replace(buckets=bucket_count(scenario))


def detailed_result(
    workload: Workload,
    profile: Profile,
    scenario: Scenario,
    trace: TwinTrace,
    result: SimulationResult,
    interrupt: Callable[[], None] | None = None,
) -> DetailedResult:
    """Return the details of a run of a scenario `with_buckets`.

    Requests are simulated alone for their slowdown, and without adapters for ``slo.tpt_over_base``;
    `interrupt` is that of `capplan.twin.instance.run`.
    """
    overhead_s = profile.host.value("request_ms") / 1e3
    itl_factor = client_itl_factor(profile.host, scenario, trace)
    ranks = np.array([0, *(adapter.rank for adapter in workload.adapters)], np.int32)
    finished = np.flatnonzero(request_status(trace, scenario.horizon_ns) == FINISHED)
    alone_s = isolated_s(scenario, ranks, finished, partial(run, interrupt=interrupt))
    table = request_table(workload, scenario, trace, overhead_s, alone_s)
    base_tpt_ms = (
        None if workload.slo.tpt_over_base is None else mean_base_tpt_ms(scenario, overhead_s, interrupt)
    )
    bounds, kept = attainment(workload.slo, result, table, overhead_s, itl_factor, base_tpt_ms)
    seen = trace.adapters.copy()
    seen[0] = (0,) * len(seen.dtype)  # admissions of the base model are neither hits nor misses

    def metrics(group_of_adapter: NDArray[np.int64], names: Sequence[str]) -> tuple[GroupMetrics, ...]:
        adapters = np.zeros(len(names), seen.dtype).view(np.recarray)
        for field in seen.dtype.names:
            np.add.at(adapters[field], group_of_adapter, seen[field])
        group = group_of_adapter[table.adapter]
        return group_metrics(table, group, names, adapters, kept, result.duration_s, itl_factor)

    (overall,) = metrics(np.zeros(ranks.size, np.int64), ["all"])
    distinct, rank_number = np.unique(ranks, return_inverse=True)
    ranked = metrics(rank_number, [f"rank {rank}" for rank in distinct])
    adapters = metrics(np.arange(ranks.size), table.adapters)
    first = 0 if adapters[0].submitted else 1  # the base model if it has requests
    return DetailedResult(
        result=result,
        requests=table,
        overall=overall,
        by_rank=dict(zip(distinct.tolist()[first:], ranked[first:], strict=True)),
        by_adapter=dict(zip(table.adapters[first:], adapters[first:], strict=True)),
        slo=bounds,
        series=time_series(scenario, trace, table),
    )


def tpt_attainment(
    scenario: Scenario,
    trace: TwinTrace,
    status: NDArray[np.int8],
    overhead_s: float,
    factor: float,
    interrupt: Callable[[], None] | None = None,
) -> Attainment:
    """Return the attainment of ``slo.tpt_over_base``: of `factor` times the mean TPT without adapters.

    It is that of a detailed run without its details. `status` is that of `request_status`, and `interrupt`
    that of `capplan.twin.instance._core.run`.
    """
    requests = scenario.requests
    limit_ms = factor * mean_base_tpt_ms(scenario, overhead_s, interrupt)
    until_ns = np.where(status == FINISHED, trace.finish_ns, scenario.horizon_ns)
    room = np.maximum(scenario.limits.max_model_len - requests.prompt_tokens, 1)
    tpt_ms = 1e3 * ((until_ns - requests.arrival_ns) / NS_PER_S + overhead_s)
    late = tpt_ms / np.minimum(requests.output_tokens, room) > limit_ms
    broken, kept = late | (status == REJECTED) | (status == LOST), (status == FINISHED) & ~late
    counts = int(kept.sum()), int(broken.sum())
    return Attainment("tpt_over_base", limit_ms, float("nan"), *counts, status.size - sum(counts))


def mean_base_tpt_ms(
    scenario: Scenario, overhead_s: float, interrupt: Callable[[], None] | None = None
) -> float:
    """Return the mean TPT of the same requests on the same GPU without adapters and slots."""
    requests = scenario.requests
    bare = scenario._replace(
        requests=requests._replace(adapter=np.zeros_like(requests.adapter)),
        costs=scenario.costs._replace(a_max=0, s_max=0),
        buckets=0,
    )
    limit = scenario.limits.max_model_len
    trace = run(bare, interrupt=interrupt)
    tpt_ms = reduce_trace(bare.requests, trace, bare.horizon_ns, limit, overhead_s).tpt_ms
    return float(tpt_ms.mean()) if tpt_ms.size else float("nan")
