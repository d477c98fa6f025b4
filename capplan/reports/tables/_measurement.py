"""Tables of load tests, of plans beside measurements, and of observations beside their workloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from capplan.reports._console import DASH, Table, counted, number, percent

if TYPE_CHECKING:
    from capplan.observe import FitRow
    from capplan.profiling.load import BenchResult, LoadMetrics
    from capplan.profiling.validation import GroupValidation, MetricComparison


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


_HEAD: Final = (
    "metric",
    "measured",
    "predicted",
    "SMAPE, %",
    "tolerance, %",
    "constant step",
    "SMAPE, %",
    "offered load",
    "SMAPE, %",
)


_LABELS: Final = {
    "throughput_tok_s": ("throughput", "tok/s"),
    "itl_ms_mean": ("mean ITL", "ms"),
}
"""Names and units of the metrics with a tolerance."""


_THREE_DECIMALS: Final = ("ttft_s", "e2e_s", "served")


def group_table(group: GroupValidation, *, on_page: bool = False) -> Table:
    """Return one row per metric, and the verdict on starvation."""
    starved, predicted, constant = (
        "yes" if each else "no"
        for each in (group.starved, group.predicted_starved, group.constant_step_starved)
    )
    verdict = ("starved", starved, predicted, "", "equal", constant, "", "no", "")
    head = list(_HEAD)
    if on_page:  # columns become labels on narrow screens
        head[6], head[8] = "SMAPE of constant step, %", "SMAPE of offered load, %"
    return Table(head, [*map(_row, group.comparisons), verdict])


def _row(each: MetricComparison) -> tuple[str, ...]:
    decimals = 3 if each.name.startswith(_THREE_DECIMALS) else 2
    return (
        each.name,
        number(each.measured, decimals),
        number(each.predicted, decimals),
        number(each.error, 2),
        DASH if each.tolerance is None else number(each.tolerance, 1),
        number(each.constant_step, decimals),
        number(each.constant_step_error, 2),
        number(each.offered_load, decimals),
        number(each.offered_load_error, 2),
    )


def heading(group: GroupValidation) -> str:
    """Return the heading of a group's table."""
    scale = "" if group.rate_scale == 1.0 else f", rates times {group.rate_scale:g}"
    return f"group {group.group}: {group.requests:,} requests in {group.duration_s:g} s{scale}"


_FAR: Final = 0.1


def speed_note(group: GroupValidation) -> str | None:
    """Return how fast the machine was, and the predictions without it; None if it is unknown."""
    if group.slowdown is None:
        return None
    known = [each for each in group.comparisons if each.tolerance is not None]
    values = (f"{_valued(each, each.as_profiled)} ({number(each.as_profiled_error, 1)} %)" for each in known)
    note = (
        f"speed: by the engine's probe, steps took {number(group.slowdown, 3)} times as long as profiled, "
        f"which the predictions count; as profiled: {', '.join(values)}"
    )
    return note if abs(group.slowdown - 1.0) <= _FAR else f"{note}; profile the engine again on this machine"


def _valued(each: MetricComparison, value: float) -> str:
    label, unit = _LABELS[each.name]
    return f"{label} {number(value, 1)} {unit}"


def group_verdict(group: GroupValidation) -> str:
    """Return whether a group agrees, the metrics with a tolerance, and the faults of the measurement."""
    bounded = [each for each in group.comparisons if each.tolerance is not None]
    wrong = [_metric_verdict(each) for each in bounded if not each.agrees]
    if group.starved != group.predicted_starved:
        words = {True: "starved", False: "not starved"}
        wrong.append(f"{words[group.starved]} measured, {words[group.predicted_starved]} predicted")
    parts = wrong or [_metric_verdict(each) for each in bounded]
    verdict = "agrees" if group.agrees else "disagrees"
    return "; ".join((f"{verdict}: {', '.join(parts)}", *group.faults))


def _metric_verdict(each: MetricComparison) -> str:
    """Return the values of a metric, its error, and its tolerance."""
    values = f"{_valued(each, each.measured)} measured, {number(each.predicted, 1)} predicted"
    side = "within" if each.agrees else "over"
    return f"{values}: {number(each.error, 1)} % {side} the tolerance of {each.tolerance:g} %"


FIT_HEAD: Final = ("", "observed", "simulated", "difference")


def fit_cells(row: FitRow) -> tuple[str, str, str, str]:
    """Return the cells of an observation beside its workload, under `FIT_HEAD`."""
    difference = f"{100 * row.error:+.1f} " + ("points" if row.what.endswith("share") else "%")
    return row.what, number(row.observed, 3), number(row.simulated, 3), difference
