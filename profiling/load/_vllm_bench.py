"""Result files of ``vllm bench serve``: writer and reader.

Keys are those of vLLM 0.32 (``vllm/benchmarks/serve.py``). TTFT counts from sending, ITL are gaps between
events, the duration ends with the last answer, and there are no adapters.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.profiling.load._result import (
    BenchResult,
    ClientHealth,
    LoadMetrics,
    MeasuredStats,
    statistics,
)
from capplan.spec import STARVED_BELOW, latency_stats, write_text_atomic
from capplan.workload import read_vllm_result

_MS_PER_S: Final = 1e3
_MOST: Final = 1e18  # seconds, requests and tokens are fewer
_OPTIONAL: Final = ("failed", "num_prompts")
_NEEDED: Final = ("duration", "completed", "total_input_tokens", "total_output_tokens")


def write_vllm_bench(
    path: str | os.PathLike[str], result: BenchResult, requests: str | os.PathLike[str]
) -> None:
    """Write a result as ``vllm bench serve --save-result --save-detailed`` does.

    Raises
    ------
    InputError
        If the file cannot be written.
    """
    write_text_atomic(path, json.dumps(vllm_document(result, _rows(requests, result))))


def vllm_document(result: BenchResult, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document; `rows` are columns of `RequestFile` for sent requests."""
    finished = np.array([status == "finished" for status in rows["status"]], bool)
    sent = np.array(rows["sent_s"], float)
    ttft_s = np.where(finished, np.array(rows["ttft_sent_s"], float), 0.0)
    last_s = np.where(finished, np.array(rows["finish_s"], float), np.nan)
    latency_s = np.where(finished, last_s - sent, 0.0)
    output = np.where(finished, np.array(rows["output_tokens"], np.int64), 0)
    prompt = np.array(rows["prompt_tokens"], np.int64)
    events = zip(rows["event_ms"], finished.tolist(), strict=True)
    itl_s = [np.diff(np.asarray(each, float)) / _MS_PER_S if whole else np.empty(0) for each, whole in events]
    duration_s = float(np.nanmax(last_s) - sent.min()) if finished.any() else result.duration_s
    inputs, outputs, count = int(prompt[finished].sum()), int(output.sum()), int(finished.sum())
    several = finished & (output > 1)
    tpot_s = (latency_s - ttft_s)[several] / (output[several] - 1)
    return {
        "date": datetime.fromisoformat(result.started_at).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai",
        "backend": "openai",
        "label": result.created_by,
        "model_id": result.base_model,
        "tokenizer_id": result.base_model,
        "num_prompts": int(finished.size),
        "request_rate": finished.size / result.duration_s,
        "burstiness": 1.0,
        "max_concurrency": result.settings.get("max_in_flight"),
        "duration": duration_s,
        "completed": count,
        "failed": int(finished.size) - count,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": count / duration_s,
        "request_goodput": None,
        "output_throughput": outputs / duration_s,
        "total_token_throughput": (inputs + outputs) / duration_s,
        "input_lens": prompt.tolist(),
        "output_lens": output.tolist(),
        "ttfts": ttft_s.tolist(),
        "itls": [each.tolist() for each in itl_s],
        "latencies": latency_s.tolist(),
        "start_times": sent.tolist(),
        "queue_times": [0.0] * finished.size,
        "generated_texts": [""] * finished.size,
        "errors": ["" if status == "finished" else status for status in rows["status"]],
        **_summary("ttft", ttft_s[finished]),
        **_summary("tpot", tpot_s),
        **_summary("itl", np.concatenate([np.empty(0), *itl_s])),
        **_summary("e2el", latency_s[finished]),
    }


def read_result(path: str | os.PathLike[str]) -> BenchResult:
    """Read a result of `capplan bench`, or a file of ``vllm bench serve``.

    Raises
    ------
    InputError
        For a file that is neither.
    """
    data = read_vllm_result(Path(path))
    return BenchResult.from_json(path) if "schema_version" in data else _result(data, os.fspath(path))


def read_vllm_bench(path: str | os.PathLike[str]) -> BenchResult:
    """Read a file of ``vllm bench serve`` as a result.

    Missing facts stay empty: lag of the client, adapters, TTFT since due. Percentiles come from the details
    if present.

    Raises
    ------
    InputError
        For a file that is none.
    """
    return _result(read_vllm_result(Path(path)), os.fspath(path))


