"""Standard errors of fitted coefficients where measurements of one run resemble each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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
