"""`simulate`: one GPU serving a workload for a while, in milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from capplan.spec import Profile, Workload
from capplan.twin.core import run
from capplan.twin.result import SimulationResult, summarize
from capplan.twin.scenario import Scenario, build_scenario
from capplan.twin.trace import Trace

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_MAX_MODEL_LEN = 8192
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9


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
    runner: Callable[[Scenario], Trace] = run,
) -> SimulationResult:
    """Simulate one GPU that serves all adapters of `workload`.

    Parameters
    ----------
    workload
        Adapters, rates and request lengths.
    profile
        GPU, model and engine; its serving rules are the ones simulated.
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
    scenario = build_scenario(
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
    )
    trace = runner(scenario)
    host = profile.host
    result = summarize(scenario, trace, host.value("request_ms"), host.value("client_itl_factor"))
    return replace(result, wall_s=time.perf_counter() - started)
