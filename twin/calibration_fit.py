"""Least squares with the twin in the loop: fit coefficients of a profile to measured runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from capplan.errors import InputError
from capplan.models.calibration.least_squares import clustered_errors, smape
from capplan.models.calibration.tables import KV_BOUND, KV_FULL, OVERLOADED, QUEUED, SLOT_BOUND, UNQUEUED
from capplan.models.step_latency import (
    ADDITIVE,
    StepFeatures,
    StepRanks,
    coefficient_array,
    latency_code,
    latency_form,
    rank_ms,
    step_ms,
)
from capplan.spec import Coefficient, FittedModel, Profile
from capplan.twin.calibration_runs import TARGETS, MeasuredRun
from capplan.twin.result import SimulationResult

Progress = Callable[[int, int], None]

_TRUST: Final = MappingProxyType(
    {"ttft_s_p50": 0.1, "ttft_s_mean": 0.1, "ttft_s_mean_charged": 0.1, "e2e_s_mean": 0.05}
)

"""Scatter (of the logarithm) that a prediction is allowed before it counts; 0.02 for what is not listed."""

_TRUST_OTHERWISE: Final = 0.02

_WORST: Final = 3.0  # logarithm; also where the twin completes nothing and has no answer

_FACTOR: Final = float(np.log(20.0))  # most that a coefficient may change, up or down

_PRIOR: Final = 1.0  # scatter of the logarithm about the start: decides where the runs say nothing

_TOLERATED: Final = 3.0  # in units of trust: beyond, a miss counts less than by its square

_STEP: Final = 0.1  # of the logarithm, for derivatives: more than the grain of a simulation

_LEAP: Final = 0.7  # of the logarithm, most that leaving runs out may change a coefficient

_ROUNDS_FROM_AFAR: Final = 12

_ROUNDS_NEARBY: Final = 6


@dataclass(frozen=True)
class RunCalibration:
    """The coefficients that fit the runs best, and how well the twin then predicts them."""

    runs: tuple[MeasuredRun, ...]
    free: tuple[FreeCoefficient, ...]
    fitted: NDArray[np.float64]
    """Values of `free`."""
    std_errors: NDArray[np.float64]
    before: NDArray[np.float64]
    """What the twin said before the fit, shape (runs, targets); NaN where nothing was measured."""
    after: NDArray[np.float64]
    held_out: NDArray[np.float64]
    """... and by fits without the run."""
    regimes: tuple[str, ...]
    """What held each run back."""

    def measured(self) -> NDArray[np.float64]:
        """Return the measurements, shape (runs, targets)."""
        return _measured(self.runs)

    def errors(self, predicted: NDArray[np.float64], regime: str | None = None) -> dict[str, float]:
        """Return the SMAPE of each target that was measured, in percent; of one regime, or of all runs."""
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
    progress: Progress | None = None,
) -> RunCalibration:
    """Fit coefficients of a profile to measured runs.

    Parameters
    ----------
    runs
        The runs; their predictions are weighed alike.
    base
        The profile that is started from.
    free
        What may change, each by at most a factor of 20.
    seed
        Of the simulations; run i has ``seed + i``, whatever the coefficients.
    folds
        Parts of the cross-validation: run i belongs to part i mod folds. A part's coefficients are the common
        ones after one Gauss-Newton step without its runs.
    workers
        Threads.
    progress
        Called with (simulations done, most that there may be).

    Raises
    ------
    InputError
        When a run's settings break a rule, or the memory model says it cannot have run.
    """
    problem = _Problem(tuple(runs), base, tuple(free), seed, workers, progress)
    start = np.zeros(len(free))
    # Squares lead from far away; near the end, runs that no coefficients meet must not have their way.
    near = _minimise(problem, start, loss="linear", rounds=_ROUNDS_FROM_AFAR)
    best = _minimise(problem, near, loss="soft_l1", rounds=_ROUNDS_NEARBY)
    values = np.array(problem.values(best))
    residuals, jacobian = problem.residuals(best), problem.slopes(best)
    weight = (1.0 + (residuals / _TOLERATED) ** 2) ** -0.25  # of the robust loss, square root
    held_out = problem.left_out(best, jacobian * weight[:, None], residuals * weight, folds)
    if progress is not None:
        progress(problem.most, problem.most)
    groups = np.append(np.repeat(np.arange(len(problem.runs)), len(TARGETS)), -1 - np.arange(len(free)))
    errors = clustered_errors(
        jacobian * weight[:, None], residuals * weight, np.abs(best) < _FACTOR * 0.999, groups
    )
    return RunCalibration(
        runs=problem.runs,
        free=problem.free,
        fitted=values,
        std_errors=errors * values,
        before=problem.predict(start),
        after=problem.predict(best),
        held_out=held_out,
        regimes=tuple(
            _regime(run, result) for run, result in zip(problem.runs, problem.simulate(best), strict=True)
        ),
    )


def _minimise(
    problem: _Problem, start: NDArray[np.float64], *, loss: Literal["linear", "soft_l1"], rounds: int
) -> NDArray[np.float64]:
    found: Any = least_squares(
        problem.residuals,
        start,
        problem.slopes,
        bounds=(-_FACTOR, _FACTOR),
        loss=loss,
        f_scale=_TOLERATED,
        ftol=1e-3,
        xtol=1e-3,
        max_nfev=rounds,
    )
    best: NDArray[np.float64] = found.x
    return best


class _Problem:
    """The least-squares problem; logarithms of factors on the start are its unknowns."""

    def __init__(
        self,
        runs: tuple[MeasuredRun, ...],
        base: Profile,
        free: tuple[FreeCoefficient, ...],
        seed: int,
        workers: int,
        progress: Progress | None,
    ) -> None:
        self.runs, self.base, self.free, self.seed, self.workers = runs, base, free, seed, workers
        self.progress = progress
        self.inside = np.array([not is_outside(each) for each in free])
        self.done = 0
        rounds = _ROUNDS_FROM_AFAR + _ROUNDS_NEARBY + 1
        self.most = len(runs) * (1 + rounds * (1 + int(self.inside.sum())))
        self.known: dict[bytes, list[SimulationResult]] = {}

    def simulate(
        self, logs: NDArray[np.float64], only: NDArray[np.bool_] | None = None
    ) -> list[SimulationResult]:
        """Return the twin's answers, of all runs or of some, with the start's time outside the steps.

        Those of all runs are kept for the next asking.
        """
        key = logs[self.inside].tobytes()
        if key in self.known:
            return [r for i, r in enumerate(self.known[key]) if only is None or only[i]]
        profile = with_coefficients(self.base, self.free, self.values(np.where(self.inside, logs, 0.0)))
        asked = [i for i in range(len(self.runs)) if only is None or only[i]]
        results = []
        with ThreadPoolExecutor(self.workers) as pool:
            for result in pool.map(partial(self._one, profile), asked):
                results.append(result)
                self.done += 1
                if self.progress is not None:
                    self.progress(min(self.done, self.most), self.most)
        if only is None:
            self.known[key] = results
        return results

    def _one(self, profile: Profile, index: int) -> SimulationResult:
        return self.runs[index].simulate(profile, self.seed + index)

    def values(self, logs: NDArray[np.float64]) -> list[float]:
        """Return the coefficients at these unknowns."""
        return [each.start * float(np.exp(log)) for each, log in zip(self.free, logs, strict=True)]

    def predict(
        self, logs: NDArray[np.float64], only: NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        """Return what the twin says of whatever was measured, shape (runs, targets)."""
        results = self.simulate(logs, only)
        before = dict(zip((each.name for each in self.free), self.values(0.0 * logs), strict=True))
        after = dict(zip(before, self.values(logs), strict=True))
        said = np.array([answer(result, before, after) for result in results])
        runs = [run for i, run in enumerate(self.runs) if only is None or only[i]]
        return np.where(np.isnan(_measured(runs)), np.nan, said)

    def residuals(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how far the twin is off, in units of trust, and how far the unknowns are from the start."""
        return np.append(_misses(self.runs, self.predict(logs)).ravel(), logs / _PRIOR)

    def slopes(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the derivatives of `residuals`, shape (residuals, unknowns)."""
        here = self.residuals(logs)
        columns = []
        for at in range(logs.size):
            there = logs.copy()
            there[at] += _STEP if logs[at] + _STEP <= _FACTOR else -_STEP
            columns.append((self.residuals(there) - here) / (there[at] - logs[at]))
        return np.column_stack(columns)

    def left_out(
        self,
        best: NDArray[np.float64],
        jacobian: NDArray[np.float64],
        residuals: NDArray[np.float64],
        folds: int,
    ) -> NDArray[np.float64]:
        """Return what the twin says of each run with coefficients that owe nothing to it."""
        part = np.arange(len(self.runs)) % folds
        predicted = np.full((len(self.runs), len(TARGETS)), np.nan)
        for fold in np.unique(part):
            out = part == fold
            kept = np.append(np.repeat(~out, len(TARGETS)), np.ones(best.size, bool))
            step = np.linalg.lstsq(jacobian[kept], -residuals[kept], rcond=None)[0]
            logs = np.clip(best + np.clip(step, -_LEAP, _LEAP), -_FACTOR, _FACTOR)
            predicted[out] = self.predict(logs, out)
        return predicted


def _measured(runs: Sequence[MeasuredRun]) -> NDArray[np.float64]:
    return np.array([[run.measured.get(target, np.nan) for target in TARGETS] for run in runs])


def _misses(runs: Sequence[MeasuredRun], predicted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log(predicted / measured) in units of trust; 0 where nothing was measured."""
    measured = _measured(runs)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(predicted / measured)
    logs = np.where(np.isnan(logs), -_WORST, np.clip(logs, -_WORST, _WORST))
    trust = np.array([_TRUST.get(target, _TRUST_OTHERWISE) for target in TARGETS])
    return np.where(np.isnan(measured), 0.0, logs / trust)


def _regime(run: MeasuredRun, result: SimulationResult) -> str:
    """Return what held a run back, as `capplan.models.calibration.tables.regimes` says it, by the twin."""
    if run.regime:
        return run.regime
    if result.rejected > 0:
        return OVERLOADED
    if result.kv_tokens_mean > KV_FULL * result.kv_tokens:
        return KV_BOUND
    if result.waiting_mean < 1.0:
        return UNQUEUED
    return SLOT_BOUND if run.settings["a_max"] < len(run.workload.adapters) else QUEUED


PARTS: Final = ("step_latency", "loading", "host")

_TYPICAL: Final = StepFeatures(
    tokens=300.0,
    requests=100.0,
    kv_tokens=36_000.0,
    adapters=20.0,
    a_max=32.0,
    s_max=16.0,
    waiting=500.0,
    slots_per_adapter=0.5,
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
)

_SHARE: Final = 0.02

_OUTSIDE_STEPS: Final = MappingProxyType({"request_ms": 5.0, "client_itl_factor": 1.0, "serving_factor": 1.0})

_BY_DEFAULT: Final = ("base_ms", "ms_per_ktoken", "ms_per_kv_ktoken", "ms_per_adapter", "ms_per_slot_rank16")


@dataclass(frozen=True)
class FreeCoefficient:
    """A coefficient that a fit may change."""

    part: str
    """Of `PARTS`."""
    name: str
    start: float
    """Above 0."""


def free_coefficients(
    base: Profile, names: Sequence[str] | None, *, steps_known: bool, latency_measured: bool
) -> tuple[FreeCoefficient, ...]:
    """Return the coefficients that may change.

    Parameters
    ----------
    base
        The profile that is started from.
    names
        Their names; None: with the steps known from a table, what clients see of them
        (``client_itl_factor``); otherwise base, tokens, KV tokens, adapters and slots of the additive form,
        or all of another form. Where waiting was measured, time outside the steps (``request_ms``) as well.
    steps_known, latency_measured
        Whether they are.

    Raises
    ------
    InputError
        For a name that no part of the profile has, or one given twice.
    """
    if names is None:
        outside = ("request_ms",) if latency_measured else ()
        form = latency_form(base.step_latency.form)
        of_steps = _BY_DEFAULT if form is ADDITIVE else _positive(base.step_latency)
        names = (*(("client_itl_factor",) if steps_known else of_steps), *outside)
    if len(set(names)) < len(names):
        raise InputError("must name each coefficient once", ",".join(names), "--free")
    return tuple(_free(base, name) for name in names)


def _positive(model: FittedModel) -> tuple[str, ...]:
    return tuple(name for name, coefficient in model.coefficients.items() if coefficient.value > 0.0)


def _free(base: Profile, name: str) -> FreeCoefficient:
    """Return a coefficient at its value in the base, or, where that is 0, at a small one."""
    known = {part: _names(base, part) for part in PARTS}
    for part, names in known.items():
        if name in names:
            coefficients = getattr(base, part).coefficients
            value = coefficients[name].value if name in coefficients else 0.0
            return FreeCoefficient(part, name, value if value > 0.0 else _small(base, part, name))
    rule = f"must be one of {', '.join(name for names in known.values() for name in names)}"
    raise InputError(rule, name, "--free")


def _names(base: Profile, part: str) -> tuple[str, ...]:
    if part == "step_latency":
        return latency_form(base.step_latency.form).names
    return tuple(getattr(base, part).coefficients)


def _small(base: Profile, part: str, name: str) -> float:
    """Return a value by which the coefficient adds 2 % to a typical step, or a round number elsewhere."""
    if part != "step_latency":
        return _OUTSIDE_STEPS.get(name, 1.0)
    model = base.step_latency
    form = latency_form(model.form)
    zero = {each: Coefficient(value=0.0) for each in form.names}
    whole = _typical_ms(base, model)
    one = _typical_ms(base, model.replace(coefficients=zero | {name: Coefficient(value=1.0)}))
    return _SHARE * whole / one if one > 0.0 and whole > 0.0 else 1.0


def _typical_ms(base: Profile, model: FittedModel) -> float:
    code, k = latency_code(model.form, base.engine.kernel), coefficient_array(model)
    return step_ms(code, k, _TYPICAL) + rank_ms(code, k, _TYPICAL.s_max, _TYPICAL_RANKS)


def with_coefficients(base: Profile, free: Sequence[FreeCoefficient], values: Sequence[float]) -> Profile:
    """Return the profile with other values of the free coefficients."""
    changed = base
    for part in PARTS:
        own = {
            f.name: Coefficient(value=float(value))
            for f, value in zip(free, values, strict=True)
            if f.part == part and np.isfinite(value)
        }
        if own:
            model = getattr(changed, part)
            changed = changed.replace(**{part: model.replace(coefficients=model.coefficients | own)})
    return changed


REQUEST_MS: Final = "request_ms"

ITL_FACTOR: Final = "client_itl_factor"


def is_outside(free: FreeCoefficient) -> bool:
    """Tell whether a coefficient is about time outside the steps."""
    return free.part == "host" and free.name in (REQUEST_MS, ITL_FACTOR)


def answer(
    result: SimulationResult, before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[float, ...]:
    """Return every target as it would be with other coefficients outside the steps.

    Parameters
    ----------
    result
        Simulated with the coefficients `before`.
    before, after
        Values of free coefficients by name; those that are missing have not changed.
    """
    later_s = (after.get(REQUEST_MS, 0.0) - before.get(REQUEST_MS, 0.0)) / 1e3
    stretch = after.get(ITL_FACTOR, 1.0) / before.get(ITL_FACTOR, 1.0)
    shifts = {
        "ttft_s_p50": later_s,
        "ttft_s_mean": later_s,
        "ttft_s_mean_charged": later_s * result.completed / max(1, result.submitted),
        "e2e_s_mean": later_s,
    }
    factors = {"itl_ms_mean": stretch}
    return tuple(
        float(getattr(result, target)) * factors.get(target, 1.0) + shifts.get(target, 0.0)
        for target in TARGETS
    )
