"""Calibration: fit a profile to tables of measurements.

`calibrate` fits step tables by least squares and whole runs with the twin in the loop: all coefficients of
the step model without a step table, otherwise those outside the engine's steps.

With the twin in the loop, every run keeps its seed from one set of coefficients to the next (common random
numbers), so that the coefficients alone cause a difference between two predictions. The residuals are
differences of logarithms: predicting twice the throughput weighs as much as predicting half of it, in small
runs and in large ones. Host coefficients change no decision of the engine. Their effect on a result is
computed without a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from capplan.errors import InputError
from capplan.models import (
    ADDITIVE,
    StepFeatures,
    StepRanks,
    coefficient_array,
    latency_code,
    latency_form,
    rank_ms,
    read_crossover,
    step_ms,
)
from capplan.models.calibration import (
    DEFAULT_FOLDS,
    KV_BOUND,
    KV_FULL,
    OVERLOADED,
    QUEUED,
    SLOT_BOUND,
    SMAPE_FORMULA,
    UNQUEUED,
    MeasuredSteps,
    StepCalibration,
    calibrate_steps,
    clustered_covariance,
    coefficient,
    fit_length_correlation,
    fit_loading,
    fit_memory,
    read_steps,
    smape,
    uncertainty,
)
from capplan.spec import (
    Coefficient,
    Fit,
    FittedModel,
    Kernel,
    Profile,
    Provenance,
    ProvenanceKind,
    Uncertainty,
)
from capplan.twin.calibration._runs import TARGETS, MeasuredRun, measured_targets, read_runs
from capplan.twin.instance._core import run as run_compiled
from capplan.twin.instance._extrapolation import MODELS
from capplan.twin.instance._metrics import ScrapeLoad, SimulationResult, itl_factor, scrape_load
from capplan.twin.instance._simulate import result_of

OnSimulation = Callable[[int, int], None]

_SCATTER: Final = MappingProxyType(
    {"ttft_s_p50": 0.1, "ttft_s_mean": 0.1, "ttft_s_mean_charged": 0.1, "e2e_s_mean": 0.05}
)
"""Expected scatter of log(predicted / measured), the unit of the residuals."""

_SCATTER_DEFAULT: Final = 0.02
_MAX_MISS: Final = 3.0  # of the logarithm; also for a run of which the simulation completes nothing
_MAX_LOG: Final = float(np.log(20.0))  # bound on the change of a coefficient
_PRIOR_SCATTER: Final = 1.0  # of the logarithm about the start: decides if the runs hold no information
_SOFT_LIMIT: Final = 3.0  # in units of scatter: beyond it the loss grows linearly
_STEP: Final = 0.1  # of the logarithm, for derivatives: above the granularity of a simulation
_MAX_FOLD_STEP: Final = 0.7  # of the logarithm, for the fit without the runs of a fold
_GLOBAL_ROUNDS: Final = 12
_LOCAL_ROUNDS: Final = 6

_TYPICAL: Final = StepFeatures(
    tokens=300.0,
    requests=100.0,
    kv_tokens=36_000.0,
    adapters=20.0,
    a_max=32.0,
    s_max=16.0,
    waiting=500.0,
    slots_per_adapter=0.5,
    adapters_served=64.0,
)
_TYPICAL_RANKS: Final = StepRanks(
    decodes=100.0,
    prefills=1.0,
    lora_decodes=100.0,
    lora_prefills=1.0,
    lora_prefill_tokens=200.0,
    max_rank=16.0,
    decode_rank_sum=1200.0,
    prefill_rank_sum=12.0,
    prefill_rank_tokens=2400.0,
    prefill_mpairs=0.02,
)
_TYPICAL_SHARE: Final = 0.02
_STARTS: Final = MappingProxyType(
    {"request_ms": 5.0, "scrape_us_per_series": 5.0, "scrape_us_per_series_adapter": 0.2}
)

_ADDITIVE_DEFAULT: Final = (
    "base_ms",
    "ms_per_ktoken",
    "ms_per_kv_ktoken",
    "ms_per_adapter",
    "ms_per_slot_rank16",
)


@dataclass(frozen=True)
class FreeCoefficient:
    """A coefficient that a fit may change."""

    part: str
    """One of `MODELS`."""
    name: str
    start: float
    """Above 0."""


def free_coefficients(
    base: Profile, names: Sequence[str] | None, *, steps_known: bool, latency_measured: bool
) -> tuple[FreeCoefficient, ...]:
    """Return the coefficients that may change.

    Without `names`: ``client_itl_factor`` if a step table determines the step model; otherwise base, tokens,
    KV tokens, adapters and slots of the additive form, or all of another form. With measured latencies (TTFT
    or end to end) ``request_ms`` as well. Raise `InputError` for a name that no component of the profile has,
    or one given twice.
    """
    if names is None:
        host = ("request_ms",) if latency_measured else ()
        steps: tuple[str, ...] = ("client_itl_factor",)
        if not steps_known:
            coefficients = base.step_latency.coefficients
            additive = latency_form(base.step_latency.form) is ADDITIVE
            steps = (
                _ADDITIVE_DEFAULT if additive else tuple(n for n, c in coefficients.items() if c.value > 0)
            )
        names = (*steps, *host)
    if len(set(names)) < len(names):
        raise InputError("must name each coefficient once", ",".join(names), "--free")
    return tuple(_free(base, name) for name in names)


def _free(base: Profile, name: str) -> FreeCoefficient:
    """Return a coefficient with its value in the base as the start, or a small start if that is 0."""
    known = {part: tuple(getattr(base, part).coefficients) for part in MODELS}
    known["step_latency"] = latency_form(base.step_latency.form).names
    for part, names in known.items():
        if name in names:
            coefficient = getattr(base, part).coefficients.get(name)
            if coefficient is not None and coefficient.value > 0.0:
                return FreeCoefficient(part, name, coefficient.value)
            start = _small_term(base, name) if part == "step_latency" else _STARTS.get(name, 1.0)
            return FreeCoefficient(part, name, start)
    rule = f"must be one of {', '.join(name for names in known.values() for name in names)}"
    raise InputError(rule, name, "--free")


def _small_term(base: Profile, name: str) -> float:
    """Return the value at which a term of the step model is 2 % of a typical step."""
    model = base.step_latency
    zero = {each: Coefficient(value=0.0) for each in latency_form(model.form).names}
    total = _typical_ms(base, model)
    unit = _typical_ms(base, model.replace(coefficients=zero | {name: Coefficient(value=1.0)}))
    return _TYPICAL_SHARE * total / unit if unit > 0.0 and total > 0.0 else 1.0


def _typical_ms(base: Profile, model: FittedModel) -> float:
    code, k = latency_code(model.form, base.engine.kernel), coefficient_array(model)
    return step_ms(code, k, _TYPICAL) + rank_ms(code, k, _TYPICAL.s_max, _TYPICAL_RANKS)


def with_coefficients(base: Profile, free: Sequence[FreeCoefficient], values: Sequence[float]) -> Profile:
    """Return the profile with other values of the free coefficients."""
    changed = base
    for part in MODELS:
        own = {
            each.name: Coefficient(value=float(value))
            for each, value in zip(free, values, strict=True)
            if each.part == part and np.isfinite(value)
        }
        if own:
            model = getattr(changed, part)
            changed = changed.replace(**{part: model.replace(coefficients=model.coefficients | own)})
    return changed


@dataclass(frozen=True)
class RunCalibration:
    """Fitted coefficients and the predictions of the twin before and after the fit."""

    runs: tuple[MeasuredRun, ...]
    free: tuple[FreeCoefficient, ...]
    fitted: NDArray[np.float64]
    """Values of `free`."""
    covariance: NDArray[np.float64]
    """Covariance of `fitted`, shape (coefficients, coefficients); NaN for those on a bound."""
    before: NDArray[np.float64]
    """Predictions with the initial profile, shape (runs, targets); NaN if not measured."""
    after: NDArray[np.float64]
    held_out: NDArray[np.float64]
    """Predictions of each run by a fit without it."""
    regimes: tuple[str, ...]
    """Limiting resource of each run."""

    @property
    def std_errors(self) -> NDArray[np.float64]:
        """Standard errors of `fitted`; NaN for coefficients on a bound."""
        return np.sqrt(np.diag(self.covariance))

    def scatter(self, target: str) -> float:
        """Return the root mean square of measured / predicted - 1 of a target in left-out runs."""
        at = TARGETS.index(target)
        relative = self.measured()[:, at] / self.held_out[:, at] - 1.0
        return float(np.sqrt(np.nanmean(relative**2)))

    def measured(self) -> NDArray[np.float64]:
        """Return the measurements, shape (runs, targets)."""
        return measured_targets(self.runs)

    def errors(self, predicted: NDArray[np.float64], regime: str | None = None) -> dict[str, float]:
        """Return the SMAPE of each measured target, in percent, of one regime or of all runs."""
        keep = np.array([regime in (None, each) for each in self.regimes])
        measured = self.measured()
        errors = {}
        for at, target in enumerate(TARGETS):
            known = keep & ~np.isnan(measured[:, at]) & ~np.isnan(predicted[:, at])
            if known.any():
                errors[target] = smape(predicted[known, at], measured[known, at])
        return errors


def calibrate_runs(
    runs: Sequence[MeasuredRun],
    base: Profile,
    free: Sequence[FreeCoefficient],
    *,
    seed: int = 0,
    folds: int = 5,
    workers: int = 1,
    progress: OnSimulation | None = None,
) -> RunCalibration:
    """Fit coefficients of a profile to measured runs, all of one weight.

    A coefficient changes by a factor of at most 20. Run i is simulated with ``seed + i``, whatever the
    coefficients, in `workers` threads, and belongs to part i mod `folds` of the cross-validation. The
    coefficients of a part are the common ones after one Gauss-Newton step without its runs. `progress` gets
    the simulations done and an upper bound of them. Raise `InputError` for a run whose settings break a rule,
    or that the memory model rules out.
    """
    problem = _Problem(tuple(runs), base, tuple(free), seed, workers, progress)
    start = np.zeros(len(free))
    # Squared errors converge from afar; the robust loss then limits the weight of runs that no fit predicts.
    near = _minimise(problem, start, loss="linear", rounds=_GLOBAL_ROUNDS)
    best = _minimise(problem, near, loss="soft_l1", rounds=_LOCAL_ROUNDS)
    values = np.array(problem.values(best))
    residuals, jacobian = problem.weighted(best)
    held_out = problem.held_out(best, jacobian, residuals, folds)
    if progress is not None:
        progress(problem.max_simulations, problem.max_simulations)
    groups = np.append(np.repeat(np.arange(len(problem.runs)), len(TARGETS)), -1 - np.arange(len(free)))
    of_logs = clustered_covariance(jacobian, residuals, np.abs(best) < _MAX_LOG * 0.999, groups)
    simulated = zip(problem.runs, problem.simulate(best), strict=True)
    return RunCalibration(
        runs=problem.runs,
        free=problem.free,
        fitted=values,
        covariance=of_logs * np.outer(values, values),
        before=problem.predict(start),
        after=problem.predict(best),
        held_out=held_out,
        regimes=tuple(_regime(run, each.result) for run, each in simulated),
    )


def _minimise(
    problem: _Problem, start: NDArray[np.float64], *, loss: Literal["linear", "soft_l1"], rounds: int
) -> NDArray[np.float64]:
    found: Any = least_squares(
        problem.residuals,
        start,
        problem.jacobian,
        bounds=(-_MAX_LOG, _MAX_LOG),
        loss=loss,
        f_scale=_SOFT_LIMIT,
        ftol=1e-3,
        xtol=1e-3,
        max_nfev=rounds,
    )
    best: NDArray[np.float64] = found.x
    return best


class SimulatedRun(NamedTuple):
    """Result of a simulation, and the load of scrapes in it."""

    result: SimulationResult
    load: ScrapeLoad | None


def simulate_runs(
    runs: Sequence[MeasuredRun], profile: Profile, seeds: Sequence[int], workers: int
) -> Iterator[SimulatedRun]:
    """Simulate runs in parallel threads, yielding in their order; see `MeasuredRun.simulate`."""
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(_simulate_run, runs, repeat(profile), seeds)


def _simulate_run(run: MeasuredRun, profile: Profile, seed: int) -> SimulatedRun:
    scenario = run.scenario(profile, seed)
    trace = run_compiled(scenario)
    return SimulatedRun(result_of(profile, scenario, trace), scrape_load(scenario, trace))


def predict_targets(simulated: SimulatedRun, before: FittedModel, after: FittedModel) -> tuple[float, ...]:
    """Return every target of a run, simulated with a host model, as it would be with another one."""
    result = simulated.result
    shift_s = (after.value("request_ms") - before.value("request_ms")) / 1e3
    shifts_s = {
        "ttft_s_p50": shift_s,
        "ttft_s_mean": shift_s,
        "ttft_s_mean_charged": shift_s * result.completed / max(1, result.submitted),
        "e2e_s_mean": shift_s,
    }
    stretch = itl_factor(after, simulated.load) / itl_factor(before, simulated.load)
    factors = {"itl_ms_mean": stretch}
    return tuple(
        float(getattr(result, target)) * factors.get(target, 1.0) + shifts_s.get(target, 0.0)
        for target in TARGETS
    )


class _Problem:
    """The least-squares problem. The unknowns are logarithms of factors on the start."""

    def __init__(
        self,
        runs: tuple[MeasuredRun, ...],
        base: Profile,
        free: tuple[FreeCoefficient, ...],
        seed: int,
        workers: int,
        progress: OnSimulation | None,
    ) -> None:
        self.runs, self.base, self.free, self.seed, self.workers = runs, base, free, seed, workers
        self.progress = progress
        self.simulated = np.array([each.part != "host" for each in free])
        """Unknowns that need a simulation."""
        self.done = 0
        rounds = _GLOBAL_ROUNDS + _LOCAL_ROUNDS + 1
        self.max_simulations = len(runs) * (1 + rounds * (1 + int(self.simulated.sum())))
        self.cache: dict[bytes, list[SimulatedRun]] = {}

    def simulate(
        self, logs: NDArray[np.float64], only: NDArray[np.bool_] | None = None
    ) -> list[SimulatedRun]:
        """Simulate all runs or some, with the initial host model; results of all runs are cached."""
        key = logs[self.simulated].tobytes()
        if key in self.cache:
            return [each for i, each in enumerate(self.cache[key]) if only is None or only[i]]
        profile = self._profile(np.where(self.simulated, logs, 0.0))
        indices = [i for i in range(len(self.runs)) if only is None or only[i]]
        runs, seeds = [self.runs[i] for i in indices], [self.seed + i for i in indices]
        simulated = []
        for each in simulate_runs(runs, profile, seeds, self.workers):
            simulated.append(each)
            self.done += 1
            if self.progress is not None:
                self.progress(min(self.done, self.max_simulations), self.max_simulations)
        if only is None:
            self.cache[key] = simulated
        return simulated

    def _profile(self, logs: NDArray[np.float64]) -> Profile:
        return with_coefficients(self.base, self.free, self.values(logs))

    def values(self, logs: NDArray[np.float64]) -> list[float]:
        """Return the coefficients at these unknowns."""
        return [each.start * float(np.exp(log)) for each, log in zip(self.free, logs, strict=True)]

    def predict(
        self, logs: NDArray[np.float64], only: NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        """Return the predictions of the measured targets, shape (runs, targets), NaN elsewhere."""
        before, after = self._profile(0.0 * logs).host, self._profile(logs).host
        predicted = np.array([predict_targets(each, before, after) for each in self.simulate(logs, only)])
        runs = tuple(run for i, run in enumerate(self.runs) if only is None or only[i])
        return np.where(np.isnan(measured_targets(runs)), np.nan, predicted)

    def residuals(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the misses in units of scatter, followed by the distances from the start."""
        measured = measured_targets(self.runs)
        with np.errstate(divide="ignore", invalid="ignore"):
            misses = np.log(self.predict(logs) / measured)
        misses = np.where(np.isnan(misses), -_MAX_MISS, np.clip(misses, -_MAX_MISS, _MAX_MISS))
        scatter = np.array([_SCATTER.get(target, _SCATTER_DEFAULT) for target in TARGETS])
        return np.append(np.where(np.isnan(measured), 0.0, misses / scatter).ravel(), logs / _PRIOR_SCATTER)

    def jacobian(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the derivatives of `residuals`, shape (residuals, unknowns)."""
        here = self.residuals(logs)
        columns = []
        for at in range(logs.size):
            there = logs.copy()
            there[at] += _STEP if logs[at] + _STEP <= _MAX_LOG else -_STEP
            columns.append((self.residuals(there) - here) / (there[at] - logs[at]))
        return np.column_stack(columns)

    def weighted(self, logs: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return residuals and Jacobian with the weights of the robust loss."""
        residuals = self.residuals(logs)
        weight = (1.0 + (residuals / _SOFT_LIMIT) ** 2) ** -0.25  # square root of the weight of the loss
        return residuals * weight, self.jacobian(logs) * weight[:, None]

    def held_out(
        self,
        best: NDArray[np.float64],
        jacobian: NDArray[np.float64],
        residuals: NDArray[np.float64],
        folds: int,
    ) -> NDArray[np.float64]:
        """Return the predictions of each run with coefficients fitted without its fold."""
        part = np.arange(len(self.runs)) % folds
        predicted = np.full((len(self.runs), len(TARGETS)), np.nan)
        for fold in np.unique(part):
            out = part == fold
            kept = np.append(np.repeat(~out, len(TARGETS)), np.ones(best.size, bool))
            step = np.linalg.lstsq(jacobian[kept], -residuals[kept], rcond=None)[0]
            logs = np.clip(best + np.clip(step, -_MAX_FOLD_STEP, _MAX_FOLD_STEP), -_MAX_LOG, _MAX_LOG)
            predicted[out] = self.predict(logs, out)
        return predicted


def _regime(run: MeasuredRun, result: SimulationResult) -> str:
    """Return the regime of a run, as `capplan.models.calibration._tables.regimes`, by its simulation."""
    if run.regime:
        return run.regime
    if result.rejected > 0:
        return OVERLOADED
    if result.kv_tokens_mean > KV_FULL * result.kv_tokens:
        return KV_BOUND
    if result.waiting_mean < 1.0:
        return UNQUEUED
    return SLOT_BOUND if run.settings["a_max"] < len(run.workload.adapters) else QUEUED


OnStage = Callable[[str, int, int], None]
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
    progress: OnStage | None = None,
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
    progress: OnStage | None,
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
    progress: OnStage | None,
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
    progress: OnStage | None = None,
) -> tuple[RunCalibration, Profile]:
    """Fit free coefficients of a profile to runs, and return the profile with their uncertainty and errors.

    `steps_known`: a step table has determined the step model. `progress` gets (stage, done, total).
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
    for component in MODELS:
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
