"""Calibration: fit a profile to tables of measurements.

`calibrate` fits step tables by least squares and whole runs with the twin in the loop: all coefficients of
the step model without a step table, otherwise those outside the engine's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np

from capplan.errors import InputError
from capplan.models import read_crossover
from capplan.models.calibration import (
    DEFAULT_FOLDS,
    SMAPE_FORMULA,
    MeasuredSteps,
    StepCalibration,
    calibrate_steps,
    coefficient,
    fit_length_correlation,
    fit_loading,
    fit_memory,
    read_steps,
    uncertainty,
)
from capplan.spec import Fit, FittedModel, Kernel, Profile, Provenance, ProvenanceKind, Uncertainty
from capplan.twin.calibration._fit import (
    COMPONENTS,
    RunCalibration,
    calibrate_runs,
    free_coefficients,
    simulate_runs,
)
from capplan.twin.calibration._runs import TARGETS, MeasuredRun, read_runs

Progress = Callable[[str, int, int], None]
Loads = Literal["no steps", "the table", "the twin", "unknown"]

LENGTH_CORRELATION: Final = "length_correlation"
"""Fitted to ``kv_tokens_per_request`` of the runs, if it is among the free coefficients."""

_LOAD_ROUNDS: Final = 2
_LATENCIES: Final = ("ttft_s_p50", "ttft_s_mean", "ttft_s_mean_charged", "e2e_s_mean")


@dataclass(frozen=True)
class CalibrationTables:
    """Paths of CSV or Parquet tables of measurements."""

    steps: str | None = None
    runs: str | None = None
    memory: str | None = None
    loading: str | None = None
    kernels: str | None = None

    def names(self) -> str:
        """Return the names of the files, without their folders."""
        given = (self.steps, self.runs, self.memory, self.loading, self.kernels)
        return ", ".join(Path(path).name for path in given if path is not None)


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of `calibrate`; see also `calibrate_steps` and `calibrate_runs`."""

    name: str | None = None
    """Name of the profile; None: the base's followed by ``-calibrated``."""
    source: str | None = None
    """Source of the measurements; None: the names of the files."""
    kernel: Kernel | None = None
    """None: the base's."""
    form: str | None = None
    free: tuple[str, ...] | None = None
    """See `free_coefficients`; `LENGTH_CORRELATION` may be among them."""
    folds: int = DEFAULT_FOLDS
    seed: int = 0
    workers: int = 1
    command: str = "capplan calibrate"


