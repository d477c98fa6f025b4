"""Requests of two vLLM 0.19 servers (``vllm_request_logs``), replayed by the twin at their true arrivals.

Source: github.com/casys-kaist/LLMServingSim, commit 5daddb2, MIT: 300 ShareGPT requests each, 10 per second,
with the engine's timestamps. TTFT counts from the time at which the engine queued a request, TPOT is a mean
over requests. If a log tells the KV blocks of the server, the replay has those.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.measured.case import Deployment, RefusedCase, gpu_key, require_only
from benchmarks.measured.replay import Engine, requests_of, scenario_of
from capplan import InputError, Profile
from capplan.twin import Scenario
from capplan.twin.instance import run
from capplan.workload import Requests

FOLDER: Final = "vllm_request_logs"
_VERSION: Final = "0.19.0"
"""Of logs that do not name it."""
_UNDERSTOOD: Final = MappingProxyType(
    {
        "data_parallel_size": (1,),
        "pipeline_parallel_size": (1,),
        "enable_expert_parallel": (False,),
        "dtype": ("auto", "bfloat16", "float16"),
        "quantization": ("fp8",),
        "kv_cache_dtype": ("auto", "bfloat16", "float16"),
        "speculative_config": (),
        "enforce_eager": (False,),
    }
)
_BUCKETS_PER_S: Final = 20

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RequestLog:
    """One server."""

    name: str
    deployment: Deployment
    engine: Engine
    num_blocks: int | None
    """Usable KV blocks of the server; None: not recorded."""
    requests: Requests
    course: pd.DataFrame
    """Measured ``running``, ``waiting`` and ``kv_cache_pct`` by second ``t`` from the first arrival."""
    measured: Mapping[str, float]

    def scenario(self, profile: Profile) -> Scenario:
        """Return the replay, with a time series."""
        scenario = scenario_of(profile, self.engine, self.requests)
        if self.num_blocks is not None:
            scenario = scenario._replace(num_blocks=self.num_blocks)
        return scenario

    def predict(self, profile: Profile) -> Mapping[str, float]:
        """Return the simulated latencies, in the engine's own time."""
        scenario = self.scenario(profile)
        trace = run(scenario)
        arrival_ns, outputs = self.requests.arrival_ns, self.requests.output_tokens
        ttft_ms = (trace.first_ns - arrival_ns) / 1e6
        tpot_ms = (trace.finish_ns - trace.first_ns) / 1e6 / np.maximum(outputs - 1, 1)
        e2e_ms = (trace.finish_ns - arrival_ns) / 1e6
        found = _metrics(ttft_ms, tpot_ms, e2e_ms)
        if self.num_blocks is not None:
            own = scenario_of(profile, self.engine, self.requests)
            found["kv_tokens"] = float(own.num_blocks * own.limits.block_size)
        return found

    def replayed_course(self, profile: Profile) -> pd.DataFrame:
        """Return the simulated counterpart of `course`."""
        scenario = self.scenario(profile)
        end_s = float(self.course["t"].max()) + 1.0
        buckets = round(_BUCKETS_PER_S * end_s)
        trace = run(scenario._replace(horizon_ns=round(1e9 * end_s), buckets=buckets))
        series = trace.series
        busy = np.maximum(series.busy_ns, 1)
        kv_tokens = scenario.num_blocks * scenario.limits.block_size
        return pd.DataFrame(
            {
                "t": (np.arange(buckets) + 0.5) / _BUCKETS_PER_S,
                "running": series.running_ns / busy,
                "waiting": series.waiting_ns / busy,
                "kv_cache_pct": 100.0 * series.kv_token_ns / busy / kv_tokens,
            }
        )[series.busy_ns > 0]


def _metrics(ttft_ms: Floats, tpot_ms: Floats, e2e_ms: Floats) -> dict[str, float]:
    return {
        "tpot_ms": float(np.mean(tpot_ms)),
        "tpot_p99_ms": float(np.percentile(tpot_ms, 99)),
        "ttft_ms": float(np.mean(ttft_ms)),
        "ttft_p50_ms": float(np.percentile(ttft_ms, 50)),
        "ttft_p99_ms": float(np.percentile(ttft_ms, 99)),
        "e2e_ms": float(np.mean(e2e_ms)),
    }


def read(folder: Path) -> list[RequestLog | RefusedCase]:
    """Return the servers of the folder."""
    found = sorted((folder / FOLDER).glob("*/vllm_requests.jsonl"))
    return [_log(path.parent) for path in found]


def _log(folder: Path) -> RequestLog | RefusedCase:
    lines = (folder / "vllm_requests.jsonl").read_text(encoding="utf-8").splitlines()
    table = pd.DataFrame([json.loads(line) for line in lines])
    meta = json.loads((folder / "vllm_meta.json").read_text(encoding="utf-8"))
    settings = meta["engine_kwargs"]
    hardware = meta.get("hardware", {}).get("device_name", folder.name.split("_")[0])
    dtype = settings.get("dtype", "auto")
    deployment = Deployment(
        gpu_key(hardware),
        meta["model"],
        settings.get("tensor_parallel_size", 1),
        meta.get("vllm_version", _VERSION),
        settings.get("quantization") or ("bfloat16" if dtype == "auto" else dtype),
    )
    try:
        require_only(settings, _UNDERSTOOD)
    except InputError as error:
        return RefusedCase(folder.name, deployment, error)
    first_s = table["queued_ts"].min()
    started_s = datetime.fromisoformat(meta["started_at"]).timestamp()
    course = pd.read_csv(folder / "vllm_timeseries.csv")
    course["t"] -= table["arrival_time"].min() - started_s
    if not course["kv_cache_pct"].any():
        course["kv_cache_pct"] = np.nan  # not recorded
    decoding_s = table["last_token_ts"] - table["first_token_ts"]
    measured = _metrics(
        1e3 * (table["first_token_ts"] - table["queued_ts"]).to_numpy(),
        1e3 * (decoding_s / (table["output_toks"] - 1).clip(lower=1)).to_numpy(),
        1e3 * (table["last_token_ts"] - table["queued_ts"]).to_numpy(),
    )
    cache = meta.get("kv_cache") or {}
    num_blocks = cache["num_gpu_blocks"] - 1 if cache else None  # one is vLLM's null block
    if cache:
        measured["kv_tokens"] = float(cache["num_kv_tokens"])
    return RequestLog(
        name=folder.name,
        deployment=deployment,
        engine=Engine(
            max_num_seqs=settings["max_num_seqs"],
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            max_model_len=settings["max_model_len"] or 8192,
            gpu_memory_utilization=cache.get("gpu_memory_utilization", Engine.gpu_memory_utilization),
            prefix_caching=cache.get("enable_prefix_caching", True),
        ),
        num_blocks=num_blocks,
        requests=requests_of(
            (table["queued_ts"] - first_s).to_numpy(),
            table["input_toks"].to_numpy(),
            table["output_toks"].to_numpy(),
        ),
        course=course,
        measured=measured,
    )
