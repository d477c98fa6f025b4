"""The report of a calibration: one HTML page that works offline."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from capplan.cli import html
from capplan.cli.calibrate_document import (
    FORM_HEAD,
    RESIDUAL_HEAD,
    RUN_HEAD,
    changed_parts,
    form_cells,
    load_source,
    percentage,
    reason,
    residual_cells,
    run_cells,
)
from capplan.cli.charts import Axis, Curve, bar_chart, scatter_chart
from capplan.cli.console import DASH
from capplan.models.calibration.least_squares import SMAPE_FORMULA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from capplan.models.calibration.step_model import Residuals, StepCalibration
    from capplan.spec import FittedModel
    from capplan.twin.calibration import CalibrationResult
    from capplan.twin.calibration_fit import RunCalibration

_MOST_POINTS = 4000  # of one scatter chart; evenly thinned beyond
_BINS = 41
_WORST_RUNS = 15

_MEANINGS = {
    "SMAPE": f"{SMAPE_FORMULA}; p predicted, a measured",
    "on left-out runs": "predicted by fits that had not seen the run (or, without runs, the stretch of rows)",
    "bias": "mean of predicted / measured - 1",
    "95 % within": "95th percentile of |predicted / measured - 1|",
    "overloaded": "requests in flight within 2 % of in_flight_limit, or tokens within 2 % of token_budget",
    "KV-bound": "kv_tokens above 95 % of kv_capacity",
    "un-queued": "fewer than one request waiting",
    "slot-bound": "requests waiting, and more adapters served than slots",
    "queued": "requests waiting, for none of these reasons",
}

_TARGET_AXES = {
    "throughput_tok_s": "throughput, tok/s",
    "itl_ms_mean": "ITL mean, ms",
    "tpot_ms_mean": "TPOT mean, ms",
    "ttft_s_p50": "TTFT p50, s",
    "ttft_s_mean": "TTFT mean, s",
    "ttft_s_mean_charged": "TTFT mean, unfinished charged, s",
    "e2e_s_mean": "E2E mean, s",
}


def calibration_page(made: CalibrationResult) -> str:
    """Return the report."""
    profile = made.profile
    engine = f"{profile.engine.name} {profile.engine.version}, kernel {profile.engine.kernel}"
    subtitle = f"{profile.model.name} on {profile.gpu.name}, {engine}; {profile.provenance.source}"
    flat = [] if made.steps is None else _step_sections(made, made.steps)
    if made.runs is not None:
        flat.append(_run_section(made.runs, steps_known=made.steps is not None))
    flat.append(_coefficient_section(made))
    flat.append(html.section("What the words mean", html.definitions(_MEANINGS)))
    return html.page(f"Calibration of {profile.name}", *flat, subtitle=subtitle)


def _step_sections(made: CalibrationResult, steps: StepCalibration) -> list[html.Section]:
    table = steps.table
    runs = f" of {len(table.run_names)} runs" if table.run_names else ""
    taken = "was asked for" if steps.forced else "is taken"
    forms = html.section(
        "Forms compared",
        html.table(FORM_HEAD, [form_cells(score) for score in steps.scores]),
        html.paragraph(f"Adapter loads within the steps: {load_source(made)}."),
        intro=f"Step model fitted to {table.rows:,} rows{runs} of {table.source}. "
        f"{steps.fit.candidate.label} {taken}: {reason(steps)}. Unless a form is asked for, the first of "
        "these is taken whose error is as good as the least, within a hundredth of it: ours, ours "
        "without a part, those of the papers. A kernel other than the engine's is shown for comparison only.",
    )
    measured, predicted = table.step_ms, steps.held_out_ms
    residuals = 100 * (predicted / measured - 1.0)
    curves = [
        Curve(each.name, *_thinned(measured[table.regime == each.name], predicted[table.regime == each.name]))
        for each in steps.by_regime()
    ]
    met = html.section(
        "Predicted and measured",
        html.charts(
            scatter_chart(
                "Step time",
                curves,
                Axis("measured, ms", log=True),
                Axis("predicted, ms", log=True),
                diagonal=True,
                note="on left-out runs",
            ),
            _histogram(residuals),
            _bars("By regime", steps.by_regime()),
            _bars("By a_max", steps.by_a_max()),
        ),
    )
    parts = html.section(
        "Residuals",
        html.table(("regime", *RESIDUAL_HEAD), [residual_cells(each) for each in steps.by_regime()]),
        html.table(("a_max", *RESIDUAL_HEAD), [residual_cells(each) for each in steps.by_a_max()]),
        intro="Errors on left-out runs, by what held the engine back and by its slots.",
    )
    return [forms, met, parts]


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[Sequence[float], Sequence[float]]:
    every = max(1, -(-x.size // _MOST_POINTS))
    return x[::every].tolist(), y[::every].tolist()


def _histogram(residuals: np.ndarray) -> html.Html:
    edge = max(1.0, float(np.percentile(np.abs(residuals), 99)))
    counts, edges = np.histogram(np.clip(residuals, -edge, edge), bins=_BINS, range=(-edge, edge))
    middles = [f"{(low + high) / 2:+.1f}" for low, high in pairwise(edges)]
    note = "predicted / measured - 1 in percent; the outermost bars hold what lies beyond"
    return bar_chart("Residuals", middles, {"": counts.tolist()}, Axis("rows"), note=note)


def _bars(title: str, parts: Sequence[Residuals]) -> html.Html:
    bars = {"SMAPE": [each.error for each in parts], "bias": [each.bias for each in parts]}
    return bar_chart(title, [each.name for each in parts], bars, Axis("percent"), note="on left-out runs")


def _run_section(runs: RunCalibration, *, steps_known: bool) -> html.Section:
    seen = " Only the fit to runs leaves them out: the step model has its own table." if steps_known else ""
    measured = runs.measured()
    charts = []
    for at, (target, label) in enumerate(_TARGET_AXES.items()):
        known = ~np.isnan(measured[:, at])
        if not known.any():
            continue
        curves = [
            Curve(name, measured[known, at].tolist(), predicted[known, at].tolist())
            for name, predicted in (("before", runs.before), ("after, left out of the fit", runs.held_out))
        ]
        axes = (Axis(f"measured {label}", log=True), Axis(f"predicted {label}", log=True))
        charts.append(scatter_chart(target, curves, *axes, diagonal=True))
    targets = [target for target in _TARGET_AXES if target in runs.errors(runs.before)]
    regimes = [
        (regime, str(runs.regimes.count(regime)), *_each(runs.errors(runs.held_out, regime), targets))
        for regime in sorted(set(runs.regimes))
    ]
    return html.section(
        "Whole runs",
        html.table(RUN_HEAD, run_cells(runs)),
        html.charts(*charts),
        html.table(("SMAPE on left-out runs", "runs", *targets), regimes),
        html.folded(f"The {_WORST_RUNS} runs that are met worst", _worst(runs)),
        intro=f"{len(runs.runs)} runs, each simulated by the twin with a seed of its own.{seen}",
    )


def _each(errors: dict[str, float], targets: Sequence[str]) -> list[str]:
    return [percentage(errors[target]) if target in errors else DASH for target in targets]


def _worst(runs: RunCalibration) -> html.Html:
    measured = runs.measured()
    with np.errstate(divide="ignore", invalid="ignore"):
        misses = np.abs(np.log(runs.held_out / measured))
    largest = np.nanmax(
        np.where(np.isnan(measured), np.nan, np.where(np.isfinite(misses), misses, np.inf)), axis=1
    )
    rows = []
    for index in np.argsort(largest)[::-1][:_WORST_RUNS]:
        run = runs.runs[index]
        at = int(np.nanargmax(np.where(np.isnan(measured[index]), -1.0, misses[index])))
        rows.append(
            (
                run.name,
                runs.regimes[index],
                list(_TARGET_AXES)[at],
                f"{measured[index, at]:.4g}",
                f"{runs.held_out[index, at]:.4g}",
                str(run.settings["a_max"]),
                str(len(run.workload.adapters)),
                f"{run.workload.total_rate_rps:.3g}",
            )
        )
    head = ("run", "regime", "target", "measured", "predicted", "a_max", "adapters", "req/s")
    return html.table(head, rows, numbers_from=3)


def _coefficient_section(made: CalibrationResult) -> html.Section:
    parts: list[html.Html] = []
    for part in changed_parts(made):
        model: FittedModel = getattr(made.profile, part)
        before = getattr(made.base, part).coefficients
        rows = [
            (
                name,
                f"{coefficient.value:.6g}",
                DASH if coefficient.std_error is None else f"{coefficient.std_error:.2g}",
                f"{before[name].value:.6g}" if name in before else DASH,
            )
            for name, coefficient in model.coefficients.items()
        ]
        parts.append(html.heading(f"{part}: {model.form}"))
        parts.append(
            html.paragraph(f"{model.fit.source}; error {model.fit.error:.3g} ({model.fit.error_formula})")
        )
        parts.append(html.table(("coefficient", "value", "standard error", "before"), rows))
    return html.section(
        "Coefficients",
        *parts,
        intro=f"What the calibration changed in {made.base.name}. Standard errors allow for residuals that "
        "go together within a run; a coefficient without one lies on its bound or was not fitted.",
    )
