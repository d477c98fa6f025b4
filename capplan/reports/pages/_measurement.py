"""Reports of `capplan bench`, `capplan validate` and `capplan observe`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from capplan.reports._console import Cell, Table, counted, number, percent
from capplan.reports.pages import _page as page
from capplan.reports.pages._figures import Axis, Chart, Curve, bar_rows, bounds_of, line_chart
from capplan.reports.tables._measurement import (
    FIT_HEAD,
    adapter_table,
    facts_table,
    fit_cells,
    group_table,
    group_verdict,
    heading,
    latency_table,
    speed_note,
    warnings,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from capplan.profiling.load import BenchResult
    from capplan.profiling.validation import GroupValidation, Validation

    Columns = Mapping[str, NDArray[Any]]
    from collections.abc import Sequence

    from capplan.observe import FitReport, FitRow, Observation


_BUCKETS: Final = (12, 60)  # of the charts over time, by how many requests there are

_PER_BUCKET: Final = 10
_ADAPTERS: Final = 50
_POINTS: Final = 200  # of a distribution

_BENCH_TERMS: Final = {
    **page.terms("throughput", "offered", "served", "starved"),
    "TTFT from due": "time from a request's arrival in the workload to its first token",
    "TTFT from sent": "time from sending to the first token; the difference is the delay of the client",
    "E2E": "time from a request's arrival in the workload to its last token",
    **page.terms("TPOT", "TPT"),
    "ITL": "gap between two tokens as a client sees it; tokens sent at once have one gap",
    "mean time between tokens": "from first to last token over tokens - 1",
    "client lag": "time from a request's arrival in the workload to sending",
    "p50, p90, p95, p99": "percentiles over requests completed within the window, interpolated linearly; of "
    "ITL, over all gaps within the window, exact to a third of a percent",
}


def bench_page(
    path: str, result: BenchResult, requests: str | os.PathLike[str], bounds: Mapping[str, float]
) -> str:
    """Return the report of a load test as one HTML document.

    Parameters
    ----------
    path
        File of the workload.
    result
        Measurements.
    requests
        Parquet file of the requests.
    bounds
        Latency bounds of the workload by key, such as ``ttft_p99_s``.
    """
    rows = _columns(requests)
    window = f"{result.duration_s:g} s measured after {result.warm_up_s:g} s of warm-up"
    if result.partial:
        window = f"stopped early: {window}"
    settings = {**result.settings, "workload digest": result.workload_digest}
    return page.page(
        f"Load test of {path}",
        page.section("Summary", *_verdict(result), facts_table(result), intro=window),
        page.section("Latencies", latency_table(result), page.charts(*_distributions(rows, result, bounds))),
        page.section("Over time", page.charts(*_course(rows, result, bounds)), intro="Seconds since time 0."),
        *_server(result),
        page.section("By adapter", _adapters(result)),
        page.section("Settings", page.settings_table(settings)),
        subtitle=f"{result.base_model} at {result.url}, {result.started_at}",
        cards=_bench_cards(result, bounds),
        terms=_BENCH_TERMS,
    )


def _bench_cards(result: BenchResult, bounds: Mapping[str, float]) -> list[page.Card]:
    overall = result.overall
    ttft_s, tpot_ms = overall.ttft_s.p99, overall.tpot_ms.p99
    faults = warnings(result)
    trust = page.bad(counted(len(faults), "warning")) if faults else page.good("no warning")
    return [
        page.Card(
            "Throughput",
            f"{number(overall.throughput_tok_s)} tok/s",
            f"offered {number(overall.offered_tok_s)}",
        ),
        page.served_card(overall.served_fraction, starved=overall.starved),
        page.latency_card("TTFT p99", "ttft_p99_s", ttft_s, bounds),
        page.latency_card("TPOT p99", "tpot_p99_ms", tpot_ms, bounds),
        page.Card("Measurement", trust, f"{result.duration_s:g} s, {counted(overall.completed, 'request')}"),
    ]


def _columns(requests: str | os.PathLike[str]) -> Columns:
    import pyarrow.parquet as pq

    wanted = ("status", "arrival_s", "sent_s", "finish_s", "prompt_tokens", "output_tokens")
    more = ("lag_ms", "ttft_s", "e2e_s", "tpot_ms")
    table = pq.read_table(requests, columns=[*wanted, *more])
    return {name: table[name].to_numpy() for name in table.column_names}


def _verdict(result: BenchResult) -> list[page.Block]:
    lines = warnings(result)
    if not lines:
        kept_up = "" if result.client.kept_up is None else ", and the client kept up"
        return [page.paragraph(page.good(f"No request failed{kept_up}."))]
    return [page.paragraph(page.bad(line)) for line in lines]


def _distributions(rows: Columns, result: BenchResult, limits: Mapping[str, float]) -> list[Chart]:
    import numpy as np

    end_s = result.warm_up_s + result.duration_s
    with np.errstate(invalid="ignore"):
        done = (rows["finish_s"] >= result.warm_up_s) & (rows["finish_s"] < end_s)

    def chart(title: str, label: str, column: str) -> Chart:
        values = rows[column][done]
        values = np.sort(values[~np.isnan(values)])
        shares = np.linspace(0.0, 1.0, min(_POINTS, values.size))
        at = np.quantile(values, shares) if values.size else values
        curve = Curve("", at.tolist(), shares.tolist())
        marks = bounds_of(limits, column.split("_")[0])
        return line_chart(title, [curve], Axis(label), Axis("share of requests", high=1.0), marks=marks)

    return [
        chart("Time to first token", "TTFT from due, s", "ttft_s"),
        chart("Time per output token", "TPOT, ms", "tpot_ms"),
        chart("End to end", "E2E, s", "e2e_s"),
        chart("Client lag", "lag, ms", "lag_ms"),
    ]


def _course(rows: Columns, result: BenchResult, limits: Mapping[str, float]) -> list[Chart]:
    import numpy as np

    end_s = result.warm_up_s + result.duration_s
    buckets = int(np.clip(rows["arrival_s"].size // _PER_BUCKET, *_BUCKETS))
    edges = np.linspace(0.0, end_s, buckets + 1)
    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    width_s = end_s / buckets
    time = Axis("time, s", low=0.0, high=end_s)
    marks = {"window": result.warm_up_s} if result.warm_up_s else None

    def total(at_s: NDArray[np.float64], weights: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        known = ~np.isnan(at_s)
        chosen = None if weights is None else weights[known]
        counts: NDArray[np.float64] = np.histogram(at_s[known], edges, weights=chosen)[0].astype(float)
        return counts

    def mean(column: str) -> list[float]:
        known = ~np.isnan(rows[column])
        sums = total(rows["arrival_s"][known], rows[column][known])
        counts = total(rows["arrival_s"][known])
        means: list[float] = np.where(counts > 0, sums / np.maximum(counts, 1.0), np.nan).tolist()
        return means

    def chart(title: str, label: str, *curves: Curve, metric: str = "none") -> Chart:
        bounds = bounds_of(limits, metric)
        return line_chart(title, curves, time, Axis(label), marks=marks, bounds=bounds)

    tokens = (rows["prompt_tokens"] + rows["output_tokens"]).astype(float)
    sent, failed = np.cumsum(total(rows["sent_s"])), ~np.isin(rows["status"], ("finished", "unfinished"))
    offered, completed = total(rows["arrival_s"], tokens), total(rows["finish_s"], tokens)
    in_flight = sent - np.cumsum(total(rows["finish_s"])) - np.cumsum(total(rows["sent_s"][failed]))
    return [
        chart(
            "Tokens",
            "tokens/s",
            Curve("offered", middles, (offered / width_s).tolist()),
            Curve("completed", middles, (completed / width_s).tolist()),
        ),
        chart("In flight", "requests", Curve("", middles, in_flight.tolist())),
        chart(
            "Time to first token",
            "mean TTFT from due, s",
            Curve("", middles, mean("ttft_s")),
            metric="ttft",
        ),
        chart("Time per output token", "mean TPOT, ms", Curve("", middles, mean("tpot_ms")), metric="tpot"),
        chart("Client lag", "mean lag, ms", Curve("", middles, mean("lag_ms"))),
    ]


def _server(result: BenchResult) -> list[page.Section]:
    """Return charts of what the server said of itself, if it was asked."""
    if not result.server:
        return []
    times = [each.time_s for each in result.server]
    shown = (("Running", "running"), ("Waiting", "waiting"), ("KV memory in use", "kv_used"))
    charts = [
        line_chart(
            title,
            [Curve("", times, [each.values.get(key, float("nan")) for each in result.server])],
            Axis("time, s"),
            Axis("share of KV tokens" if key == "kv_used" else "requests"),
        )
        for title, key in shown
        if any(key in each.values for each in result.server)
    ]
    took = [each.took_ms for each in result.server]
    intro = (
        f"{counted(len(took), 'scrape')} of /metrics, {number(sum(took) / len(took), 1)} ms each on average."
    )
    return [page.section("The server", page.charts(*charts), intro=intro)]


def _adapters(result: BenchResult) -> Table:
    worst = sorted(result.adapters, key=lambda each: (each.served_fraction, -each.submitted))[:_ADAPTERS]
    which = f"the {len(worst)} worst served of" if len(worst) < len(result.adapters) else "all of the"
    return adapter_table(worst, f"{which} {counted(len(result.adapters), 'adapter')} with requests")


_VALIDATION_TERMS: Final = {
    "measured": "by the load generator, from the requests that completed within the time",
    "predicted": "by the digital twin, for the same requests with the same lengths at the same times",
    **page.terms("SMAPE"),
    "constant step": "baseline: the twin with one time for all steps, its mean step at the plan's rates",
    "offered load": "baseline: every request is served; predicts no latency",
    "itl_ms_mean": "mean time between two tokens of a request, every gap counting alike",
    "kv_tokens_mean": "KV tokens in use while requests run, whole blocks, by the server's metrics",
    "starved": "served_fraction below 0.9",
}


def validation_page(plan: str, found: Validation) -> str:
    """Return the report of a validation as one HTML document; ``plan`` is the name of its file."""
    return page.page(
        "Plan and measurement",
        *map(_group_section, found.groups),
        subtitle=plan,
        cards=_validation_cards(found),
        terms=_VALIDATION_TERMS,
    )


def _validation_cards(found: Validation) -> list[page.Card]:
    agreeing = sum(group.agrees for group in found.groups)
    verdict = page.good("agrees") if found.agrees else page.bad("disagrees")
    cards = [
        page.Card("Twin and engines", verdict, f"{agreeing} of {counted(len(found.groups), 'group')} agree")
    ]
    for label, name in (("Throughput", "throughput_tok_s"), ("Mean ITL", "itl_ms_mean")):
        errors = [
            (each.error, each.tolerance)
            for group in found.groups
            for each in group.comparisons
            if each.name == name and each.error is not None
        ]
        if errors:
            error, tolerance = max(errors, key=lambda pair: pair[0])
            value = page.against_bound(error, tolerance, f"{number(error, 2)} %")
            cards.append(page.Card(f"{label}, worst SMAPE", value, f"tolerance {number(tolerance, 1)} %"))
    return cards


def _group_section(group: GroupValidation) -> page.Section:
    known = [each for each in group.comparisons if each.error is not None]
    bars = {
        "twin": [each.error for each in known],
        "constant step": [each.constant_step_error for each in known],
    }
    values = {
        name: [math.nan if error is None else error for error in errors] for name, errors in bars.items()
    }
    limits = {f"tolerance: {each.name}": each.tolerance for each in known if each.tolerance is not None}
    names = [each.name for each in known]
    errors = bar_rows("Error by metric", names, values, Axis("SMAPE, %", low=0.0), bounds=limits)
    return page.section(
        heading(group),
        group_table(group, on_page=True),
        page.paragraph(group_verdict(group)),
        *(page.paragraph(note) for note in (speed_note(group),) if note),
        *(page.paragraph(f"warning: {each}") for each in group.mismatches),
        page.charts(errors),
    )


_GOOD: Final = 0.05
"""Difference up to which a row is marked as good."""

_OBSERVATION_TERMS: Final = {
    "observed": "requests of the log that were used",
    "simulated": "requests drawn from the workload file, on one seed",
    "difference": "simulated over observed, less one; of shares, simulated less observed",
}


def observation_page(observation: Observation, report: FitReport) -> str:
    """Return the report as one HTML page that works offline.

    Parameters
    ----------
    observation
        What was observed.
    report
        Its comparison with requests of the workload.
    """
    return page.page(
        f"Traffic of {observation.source}",
        _rates(report),
        _table_section("Rates and lengths", report.rows),
        _table_section("Hours", report.hours),
        _table_section("Most popular adapters", report.shares, "Requests per million."),
        _reading(observation),
        subtitle=f"{observation.requests:,} requests in {observation.duration_s / 3600:,.4g} h",
        cards=_observation_cards(observation, report),
        terms=_OBSERVATION_TERMS,
    )


def _observation_cards(observation: Observation, report: FitReport) -> list[page.Card]:
    lost = observation.rows - observation.requests
    return [
        page.Card("Requests per second", number(observation.rate_rps, 3), f"scale {observation.scale:g}"),
        page.Card("Adapters", f"{len(observation.adapters):,}", _tail(observation)),
        page.Card(
            "Rows not used", percent(lost / max(1, observation.rows)), f"{lost:,} of {observation.rows:,}"
        ),
        page.Card("Hours", f"within {percent(report.worst('hours'))}", "simulated against observed"),
    ]


def _tail(observation: Observation) -> str:
    return (
        "" if observation.tail is None else f"and {counted(observation.tail.adapters, 'adapter')} as a class"
    )


def _rates(report: FitReport) -> page.Section:
    observed, simulated = report.minutes
    hours = [minute / 60 for minute in range(len(observed))]
    curves = [
        Curve(name, hours, [count / 60 for count in counts])
        for name, counts in (("observed", observed), ("simulated", simulated))
    ]
    chart = line_chart("Requests per second by minute", curves, Axis("hours from the start"), Axis("req/s"))
    return page.section("Rate over time", page.charts(chart))


def _table_section(heading: str, rows: Sequence[FitRow], intro: str = "") -> page.Section:
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        *values, difference = fit_cells(row)
        mark = page.good if abs(row.error) <= _GOOD else page.bad
        cells.append((*values, mark(difference)))
    return page.section(heading, Table(FIT_HEAD, cells), intro=intro)


def _reading(observation: Observation) -> page.Section:
    dropped: list[tuple[Cell, ...]] = [(d.reason, d.example, f"{d.rows:,}") for d in observation.dropped]
    parts: list[page.Block | Table] = [page.paragraph(line) for line in observation.warnings]
    parts += [page.paragraph(line) for line in (*observation.columns, *observation.notes)]
    if dropped:
        parts.append(Table(["rows not used", "example", "rows"], dropped, numbers_from=2))
    return page.section("How the log was read", *parts)
