"""What `capplan profile kernels` tells of its fits: as data for machines and as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import typer

from capplan.cli.console import number, print_table, table

if TYPE_CHECKING:
    from capplan.models.kernel_fits import KernelReport

HEAD: Final = (
    "kernel",
    "phase",
    "grid",
    "hidden",
    "half",
    "cases",
    "form",
    "R²",
    "held out",
    "SMAPE",
    "held out",
)
NUMBERS_FROM: Final = 7


def fits_document(reports: Sequence[KernelReport]) -> list[dict[str, Any]]:
    """Return every fit as JSON data."""
    return [
        {
            "kernel": report.kernel,
            "phase": report.phase,
            "grid": report.grid,
            "hidden": report.width,
            "half": report.half,
            "cases": len(report.rows),
            "meant": report.meant,
            "explained_by": report.explained_by,
            "forms": {
                name: {
                    "coefficients": dict(fit.coefficients),
                    "r2": fit.r2,
                    "held_out_r2": fit.held_out_r2,
                    "smape": fit.error,
                    "held_out_smape": fit.held_out_error,
                }
                for name, fit in report.fits.items()
            },
        }
        for report in reports
    ]


def fit_rows(report: KernelReport) -> list[tuple[str, ...]]:
    """Return a row per form; what is said of the report stands in the first only."""
    said = (report.kernel, report.phase, report.grid, str(report.width), report.half, str(len(report.rows)))
    return [
        (
            *(said if at == 0 else ("",) * len(said)),
            f"{name} *" if name == report.meant else name,
            number(fit.r2, 3),
            number(fit.held_out_r2, 3),
            f"{number(fit.error, 1)} %",
            f"{number(fit.held_out_error, 1)} %",
        )
        for at, (name, fit) in enumerate(report.fits.items())
    ]


def kernel_name(report: KernelReport) -> str:
    """Return in words what a report is of, but for the half."""
    return f"{report.kernel}, {report.phase}, {report.grid} grid, hidden size {report.width}"


def show_fits(reports: Sequence[KernelReport]) -> None:
    """Print the fits of whole kernels; those of their halves are in the report."""
    whole = [report for report in reports if report.half == "both"]
    if not whole:
        typer.echo("too few cases measured to fit anything yet")
        return
    rows = table(*HEAD, numbers_from=NUMBERS_FROM)
    for report in whole:
        for cells in fit_rows(report):
            rows.add_row(*cells)
    print_table(rows)
    typer.echo("* the form of Toppings that is meant for this kernel\n")
    for report in whole:
        typer.echo(f"{kernel_name(report)}: {report.verdict()}")
