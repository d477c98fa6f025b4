"""Simulated cases of the evaluation: scenario, TTFT over the measured part, and what the table reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.chameleon.loading import prefill_ms
from benchmarks.papers.chameleon.setting import A40, SLO_S, Platform, at_rate, profile, workload
from benchmarks.papers.chameleon.systems import SYSTEMS
from capplan import Workload
from capplan.twin import build_scenario
from capplan.twin.instance import NEVER, NS_PER_S, STATUS_REJECTED, Scenario, TwinTrace, choose_policies, run
from capplan.twin.instance._metrics import pool_metrics
from capplan.twin.instance._trace import gap_percentiles_ms

HORIZON_S: Final = 1800.0
WARM_UP_S: Final = 300.0
"""Left out of every percentile: Chameleon has one queue up to its first refresh."""
RESOLUTION: Final = 0.01
_FIRST_STEP: Final = 1.25
_BOUNDS_RPS: Final = (0.05, 400.0)

Numbers: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One system under one load."""

    system: str
    rps: float
    seed: int
    mix: str = "up"
    """Preset workload, ``chameleon-`` and this."""
    platform: Platform = A40
    horizon_s: float = HORIZON_S

    def at(self, rps: float) -> Case:
        return replace(self, rps=rps)

    @property
    def group(self) -> str:
        """Name of everything but the rate."""
        return f"{self.platform.name}.{self.mix}.{self.system}.{self.horizon_s:g}s.seed{self.seed}"


@lru_cache(maxsize=16)
def scaled_workload(mix: str, traces: str) -> Workload:
    return workload(mix, traces=traces)


def slora_scenario(load: Workload, platform: Platform, duration_s: float, seed: int) -> Scenario:
    """Return S-LoRA under its own rules."""
    args = platform.args(len(load.adapters))
    return build_scenario(load, profile(platform), args, duration_s=duration_s, seed=seed)


def case_scenario(case: Case, traces: str) -> Scenario:
    load, system = at_rate(scaled_workload(case.mix, traces), case.rps), SYSTEMS[case.system]
    serving = profile(case.platform)
    policies = choose_policies(load, serving, scheduler=system.scheduler, cache=system.cache)
    args = case.platform.args(len(load.adapters))
    return build_scenario(load, serving, args, duration_s=case.horizon_s, seed=case.seed, policies=policies)


def ttft_s(scenario: Scenario, trace: TwinTrace, overhead_s: float) -> NDArray[np.float64]:
    """Return the TTFT, or the wait so far; infinite if rejected."""
    answered = (trace.first_ns >= 0) & (trace.first_ns <= scenario.horizon_ns)
    until_ns = np.where(answered, trace.first_ns, scenario.horizon_ns)
    waited = (until_ns - scenario.requests.arrival_ns) / NS_PER_S + overhead_s
    return np.where(trace.status == STATUS_REJECTED, np.inf, waited)


def measured(scenario: Scenario, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values of requests that arrive after the warm-up and an SLO before the end."""
    arrival_ns = scenario.requests.arrival_ns
    late_ns = scenario.horizon_ns - SLO_S * NS_PER_S
    return times_s[(arrival_ns >= WARM_UP_S * NS_PER_S) & (arrival_ns < late_ns)]


def percentile_s(times_s: NDArray[np.float64], percent: float) -> float:
    return float(np.percentile(times_s, percent, method="higher")) if times_s.size else 0.0


def p99_s(case: Case, traces: str) -> float:
    """Return the P99 TTFT of a case."""
    scenario = case_scenario(case, traces)
    overhead_s = profile(case.platform).host.value("request_ms") / 1e3
    return percentile_s(measured(scenario, ttft_s(scenario, run(scenario), overhead_s)), 99)


def numbers(case: Case, traces: str) -> Numbers:
    """Return what the rows of the table read of a case."""
    scenario = case_scenario(case, traces)
    overhead_s = profile(case.platform).host.value("request_ms") / 1e3
    trace = run(scenario)
    times_s = measured(scenario, ttft_s(scenario, trace, overhead_s))
    pool = pool_metrics(scenario, trace, overhead_s)
    assert pool is not None
    submitted = scenario.requests.arrival_ns.size
    return {
        "ttft_p99_s": percentile_s(times_s, 99),
        "ttft_p50_s": percentile_s(times_s, 50),
        "ttft_max_s": float(times_s.max(initial=0.0)),
        "tbt_p99_ms": gap_percentiles_ms(trace.gaps, (99.0,))[0],
        "submitted": submitted,
        "finished_rps": float((trace.finish_ns != NEVER).sum() / case.horizon_s),
        "rejected": int(trace.counts.rejected),
        "preemptions": int(trace.counts.preemptions),
        "hit_rate": pool.hit_rate,
        "load_wait_ms_mean": pool.load_wait_ms.mean,
        "load_wait_ms_p99": pool.load_wait_ms.p99,
        "queue_shares": {size.name: size.queue_share for size in pool.sizes},
        "queue_s": {size.name: size.queue_s.mean for size in pool.sizes},
        "squashed": pool.squashes / submitted,
        "evictions": pool.evictions,
        "link_utilization": pool.link_utilization,
    }


def occupancy(case: Case, traces: str) -> Numbers:
    """Return the memory in use, and the arithmetic of the mean prompt in a large batch."""
    scenario = case_scenario(case, traces)
    trace, requests = run(scenario), scenario.requests
    rank = float(scenario.costs.rank[requests.adapter].mean())
    small_ms, large_ms = (prefill_ms(case.platform, tokens, rank) for tokens in (1000.0, 2000.0))
    return {
        "kv_tokens": float(trace.sums.kv_token_ns / scenario.horizon_ns),
        "adapter_tokens": float(scenario.costs.pages.sum()),
        "prompt_ms": float(requests.prompt_tokens.mean()) * (large_ms - small_ms) / 1000.0,
    }


def highest(holds: Callable[[float], bool], start: float) -> float:
    """Return a rate that holds and is within 1 % of one that does not; 0 if none holds."""
    low, high = start, start * _FIRST_STEP
    if holds(start):
        while holds(high):
            low, high = high, high * _FIRST_STEP
            if high > _BOUNDS_RPS[1]:
                return low
    else:
        while not holds(low):
            low, high = low / _FIRST_STEP, low
            if low < _BOUNDS_RPS[0]:
                return 0.0
    while high / low > 1.0 + RESOLUTION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
