"""Tables of a calibration.

Table of fitted kernel models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from capplan.reports._console import DASH, Table, number, smape

if TYPE_CHECKING:
    from capplan.models import KernelReport
    from capplan.models.calibration import Residuals, StepCalibration
    from capplan.profiling.kernels import Invocation
    from capplan.spec import FittedModel
    from capplan.twin.calibration import CalibrationResult, RunCalibration


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


_PARTS = ("step_latency", "memory", "loading", "host")


def changed_models(made: CalibrationResult) -> dict[str, FittedModel]:
    """Return the models of the profile that differ from those of the base, by part."""
    models = {part: getattr(made.profile, part) for part in _PARTS}
    return {part: model for part, model in models.items() if model != getattr(made.base, part)}


COEFFICIENT_HEAD = ("coefficient", "value", "standard error", "before")


def coefficients_table(model: FittedModel, base: FittedModel) -> Table:
    """Return one row per coefficient, with its value in the base."""
    rows = [
        (
            name,
            f"{coefficient.value:.6g}",
            DASH if coefficient.std_error is None else f"{coefficient.std_error:.2g}",
            f"{base.coefficients[name].value:.6g}" if name in base.coefficients else DASH,
        )
        for name, coefficient in model.coefficients.items()
    ]
    return Table(COEFFICIENT_HEAD, rows)


def load_source(made: CalibrationResult) -> str:
    """Return the source of the adapter loads in words."""
    if made.loads == "unknown":
        return (
            "not known, so their time is in the other coefficients and counts twice in a simulation; "
            "give a column load_ms, or --runs for the twin to count them"
        )
    return f"from {made.loads}"


def reason(steps: StepCalibration) -> str:
    """Return the reason for the choice of the form."""
    best = steps.scores[0]
    if steps.forced:
        return f"SMAPE {smape(steps.score.held_out_error)} on left-out runs"
    if best.label == steps.score.label:
        return f"the least SMAPE on left-out runs, {smape(best.held_out_error)}"
    own = smape(steps.score.held_out_error)
    return f"SMAPE {own} on left-out runs, where {best.label} has {smape(best.held_out_error)}"


def forms_table(steps: StepCalibration) -> Table:
    """Return one row per form of the step model."""
    rows = [
        (score.label, *[DASH] * 4, f"needs {', '.join(score.missing)}")
        if score.missing
        else (
            score.label,
            str(score.coefficients),
            smape(score.error),
            smape(score.held_out_error),
            number(score.held_out_r2, 4),
            "",
        )
        for score in steps.scores
    ]
    return Table(("form", "free coefficients", "SMAPE of the fit", "on left-out runs", "R² there", ""), rows)


def residuals_table(parts: Sequence[Residuals], name: str) -> Table:
    """Return one row per part of the step table."""
    rows = [
        (each.name, f"{each.rows:,}", f"{each.bias:+.2f} %", smape(each.error), smape(each.p95))
        for each in parts
    ]
    return Table((name, "rows", "bias", "SMAPE", "95 % within"), rows)


def runs_table(runs: RunCalibration) -> Table:
    """Return one row per target: its error before, after, and on left-out runs."""
    errors = [runs.errors(predicted) for predicted in (runs.before, runs.after, runs.held_out)]
    rows = [(target, *(smape(each.get(target, float("nan"))) for each in errors)) for target in errors[0]]
    return Table(("SMAPE", "before", "after", "on left-out runs"), rows)


def invocation_table(invocations: Sequence[Invocation]) -> Table:
    """Return what a call of CPU cores takes beside their computing."""
    rows = [
        (number(each.receivers), number(each.shared_memory_ms, 3), number(each.socket_ms, 3))
        for each in invocations
    ]
    return Table(("cores called", "shared memory, ms", "domain socket, ms"), rows)