def _result(data: Mapping[str, Any], name: str) -> BenchResult:
    _check(data, name)
    duration_s = float(data["duration"])
    inputs, outputs, completed = (int(data[key]) for key in _NEEDED[2:] + _NEEDED[1:2])
    failed = int(data.get("failed") or 0)
    submitted = int(data.get("num_prompts") or completed + failed)
    details = _details(data)
    served = completed / submitted if submitted else 1.0
    ttft_s = _stats(data, "ttft", details.get("ttft"), 1.0 / _MS_PER_S)
    overall = LoadMetrics(
        name="",
        submitted=submitted,
        completed=completed,
        failed=failed,
        rejected=0,
        executing=0,
        waiting=max(0, submitted - completed - failed),
        throughput_tok_s=(inputs + outputs) / duration_s,
        input_tok_s=inputs / duration_s,
        output_tok_s=outputs / duration_s,
        offered_tok_s=(inputs + outputs) / duration_s,
        request_rate_rps=completed / duration_s,
        served_fraction=served,
        starved=served < STARVED_BELOW,
        ttft_s=MeasuredStats(),
        ttft_sent_s=ttft_s,
        e2e_s=_stats(data, "e2el", details.get("e2el"), 1.0 / _MS_PER_S),
        tpot_ms=_stats(data, "tpot", details.get("tpot"), 1.0),
        tpt_ms=MeasuredStats(),
        itl_ms=_stats(data, "itl", details.get("itl"), 1.0),
    )
    return BenchResult(
        created_by="vllm bench serve",
        source="vllm bench serve",
        started_at=str(data.get("date", "")),
        url="",
        base_model=str(data.get("model_id", "")),
        warm_up_s=0.0,
        duration_s=duration_s,
        overall=overall,
        client=ClientHealth(lag_ms=MeasuredStats(), kept_up=None),
        settings={key: _finite(data.get(key)) for key in ("request_rate", "burstiness", "max_concurrency")},
    )


def _check(data: Mapping[str, Any], name: str) -> None:
    for key in (*_NEEDED, *_OPTIONAL):
        value = data.get(key)
        if value is None and key in _OPTIONAL:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MOST:
            raise InputError(f"must be a number >= 0, at most {_MOST:g}", value, f"{name}: {key}")
    if data["duration"] == 0:
        raise InputError("must be above 0", data["duration"], f"{name}: duration")


def _rows(requests: str | os.PathLike[str], result: BenchResult) -> dict[str, list[Any]]:
    import pandas as pd

    table = pd.read_parquet(requests)
    end_s = result.warm_up_s + result.duration_s
    inside = (table["arrival_s"] >= result.warm_up_s) & (table["arrival_s"] < end_s)
    rows: Any = table[inside & table["sent_s"].notna()].sort_values("number")
    return {name: rows[name].tolist() for name in rows.columns}


def _summary(metric: str, values_s: NDArray[np.float64]) -> dict[str, float]:
    """Return the statistics of a metric under vLLM's keys; 0 without values."""
    ms = _MS_PER_S * values_s if values_s.size else np.zeros(1)
    stats = vars(latency_stats(ms))
    keys = {**stats, "median": stats["p50"], "std": float(ms.std())}
    return {f"{name}_{metric}_ms": value for name, value in keys.items()}


def _details(data: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
    """Return metrics of single successful requests in milliseconds; empty without details."""
    keys = ("ttfts", "latencies", "output_lens", "itls")
    if not all(isinstance(data.get(key), list) for key in keys):
        return {}
    errors = data.get("errors") or [""] * len(data["ttfts"])
    good = np.array([not error for error in errors], bool)
    try:
        ttft, latency, output = (_MS_PER_S * np.array(data[key], float)[good] for key in keys[:3])
        gaps = [g for g, whole in zip(data["itls"], good.tolist(), strict=True) if whole]
        itl = _MS_PER_S * np.array([gap for each in gaps for gap in each], float)
    except (ValueError, TypeError, IndexError):
        return {}
    output = output / _MS_PER_S
    several = output > 1
    tpot = (latency - ttft)[several] / (output[several] - 1)
    return {"ttft": ttft, "e2el": latency, "tpot": tpot, "itl": itl}


def _stats(
    data: Mapping[str, Any], metric: str, details: NDArray[np.float64] | None, factor: float
) -> MeasuredStats:
    """Return the statistics of a metric, milliseconds times `factor`."""
    if details is not None and details.size:
        return statistics(factor * details)
    names = {"mean": "mean", "p50": "median", "p90": "p90", "p95": "p95", "p99": "p99"}
    found = {ours: data.get(f"{theirs}_{metric}_ms") for ours, theirs in names.items()}
    return MeasuredStats(
        **{
            key: factor * v if isinstance(v, int | float) and math.isfinite(v) else None
            for key, v in found.items()
        }
    )


def _finite(value: Any) -> Any:
    """Return a value of the file; infinity and NaN, which JSON does not have, as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
