"""Closed-loop runs of vLLM on mixtures of experts (``silicon_moe_vllm.csv``): a constant number of requests.

Source: ``silicon_sample.csv`` of PyPI aiconfigurator-core 0.12.0, Apache-2.0, from public runs of
InferenceMAX. Its scripts (commit cc9bed4 and neighbours) set what the table does not: asynchronous
scheduling, ten requests per place in flight, lengths drawn evenly from 0.8 of the stated ones to these, and
for gpt-oss on B200s an FP8 KV cache and MXFP8 activations. The weights of gpt-oss are MXFP4, whatever the
table calls them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import pandas as pd

from benchmarks.measured.case import Deployment, RefusedCase, gpu_key
from benchmarks.measured.silicon_vllm import SHORTEST, ClosedLoopRun, closed_loop_run

FILE: Final = "silicon_moe_vllm.csv"
_GPT_OSS: Final = "openai/gpt-oss"
_FP8: Final = "-FP8"
"""Of names of checkpoints with the shape of the model."""
_ASYNC_OF_0_11: Final = "vllm-0.12-async"


def read(folder: Path) -> list[ClosedLoopRun | RefusedCase]:
    """Return the rows; those with data-parallel attention or NVFP4 are refused."""
    table = pd.read_csv(folder / FILE, dtype={"backend_version": str})
    return [_run(row) for row in table.to_dict("records")]


def _whole(row: Mapping[str, object], name: str, default: int | None = None) -> int:
    """Return a number of a row; a gap has the default."""
    value = float(str(row[name]))
    return default if default is not None and value != value else int(value)


def _run(row: Mapping[str, object]) -> ClosedLoopRun | RefusedCase:
    concurrency, tp = (_whole(row, name) for name in ("batch_size", "tp_size"))
    replicas, parts = _whole(row, "attention_dp_size", 1), _whole(row, "moe_ep_size", 1)
    shares = _whole(row, "moe_tp_size", tp // parts)
    gpu, model = gpu_key(str(row["system"])), str(row["model_path"]).removesuffix(_FP8)
    version = row["backend_version"] if isinstance(row["backend_version"], str) else ""
    is_gpt_oss = model.startswith(_GPT_OSS)
    deployment = Deployment(
        gpu,
        model,
        tp,
        version,
        "fp8_block" if not is_gpt_oss else "mxfp4_mxfp8" if gpu == "b200" else "",
        "fp8" if is_gpt_oss and gpu == "b200" else "auto",
        rules=_ASYNC_OF_0_11 if version.startswith("0.11.") else "",
        expert_parallel=parts > 1,
    )
    settings = {**row, "attention_dp_size": replicas, "experts": shares * parts}
    understood: dict[str, Collection[object]] = {"attention_dp_size": (1,), "experts": (tp,)}
    if not is_gpt_oss:
        understood["moe_quant_mode"] = ("fp8",)
    return closed_loop_run(settings, deployment, concurrency, understood, SHORTEST)
