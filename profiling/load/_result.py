"""Result of a load test: metrics and JSON document."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, JsonValue

from capplan.profiling.load._record import (
    FINISHED,
    NOT_FAILURES,
    REJECTED,
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

if TYPE_CHECKING:
    from capplan.profiling.load._record import EventLoopLag

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
