"""Simulation of a given list of requests, and of clients that keep a fixed number of requests in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan import EngineArgs, Lengths, Profile, Workload
from capplan.twin import Scenario, build_scenario
from capplan.twin.instance import NEVER, SimulationResult, TwinTrace, run, summarize
from capplan.workload import Requests

Integers = NDArray[np.int64]

_LAST_NS: Final = 2**60
_DRAIN_S: Final = 1e5
"""Horizon beyond the last arrival: every request ends before it."""


@dataclass(frozen=True)
class Engine:
    """Settings of an engine without LoRA; defaults are vLLM's on large GPUs."""

    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    max_model_len: int = 16384
    gpu_memory_utilization: float = 0.9
    prefix_caching: bool = False

    def args(self, profile: Profile) -> EngineArgs:
        longest = min(self.max_model_len, profile.model.max_positions or self.max_model_len)
        return EngineArgs(
            max_loras=0,
            max_lora_rank=0,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=longest,
            gpu_memory_utilization=self.gpu_memory_utilization,
            enable_prefix_caching=self.prefix_caching,
        )


def requests_of(arrival_s: NDArray[np.float64], prompts: Integers, outputs: Integers) -> Requests:
    """Return requests of the base model in the order of arrival; arrays of shape (requests,)."""
    order = np.argsort(arrival_s, kind="stable")
    return Requests(
        np.round(1e9 * arrival_s[order]).astype(np.int64),
        np.zeros(order.size, np.int32),
        prompts[order].astype(np.int32),
        outputs[order].astype(np.int32),
    )


def scenario_of(profile: Profile, engine: Engine, requests: Requests) -> Scenario:
    """Return the scenario of an engine that serves all of the requests."""
    workload = Workload(
        base_model=profile.model.hf_ids[0],
        adapters=[],
        base_rate_rps=1.0,
        prompt_tokens=Lengths(mean=1),
        output_tokens=Lengths(mean=1),
    )
    last_s = float(requests.arrival_ns.max(initial=0)) / 1e9
    return build_scenario(
        workload, profile, engine.args(profile), duration_s=last_s + _DRAIN_S, seed=0, requests=requests
    )


def latencies(scenario: Scenario, trace: TwinTrace, overhead_ms: float = 0.0) -> SimulationResult:
    """Return the metrics of a run, with the time of a request outside the engine."""
    return summarize(scenario, trace, overhead_ms)


def closed_loop(scenario: Scenario, concurrency: int, delay_ms: float = 0.0) -> tuple[Scenario, TwinTrace]:
    """Simulate a client that sends the next request of the list when one ends; it arrives after the delay.

    The arrivals of the scenario are not used but for those of the first requests. Once arrivals are right up
    to some time, so are ends, and with them later arrivals: repeated simulations reach the only solution.
    """
    requests = scenario.requests
    count = requests.arrival_ns.size
    arrival_ns = np.full(count, _LAST_NS, np.int64)
    arrival_ns[:concurrency] = requests.arrival_ns[:concurrency]
    for _ in range(count + 1):
        at = scenario._replace(requests=requests._replace(arrival_ns=arrival_ns), horizon_ns=_LAST_NS)
        trace = run(at)
        finish_ns = np.sort(np.where(trace.finish_ns == NEVER, _LAST_NS, trace.finish_ns))
        following = arrival_ns.copy()
        following[concurrency:] = finish_ns[: max(0, count - concurrency)] + round(1e6 * delay_ms)
        if np.array_equal(following, arrival_ns):
            break
        arrival_ns = following
    return at, trace
