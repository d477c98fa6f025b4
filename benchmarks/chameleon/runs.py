"""Simulated cases of the evaluation, and the highest load within the SLO."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.chameleon.setting import (
    A40,
    LENGTH_FACTOR,
    SLO_S,
    SLORA_KNEE_RPS,
    Platform,
    at_rate,
    profile,
    workload,
)
from capplan import Workload
from capplan.twin import build_scenario
from capplan.twin.core import run
from capplan.twin.scenario import NS_PER_S, Scenario
from capplan.twin.trace import STATUS_REJECTED, TwinTrace

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
    platform: Platform = A40
    horizon_s: float = HORIZON_S

    def at(self, rps: float) -> Case:
        return Case(self.system, rps, self.seed, self.mix, self.platform, self.horizon_s)

    @property
    def name(self) -> str:
        return (
            f"{self.platform.name}.{self.mix}.{self.system}.{self.rps:.4g}rps.{self.horizon_s:g}s.{self.seed}"
        )


@lru_cache(maxsize=8)
def lengths_scaled(mix: str, traces: str) -> Workload:
    return workload(mix, LENGTH_FACTOR, traces=traces)


def slora_scenario(load: Workload, platform: Platform, duration_s: float, seed: int) -> Scenario:
    """Return S-LoRA under its own rules."""
    args = platform.args(len(load.adapters))
    return build_scenario(load, profile(platform), args, duration_s=duration_s, seed=seed)


def ttft_s(scenario: Scenario, trace: TwinTrace, request_ms: float) -> NDArray[np.float64]:
    """Return the TTFT, or the wait so far; infinite if rejected."""
    answered = (trace.first_ns >= 0) & (trace.first_ns <= scenario.horizon_ns)
    until_ns = np.where(answered, trace.first_ns, scenario.horizon_ns)
    waited = (until_ns - scenario.requests.arrival_ns) / NS_PER_S + request_ms / 1e3
    return np.where(trace.status == STATUS_REJECTED, np.inf, waited)


def measured(scenario: Scenario, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values of requests that arrive after the warm-up and an SLO before the end."""
    arrival_ns = scenario.requests.arrival_ns
    late_ns = scenario.horizon_ns - SLO_S * NS_PER_S
    return times_s[(arrival_ns >= WARM_UP_S * NS_PER_S) & (arrival_ns < late_ns)]


def percentile_s(times_s: NDArray[np.float64], percent: float) -> float:
    return float(np.percentile(times_s, percent, method="higher")) if times_s.size else 0.0


def slora_p99_s(load: Workload, platform: Platform, rps: float, seed: int) -> float:
    scenario = slora_scenario(at_rate(load, rps), platform, HORIZON_S, seed)
    times_s = ttft_s(scenario, run(scenario), profile(platform).host.value("request_ms"))
    return percentile_s(measured(scenario, times_s), 99)


def highest(holds: Callable[[float], bool], start: float = SLORA_KNEE_RPS) -> float:
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
