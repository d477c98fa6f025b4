"""The report of an observation: what a log holds, and how well its workload repeats it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.reports._console import Cell, Table, counted, number, percent
from capplan.reports.pages import _page as page
from capplan.reports.pages._figures import Axis, Curve, line_chart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from capplan.observe import FitReport, FitRow, Observation

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
    cells: list[tuple[Cell, ...]] = [_row(row) for row in rows]
    return page.section(heading, Table(["", "observed", "simulated", "difference"], cells), intro=intro)


def _row(row: FitRow) -> tuple[Cell, ...]:
    text = f"{100 * row.error:+.1f} " + ("points" if row.what.endswith("share") else "%")
    marked = page.good(text) if abs(row.error) <= _GOOD else page.bad(text)
    return row.what, number(row.observed, 3), number(row.simulated, 3), marked


def _reading(observation: Observation) -> page.Section:
    dropped: list[tuple[Cell, ...]] = [(d.reason, d.example, f"{d.rows:,}") for d in observation.dropped]
    parts: list[page.Block | Table] = [page.paragraph(line) for line in observation.warnings]
    parts += [page.paragraph(line) for line in (*observation.columns, *observation.notes)]
    if dropped:
        parts.append(Table(["rows not used", "example", "rows"], dropped, numbers_from=2))
    return page.section("How the log was read", *parts)
