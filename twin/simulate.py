"""`simulate`: one GPU serving a workload for a while, in milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Required, TypedDict, Unpack

from capplan.spec import Profile, Workload
from capplan.twin.core import run
from capplan.twin.details import DetailedResult, detailed_result, with_buckets
from capplan.twin.result import SimulationResult, summarize
from capplan.twin.scenario import Scenario, build_scenario
from capplan.twin.scrapes import client_itl_factor
from capplan.twin.trace import Trace

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_MAX_MODEL_LEN = 8192
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9


class Settings(TypedDict, total=False):
    """The settings of `simulate`, all but the runner."""

    a_max: Required[int]
    s_max: Required[int]
    duration_s: float
    seed: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_cpu_loras: int | None
    max_model_len: int
    gpu_memory_utilization: float
    max_in_flight: int | None
    rules: str | None
    prefix_caching: bool | None


def simulate(
    workload: Workload,
    profile: Profile,
    *,
    a_max: int,
    s_max: int,
    duration_s: float = 3600.0,
    seed: int = 0,
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS,
    max_cpu_loras: int | None = None,
    max_model_len: int = DEFAULT_MAX_MODEL_LEN,
    gpu_memory_utilization: float = DEFAULT_GPU_MEMORY_UTILIZATION,
    max_in_flight: int | None = None,
    rules: str | None = None,
    prefix_caching: bool | None = None,
    runner: Callable[[Scenario], Trace] = run,
) -> SimulationResult:
    """Simulate one GPU that serves all adapters of `workload`.

    Parameters
    ----------
    workload
        Adapters, rates and request lengths.
    profile
        GPU, model and engine; its serving rules are simulated unless `rules` names others.
    a_max
        Adapter slots (vLLM ``--max-loras``).
    s_max
        Rank that slots are sized for (``--max-lora-rank``), at least the largest rank served.
    duration_s
        Horizon in seconds.
    seed
        Seed of arrivals and lengths; same seed, same result.
    max_num_seqs, max_num_batched_tokens, max_model_len, gpu_memory_utilization
        As vLLM's flags of the same names.
    max_cpu_loras
        Adapters that host memory holds; None: all of them.
    max_in_flight
        Most requests running and waiting at once, beyond which arrivals are rejected; None: no bound.
    rules
        Serving rules to simulate instead of the profile's.
    prefix_caching
        Whether KV of shared prompt beginnings is kept and used again; None: as the rules have it.
    runner
        The compiled twin, or `capplan.twin.reference.run_reference`.

    Returns
    -------
    SimulationResult
        Metrics by the definitions of ARCHITECTURE section 4.

    Raises
    ------
    InfeasibleError
        With reason ``memory`` when one request of `max_model_len` does not fit beside the slots.
    InputError
        When a setting breaks its rule.
    """
    started = time.perf_counter()
    scenario = _scenario(
        workload,
        profile,
        a_max=a_max,
        s_max=s_max,
        duration_s=duration_s,
        seed=seed,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_cpu_loras=max_cpu_loras,
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
        max_in_flight=max_in_flight,
        rules=rules,
        prefix_caching=prefix_caching,
    )
    return _summary(profile, scenario, runner(scenario), started)


def simulate_detailed(
    workload: Workload,
    profile: Profile,
    *,
    runner: Callable[[Scenario], Trace] = run,
    **settings: Unpack[Settings],
) -> DetailedResult:
    """Simulate as `simulate` does, and keep what happened to every request, rank, adapter and moment.

    Takes several times as long as `simulate`: finished requests are served once more, each alone, for their
    slowdown.

    Parameters
    ----------
    workload, profile, runner, **settings
        As for `simulate`.

    Returns
    -------
    DetailedResult
        Its `result` is what `simulate` returns; `requests.to_parquet` writes one row per request.

    Raises
    ------
    InfeasibleError, InputError
        As `simulate`.
    """
    started = time.perf_counter()
    scenario = with_buckets(_scenario(workload, profile, **settings))
    trace = runner(scenario)
    result = _summary(profile, scenario, trace, started)
    overhead_s = profile.host.value("request_ms") / 1e3
    itl_factor = client_itl_factor(profile.host, scenario, trace)
    return detailed_result(workload, scenario, trace, result, overhead_s, itl_factor, runner)


def _scenario(workload: Workload, profile: Profile, **given: Unpack[Settings]) -> Scenario:
    settings: Settings = {
        "duration_s": 3600.0,
        "seed": 0,
        "max_num_seqs": DEFAULT_MAX_NUM_SEQS,
        "max_num_batched_tokens": DEFAULT_MAX_NUM_BATCHED_TOKENS,
        "max_cpu_loras": None,
        "max_model_len": DEFAULT_MAX_MODEL_LEN,
        "gpu_memory_utilization": DEFAULT_GPU_MEMORY_UTILIZATION,
        "max_in_flight": None,
        "rules": None,
        "prefix_caching": None,
        **given,
    }
    return build_scenario(workload, profile, **settings)


def _summary(profile: Profile, scenario: Scenario, trace: Trace, started: float) -> SimulationResult:
    host = profile.host
    itl_factor = client_itl_factor(host, scenario, trace)
    result = summarize(scenario, trace, host.value("request_ms"), itl_factor)
    return replace(result, wall_s=time.perf_counter() - started)
