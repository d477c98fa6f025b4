"""Ten-minute runs of vLLM 0.23.0 with Qwen3-14B on an H100 (``vllm023_h100_qwen3_14b``), Poisson.

Source: github.com/inference-sim/residency-vllm, commit 2641b57. A response has 130 chunks for 128 tokens: the
first and the last are empty, and come with a token. The ITL of the source is over the 129 gaps of chunks, so
the ITL of a simulation is ``(E2E - TTFT) / 129``. Prompts are random text, none of it in the prefix cache.
The client counts 1,024 tokens in each, the server 986 on average (``server_input_tokens`` of the trace); the
simulation has the server's number. The run with a trace is replayed at its arrivals, the others are drawn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pandas as pd

from benchmarks.measured.case import Deployment, gpu_key, require_only
from benchmarks.measured.replay import Engine, latencies, requests_of, scenario_of
from capplan import Profile
from capplan.twin.instance import run
from capplan.workload import Requests

FOLDER: Final = "vllm023_h100_qwen3_14b"
_GPU: Final = "h100-80g"
_UNDERSTOOD: Final = MappingProxyType(
    {
        "enable_chunked_prefill": (True,),
        "block_size": (16,),
        "pipeline_parallel_size": (1,),
        "data_parallel_size": (1,),
        "quantization": (),
        "kv_cache_dtype": ("auto", "bfloat16"),
    }
)
_EMPTY_CHUNKS: Final = 2
_GPU_MEMORY_UTILIZATION: Final = 0.92
"""Default of vLLM since 0.20."""


@dataclass(frozen=True, eq=False)
class RateRun:
    """One run."""

    name: str
    deployment: Deployment
    engine: Engine
    requests: Requests
    measured: Mapping[str, float]

    def predict(self, profile: Profile) -> Mapping[str, float]:
        """Return the simulated latencies and the KV tokens."""
        scenario = scenario_of(profile, self.engine, self.requests)
        found = latencies(scenario, run(scenario), profile.host.value("request_ms"))
        gaps = float(np.mean(self.requests.output_tokens)) + _EMPTY_CHUNKS - 1
        return {
            "itl_ms": 1e3 * (found.e2e_s_mean - found.ttft_s_mean) / gaps,
            "ttft_ms": 1e3 * found.ttft_s_mean,
            "ttft_p90_ms": 1e3 * found.ttft_s_p90,
            "ttft_p99_ms": 1e3 * found.ttft_s_p99,
            "e2e_ms": 1e3 * found.e2e_s_mean,
            "e2e_p99_ms": 1e3 * found.e2e_s_p99,
            "kv_tokens": float(found.kv_tokens),
        }


def read(folder: Path) -> list[RateRun]:
    """Return the runs in ascending order of rate."""
    root = folder / FOLDER
    server = json.loads((root / "server_config.json").read_text(encoding="utf-8"))
    deployment = Deployment(
        gpu_key(server.get("gpu", _GPU)),
        server["model"],
        server["tensor_parallel_size"],
        server["vllm_version"],
    )
    require_only(server, _UNDERSTOOD)
    engine = Engine(
        max_num_batched_tokens=server["max_num_batched_tokens"],
        max_model_len=server["max_seq_len"],
        max_num_seqs=server.get("max_num_seqs", Engine.max_num_seqs),
        gpu_memory_utilization=server.get("gpu_memory_utilization", _GPU_MEMORY_UTILIZATION),
        prefix_caching=server["enable_prefix_caching"],
    )
    traces = {path.parent: pd.read_csv(path) for path in root.glob("**/trace.csv")}
    counted = [trace["server_input_tokens"].to_numpy() for trace in traces.values()]
    runs = []
    for path in root.glob("**/summary.json"):
        summary = json.loads(path.read_text(encoding="utf-8"))
        trace = traces.get(path.parent)
        requests = _drawn(summary, counted) if trace is None else _traced(trace)
        name = f"{_rate_rps(summary['config']):g} rps"
        runs.append(RateRun(name, deployment, engine, requests, _measured(summary["overall"], server)))
    return sorted(runs, key=lambda run: float(run.name.split()[0]))


def _rate_rps(config: Mapping[str, Any]) -> float:
    """Return the rate of all tenants together; a run may name that of each."""
    if "aggregate_rate" in config:
        return float(config["aggregate_rate"])
    return float(config["rate_per_tenant"]) * len(config["tenants"])


def _traced(trace: pd.DataFrame) -> Requests:
    sent_s = (trace["send_time_us"] - trace["send_time_us"].min()).to_numpy() / 1e6
    return requests_of(sent_s, trace["server_input_tokens"].to_numpy(), trace["output_tokens"].to_numpy())


def _drawn(summary: Mapping[str, Any], counted: list[np.ndarray]) -> Requests:
    """Return as many requests as the run had, at even chance within its duration."""
    config, count = summary["config"], summary["overall"]["num_requests"]
    draw = np.random.default_rng(0)
    prompts = np.concatenate(counted) if counted else np.array([config["prompt_tokens"]])
    return requests_of(
        draw.uniform(0.0, config["duration"], count),
        draw.choice(prompts, count),
        np.full(count, config["max_tokens"]),
    )


def _measured(overall: Mapping[str, Any], server: Mapping[str, Any]) -> Mapping[str, float]:
    return {
        "itl_ms": overall["itl_ms"]["mean"],
        "ttft_ms": overall["ttft_ms"]["mean"],
        "ttft_p90_ms": overall["ttft_ms"]["p90"],
        "ttft_p99_ms": overall["ttft_ms"]["p99"],
        "e2e_ms": overall["e2e_ms"]["mean"],
        "e2e_p99_ms": overall["e2e_ms"]["p99"],
        "kv_tokens": float(server["kv_cache_tokens"]),
    }