@dataclass(frozen=True)
class CalibrationResult:
    """The fitted profile and how it was fitted; None for tables that were not given."""

    base: Profile
    profile: Profile
    steps: StepCalibration | None
    runs: RunCalibration | None
    loads: Loads
    """Source of the adapter loads within the steps; unknown: other coefficients include their time."""


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
        The initial profile, source of everything that no table determines.
    tables
        The measurements.
    options
        Options of the fits.
    progress
        Called with (stage, done, total).

    Raises
    ------
    InputError
        For a broken table, or an option without the table that it needs.
    """
    options = options or CalibrationOptions()
    _check_options(tables, options)
    kernel = options.kernel or base.engine.kernel
    profile = base.replace(engine=base.engine.replace(kernel=kernel))
    table = None if tables.steps is None else read_steps(tables.steps, options.folds)
    runs = () if tables.runs is None else read_runs(tables.runs, base.model.hf_ids[0])
    if options.free is not None and LENGTH_CORRELATION in options.free:
        profile = profile.replace(length_correlation=_length_correlation(runs, profile, tables.runs))
        options = replace(options, free=tuple(n for n in options.free if n != LENGTH_CORRELATION))
    if tables.memory is not None:
        profile = profile.replace(memory=fit_memory(tables.memory, profile))
    if tables.loading is not None:
        profile = profile.replace(loading=fit_loading(tables.loading, profile))
    if tables.kernels is not None:
        tokens = read_crossover(tables.kernels).sgmv_from_tokens
        profile = profile.replace(engine=profile.engine.replace(sgmv_from_tokens=tokens))
    steps: StepCalibration | None = None
    loads: Loads = "no steps"
    if table is not None:
        incomplete = bool(table.unknown_loads.any())
        loads = "the table" if not incomplete else "the twin" if runs else "unknown"
        counted = runs if loads == "the twin" else ()
        steps, profile = _fit_steps(table, counted, profile, options, progress)
    run_fit = None
    if runs:
        run_fit, profile = fit_runs(runs, profile, steps is not None, options, progress)
        profile = profile.replace(step_latency=_with_prompts(profile.step_latency, runs))
    profile = profile.replace(
        name=options.name or f"{base.name}-calibrated",
        provenance=Provenance(
            kind=ProvenanceKind.MEASURED,
            source=options.source or tables.names(),
            command=options.command,
            notes=f"Started from {base.name} ({base.provenance.kind}: {base.provenance.source}).",
        ),
    )
    return CalibrationResult(base, profile, steps, run_fit, loads)


def _check_options(tables: CalibrationTables, options: CalibrationOptions) -> None:
    if tables == CalibrationTables():
        raise InputError("needs a table of steps, runs, memory, loading or kernels", location="calibrate")
    if options.free is not None and tables.runs is None:
        raise InputError("needs a table of runs", location="--free")
    if options.form is not None and tables.steps is None:
        raise InputError("needs a table of steps", location="--form")


def _length_correlation(runs: Sequence[MeasuredRun], profile: Profile, location: str | None) -> float:
    held = [(run.workload, run.kv_tokens_per_request) for run in runs if run.kv_tokens_per_request]
    if not held:
        rule = f"must have a value, since {LENGTH_CORRELATION} is free"
        raise InputError(rule, location=f"{location}: kv_tokens_per_request")
    lengths = [(workload.prompt_tokens, workload.output_tokens) for workload, _ in held]
    return fit_length_correlation(lengths, [tokens for _, tokens in held], profile.engine.block_size)


def _fit_steps(
    table: MeasuredSteps,
    runs: Sequence[MeasuredRun],
    profile: Profile,
    options: CalibrationOptions,
    progress: Progress | None,
) -> tuple[StepCalibration, Profile]:
    """Fit the step model. With runs, repeat the fit with the adapter loads that the twin counts in each."""

    def fit(measured: MeasuredSteps, stage: str) -> tuple[StepCalibration, Profile]:
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
    if factor is None or load_ms is None or not load_ms.any():  # no loads: the factor is undetermined
        return fitted
    loading = profile.loading.replace(coefficients=profile.loading.coefficients | {"serving_factor": factor})
    return fitted.replace(loading=loading)


def _require_same_runs(table: MeasuredSteps, runs: Sequence[MeasuredRun]) -> None:
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
    """Return the milliseconds of simulated adapter loads per step of each run, at a serving factor of 1."""
    factor = profile.loading.value("serving_factor")
    seeds = range(options.seed, options.seed + len(runs))
    loads = {}
    for run, (result, _) in zip(runs, simulate_runs(runs, profile, seeds, options.workers), strict=True):
        loads[run.name] = result.load_s * 1e3 / factor / max(1, result.steps)
        if progress is not None:
            progress(stage, len(loads), len(runs))
    return loads


def fit_runs(
    runs: Sequence[MeasuredRun],
    profile: Profile,
    steps_known: bool,
    options: CalibrationOptions,
    progress: Progress | None = None,
) -> tuple[RunCalibration, Profile]:
    """Fit free coefficients of a profile to runs, and return the profile with their uncertainty and errors.

    Parameters
    ----------
    runs
        The runs.
    profile
        The initial profile.
    steps_known
        Whether a step table has determined the step model.
    options
        Options of the fit.
    progress
        Called with (stage, done, total).
    """
    latencies = any(target in run.measured for run in runs for target in _LATENCIES)
    free = free_coefficients(profile, options.free, steps_known=steps_known, latency_measured=latencies)
    found = calibrate_runs(
        runs,
        profile,
        free,
        seed=options.seed,
        folds=options.folds,
        workers=options.workers,
        progress=None if progress is None else lambda done, total: progress("simulating runs", done, total),
    )
    fitted = profile
    for component in COMPONENTS:
        own = {
            each.name: coefficient(value, error)
            for each, value, error in zip(free, found.fitted, found.std_errors, strict=True)
            if each.part == component
        }
        if own:
            model = getattr(fitted, component)
            quality = _quality(found, model.fit, component)
            model = model.replace(coefficients=model.coefficients | own, fit=quality)
            if component == "step_latency":
                model = model.replace(uncertainty=_run_uncertainty(found))
            fitted = fitted.replace(**{component: model})
    return found, fitted


def _run_uncertainty(found: RunCalibration) -> Uncertainty:
    """Return the uncertainty of a step model fitted to runs."""
    own = [at for at, each in enumerate(found.free) if each.part == "step_latency"]
    covariance = found.covariance[np.ix_(own, own)]
    return uncertainty([found.free[at].name for at in own], covariance, found.scatter(_target(found)))


def _target(found: RunCalibration) -> str:
    """Return the first measured target, mean ITL and TPOT before the others."""
    known = found.errors(found.after)
    return next(name for name in ("itl_ms_mean", "tpot_ms_mean", *TARGETS) if name in known)


def _with_prompts(model: FittedModel, runs: Sequence[MeasuredRun]) -> FittedModel:
    """Return the model with the range of the mean prompt lengths of the runs."""
    lengths = [run.workload.lengths_of(a)[0].mean_tokens for run in runs for a in run.workload.adapters]
    prompts = {"prompt_tokens": (min(lengths), max(lengths))} if lengths else {}
    return model.replace(fitted_range=model.fitted_range | prompts)


def _quality(found: RunCalibration, before: Fit, component: str) -> Fit:
    after, held_out, target = found.errors(found.after), found.errors(found.held_out), _target(found)
    kept = f" (the rest: {before.source})" if component == "loading" else ""
    return Fit(
        source=f"{len(found.runs)} runs with the twin in the loop{kept}",
        samples=len(found.runs),
        error_formula=f"{SMAPE_FORMULA} of {target} of whole runs",
        error=after[target],
        cross_validated_error=held_out.get(target),
    )
