"""Reports of `capplan calibrate` and `capplan profile kernels`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from capplan.reports._console import DASH, Table, smape
from capplan.reports.pages import _page as page
from capplan.reports.pages._figures import Axis, Chart, Curve, bar_chart, histogram, scatter_chart
from capplan.reports.tables import _calibration as tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from capplan.models import KernelReport
    from capplan.models.calibration import Residuals, StepCalibration
    from capplan.twin.calibration import CalibrationResult, RunCalibration

_MOST_POINTS = 4000  # of one scatter chart; evenly thinned beyond
_BINS = 41
_WORST_RUNS = 15

_TERMS = {
    **page.terms("SMAPE"),
    "on left-out runs": "predicted by fits without the run (or, without runs, the block of rows)",
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
    title = f"Calibration of {profile.name}"
    return page.page(title, *flat, subtitle=subtitle, cards=_cards(made), terms=_TERMS)


def _cards(made: CalibrationResult) -> list[page.Card]:
    cards = [
        page.Card("Changed", ", ".join(tables.changed_models(made)) or "nothing", f"base {made.base.name}")
    ]
    if made.steps is not None:
        score = made.steps.score
        cards += [
            page.Card("Step time SMAPE", smape(score.held_out_error), "on left-out runs"),
            page.Card("Step model", made.steps.fit.candidate.label, f"{made.steps.table.rows:,} rows"),
        ]
    if made.runs is not None:
        held_out = made.runs.errors(made.runs.held_out)
        for label, target in (("Throughput", "throughput_tok_s"), ("Mean ITL", "itl_ms_mean")):
            if target in held_out:
                note = f"on {len(made.runs.runs)} left-out runs"
                cards.append(page.Card(f"{label} SMAPE", smape(held_out[target]), note))
    return cards


def _step_sections(made: CalibrationResult, steps: StepCalibration) -> list[page.Section]:
    table = steps.table
    runs = f" of {len(table.run_names)} runs" if table.run_names else ""
    taken = "was given" if steps.forced else "is taken"
    forms = page.section(
        "Forms compared",
        tables.forms_table(steps),
        page.paragraph(f"Adapter loads within the steps: {tables.load_source(made)}."),
        intro=f"Step model fitted to {table.rows:,} rows{runs} of {table.source}. "
        f"{steps.fit.candidate.label} {taken}: {tables.reason(steps)}. Unless --form is given, the first "
        "form within 1 % of the least error is taken, in this order: that of capplan, that of capplan "
        "without a part, those of the papers. Kernels other than the engine's are shown for comparison only.",
    )
    measured, predicted = table.step_ms, steps.held_out_ms
    residuals = 100 * (predicted / measured - 1.0)
    curves = [
        Curve(each.name, *_thinned(measured[table.regime == each.name], predicted[table.regime == each.name]))
        for each in steps.by_regime()
    ]
    met = page.section(
        "Predicted and measured",
        page.charts(
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
    parts = page.section(
        "Residuals",
        tables.residuals_table(steps.by_regime(), "regime"),
        tables.residuals_table(steps.by_a_max(), "a_max"),
        intro="Errors on left-out runs, by the bottleneck of the engine and by its slots.",
    )
    return [forms, met, parts]


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[Sequence[float], Sequence[float]]:
    every = max(1, -(-x.size // _MOST_POINTS))
    return x[::every].tolist(), y[::every].tolist()


def _histogram(residuals: np.ndarray) -> Chart:
    edge = max(1.0, float(np.percentile(np.abs(residuals), 99)))
    note = "the outermost bars hold the values beyond"
    axis = Axis("predicted / measured - 1, %")
    return histogram("Residuals", np.clip(residuals, -edge, edge).tolist(), axis, bins=_BINS, note=note)


def _bars(title: str, parts: Sequence[Residuals]) -> Chart:
    bars = {"SMAPE": [each.error for each in parts], "bias": [each.bias for each in parts]}
    return bar_chart(title, [each.name for each in parts], bars, Axis("percent"), note="on left-out runs")


def _run_section(runs: RunCalibration, *, steps_known: bool) -> page.Section:
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
    return page.section(
        "Whole runs",
        tables.runs_table(runs),
        page.charts(*charts),
        Table(("SMAPE on left-out runs", "runs", *targets), regimes),
        page.folded(f"The {_WORST_RUNS} runs with the largest errors", _worst(runs)),
        intro=f"{len(runs.runs)} runs, each simulated by the twin with a seed of its own.{seen}",
    )


def _each(errors: dict[str, float], targets: Sequence[str]) -> list[str]:
    return [smape(errors[target]) if target in errors else DASH for target in targets]


def _worst(runs: RunCalibration) -> Table:
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
    return Table(head, rows, numbers_from=3)


def _coefficient_section(made: CalibrationResult) -> page.Section:
    parts: list[page.Block | Table] = []
    for part, model in tables.changed_models(made).items():
        fit = f"{model.fit.source}; error {model.fit.error:.3g} ({model.fit.error_formula})"
        parts += [page.heading(f"{part}: {model.form}"), page.paragraph(fit)]
        parts.append(tables.coefficients_table(model, getattr(made.base, part)))
    return page.section(
        "Coefficients",
        *parts,
        intro=f"Changes from {made.base.name}. Standard errors allow for correlated residuals within a run; "
        "a coefficient without one is at its bound or was not fitted.",
    )


_KERNEL_TERMS = {
    "half": "shrink: from the hidden size down to the rank; expand: back up; both: their sum",
    "toppings-bgmv": "alpha * |S| * largest rank + beta, in microseconds; ordinary least squares",
    "toppings-mbgmv": "alpha * sum of the requests' ranks + beta, likewise",
    "additive": "launches, bytes and operations, at true ranks and padded: non-negative least squares of "
    "relative errors",
    "*": "the form of Toppings for this kernel",
    "held out": "predicted by fits without the configuration (batch and mix of ranks)",
    "R²": "share of the variance of the times that the form explains",
    **page.terms("SMAPE"),
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
        Settings and device of the measurement.
    """
    threads = settings.get("threads")
    shown = f"{settings['device_name']}, {settings['dtype']}" + (f", threads: {threads}" if threads else "")
    visits, disturbed = int(table["visits"].sum()), int(table["disturbed"].sum())
    whole = [report for report in reports if report.half == "both"]
    verdicts = page.section(
        "Best form by kernel",
        *(page.paragraph(f"{tables.kernel_name(report)}: {report.verdict()}.") for report in whole),
        intro=f"{len(table) // 2:,} medians of shrink and of expand, from {visits:,} visits; in "
        f"{100 * disturbed / max(1, visits):.1f} % of the visits another process ran on the core.",
    )
    fits = page.section(
        "Fits",
        tables.fits_table(reports, on_page=True),
    )
    charts = page.section("Measured and predicted", *(_kernel_charts(report) for report in whole))
    coefficients = page.section("Coefficients", _kernel_coefficients(reports))
    explained = f"{sum(report.explained_by == report.meant for report in whole)} of {len(whole)}"
    cards = [
        page.Card("Kernels as their form", explained, "best explained by their own form of Toppings"),
        page.Card("Medians", f"{len(table):,}", f"{visits:,} visits"),
        page.Card("Disturbed visits", f"{100 * disturbed / max(1, visits):.1f} %"),
        page.Card("Device", str(settings["device_name"]), str(settings["dtype"])),
    ]
    sections = (verdicts, fits, charts, coefficients)
    return page.page("LoRA kernels", *sections, subtitle=shown, cards=cards, terms=_KERNEL_TERMS)


def _kernel_charts(report: KernelReport) -> page.Block:
    rows = report.rows
    name = tables.kernel_name(report)
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
    return page.charts(
        scatter_chart(name, against(padded_work), Axis("batch × largest rank"), time),
        scatter_chart(name, against(rows["rank_sum"]), Axis("sum of ranks"), time),
        scatter_chart(name, met, *axes, diagonal=True, note="on left-out configurations"),
    )


def _kernel_coefficients(reports: Sequence[KernelReport]) -> Table:
    head = ("kernel", "phase", "grid", "half", "form", "coefficient", "hidden size", "µs per unit")
    rows = [
        (report.kernel, report.phase, report.grid, report.half, form, name, str(report.width), f"{value:.4g}")
        for report in reports
        for form, fit in report.fits.items()
        for name, value in fit.coefficients.items()
    ]
    return Table(head, rows, numbers_from=6)
