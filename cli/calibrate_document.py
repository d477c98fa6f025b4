"""What `capplan calibrate` tells of a calibration: as data for machines and as tables for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from capplan.cli.console import DASH, number, print_table, table

if TYPE_CHECKING:
    from capplan.models.calibration.step_model import StepCalibration, StepModelScore
    from capplan.spec import FittedModel
    from capplan.twin.calibration import CalibrationResult
    from capplan.twin.calibration_fit import RunCalibration

PARTS = ("step_latency", "memory", "loading", "host")


def document(made: CalibrationResult) -> dict[str, Any]:
    """Return everything that was found, as JSON data."""
    return {
        "profile": made.profile.name,
        "base": made.base.name,
        "changed": {part: _part(getattr(made.profile, part)) for part in changed_parts(made)},
        "adapter_loads": made.loads,
        "steps": None if made.steps is None else _steps(made.steps),
        "runs": None if made.runs is None else _runs(made.runs),
    }


def changed_parts(made: CalibrationResult) -> tuple[str, ...]:
    """Return the parts of the profile that are not those of the base."""
    return tuple(part for part in PARTS if getattr(made.profile, part) != getattr(made.base, part))


def _part(model: FittedModel) -> dict[str, Any]:
    return model.model_dump(mode="json", include={"form", "coefficients", "fit"})


def _steps(steps: StepCalibration) -> dict[str, Any]:
    return {
        "rows": steps.table.rows,
        "runs": len(steps.table.run_names),
        "chosen": steps.fit.candidate.label,
        "forced": steps.forced,
        "forms": [asdict(score) for score in steps.scores],
        "by_regime": [asdict(each) for each in steps.by_regime()],
        "by_a_max": [asdict(each) for each in steps.by_a_max()],
    }


def _runs(runs: RunCalibration) -> dict[str, Any]:
    return {
        "runs": len(runs.runs),
        "coefficients": {
            free.name: {"start": free.start, "value": float(value), "std_error": float(error)}
            for free, value, error in zip(runs.free, runs.fitted, runs.std_errors, strict=True)
        },
        "error_before": runs.errors(runs.before),
        "error_after": runs.errors(runs.after),
        "error_held_out": runs.errors(runs.held_out),
        "held_out_by_regime": {
            regime: runs.errors(runs.held_out, regime) for regime in sorted(set(runs.regimes))
        },
    }


def show(made: CalibrationResult) -> None:
    """Print the tables."""
    if made.steps is not None:
        print_table(_forms_table(made.steps))
        chosen = made.steps.fit.candidate.label
        typer.echo(f"{'asked for' if made.steps.forced else 'chosen'}: {chosen}, {reason(made.steps)}\n")
        print_table(_residuals_table(made.steps))
        typer.echo(f"adapter loads within the steps: {load_source(made)}\n")
    if made.runs is not None:
        print_table(_runs_table(made.runs))
    rows = table("coefficient", "value", "standard error", "before", numbers_from=1)
    for part in changed_parts(made):
        before = getattr(made.base, part).coefficients
        for name, coefficient in getattr(made.profile, part).coefficients.items():
            error = DASH if coefficient.std_error is None else f"{coefficient.std_error:.2g}"
            was = f"{before[name].value:.6g}" if name in before else DASH
            rows.add_row(f"{part}.{name}", f"{coefficient.value:.6g}", error, was)
    print_table(rows)


def load_source(made: CalibrationResult) -> str:
    """Return where the adapter loads are from, in words."""
    if made.loads == "unknown":
        return (
            "not known, so their time is in the other coefficients and counts twice in a simulation; "
            "give a column load_ms, or --runs for the twin to count them"
        )
    return f"from {made.loads}"


def reason(steps: StepCalibration) -> str:
    """Return why the form was taken, in half a sentence."""
    best = steps.scores[0]
    if steps.forced:
        return f"SMAPE {percentage(steps.score.held_out_error)} on left-out runs"
    if best.label == steps.score.label:
        return f"the least SMAPE on left-out runs, {percentage(best.held_out_error)}"
    mine = percentage(steps.score.held_out_error)
    return f"SMAPE {mine} on left-out runs, where {best.label} has {percentage(best.held_out_error)}"


def percentage(value: float) -> str:
    """Return an error that is in percent already."""
    return DASH if value != value else f"{value:.2f} %"


def form_cells(score: StepModelScore) -> tuple[str, ...]:
    """Return the row of a form in the tables of forms."""
    if score.missing:
        return score.label, DASH, DASH, DASH, DASH, f"needs {', '.join(score.missing)}"
    return (
        score.label,
        str(score.coefficients),
        percentage(score.error),
        percentage(score.held_out_error),
        number(score.held_out_r2, 4),
        "",
    )


FORM_HEAD = ("form", "free coefficients", "SMAPE of the fit", "on left-out runs", "R² there", "")


def _forms_table(steps: StepCalibration) -> Any:
    rows = table(*FORM_HEAD, numbers_from=1)
    for score in steps.scores:
        rows.add_row(*form_cells(score))
    return rows


RESIDUAL_HEAD = ("rows", "bias", "SMAPE", "95 % within")


def _residuals_table(steps: StepCalibration) -> Any:
    rows = table("on left-out runs", *RESIDUAL_HEAD, numbers_from=1)
    for each in steps.by_regime():
        rows.add_row(*residual_cells(each))
    for each in steps.by_a_max():
        rows.add_row(f"a_max {each.name}", *residual_cells(each)[1:])
    return rows


def residual_cells(each: Any) -> tuple[str, ...]:
    """Return the row of a part of the step table."""
    bias = f"{each.bias:+.2f} %"
    return each.name, f"{each.rows:,}", bias, percentage(each.error), percentage(each.p95)


RUN_HEAD = ("SMAPE", "before", "after", "on left-out runs")


def run_cells(runs: RunCalibration) -> list[tuple[str, ...]]:
    """Return the rows of the table of run errors."""
    after, held_out = runs.errors(runs.after), runs.errors(runs.held_out)
    nothing = float("nan")
    return [
        (
            target,
            percentage(error),
            percentage(after.get(target, nothing)),
            percentage(held_out.get(target, nothing)),
        )
        for target, error in runs.errors(runs.before).items()
    ]


def _runs_table(runs: RunCalibration) -> Any:
    rows = table(*RUN_HEAD, numbers_from=1)
    for cells in run_cells(runs):
        rows.add_row(*cells)
    return rows
