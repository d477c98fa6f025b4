"""Closed-loop runs of vLLM on dense models (``silicon_dense_vllm.csv``): a constant number of requests.

Source: github.com/ai-dynamo/aiconfigurator, ``silicon_sample.csv``, commit 095f58a, Apache-2.0. The table
names no client, number of requests or spread of lengths. With equal lengths requests of a simulation stay in
step: they arrive, prefill and end together, at a TTFT that rows at low concurrency contradict. So lengths are
drawn evenly from within `SPREAD` of the means of a row.

Rows of Llama-3.1-70B name no version; they date from October 2025. The public benchmark that they come from
(InferenceMAX) runs with asynchronous scheduling, and with lengths drawn evenly from 0.8 of the stated ones to
these. On a B200 their KV cache must have had 8 bits:
64 requests of 1,024 + 8,192 tokens on one waited 0.4 s for their first token, and with 16 bits of KV about
29 of them fit at their end. On H100s it must have had 16: the same requests on two waited 31 s.

FP8 rows of Qwen3-32B come from a server of several engines on eight GPUs: their 3, 12 and 144 requests per
engine agree with the measured TPOT, 24, 48 and 144 do not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import pandas as pd

from benchmarks.measured.case import Deployment, RefusedCase, gpu_key, require_only
from benchmarks.measured.replay import Engine, closed_loop, latencies, requests_of, scenario_of
from capplan import InputError, Profile

FILE: Final = "silicon_dense_vllm.csv"
_GENERATIONS: Final = 6
_GENERATIONS_UNRECORDED: Final = 10
"""Requests of a run over its concurrency; of rows without a version as their benchmark has it."""
SPREAD: Final = 0.1
_DTYPES: Final = MappingProxyType(
    {"fp8": "fp8", "fp4": "nvfp4", "nvfp4": "nvfp4", "bf16": "bfloat16", "bfloat16": "bfloat16"}
)
_UNDERSTOOD: Final = MappingProxyType(
    {
        "backend": ("vllm",),
        "pp_size": (1,),
        "attention_dp_size": (1,),
        "precision": tuple(_DTYPES),
        "gemm_quant_mode": tuple(_DTYPES),
    }
)
_GPUS_OF_SERVER: Final = 8
_UNRECORDED_VERSION: Final = "0.12.0"
_UNRECORDED_RULES: Final = "vllm-0.12-async"
"""Nearest rules of the rows without a version, which have asynchronous scheduling."""
SHORTEST: Final = 0.8
_DTYPE_KEYS: Final = ("precision", "gemm_quant_mode")


@dataclass(frozen=True)
class ClosedLoopRun:
    """One row."""

    name: str
    deployment: Deployment
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    measured: Mapping[str, float]
    shortest: float | None = None
    """Least length over the stated one, which is the longest; None: lengths spread around it."""

    def predict(self, profile: Profile, spread: float = SPREAD) -> Mapping[str, float]:
        """Return the simulated latencies of all requests."""
        count = (_GENERATIONS if self.shortest is None else _GENERATIONS_UNRECORDED) * self.concurrency
        drawn = np.random.default_rng(0)
        low, high = (1 - spread, 1 + spread) if self.shortest is None else (self.shortest, 1.0)
        prompts, outputs = (
            drawn.integers(round(low * stated), round(high * stated) + 1, count)
            for stated in (self.prompt_tokens, self.output_tokens)
        )
        requests = requests_of(np.zeros(count), prompts, outputs)
        request_ms = profile.host.value("request_ms")
        scenario = scenario_of(profile, Engine(), requests)
        scenario, trace = closed_loop(scenario, self.concurrency, request_ms)
        found = latencies(scenario, trace, request_ms)
        return {"tpot_ms": found.tpot_ms_mean, "ttft_ms": 1e3 * found.ttft_s_mean}


def read(folder: Path) -> list[ClosedLoopRun | RefusedCase]:
    """Return the rows of one aggregated engine."""
    table = pd.read_csv(folder / FILE, dtype={"backend_version": str, "precision": str})
    whole = table[table["mode"] == "agg"]
    return [_run(row) for row in whole.to_dict("records")]


def _run(row: Mapping[str, object]) -> ClosedLoopRun | RefusedCase:
    concurrency, tp = (int(float(str(row[name]))) for name in ("batch_size", "tp_size"))
    version = str(row["backend_version"]) if isinstance(row["backend_version"], str) else ""
    dtype = next((_DTYPES[str(row[key])] for key in _DTYPE_KEYS if str(row[key]) in _DTYPES), "bfloat16")
    if dtype == "fp8" and version:
        concurrency = concurrency * tp // _GPUS_OF_SERVER
    gpu, model = gpu_key(str(row["system"])), str(row["model_path"])
    kv_cache_dtype = "fp8" if gpu == "b200" and dtype == "fp8" and not version else "auto"
    rules = "" if version else _UNRECORDED_RULES
    deployment = Deployment(gpu, model, tp, version or _UNRECORDED_VERSION, dtype, kv_cache_dtype, rules)
    shortest = None if version else SHORTEST
    return closed_loop_run(row, deployment, concurrency, _UNDERSTOOD, shortest)


def closed_loop_run(
    row: Mapping[str, object],
    deployment: Deployment,
    concurrency: int,
    understood: Mapping[str, Collection[object]],
    shortest: float | None,
) -> ClosedLoopRun | RefusedCase:
    """Return a row as a run, or refused by its settings that are not understood."""
    prompt, output = (int(float(str(row[name]))) for name in ("isl", "osl"))
    name = f"{prompt} + {output}, {concurrency} in flight"
    try:
        require_only(row, understood)
    except InputError as error:
        return RefusedCase(name, deployment, error)
    return ClosedLoopRun(
        name=name,
        deployment=deployment,
        concurrency=concurrency,
        prompt_tokens=prompt,
        output_tokens=output,
        measured={f"{each}_ms": float(str(row[f"silicon_{each}_ms"])) for each in ("tpot", "ttft")},
        shortest=shortest,
    )
