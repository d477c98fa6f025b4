"""Step model of a profile: fit every candidate, cross-validate, select."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.models.calibration._candidates import (
    StepModelCandidate,
    StepModelFit,
    candidate_named,
    candidates,
)
from capplan.models.calibration._least_squares import SMAPE_FORMULA, r_squared, smape, uncertainty
from capplan.models.calibration._tables import REGIMES, MeasuredSteps
from capplan.spec import Fit, FittedModel, Kernel, Uncertainty

DEFAULT_FOLDS: Final = 5
_UNFITTED: Final = "cannot be fitted: values are too large, too small or too far apart"
NEGLIGIBLE: Final = 0.01
NEGLIGIBLE_POINTS: Final = 0.02
"""Candidates count as equal if their held-out errors differ by less than `NEGLIGIBLE` of the error or by less
than this number of percentage points.

The full additive form is preferred among equals. Runs of one length distribution do not separate KV tokens
from requests, for example, and a term left out for this reason would be missed with other lengths.
"""


@dataclass(frozen=True)
class StepModelScore:
    """Errors of one candidate; NaN if it could not be fitted."""

    label: str
    coefficients: int
    """Number of coefficients that are not on a bound."""
    error: float
    """SMAPE on the rows of the fit, in percent."""
    held_out_error: float
    """SMAPE on rows whose run was left out of the fit, in percent."""
    held_out_r2: float
    """Explained share of the variance on left-out rows; negative if worse than their mean."""
    missing: tuple[str, ...] = ()
    """Required columns that the table does not have."""


@dataclass(frozen=True)
class Residuals:
    """Errors of predictions on left-out rows of one part of the table, in percent."""

    name: str
    rows: int
    bias: float
    """Mean of predicted / measured - 1."""
    error: float
    """SMAPE."""
    p95: float
    """95th percentile of |predicted / measured - 1|."""


@dataclass(frozen=True)
class StepCalibration:
    """The selected step model and the scores of all candidates."""

    table: MeasuredSteps
    fit: StepModelFit
    forced: bool
    """Whether the form was given instead of selected."""
    scores: tuple[StepModelScore, ...]
    """In ascending order of held-out error."""
    held_out_ms: NDArray[np.float64]
    """Predictions of the selected candidate by fits without the row's run, shape (rows,)."""

    @property
    def score(self) -> StepModelScore:
        """Score of the selected candidate."""
        return next(score for score in self.scores if score.label == self.fit.candidate.label)

    def model(self) -> FittedModel:
        """Return the step model as a profile stores it."""
        table = self.table
        predicted = self.fit.predict(table)
        runs = f" of {len(table.run_names)} runs" if table.run_names else ""
        return FittedModel(
            form=self.fit.candidate.form.name,
            coefficients=self.fit.coefficients(),
            fitted_range=step_ranges(table),
            fit=Fit(
                source=f"{table.source}: {table.rows} rows{runs}",
                samples=table.rows,
                error_formula=SMAPE_FORMULA,
                error=smape(predicted, table.step_ms),
                cross_validated_error=self.score.held_out_error,
                max_error=float(100 * np.max(np.abs(predicted / table.step_ms - 1.0))),
                probe_ms=table.probe_ms,
            ),
            uncertainty=self.uncertainty(),
        )

    def uncertainty(self) -> Uncertainty:
        """Return covariance of the coefficients of the step model, and scatter of left-out runs."""
        known = [at for at, name in enumerate(self.fit.names) if name in self.fit.candidate.form.names]
        covariance = self.fit.covariance[np.ix_(known, known)]
        scatter = run_scatter(self.table, self.held_out_ms)
        return uncertainty([self.fit.names[at] for at in known], covariance, scatter)

    def by_regime(self) -> tuple[Residuals, ...]:
        """Return the errors in each regime, in the order of `REGIMES`, followed by other names."""
        present = set(self.table.regime.tolist())
        order = [*(name for name in REGIMES if name in present), *sorted(present - set(REGIMES))]
        return tuple(self._residuals(name, self.table.regime == name) for name in order)

    def by_a_max(self) -> tuple[Residuals, ...]:
        """Return the errors at each number of slots."""
        values = np.unique(self.table.a_max)
        return tuple(self._residuals(f"{value:g}", self.table.a_max == value) for value in values)

    def _residuals(self, name: str, keep: NDArray[np.bool_]) -> Residuals:
        predicted, measured = self.held_out_ms[keep], self.table.step_ms[keep]
        relative = predicted / measured - 1.0
        return Residuals(
            name=name,
            rows=int(keep.sum()),
            bias=100 * float(np.mean(relative)),
            error=smape(predicted, measured),
            p95=100 * float(np.percentile(np.abs(relative), 95)),
        )


