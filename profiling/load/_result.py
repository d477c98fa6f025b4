"""Result of a load test: metrics and JSON document, and result files of ``vllm bench serve``.

Keys of these files are those of vLLM 0.32 (``vllm/benchmarks/serve.py``). TTFT counts from sending, ITL are
gaps between events, the duration ends with the last answer, and there are no adapters.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, JsonValue

from capplan.errors import InputError
from capplan.profiling.load._record import (
    FINISHED,
    NOT_FAILURES,
    REJECTED,
    EventLoopLag,
    LogHistogram,
    MeasurementWindow,
    RequestRecords,
)
from capplan.spec import (
    PERCENTILES,
    STARVED_BELOW,
    Many,
    SpecModel,
    format_key,
    latency_stats,
    parse_json,
    read_text,
    validate_document,
    write_text_atomic,
)
from capplan.workload import read_vllm_result

Number = float | None
"""Null without measurements."""
_MS_PER_S: Final = 1e3


class MeasuredStats(SpecModel):
    """Mean and percentiles, interpolated linearly."""

    mean: Number = None
    p50: Number = None
    p90: Number = None
    p95: Number = None
    p99: Number = None


class LoadMetrics(SpecModel):
    """Metrics of an adapter's requests, or of all; names as in `capplan simulate`."""

    name: str = Field(description="Adapter; empty: the base model.")
    submitted: int = Field(description="Requests due from the start of the run to the end of the window.")
    completed: int = Field(description="Requests that completed within the window.")
    failed: int = Field(description="Requests that failed, from the start of the run.")
    rejected: int = Field(description="Requests not sent because of the limit on requests in flight.")
    executing: int = Field(description="Requests that had a token, but not all, at the end of the window.")
    waiting: int = Field(description="Requests without a token at the end of the window.")
    throughput_tok_s: float = Field(description="Input and output tokens completed in the window per second.")
    input_tok_s: float
    output_tok_s: float
    offered_tok_s: float = Field(description="Tokens of the requests that were due in the window per second.")
    request_rate_rps: float = Field(description="Requests completed in the window per second.")
    served_fraction: float = Field(
        description="Tokens of completed over tokens of submitted requests, those executing left out of both."
    )
    starved: bool = Field(description=f"served_fraction below {STARVED_BELOW}.")
    ttft_s: MeasuredStats = Field(description="From when a request was due to its first token.")
    ttft_sent_s: MeasuredStats = Field(description="From when a request was sent to its first token.")
    ttft_s_mean_charged: Number = Field(
        None,
        description="Mean over requests due in the window; an unfinished one is charged the whole window.",
    )
    e2e_s: MeasuredStats = Field(description="From when a request was due to its last token.")
    tpot_ms: MeasuredStats = Field(description="(E2E - TTFT) / (output tokens - 1).")
    tpt_ms: MeasuredStats = Field(description="E2E / output tokens.")
    itl_ms: MeasuredStats = Field(
        description="Gaps between tokens at the client; the mean is over completed requests."
    )
    token_gap_ms_mean: Number = Field(
        None,
        description="First to last token over tokens - 1: shorter than itl_ms if events hold several tokens.",
    )


class ClientHealth(SpecModel):
    """Whether the client sent in time."""

    lag_ms: MeasuredStats = Field(description="From when a request was due to when it was sent.")
    lag_ms_max: Number = None
    loop_lag_ms_p99: Number = Field(
        None, description="Lateness of the event loop, sampled 50 times a second."
    )
    kept_up: bool | None = Field(description="Whether lag and loop are within their limits; null: unknown.")


class Failure(SpecModel):
    """Requests that failed in one way."""

    kind: str
    requests: int
    message: str = Field("", description="Message of the first of them.")


class UncertainAnswers(SpecModel):
    """Completed requests of the whole run whose metrics are uncertain."""

    uncounted: int = Field(
        0, description="Requests whose tokens the server did not count: events with text count instead."
    )
    buffered: int = Field(
        0, description="Requests whose tokens arrived at once: TTFT is E2E, without TPOT and ITL."
    )
    other_length: int = Field(0, description="Requests with another number of output tokens than requested.")


class ServerSample(SpecModel):
    """One scrape of the server's metrics."""

    time_s: float
    took_ms: float
    values: dict[str, float]


class BenchResult(SpecModel):
    """A load test."""

    schema_version: Literal[1] = 1
    created_by: str
    started_at: str = Field(description="ISO 8601, UTC.")
    source: str = Field("capplan bench", description="Program that measured.")
    url: str
    base_model: str
    workload_digest: str | None = None
    settings: dict[str, JsonValue] = Field({}, description="Settings of the run.")
    partial: bool = Field(False, description="Whether the run was stopped before its time.")
    warm_up_s: float = Field(description="Time before the window.")
    duration_s: float = Field(description="Length of the window.")
    overall: LoadMetrics
    adapters: Many[LoadMetrics] = ()
    failures: Many[Failure] = ()
    uncertain: UncertainAnswers = UncertainAnswers()
    client: ClientHealth
    server: Annotated[Many[ServerSample], Field(description="Scrapes of /metrics.")] = ()

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the result as JSON text, and write it to ``path`` atomically if given."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        if path is not None:
            write_text_atomic(path, text)
        return text

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """Read a result.

        Raises
        ------
        InputError
            For the first broken rule, with file and key.
        """
        name = os.fspath(path)
        data: Any = parse_json(read_text(path), name)
        return validate_document(cls, data, lambda key: f"{name}: {format_key(key)}" if key else name)


