"""Calibration: tables of measurements in, a profile out, with what it was chosen from and how well it does.

Step tables are fitted directly. Whole runs are fitted with the twin in the loop: without a step table its
coefficients, with one only what lies outside the engine's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np

from capplan.errors import InputError
from capplan.models.calibration.components import fit_loading, fit_memory
from capplan.models.calibration.least_squares import SMAPE_FORMULA
from capplan.models.calibration.step_model import DEFAULT_FOLDS, StepCalibration, calibrate_steps
from capplan.models.calibration.tables import StepTable, read_steps
from capplan.spec import Coefficient, Fit, Kernel, Profile, Provenance, ProvenanceKind
from capplan.twin.calibration_fit import (
    PARTS,
    RunCalibration,
    calibrate_runs,
    free_coefficients,
    with_coefficients,
)
from capplan.twin.calibration_runs import TARGETS, MeasuredRun, read_runs

Progress = Callable[[str, int, int], None]
Loads = Literal["no steps", "the table", "the twin", "unknown"]

_LOAD_ROUNDS: Final = 2
_WAITS: Final = ("ttft_s_p50", "ttft_s_mean", "ttft_s_mean_charged", "e2e_s_mean")


@dataclass(frozen=True)
class CalibrationTables:
    """The measurements; paths of CSV or Parquet tables."""

    steps: str | None = None
    runs: str | None = None
    memory: str | None = None
    loading: str | None = None

    def names(self) -> str:
        """Return the names of the files, without their folders."""
        given = (self.steps, self.runs, self.memory, self.loading)
        return ", ".join(Path(path).name for path in given if path is not None)


@dataclass(frozen=True)
class CalibrationOptions:
    """How to calibrate; see `calibrate_steps` and `calibrate_runs`."""

    name: str | None = None
    """Of the profile that is made; None: the base's with ``-calibrated`` behind it."""
    source: str | None = None
    """Where the measurements are from; None: the names of the files."""
    kernel: Kernel | None = None
    """None: the base's."""
    form: str | None = None
    free: tuple[str, ...] | None = None
    folds: int = DEFAULT_FOLDS
    seed: int = 0
    workers: int = 1
    command: str = "capplan calibrate"


@dataclass(frozen=True)
class CalibrationResult:
    """The profile and where its numbers come from; what was not asked for is None."""

    base: Profile
    profile: Profile
    steps: StepCalibration | None
    runs: RunCalibration | None
    loads: Loads
    """Where the adapter loads within the steps are from; unknown: their time is in the other coefficients."""


def calibrate(
    base: Profile,
    tables: CalibrationTables,
    options: CalibrationOptions | None = None,
    progress: Progress | None = None,
) -> CalibrationResult:
    """Fit a profile to tables of measurements.

    Parameters
    ----------
    base
        The profile that is started from; what no table tells stays as it is there.
    tables
        What was measured.
    options
        How to go about it.
    progress
        Called with (stage, done, total).

    Raises
    ------
    InputError
        For a broken table, or options that do not go with it.
    """
    chosen = options or CalibrationOptions()
    if tables == CalibrationTables():
        raise InputError("needs a table of steps, runs, memory or loading", location="calibrate")
    if chosen.free is not None and tables.runs is None:
        raise InputError("needs a table of runs", location="--free")
    if chosen.form is not None and tables.steps is None:
        raise InputError("needs a table of steps", location="--form")
    kernel = chosen.kernel or base.engine.kernel
    profile = base.replace(engine=base.engine.replace(kernel=kernel))
    table = None if tables.steps is None else read_steps(tables.steps, chosen.folds)
    runs = () if tables.runs is None else read_runs(tables.runs, base.model.hf_ids[0])
    if tables.memory is not None:
        profile = profile.replace(memory=fit_memory(tables.memory, profile))
    if tables.loading is not None:
        profile = profile.replace(loading=fit_loading(tables.loading, profile))
    steps: StepCalibration | None = None
    loads: Loads = "no steps"
    if table is not None:
        blind = bool(table.unknown_loads.any())
        loads = "unknown" if blind and not runs else "the twin" if blind else "the table"
        counted = runs if loads == "the twin" else ()
        steps, profile = _fit_steps(table, counted, profile, chosen, progress)
    whole = None
    if runs:
        whole, profile = _fit_runs(runs, profile, steps is not None, chosen, progress)
    profile = profile.replace(
        name=chosen.name or f"{base.name}-calibrated",
        provenance=Provenance(
            kind=ProvenanceKind.MEASURED,
            source=chosen.source or tables.names(),
            command=chosen.command,
            notes=f"Started from {base.name} ({base.provenance.kind}: {base.provenance.source}).",
        ),
    )
    return CalibrationResult(base, profile, steps, whole, loads)


