"""Least squares with bounds, relative errors and clustered standard errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import lsq_linear

from capplan.spec import Coefficient, Fit, FittedModel

SMAPE_FORMULA = "100 * mean(|p - a| / (|p| + |a|))"


def smape(predicted: ArrayLike, actual: ArrayLike) -> float:
    """Return ``100 * mean(|p - a| / (|p| + |a|))``, NaN when there is nothing to compare."""
    p, a = np.asarray(predicted, float), np.asarray(actual, float)
    return float(100 * np.mean(np.abs(p - a) / (np.abs(p) + np.abs(a)))) if a.size else float("nan")


@dataclass(frozen=True)
class LinearProblem:
    """A linear model to fit: ``y ~ design @ coefficients`` with errors relative to y.

    Attributes
    ----------
    names
        Names of the coefficients, one per column.
    design
        Regressors, shape (samples, coefficients).
    y
        Measurements, shape (samples,), positive.
    free_sign
        Coefficients that may be negative; all others are bounded below by 0, since no part of a step takes
        less than no time.
    """

    names: tuple[str, ...]
    design: NDArray[np.float64]
    y: NDArray[np.float64]
    free_sign: tuple[str, ...] = ()

    def lower_bounds(self) -> NDArray[np.float64]:
        """Return 0 or minus infinity for each coefficient."""
        return np.array([-np.inf if name in self.free_sign else 0.0 for name in self.names])

    def rows(self, keep: NDArray[np.bool_]) -> LinearProblem:
        """Return the problem with some of its samples."""
        return LinearProblem(self.names, self.design[keep], self.y[keep], self.free_sign)


@dataclass(frozen=True)
class LinearFit:
    """The solution of a `LinearProblem`."""

    problem: LinearProblem
    values: NDArray[np.float64]
    std_errors: NDArray[np.float64]
    """NaN for coefficients that ended on their bound."""

    def predict(self, design: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the model's answer, shape (samples,)."""
        return design @ self.values

    @property
    def error(self) -> float:
        """SMAPE on the samples of the fit."""
        return smape(self.predict(self.problem.design), self.problem.y)


def fit_linear(problem: LinearProblem) -> LinearFit:
    """Minimise the relative squared error within the bounds."""
    weighted = problem.design / problem.y[:, None]
    largest = np.abs(weighted).max(axis=0)
    scale = np.where(largest > 0, largest, 1.0)  # a regressor that is always 0 gets the coefficient 0
    # The triangle of a QR decomposition has the same least squares as all the rows, and few of its own.
    q, r = np.linalg.qr(weighted / scale)
    answer = q.T @ np.ones(problem.y.size)
    solution = lsq_linear(r, answer, bounds=(problem.lower_bounds(), np.inf), method="bvls")
    values = solution.x / scale
    free = solution.active_mask == 0
    errors = np.full(values.size, np.nan)
    spare = problem.y.size - int(free.sum())
    if spare > 0:
        variance = float(np.sum((weighted @ values - 1.0) ** 2)) / spare
        scaled = (weighted / scale)[:, free]
        covariance = np.linalg.pinv(scaled.T @ scaled) * variance
        errors[free] = np.sqrt(np.maximum(np.diag(covariance), 0.0)) / scale[free]
    return LinearFit(problem, values, errors)


def cross_validate(problem: LinearProblem, groups: ArrayLike, folds: int = 5) -> float:
    """Return the SMAPE on samples whose group was left out of the fit.

    Parameters
    ----------
    problem
        The whole problem.
    groups
        Group of each sample (its run, say), shape (samples,); a group is never on both sides.
    folds
        Number of parts; group g of the sorted distinct groups belongs to part g mod folds.
    """
    _, numbers = np.unique(np.asarray(groups), return_inverse=True)
    predicted = np.empty_like(problem.y)
    for fold in range(folds):
        out = numbers % folds == fold
        if out.any():
            predicted[out] = fit_linear(problem.rows(~out)).predict(problem.design[out])
    return smape(predicted, problem.y)


def fitted_model(
    form: str,
    fit: LinearFit,
    source: str,
    *,
    cross_validated: float | None = None,
    ranges: dict[str, tuple[float, float]] | None = None,
    fixed: Sequence[tuple[str, float]] = (),
) -> FittedModel:
    """Put a fit into the form that profiles store.

    Parameters
    ----------
    form
        Name of the model's form.
    fit
        The coefficients.
    source
        What it was fitted on.
    cross_validated
        Error on left-out samples, where it was computed.
    ranges
        Smallest and largest value of each input on which the fit rests.
    fixed
        Coefficients of the form that were not fitted.
    """
    predicted = fit.predict(fit.problem.design)
    coefficients = {name: Coefficient(value=value) for name, value in fixed}
    for name, value, error in zip(fit.problem.names, fit.values, fit.std_errors, strict=True):
        coefficients[name] = Coefficient(
            value=float(value), std_error=None if np.isnan(error) else float(error)
        )
    return FittedModel(
        form=form,
        coefficients=coefficients,
        fitted_range=ranges or {},
        fit=Fit(
            source=source,
            samples=fit.problem.y.size,
            error_formula=SMAPE_FORMULA,
            error=fit.error,
            cross_validated_error=cross_validated,
            max_error=float(100 * np.max(np.abs(predicted / fit.problem.y - 1.0))),
        ),
    )


def clustered_errors(
    jacobian: NDArray[np.float64],
    residuals: NDArray[np.float64],
    free: NDArray[np.bool_],
    groups: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Return the standard error of each coefficient, NaN for those that are not free.

    The residuals of a group (a run, say) may go together in any way; those of different groups are taken to
    be independent (the sandwich estimator with clusters, small-sample factor ``G/(G-1) * (n-1)/(n-p)``). With
    no more groups than coefficients that estimator is void, and all residuals are taken to be independent.

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
    errors = np.full(free.size, np.nan)
    samples, parameters = residuals.size, int(free.sum())
    if parameters == 0 or samples <= parameters:
        return errors
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
    errors[free] = np.sqrt(np.maximum(np.diag(covariance), 0.0)) / scale
    return errors