@dataclass(frozen=True)
class LagLimits:
    """Limits within which a client kept up, in milliseconds."""

    p50_ms: float = 5.0
    p99_ms: float = 100.0
    loop_p99_ms: float = 100.0


def overall_metrics(
    record: RequestRecords, window: MeasurementWindow, gaps: LogHistogram | None = None
) -> LoadMetrics:
    """Return the metrics of all requests; `gaps` adds percentiles of ITL."""
    return _metrics("", record, window, gaps)


def adapter_metrics(record: RequestRecords, window: MeasurementWindow) -> tuple[LoadMetrics, ...]:
    """Return the metrics of each adapter with requests, in the order of the workload."""
    order = np.argsort(record.adapter, kind="stable")
    starts = np.searchsorted(record.adapter[order], np.arange(len(record.names) + 1))
    parts = zip(record.names, starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    return tuple(
        _metrics(name, record.take(order[low:high]), window) for name, low, high in parts if high > low
    )


def client_health(
    record: RequestRecords, window: MeasurementWindow, loop_lag: EventLoopLag, limits: LagLimits | None = None
) -> ClientHealth:
    """Return the lag of requests due in the window, and whether the client kept up."""
    limits = limits or LagLimits()
    wanted = window.holds(record.due_s) & ~record.of_kind(REJECTED)
    sent_s = np.where(np.isnan(record.sent_s), window.end_s, record.sent_s)  # unsent: the end
    lag_ms = _MS_PER_S * np.maximum(0.0, sent_s - record.due_s)[wanted]
    stats = statistics(lag_ms)
    loop_ms = loop_lag.percentile_ms(99.0)
    kept_up = (
        (stats.p50 or 0.0) <= limits.p50_ms
        and (stats.p99 or 0.0) <= limits.p99_ms
        and (loop_ms or 0.0) <= limits.loop_p99_ms
    )
    return ClientHealth(
        lag_ms=stats,
        lag_ms_max=float(lag_ms.max()) if lag_ms.size else None,
        loop_lag_ms_p99=loop_ms,
        kept_up=kept_up,
    )


def _metrics(
    name: str, record: RequestRecords, window: MeasurementWindow, gaps: LogHistogram | None = None
) -> LoadMetrics:
    due, sent, first, last = record.due_s, record.sent_s, record.first_s, record.last_s
    prompt, output = (each.astype(np.int64) for each in (record.prompt_tokens, record.output_tokens))
    tokens = prompt + output
    finished, rejected = record.of_kind(FINISHED), record.of_kind(REJECTED)
    harmless = np.any([record.of_kind(kind) for kind in NOT_FAILURES], axis=0)
    ended = finished & (last < window.end_s)
    failed = ~harmless & (record.ended_s < window.end_s)
    executing = ~ended & ~failed & ~rejected & (first < window.end_s)
    done = finished & window.holds(last)
    due_inside = window.holds(due)
    answerable = int(tokens[~executing].sum())
    served = float(tokens[ended].sum()) / answerable if answerable else 1.0
    ttft_s, e2e_s = first - due, last - due
    streamed = done & ~record.is_buffered
    several = streamed & (output > 1)
    spread_ms = _MS_PER_S * (last - first)
    charged = np.where(ended, ttft_s, window.duration_s)[due_inside]
    return LoadMetrics(
        name=name,
        submitted=len(record),
        completed=int(done.sum()),
        failed=int(failed.sum()),
        rejected=int(rejected.sum()),
        executing=int(executing.sum()),
        waiting=int((~ended & ~failed & ~rejected & ~executing).sum()),
        throughput_tok_s=float(tokens[done].sum()) / window.duration_s,
        input_tok_s=float(prompt[done].sum()) / window.duration_s,
        output_tok_s=float(output[done].sum()) / window.duration_s,
        offered_tok_s=float(tokens[due_inside].sum()) / window.duration_s,
        request_rate_rps=float(done.sum()) / window.duration_s,
        served_fraction=served,
        starved=served < STARVED_BELOW,
        ttft_s=statistics(ttft_s[done]),
        ttft_sent_s=statistics((first - sent)[done]),
        ttft_s_mean_charged=_mean(charged),
        e2e_s=statistics(e2e_s[done]),
        tpot_ms=statistics(spread_ms[several] / (output[several] - 1)),
        tpt_ms=statistics(_MS_PER_S * e2e_s[done] / np.maximum(output[done], 1)),
        itl_ms=_itl(spread_ms[streamed], record.events[streamed], gaps),
        token_gap_ms_mean=_ratio(spread_ms[several].sum(), (output[several] - 1).sum()),
    )


def _itl(
    spread_ms: NDArray[np.float64], events: NDArray[np.int32], gaps: LogHistogram | None
) -> MeasuredStats:
    mean = _ratio(spread_ms.sum(), np.maximum(events - 1, 0).sum())
    if gaps is None:
        return MeasuredStats(mean=mean)
    found = zip(PERCENTILES, gaps.percentiles_s(PERCENTILES), strict=True)
    known = {f"p{percent}": _MS_PER_S * gap_s for percent, gap_s in found if not math.isnan(gap_s)}
    return MeasuredStats(mean=mean, **known)


def statistics(values: NDArray[np.float64]) -> MeasuredStats:
    """Return mean and percentiles; empty without any value."""
    return MeasuredStats(**vars(latency_stats(values))) if values.size else MeasuredStats()


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if values.size else None


def _ratio(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole else None


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


def _result(data: Mapping[str, Any], name: str) -> BenchResult:
    """Return the result in a file of ``vllm bench serve``.

    Missing facts stay empty: lag of the client, adapters, TTFT since due. Percentiles come from the details
    if present.
    """
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
