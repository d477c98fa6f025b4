"""Workloads of LoRAServe's evaluation, and requests drawn from them at a rate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import preset_workload
from capplan import Profile, Workload
from capplan.profiling.load._requests import scaled
from capplan.spec import LengthPairs
from capplan.twin.instance import NS_PER_S, STATUS_REJECTED, draw_for
from capplan.workload import Requests

TRACES: Final = tuple(
    f"{arrivals}-{skew}"
    for arrivals in ("poisson", "uniform")
    for skew in ("uniform", "shifting", "exponential")
)
LENGTHS: Final = "azure_llm_2023_conv.parquet"
MAX_PROMPT_TOKENS: Final = 1024
"""Longest prompt of the authors' traces (their generator of traces), for a model of 2,048 positions."""
MAX_OUTPUT_TOKENS: Final = 256
MAX_MODEL_LEN: Final = 2048
BOUND_S: Final = 10.0
"""SLO: P95 TTFT (section III-A4)."""


def trace_workload(trace: str, traces: Path) -> Workload:
    """Return one of the six traces as a workload, or any other preset ``loraserve-TRACE``.

    Lengths are those of the Azure conversations of 2023 within the bounds of the authors' traces.
    """
    workload = preset_workload(f"loraserve-{trace}", traces=str(traces))
    pairs = workload.length_pairs
    if pairs is None:
        raise ValueError(f"preset loraserve-{trace} has no recorded lengths")
    short = (pairs.prompt_tokens <= MAX_PROMPT_TOKENS) & (pairs.output_tokens <= MAX_OUTPUT_TOKENS)
    bounded = LengthPairs.from_arrays(pairs.prompt_tokens[short], pairs.output_tokens[short])
    return workload.with_length_pairs(bounded)


def production_workload(adapters: int, traces: Path) -> Workload:
    """Return the stand-in of the production trace, which is not published.

    Popularity of the preset ``loraserve-production-N``: shares of ranks of ServeGen's largest clients, a
    power law of 1 within each rank. Poisson arrivals and lengths as in the six traces.
    """
    popular = preset_workload(f"loraserve-production-{adapters}", traces=str(traces))
    steady = trace_workload("poisson-uniform", traces)
    without = {"prompt_tokens": None, "output_tokens": None}  # lengths of the clients
    alike = tuple(adapter.model_copy(update=without) for adapter in popular.adapters)
    return steady.model_copy(update={"adapters": alike})


def grown(workload: Workload, factor: int) -> Workload:
    """Return a workload with so many adapters, and so much traffic, for each one (weak scaling)."""
    copies = [
        adapter.model_copy(update={"name": f"{adapter.name}.{copy}"})
        for adapter in workload.adapters
        for copy in range(factor)
    ]
    return workload.model_copy(update={"adapters": tuple(copies)}) if factor > 1 else workload


@dataclass(frozen=True)
class Load:
    """Requests of a workload."""

    workload: Workload
    profile: Profile
    requests: Requests
    duration_s: float
    seed: int

    @property
    def names(self) -> list[str]:
        """Adapters by number, from 1."""
        return [adapter.name for adapter in self.workload.adapters]


def load_at(workload: Workload, profile: Profile, rps: float, duration_s: float, seed: int) -> Load:
    """Return the requests of a workload at a rate; the same random numbers at every rate."""
    faster = at_rate(workload, rps)
    requests = draw_for(faster, profile, duration_s, seed, MAX_MODEL_LEN)
    return Load(faster, profile, requests, duration_s, seed)


def at_rate(workload: Workload, rps: float) -> Workload:
    """Return the workload at a total rate."""
    return scaled(workload, rps / workload.total_rate_rps)


def declared_tok_s(load: Load) -> list[float]:
    """Return the demand of the mean rates at the mean request length."""
    requests = load.requests
    tokens = float(requests.prompt_tokens.mean(dtype=float) + requests.output_tokens.mean(dtype=float))
    return [adapter.rate_rps * tokens for adapter in load.workload.adapters]


def ttft_s(
    arrival_ns: NDArray[np.int64], first_ns: NDArray[np.int64], status: NDArray[np.int8], horizon_ns: int
) -> NDArray[np.float64]:
    """Return the TTFT, or the wait so far; infinite if rejected."""
    answered = (first_ns >= 0) & (first_ns <= horizon_ns)
    waited = (np.where(answered, first_ns, horizon_ns) - arrival_ns) / NS_PER_S
    return np.where(status == STATUS_REJECTED, np.inf, waited)


def p95_ttft_s(load: Load, times_s: NDArray[np.float64], bound_s: float = BOUND_S) -> float:
    """Return the 95th percentile, excluding requests of the last `bound_s` seconds."""
    counted = load.requests.arrival_ns < (load.duration_s - bound_s) * NS_PER_S
    return float(np.percentile(times_s[counted], 95, method="higher")) if counted.any() else 0.0
