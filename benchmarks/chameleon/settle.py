"""The two numbers of the setting that are solved for: the length factor and the pool of the A40."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean
from typing import Final

import numpy as np

from benchmarks.chameleon.runs import highest, lengths_scaled, slora_p99_s, slora_scenario
from benchmarks.chameleon.setting import (
    A40,
    LENGTH_FACTOR,
    POOL_TOKENS,
    SLO_FACTOR,
    SLO_S,
    SLORA_KNEE_RPS,
    at_rate,
    profile,
    workload,
)
from capplan import Workload
from capplan.twin.core import run
from capplan.twin.scenario import NS_PER_S

_ALONE_RPS: Final = 0.02
_ALONE_S: Final = 100_000.0
_PRECISION: Final = 0.002


def alone_s(load: Workload) -> float:
    """Return the mean time of a request of 2,000 that are alone in the engine, load included."""
    scenario = slora_scenario(at_rate(load, _ALONE_RPS), A40, _ALONE_S, 0)
    trace = run(scenario)
    ended = trace.finish_ns >= 0
    in_engine_s = (trace.finish_ns - scenario.requests.arrival_ns)[ended] / NS_PER_S
    return float(np.mean(in_engine_s)) + profile(A40).host.value("request_ms") / 1e3


def length_factor(traces: str) -> float:
    """Return the factor on lengths for which `SLO_FACTOR` times the mean time alone is the SLO."""
    low, high = 0.02, 1.0
    while high / low > 1.0 + _PRECISION:
        middle = math.sqrt(low * high)
        within = SLO_FACTOR * alone_s(workload(factor=middle, traces=traces)) <= SLO_S
        low, high = (middle, high) if within else (low, middle)
    return low


def slora_knee_rps(traces: str, pool_tokens: int, seeds: int) -> list[float]:
    """Return S-LoRA's knee per seed with a pool of so many tokens."""
    platform, load = replace(A40, pool_tokens=pool_tokens), lengths_scaled("up", traces)
    return [
        highest(lambda rps, s=seed: slora_p99_s(load, platform, rps, s) <= SLO_S) for seed in range(seeds)
    ]


def factor_report(traces: str) -> str:
    found = length_factor(traces)
    alone = alone_s(workload(factor=LENGTH_FACTOR, traces=traces))
    return f"length factor {found:.4f}; with {LENGTH_FACTOR:g} a request alone takes {alone:.3f} s"


def pool_report(traces: str, seeds: int) -> str:
    lines = []
    for pool in (POOL_TOKENS - 200, POOL_TOKENS, POOL_TOKENS + 200, None):
        tokens = replace(A40, pool_tokens=pool).pool()
        knees = slora_knee_rps(traces, tokens, seeds)
        span = f"{min(knees):.2f} to {max(knees):.2f}"
        lines.append(
            f"pool {tokens}: S-LoRA's knee {fmean(knees):.2f} ({span}), the paper's {SLORA_KNEE_RPS}"
        )
    return "\n".join(lines)
