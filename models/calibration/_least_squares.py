"""Non-negative fits with constant relative scatter, and standard errors that allow for clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import lsq_linear

from capplan.spec import Coefficient, Fit, FittedModel, Uncertainty

SMAPE_FORMULA = "100 * mean(|p - a| / (|p| + |a|))"
_ROUNDS: Final = 50
_CONVERGED: Final = 1e-8
_LEAST_SHARE: Final = 0.1
"""Smallest prediction, relative to the measurement, that a weight is computed from."""


def smape(predicted: ArrayLike, actual: ArrayLike) -> float:
    """Return ``100 * mean(|p - a| / (|p| + |a|))``, NaN for empty arrays."""
    p, a = np.asarray(predicted, float), np.asarray(actual, float)
    return float(100 * np.mean(np.abs(p - a) / (np.abs(p) + np.abs(a)))) if a.size else float("nan")


def r_squared(predicted: NDArray[np.float64], actual: NDArray[np.float64]) -> float:
    """Return the explained share of the variance; NaN without variance."""
    spread = float(np.sum((actual - actual.mean()) ** 2))
    return 1.0 - float(np.sum((actual - predicted) ** 2)) / spread if spread > 0.0 else float("nan")


@dataclass(frozen=True)
class LinearProblem:
    """Linear model to fit: ``y ~ design @ coefficients`` with relative errors.

    Coefficients are bounded below by 0, since no part of a step takes negative time.
    """

    names: tuple[str, ...]
    """Coefficients, one per column."""
    design: NDArray[np.float64]
    """Regressors, shape (samples, coefficients)."""
    y: NDArray[np.float64]
    """Measurements, shape (samples,), positive."""

    @staticmethod
    def of(columns: Mapping[str, NDArray[np.float64]], y: NDArray[np.float64]) -> LinearProblem:
        """Return the problem of named regressors, shape (samples,) each."""
        return LinearProblem(tuple(columns), np.column_stack(list(columns.values())), y)

    def expected(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the predictions, shape (samples,), none of them near 0."""
        return np.maximum(self.design @ values, _LEAST_SHARE * self.y)

    def relative(self, values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return design and residuals relative to the predictions of a fit."""
        expected = self.expected(values)
        return self.design / expected[:, None], (self.design @ values - self.y) / expected

    def rows(self, keep: NDArray[np.bool_]) -> LinearProblem:
        """Return the problem with a subset of its samples."""
        return LinearProblem(self.names, self.design[keep], self.y[keep])


@dataclass(frozen=True)
class LinearFit:
    """Solution of a `LinearProblem`."""

    problem: LinearProblem
    values: NDArray[np.float64]
    covariance: NDArray[np.float64]
    """NaN for coefficients on their bound."""

    @property
    def std_errors(self) -> NDArray[np.float64]:
        """Standard errors; NaN for coefficients on their bound."""
        return np.sqrt(np.diag(self.covariance))

    def predict(self, design: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the predictions, shape (samples,)."""
        return design @ self.values

    @property
    def error(self) -> float:
        """SMAPE on the samples of the fit."""
        return smape(self.predict(self.problem.design), self.problem.y)


def fit_linear(problem: LinearProblem) -> LinearFit:
    """Minimise the squared errors relative to the measurements, with coefficients of at least 0.

    For measurements without scatter, such as medians of repetitions.
    """
    return _fit_of(problem, *_solve(problem, problem.y), problem.y)


def fit_mean(problem: LinearProblem) -> LinearFit:
    """Fit the mean of measurements whose standard deviation is proportional to it, coefficients at least 0.

    Quasi-likelihood by iteratively reweighted least squares (McCullagh and Nelder 1989, chapter 9): squared
    errors are weighted by 1 / prediction^2. Weights of 1 / measurement^2 would count a measurement that is
    high by chance less than one that is low: with a scatter of 25 % the fit would be 12 % below the mean.
    """
    values, free = _solve(problem, problem.y)
    for _ in range(_ROUNDS):
        before = values
        values, free = _solve(problem, problem.expected(before))
        change = np.abs(problem.design @ (values - before)) / problem.y
        if change.max(initial=0.0) < _CONVERGED:
            break
    return _fit_of(problem, values, free, problem.expected(values))


def _fit_of(
    problem: LinearProblem,
    values: NDArray[np.float64],
    free: NDArray[np.bool_],
    expected: NDArray[np.float64],
) -> LinearFit:
    """Return a solution with its covariance; errors are relative to `expected`."""
    weighted = problem.design / expected[:, None]
    whole = np.full((values.size, values.size), np.nan)
    degrees = problem.y.size - int(free.sum())
    if degrees > 0:
        variance = float(np.sum((weighted @ values - problem.y / expected) ** 2)) / degrees
        scale = _column_scale(weighted)
        scaled = (weighted / scale)[:, free]
        covariance = np.linalg.pinv(scaled.T @ scaled) * variance
        np.fill_diagonal(covariance, np.maximum(np.diag(covariance), 0.0))
        whole[np.ix_(free, free)] = covariance / np.outer(scale[free], scale[free])
    return LinearFit(problem, values, whole)


def _solve(
    problem: LinearProblem, expected: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return coefficients, and which of them are off their bound, with errors relative to `expected`."""
    weighted = problem.design / expected[:, None]
    scale = _column_scale(weighted)
    # The triangle of a QR decomposition has the same solution as all rows, with few rows of its own.
    q, r = np.linalg.qr(weighted / scale)
    solution = lsq_linear(r, q.T @ (problem.y / expected), bounds=(0.0, np.inf), method="bvls")
    return solution.x / scale, solution.active_mask == 0


def _column_scale(weighted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the largest magnitude of each column; 1 for a regressor that is always 0."""
    largest = np.abs(weighted).max(axis=0)
    return np.where(largest > 0, largest, 1.0)


def cross_validate(problem: LinearProblem, groups: ArrayLike, folds: int = 5) -> float:
    """Return the SMAPE on samples whose group, such as a run, was left out of the fit.

    Group g of the sorted distinct `groups`, shape (samples,), belongs to part g mod `folds`.
    """
    _, numbers = np.unique(np.asarray(groups), return_inverse=True)
    predicted = np.empty_like(problem.y)
    for fold in range(folds):
        out = numbers % folds == fold
        if out.any():
            predicted[out] = fit_linear(problem.rows(~out)).predict(problem.design[out])
    return smape(predicted, problem.y)


def clustered_covariance(
    jacobian: NDArray[np.float64],
    residuals: NDArray[np.float64],
    free: NDArray[np.bool_],
    groups: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Return the covariance of the coefficients, NaN in rows and columns of those that are not free.

    The residuals of a group, such as a run, may correlate in any way; those of different groups are taken as
    independent (sandwich estimator with clusters, small-sample factor ``G/(G-1) * (n-1)/(n-p)``). With no
    more groups than coefficients the estimator is undefined, and all residuals are taken as independent.

    Parameters
    ----------
    jacobian
        Derivatives of the residuals by the coefficients, shape (samples, coefficients).
    residuals
        Shape (samples,).
    free
        Coefficients that are not on a bound, shape (coefficients,).
    groups
        Group of each sample, shape (samples,).
    """
    whole = np.full((free.size, free.size), np.nan)
    samples, parameters = residuals.size, int(free.sum())
    if parameters == 0 or samples <= parameters:
        return whole
    scale = np.abs(jacobian[:, free]).max(axis=0)
    scale[scale == 0.0] = 1.0
    scaled = jacobian[:, free] / scale
    inverse = np.linalg.pinv(scaled.T @ scaled)
    _, numbers = np.unique(groups, return_inverse=True)
    clusters = int(numbers.max()) + 1
    if clusters > parameters:
        scores = np.zeros((clusters, parameters))
        np.add.at(scores, numbers, scaled * residuals[:, None])
        factor = clusters / (clusters - 1) * (samples - 1) / (samples - parameters)
        covariance = factor * inverse @ (scores.T @ scores) @ inverse
    else:
        covariance = inverse * float(residuals @ residuals) / (samples - parameters)
    np.fill_diagonal(covariance, np.maximum(np.diag(covariance), 0.0))
    whole[np.ix_(free, free)] = covariance / np.outer(scale, scale)
    return whole


def uncertainty(names: Sequence[str], covariance: NDArray[np.float64], scatter: float = 0.0) -> Uncertainty:
    """Return an uncertainty as profiles store it; coefficients on a bound (NaN) are left out."""
    free = np.flatnonzero(~np.isnan(np.diag(covariance))).tolist()
    rows = covariance[np.ix_(free, free)].tolist()
    return Uncertainty(
        names=tuple(names[i] for i in free), covariance=tuple(map(tuple, rows)), scatter=scatter
    )


def coefficient(value: float, std_error: float) -> Coefficient:
    """Return a fitted coefficient; a standard error that is not finite is left out."""
    return Coefficient(value=float(value), std_error=float(std_error) if np.isfinite(std_error) else None)


def fitted_model(
    form: str,
    fit: LinearFit,
    source: str,
    *,
    ranges: dict[str, tuple[float, float]] | None = None,
    fixed: Mapping[str, float] = MappingProxyType({}),
) -> FittedModel:
    """Return a fit as profiles store it.

    `ranges` are the smallest and largest values of each input, `fixed` the coefficients not fitted.
    """
    predicted = fit.predict(fit.problem.design)
    coefficients = {name: Coefficient(value=value) for name, value in fixed.items()}
    for name, value, error in zip(fit.problem.names, fit.values, fit.std_errors, strict=True):
        coefficients[name] = coefficient(value, error)
    return FittedModel(
        form=form,
        coefficients=coefficients,
        fitted_range=ranges or {},
        fit=Fit(
            source=source,
            samples=fit.problem.y.size,
            error_formula=SMAPE_FORMULA,
            error=fit.error,
            max_error=float(100 * np.max(np.abs(predicted / fit.problem.y - 1.0))),
        ),
        uncertainty=uncertainty(fit.problem.names, fit.covariance),
    )