def _fit_steps(
    table: StepTable,
    runs: Sequence[MeasuredRun],
    profile: Profile,
    options: CalibrationOptions,
    progress: Progress | None,
) -> tuple[StepCalibration, Profile]:
    """Fit the step model; with runs, the twin counts the loads of each, and the fit is repeated with them."""

    def fit(measured: StepTable, stage: str) -> tuple[StepCalibration, Profile]:
        steps = calibrate_steps(
            measured,
            profile.engine.kernel,
            form=options.form,
            folds=options.folds,
            progress=None if progress is None else lambda done, total: progress(stage, done, total),
        )
        return steps, _with_steps(profile, steps)

    if runs:
        _require_same_runs(table, runs)
    unknown = table.unknown_loads
    steps, fitted = fit(replace(table, load_ms=None) if unknown.any() else table, "fitting forms")
    if runs:
        for number in range(1, _LOAD_ROUNDS + 1):
            stage = f"counting loads, round {number} of {_LOAD_ROUNDS}"
            loads = _idle_load_ms(runs, fitted, options, stage, progress)
            per_run = np.array([loads.get(name, 0.0) for name in table.run_names])
            known = np.zeros(table.rows) if table.load_ms is None else table.load_ms
            with_loads = replace(table, load_ms=np.where(unknown, per_run[table.run], known))
            steps, fitted = fit(with_loads, f"fitting forms, round {number}")
    return steps, fitted


def _with_steps(profile: Profile, steps: StepCalibration) -> Profile:
    kernel = steps.fit.candidate.kernel
    fitted = profile.replace(step_latency=steps.model(), engine=profile.engine.replace(kernel=kernel))
    factor, load_ms = steps.fit.serving_factor, steps.table.load_ms
    if factor is None or load_ms is None or not load_ms.any():  # steps without loads say nothing of them
        return fitted
    loading = profile.loading.replace(coefficients=profile.loading.coefficients | {"serving_factor": factor})
    return fitted.replace(loading=loading)


def _require_same_runs(table: StepTable, runs: Sequence[MeasuredRun]) -> None:
    named = {table.run_names[at] for at in table.run[table.unknown_loads]} if table.run_names else set()
    unknown = sorted(named - {run.name for run in runs})
    if unknown or not named:
        rule = "must name runs of the table of runs, or else have a load_ms"
        raise InputError(rule, unknown[0] if unknown else "", f"{table.source}: run")


def _idle_load_ms(
    runs: Sequence[MeasuredRun],
    profile: Profile,
    options: CalibrationOptions,
    stage: str,
    progress: Progress | None,
) -> dict[str, float]:
    """Return the milliseconds of adapter loads per step of each run, as the twin counts, engine idle."""
    from concurrent.futures import ThreadPoolExecutor

    factor = profile.loading.value("serving_factor")
    loads = {}

    def one(numbered: tuple[int, MeasuredRun]) -> float:
        number, run = numbered
        result = run.simulate(profile, options.seed + number)
        return result.load_s * 1e3 / factor / max(1, result.steps)

    with ThreadPoolExecutor(options.workers) as pool:
        for done, (run, load_ms) in enumerate(
            zip(runs, pool.map(one, enumerate(runs)), strict=True), start=1
        ):
            loads[run.name] = load_ms
            if progress is not None:
                progress(stage, done, len(runs))
    return loads


def _fit_runs(
    runs: Sequence[MeasuredRun],
    profile: Profile,
    steps_known: bool,
    options: CalibrationOptions,
    progress: Progress | None,
) -> tuple[RunCalibration, Profile]:
    waits = any(target in run.measured for run in runs for target in _WAITS)
    free = free_coefficients(profile, options.free, steps_known=steps_known, latency_measured=waits)
    found = calibrate_runs(
        runs,
        profile,
        free,
        seed=options.seed,
        folds=options.folds,
        workers=options.workers,
        progress=None if progress is None else lambda done, total: progress("simulating runs", done, total),
    )
    fitted = with_coefficients(profile, free, found.fitted.tolist())
    for part in PARTS:
        names = {f.name: at for at, f in enumerate(free) if f.part == part}
        if names:
            model = getattr(fitted, part)
            errors = {
                name: Coefficient(value=float(found.fitted[at]), std_error=_known(found.std_errors[at]))
                for name, at in names.items()
            }
            own = model.replace(
                coefficients=model.coefficients | errors, fit=_quality(found, model.fit, part)
            )
            fitted = fitted.replace(**{part: own})
    return found, fitted


def _known(error: float) -> float | None:
    return float(error) if np.isfinite(error) else None


def _quality(found: RunCalibration, before: Fit, part: str) -> Fit:
    """Return how well the runs are met by the first target that all of this is about."""
    after, held_out = found.errors(found.after), found.errors(found.held_out)
    target = next(name for name in ("itl_ms_mean", *TARGETS) if name in after)
    told = f" (the rest: {before.source})" if part == "loading" else ""
    return Fit(
        source=f"{len(found.runs)} runs with the twin in the loop{told}",
        samples=len(found.runs),
        error_formula=f"{SMAPE_FORMULA} of {target} of whole runs",
        error=after[target],
        cross_validated_error=held_out.get(target),
    )
