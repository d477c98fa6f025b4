"""The number of the setting that is solved for, the length factor; and S-LoRA's knee with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from statistics import fmean
from typing import Final

import numpy as np

from benchmarks.papers.chameleon.runs import (
    HORIZON_S,
    highest,
    measured,
    percentile_s,
    slora_scenario,
    ttft_s,
)
from benchmarks.papers.chameleon.setting import (
    A40,
    LENGTH_FACTOR,
    LMSYS,
    LMSYS_SLO_S,
    SLO_FACTOR,
    SLO_S,
    SLORA_KNEE_RPS,
    Platform,
    at_rate,
    profile,
    workload,
)
from capplan import Workload
from capplan.twin.instance import NS_PER_S, run

_ALONE_RPS: Final = 0.02
_ALONE_S: Final = 100_000.0
_PRECISION: Final = 0.002


def alone_s(load: Workload, platform: Platform = A40) -> float:
    """Return the mean time of a request of 2,000 that are alone in the engine, load included."""
    scenario = slora_scenario(at_rate(load, _ALONE_RPS), platform, _ALONE_S, 0)
    trace = run(scenario)
    ended = trace.finish_ns >= 0
    in_engine_s = (trace.finish_ns - scenario.requests.arrival_ns)[ended] / NS_PER_S
    return float(np.mean(in_engine_s)) + profile(A40).host.value("request_ms") / 1e3


def length_factor(traces: str, platform: Platform = A40, mix: str = "up", slo_s: float = SLO_S) -> float:
    """Return the factor on lengths for which `SLO_FACTOR` times the mean time alone is the SLO."""
    low, high = 0.02, 1.0
    while high / low > 1.0 + _PRECISION:
        middle = math.sqrt(low * high)
        within = SLO_FACTOR * alone_s(workload(mix, middle, traces=traces), platform) <= slo_s
        low, high = (middle, high) if within else (low, middle)
    return low


def slora_knee_rps(load: Workload, platform: Platform, seeds: int) -> list[float]:
    """Return S-LoRA's knee per seed."""
    overhead_s = profile(platform).host.value("request_ms") / 1e3

    def holds(seed: int, rps: float) -> bool:
        scenario = slora_scenario(at_rate(load, rps), platform, HORIZON_S, seed)
        times_s = ttft_s(scenario, run(scenario), overhead_s)
        return percentile_s(measured(scenario, times_s), 99) <= SLO_S

    return [highest(partial(holds, seed), SLORA_KNEE_RPS) for seed in range(seeds)]


def report(traces: str, seeds: int) -> Iterator[str]:
    """Yield the length factor of the SLO, and S-LoRA's knee, which settles nothing."""
    alone = alone_s(workload(factor=LENGTH_FACTOR, traces=traces))
    yield f"setting: factor {LENGTH_FACTOR:g}, a request alone takes {alone:.3f} s"
    factor = length_factor(traces)
    knees = slora_knee_rps(workload(factor=factor, traces=traces), A40, seeds)
    lmsys = length_factor(traces, mix=LMSYS, slo_s=LMSYS_SLO_S)
    yield f"factor {lmsys:.3f} for lengths of LMSYS-Chat-1M"
    span = f"{min(knees):.2f} to {max(knees):.2f}"
    yield f"factor {factor:.3f}, S-LoRA's knee {fmean(knees):.2f} ({span}), the paper's {SLORA_KNEE_RPS}"
