"""Table of fitted kernel models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from capplan.reports._console import Table, number

if TYPE_CHECKING:
    from capplan.models import KernelReport


def fits_table(reports: Sequence[KernelReport], *, on_page: bool = False) -> Table:
    """Return one row per form; on the terminal, the facts of a report are in its first row only."""
    rows = []
    for report in reports:
        size, cases = str(report.width), str(len(report.rows))
        facts = (report.kernel, report.phase, report.grid, size, report.half, cases)
        for name, fit in report.fits.items():
            scores = (number(fit.r2, 3), number(fit.held_out_r2, 3))
            errors = (f"{number(fit.error, 1)} %", f"{number(fit.held_out_error, 1)} %")
            rows.append((*facts, f"{name} *" if name == report.meant else name, *scores, *errors))
            facts = facts if on_page else ("",) * 6
    r2, error = ("R² held out", "SMAPE held out") if on_page else ("held out", "held out")
    head = ("kernel", "phase", "grid", "hidden", "half", "cases", "form", "R²", r2, "SMAPE", error)
    return Table(head, rows, numbers_from=7)


def kernel_name(report: KernelReport) -> str:
    """Return kernel, phase, grid and hidden size of a report."""
    return f"{report.kernel}, {report.phase}, {report.grid} grid, hidden size {report.width}"
