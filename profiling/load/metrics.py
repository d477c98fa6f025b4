"""Throughput, latencies and starvation of a run, by the definitions of ARCHITECTURE section 4."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from capplan.profiling.load.gaps import GapHistogram
from capplan.profiling.load.outcome import FINISHED, NOT_FAILURES, REJECTED
from capplan.profiling.load.pulse import Pulse
from capplan.profiling.load.record import Record, Window
from capplan.profiling.load.result import ClientHealth, LoadMetrics, Stats
from capplan.spec import STARVED_BELOW

PERCENTILES: Final = (50, 90, 95, 99)
_MS_PER_S: Final = 1e3


@dataclass(frozen=True)
class LagLimits:
    """Up to where a client counts as having kept up, in milliseconds."""

    p50_ms: float = 5.0
    p99_ms: float = 100.0
    loop_p99_ms: float = 100.0


def overall_metrics(record: Record, window: Window, gaps: GapHistogram | None = None) -> LoadMetrics:
    """Return the metrics of all requests; with the gaps, their percentiles."""
    return _metrics("", record, window, np.arange(len(record)), gaps)


def adapter_metrics(record: Record, window: Window) -> tuple[LoadMetrics, ...]:
    """Return the metrics of each adapter that was asked for, in the order of the workload."""
    order = np.argsort(record.adapter, kind="stable")
    starts = np.searchsorted(record.adapter[order], np.arange(len(record.names) + 1))
    parts = zip(record.names, starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    return tuple(
        _metrics(name, record, window, order[low:high], None) for name, low, high in parts if high > low
    )


def client_health(
    record: Record, window: Window, pulse: Pulse, limits: LagLimits | None = None
) -> ClientHealth:
    """Tell whether requests due in the window went out in time, if at all."""
    limits = limits or LagLimits()
    wanted = window.holds(record.due_s) & ~record.of_kind(REJECTED)
    sent_s = np.where(np.isnan(record.sent_s), window.end_s, record.sent_s)  # at the end, or never
    lag_ms = _MS_PER_S * np.maximum(0.0, sent_s - record.due_s)[wanted]
    stats = statistics(lag_ms)
    loop_ms = pulse.late_ms(99.0)
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
    name: str, record: Record, window: Window, rows: NDArray[np.int64], gaps: GapHistogram | None
) -> LoadMetrics:
    due, sent, first, last = (
        each[rows] for each in (record.due_s, record.sent_s, record.first_s, record.last_s)
    )
    prompt, output = (each[rows].astype(np.int64) for each in (record.prompt_tokens, record.output_tokens))
    tokens = prompt + output
    finished = record.of_kind(FINISHED)[rows]
    rejected = record.of_kind(REJECTED)[rows]
    harmless = np.isin(record.kind[rows], [i for i, kind in enumerate(record.kinds) if kind in NOT_FAILURES])
    ended = finished & (last < window.end_s)
    failed = ~harmless & (record.ended_s[rows] < window.end_s)
    executing = ~ended & ~failed & ~rejected & (first < window.end_s)
    done = finished & window.holds(last)
    asked = window.holds(due)
    answerable = int(tokens[~executing].sum())
    served = float(tokens[ended].sum()) / answerable if answerable else 1.0
    ttft_s, e2e_s = first - due, last - due
    several = done & (output > 1)
    spread_ms = _MS_PER_S * (last - first)
    charged = np.where(ended, ttft_s, window.duration_s)[asked]
    return LoadMetrics(
        name=name,
        submitted=int(rows.size),
        completed=int(done.sum()),
        failed=int(failed.sum()),
        rejected=int(rejected.sum()),
        executing=int(executing.sum()),
        waiting=int((~ended & ~failed & ~rejected & ~executing).sum()),
        throughput_tok_s=float(tokens[done].sum()) / window.duration_s,
        input_tok_s=float(prompt[done].sum()) / window.duration_s,
        output_tok_s=float(output[done].sum()) / window.duration_s,
        offered_tok_s=float(tokens[asked].sum()) / window.duration_s,
        request_rate_rps=float(done.sum()) / window.duration_s,
        served_fraction=served,
        starved=served < STARVED_BELOW,
        ttft_s=statistics(ttft_s[done]),
        ttft_sent_s=statistics((first - sent)[done]),
        ttft_s_mean_charged=_mean(charged),
        e2e_s=statistics(e2e_s[done]),
        tpot_ms=statistics(spread_ms[several] / (output[several] - 1)),
        tpt_ms=statistics(_MS_PER_S * e2e_s[done] / np.maximum(output[done], 1)),
        itl_ms=_itl(spread_ms[done], record.events[rows][done], gaps),
        token_gap_ms_mean=_ratio(spread_ms[several].sum(), (output[several] - 1).sum()),
    )


def _itl(spread_ms: NDArray[np.float64], events: NDArray[np.int32], gaps: GapHistogram | None) -> Stats:
    mean = _ratio(spread_ms.sum(), np.maximum(events - 1, 0).sum())
    if gaps is None:
        return Stats(mean=mean)
    found = [None if math.isnan(s) else _MS_PER_S * s for s in gaps.percentiles_s(PERCENTILES)]
    return Stats(mean=mean, **_named(found))


def statistics(values: NDArray[np.float64]) -> Stats:
    """Return mean and percentiles; empty without any value."""
    if values.size == 0:
        return Stats()
    return Stats(mean=float(values.mean()), **_named(np.percentile(values, PERCENTILES).tolist()))


def _named(values: list[Any]) -> dict[str, Any]:
    return {f"p{percent}": value for percent, value in zip(PERCENTILES, values, strict=True)}


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if values.size else None


def _ratio(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole else None
