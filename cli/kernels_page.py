"""The report of `capplan profile kernels`: one HTML page that works offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capplan.cli import html
from capplan.cli.charts import Axis, Curve, scatter_chart
from capplan.cli.kernel_tables import HEAD, NUMBERS_FROM, fit_rows, kernel_name
from capplan.models.calibration.least_squares import SMAPE_FORMULA

if TYPE_CHECKING:
    import pandas as pd

    from capplan.models.kernel_fits import KernelReport

_MEANINGS = {
    "half": "shrink: from the hidden size down to the rank; expand: back up; both: their sum",
    "toppings-bgmv": "alpha * |S| * largest rank + beta, in microseconds; ordinary least squares",
    "toppings-mbgmv": "alpha * sum of the requests' ranks + beta, likewise",
    "additive": "what is launched, read and computed, at true ranks and padded: least squares of relative "
    "errors, no coefficient below 0",
    "*": "the form of Toppings that is meant for this kernel",
    "held out": "predicted by fits that had not seen the configuration (batch and mix of ranks)",
    "R²": "share of the variance of the times that the form explains",
    "SMAPE": f"{SMAPE_FORMULA}; p predicted, a measured",
}


def kernels_page(table: pd.DataFrame, reports: Sequence[KernelReport], settings: Mapping[str, Any]) -> str:
    """Return the report.

    Parameters
    ----------
    table
        The timings.
    reports
        The fits to them.
    settings
        What was asked for, and on what.
    """
    threads = settings.get("threads")
    shown = f"{settings['device_name']}, {settings['dtype']}" + (f", threads: {threads}" if threads else "")
    visits, disturbed = int(table["visits"].sum()), int(table["disturbed"].sum())
    whole = [report for report in reports if report.half == "both"]
    verdicts = html.section(
        "Which form explains which kernel",
        *(html.paragraph(f"{kernel_name(report)}: {report.verdict()}.") for report in whole),
        intro=f"{len(table) // 2:,} medians of shrink and of expand, from {visits:,} visits; in "
        f"{100 * disturbed / max(1, visits):.1f} % of the visits something else ran on the core.",
    )
    fits = html.section(
        "Fits",
        html.table(HEAD, [row for report in reports for row in fit_rows(report)], numbers_from=NUMBERS_FROM),
    )
    charts = html.section("Measured and predicted", *(_charts(report) for report in whole))
    coefficients = html.section("Coefficients", html.table(*_coefficients(reports), numbers_from=6))
    words = html.section("What the words mean", html.definitions(_MEANINGS))
    return html.page("LoRA kernels", verdicts, fits, charts, coefficients, words, subtitle=shown)


def _charts(report: KernelReport) -> html.Html:
    rows = report.rows
    name = kernel_name(report)
    alike = rows["rank_sum"] == rows["requests"] * rows["max_rank"]
    padded_work = rows["requests"] * rows["max_rank"]

    def against(work: pd.Series[Any]) -> list[Curve]:
        parts = {"one rank": alike, "mixed ranks": ~alike}
        return [
            Curve(label, work[part].to_list(), rows["median_us"][part].to_list())
            for label, part in parts.items()
        ]

    met = [
        Curve(form, rows["median_us"].to_list(), fit.held_out.tolist()) for form, fit in report.fits.items()
    ]
    time = Axis("time, µs")
    axes = (Axis("measured, µs", log=True), Axis("predicted, µs", log=True))
    return html.charts(
        scatter_chart(name, against(padded_work), Axis("batch × largest rank"), time),
        scatter_chart(name, against(rows["rank_sum"]), Axis("sum of ranks"), time),
        scatter_chart(name, met, *axes, diagonal=True, note="on left-out configurations"),
    )


def _coefficients(reports: Sequence[KernelReport]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    head = ("kernel", "phase", "grid", "half", "form", "coefficient", "hidden size", "µs per unit")
    rows: list[tuple[str, ...]] = [
        (report.kernel, report.phase, report.grid, report.half, form, name, str(report.width), f"{value:.4g}")
        for report in reports
        for form, fit in report.fits.items()
        for name, value in fit.coefficients.items()
    ]
    return head, rows
