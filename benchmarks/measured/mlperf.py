"""Server runs of Llama-2-70B on AMD GPUs (``mlperf51_server.csv``): MLPerf Inference v5.1, Poisson arrivals.

Source: github.com/mlcommons/inference_results_v5.1 (2025-09). The submissions run a copy of the model on each
GPU, with weights and KV cache in FP8. Mean outputs are tokens per second over the scheduled rate. Prompts are
those of OpenOrca, of at most 1,024 tokens; their mean is not recorded, and `PROMPT_TOKENS` is assumed. The
results at 99 and 99.9 % of the accuracy are the same run, and one of them is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import pandas as pd

from benchmarks.measured.case import Deployment, RefusedCase
from benchmarks.measured.replay import Engine, latencies, requests_of, scenario_of
from capplan import InputError, Profile
from capplan.twin.instance import SimulationResult, run

FILE: Final = "mlperf51_server.csv"
PROMPT_TOKENS: Final = 300.0
LONGEST_TOKENS: Final = 1024
"""Of prompts and outputs."""
_LONGEST_RUN_S: Final = 300.0
_SHAPE: Final = 1.3
"""Of the gamma distribution that lengths are drawn from."""
_ENGINE: Final = Engine(max_num_seqs=2048, max_num_batched_tokens=16384, max_model_len=2048)
_ROW: Final = r"(?P<gpus>\d+)x(?P<gpu>MI3\d\dX)|(?P<other>MI3\d\dX)_\d+GBx(?P<count>\d+)"
_MODEL: Final = "llama2-70b-99"
BOUNDS_MS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {"Server": (2000.0, 200.0), "Interactive": (450.0, 40.0)}
)
"""MLPerf's bounds of TTFT p99 and TPOT p99."""


@dataclass(frozen=True)
class ServerRun:
    """One submission: one of its replicas at its share of the rate."""

    name: str
    system: str
    deployment: Deployment
    rate_rps: float
    output_tokens: float
    bounds_ms: tuple[float, float]
    """Of TTFT p99 and TPOT p99."""
    measured: Mapping[str, float]

    def predict(self, profile: Profile) -> Mapping[str, float]:
        """Return the simulated latencies."""
        found = self.simulate(profile)
        return {
            "tpot_ms": found.tpot_ms_mean,
            "tpot_p99_ms": found.tpot_ms_p99,
            "ttft_ms": 1e3 * found.ttft_s_mean,
            "ttft_p99_ms": 1e3 * found.ttft_s_p99,
        }

    def simulate(self, profile: Profile) -> SimulationResult:
        """Simulate Poisson arrivals at the rate."""
        drawn = np.random.default_rng(1)
        count = round(self.rate_rps * _LONGEST_RUN_S)
        arrival_s = np.cumsum(drawn.exponential(1.0 / self.rate_rps, count))
        prompts, outputs = (
            np.clip(np.round(drawn.gamma(_SHAPE, mean / _SHAPE, count)), 1, LONGEST_TOKENS).astype(np.int64)
            for mean in (PROMPT_TOKENS, self.output_tokens)
        )
        scenario = scenario_of(profile, _ENGINE, requests_of(arrival_s, prompts, outputs))
        return latencies(scenario, run(scenario))

    def is_within_bounds(self, profile: Profile, rate_rps: float) -> bool:
        """Return whether a replica keeps the benchmark's bounds at another rate."""
        found = replace(self, rate_rps=rate_rps).predict(profile)
        return found["ttft_p99_ms"] <= self.bounds_ms[0] and found["tpot_p99_ms"] <= self.bounds_ms[1]


def read(folder: Path) -> list[ServerRun | RefusedCase]:
    """Return the rows on AMD GPUs; rows of other models are refused."""
    table = pd.read_csv(folder / FILE)
    found = table["system"].str.extract(_ROW)
    table["gpu"] = found["gpu"].fillna(found["other"]).str.lower()
    table["gpus"] = found["gpus"].fillna(found["count"])
    whole = table[table["gpu"].notna() & ~table["model"].str.endswith("99.9")]
    return [_run(row) for row in whole.to_dict("records")]


def _run(row: Mapping[str, object]) -> ServerRun | RefusedCase:
    system, scenario = str(row["system"]), str(row["scenario"])
    number = {name: float(str(row[name])) for name in ("gpus", "scheduled_qps", "tokens_per_s")}
    number |= {name: float(str(value)) / 1e6 for name, value in row.items() if name.endswith("_ns")}
    deployment = Deployment(str(row["gpu"]), "meta-llama/Llama-2-70b-hf", dtype="fp8", kv_cache_dtype="fp8")
    name = f"{row['org']} {system}, {scenario}"
    if row["model"] != _MODEL:
        reason = InputError(f"is not simulated unless {_MODEL}", str(row["model"]), "model")
        return RefusedCase(name, replace(deployment, model=str(row["model"])), reason)
    return ServerRun(
        name=name,
        system=f"{row['org']} {system}",
        deployment=deployment,
        rate_rps=number["scheduled_qps"] / number["gpus"],
        output_tokens=number["tokens_per_s"] / number["scheduled_qps"],
        bounds_ms=BOUNDS_MS[scenario],
        measured={
            "tpot_ms": number["tpot_mean_ns"],
            "tpot_p99_ms": number["tpot_p99_ns"],
            "ttft_ms": number["ttft_mean_ns"],
            "ttft_p99_ms": number["ttft_p99_ns"],
        },
    )
