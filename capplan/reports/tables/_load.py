"""Tables of a load test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from capplan.reports._console import Table, counted, number, percent

if TYPE_CHECKING:
    from capplan.profiling.load import BenchResult, LoadMetrics


_STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99")


_LATENCIES: Final = (
    ("TTFT from due, s", "ttft_s", 3),
    ("TTFT from sent, s", "ttft_sent_s", 3),
    ("ITL, ms", "itl_ms", 2),
    ("TPOT, ms", "tpot_ms", 2),
    ("TPT, ms", "tpt_ms", 2),
    ("E2E, s", "e2e_s", 2),
)


def latency_table(result: BenchResult) -> Table:
    """Return mean and percentiles of every latency and of the client's lag."""
    latencies = [(name, getattr(result.overall, field), decimals) for name, field, decimals in _LATENCIES]
    rows = [
        (name, *(number(getattr(stats, statistic), decimals) for statistic in _STATISTICS))
        for name, stats, decimals in (*latencies, ("client lag, ms", result.client.lag_ms, 2))
    ]
    return Table(("latency", *_STATISTICS), rows)


def adapter_table(adapters: Sequence[LoadMetrics], caption: str = "") -> Table:
    """Return one row per adapter."""
    rows = [
        (
            each.name or "(base model)",
            number(each.submitted),
            number(each.completed),
            percent(each.served_fraction),
            number(each.throughput_tok_s, 1),
            number(each.ttft_s.p50, 3),
            number(each.itl_ms.mean, 2),
        )
        for each in adapters
    ]
    head = ("adapter", "submitted", "completed", "served", "tok/s", "TTFT p50, s", "ITL mean, ms")
    return Table(head, rows, caption=caption)


def facts_table(result: BenchResult) -> Table:
    """Return the metrics other than latencies."""
    overall = result.overall
    facts = {
        "throughput, tok/s": number(overall.throughput_tok_s, 1),
        "offered, tok/s": number(overall.offered_tok_s, 1),
        "input, tok/s": number(overall.input_tok_s, 1),
        "output, tok/s": number(overall.output_tok_s, 1),
        "completed in the window": number(overall.completed),
        "submitted": number(overall.submitted),
        "failed": number(overall.failed),
        "rejected": number(overall.rejected),
        "executing at the end": number(overall.executing),
        "waiting at the end": number(overall.waiting),
        "served": percent(overall.served_fraction),
        "starved": "yes" if overall.starved else "no",
        "mean time between tokens, ms": number(overall.token_gap_ms_mean, 2),
    }
    return Table(("metric", "value"), list(facts.items()))


def doubts(result: BenchResult) -> list[str]:
    """Return what answers leave unknown, one per line."""
    uncertain = result.uncertain
    reasons = (
        (uncertain.uncounted, "without token counts: events with text are counted as tokens"),
        (
            uncertain.buffered,
            "whose tokens arrived at once: something between server and client holds them back; TTFT is E2E, "
            "and TPOT and ITL leave them out",
        ),
        (
            uncertain.other_length,
            "of another length than requested: the server ignores ignore_eos or max_tokens",
        ),
    )
    return [f"warning: {counted(count, 'answer')} {reason}" for count, reason in reasons if count]


def warnings(result: BenchResult) -> list[str]:
    """Return the reasons to doubt the result, one per line."""
    lines = []
    for each in result.failures:
        message = f": {' '.join(each.message.split())}" if each.message else ""
        lines.append(f"failed: {counted(each.requests, 'request')} with {each.kind}{message}")
    overall, client = result.overall, result.client
    if overall.completed == 0:
        lines.append("failed: no request was answered within the window")
    if client.kept_up is False:
        lag = f"median {number(client.lag_ms.p50, 1)} ms, 99 % within {number(client.lag_ms.p99, 1)} ms"
        lines.append(
            f"this client could not keep up: requests were sent late ({lag}), its loop was late by "
            f"{number(client.loop_lag_ms_p99, 1)} ms; latencies include its own delay"
        )
    return lines