def run_scatter(table: MeasuredSteps, predicted_ms: NDArray[np.float64]) -> float:
    """Return the root mean square over runs of the mean of measured / predicted - 1 in a run."""
    _, numbers = np.unique(table.run, return_inverse=True)
    relative = table.step_ms / predicted_ms - 1.0
    return float(np.sqrt(np.mean((np.bincount(numbers, relative) / np.bincount(numbers)) ** 2)))


def step_ranges(table: MeasuredSteps) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest value of each input of the step model."""
    inputs = ("tokens", "requests", "kv_tokens", "adapters", "a_max", "s_max", "waiting")
    own = {name: (float(getattr(table, name).min()), float(getattr(table, name).max())) for name in inputs}
    return {**own, **table.load_ranges}


def calibrate_steps(
    table: MeasuredSteps,
    kernel: Kernel = Kernel.VLLM,
    *,
    form: str | None = None,
    folds: int = DEFAULT_FOLDS,
    progress: Callable[[int, int], None] | None = None,
) -> StepCalibration:
    """Fit every candidate and select one.

    Parameters
    ----------
    table
        The measured steps.
    kernel
        Kernel of the engine, which determines the ranks that it pays for.
    form
        Label of the candidate to take. None: the first in the order of `candidates` whose held-out error
        equals the lowest, by `NEGLIGIBLE`.
    folds
        Parts of the cross-validation; run g belongs to part g mod folds and is never on both sides.
    progress
        Called with (fits done, all fits).

    Raises
    ------
    InputError
        For an unknown form, one whose columns are missing, or fewer rows than coefficients.
    """
    forced = None if form is None else candidate_named(form, table, kernel)
    every = candidates(table, kernel)
    possible = [each for each in every if not each.missing(table)]
    fits: dict[str, StepModelFit] = {}
    held_out: dict[str, NDArray[np.float64]] = {}
    for done, each in enumerate(possible):
        if progress is not None:
            progress(done, len(possible))
        fits[each.label] = _fit(each, table)
        held_out[each.label] = predict_left_out(each, table, folds)
    if progress is not None:
        progress(len(possible), len(possible))
    nan = float("nan")
    scores = [_score(fits[each.label], table, held_out[each.label]) for each in possible]
    scores += [
        StepModelScore(each.label, 0, nan, nan, nan, missing)
        for each in every
        if (missing := each.missing(table))
    ]
    scores.sort(key=lambda s: (np.isnan(s.held_out_error), s.held_out_error, s.coefficients))
    preferred = [each.label for each in possible if each.kernel is kernel]
    label = _best(scores, preferred) if forced is None else forced.label
    return StepCalibration(table, fits[label], forced is not None, tuple(scores), held_out[label])


def predict_left_out(candidate: StepModelCandidate, table: MeasuredSteps, folds: int) -> NDArray[np.float64]:
    """Return the milliseconds of each row predicted by a fit without the row's run, shape (rows,)."""
    _, numbers = np.unique(table.run, return_inverse=True)
    part = numbers % folds
    if np.unique(part).size < 2:
        rule = "must hold two runs to be cross-validated; without a column run, rows are cut in stretches"
        raise InputError(rule, location=table.source)
    predicted = np.empty(table.rows)
    for fold in np.unique(part):
        out = part == fold
        predicted[out] = _fit(candidate, table.select(~out)).predict(table.select(out))
    return predicted


def _fit(candidate: StepModelCandidate, table: MeasuredSteps) -> StepModelFit:
    coefficients = len(candidate.form.names) - len(candidate.left_out)
    if table.rows < coefficients:
        rule = f"must leave at least {coefficients} rows to each fit of the form {candidate.label}"
        raise InputError(rule, table.rows, table.source)
    try:
        return candidate.fit(table)
    except (ValueError, np.linalg.LinAlgError) as error:  # ValueError: sums that overflow
        if isinstance(error, InputError):
            raise
        raise InputError(f"{_UNFITTED} by {candidate.label}", location=table.source) from None


def _score(fit: StepModelFit, table: MeasuredSteps, held_out: NDArray[np.float64]) -> StepModelScore:
    return StepModelScore(
        label=fit.candidate.label,
        coefficients=int(np.sum(~np.isnan(fit.std_errors))),
        error=smape(fit.predict(table), table.step_ms),
        held_out_error=smape(held_out, table.step_ms),
        held_out_r2=r_squared(held_out, table.step_ms),
    )


def _best(scores: Sequence[StepModelScore], preferred: Sequence[str]) -> str:
    """Return the first label in order of preference whose held-out error equals the lowest."""
    errors = {
        score.label: score.held_out_error if np.isfinite(score.held_out_error) else np.inf for score in scores
    }
    least = min(errors[label] for label in preferred)
    if not np.isfinite(least):
        raise InputError(_UNFITTED, location="steps")
    limit = least + max(NEGLIGIBLE * least, NEGLIGIBLE_POINTS)
    return next(label for label in preferred if errors[label] <= limit)
