"""Whole-number lengths with a given mean: a gamma variable rounded to integers and clipped to [1, limit].

Rounding and clipping move the mean (short requests are rounded up to 1 token, long ones cut), so the
parameters of the gamma are solved for: its scale such that the mean of the result is exact, its shape such
that the standard deviation is too, or as close as the clip allows without changing the shape more than
fourfold. Below half a token of standard deviation rounding decides everything: callers use a constant.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammainc, gammaincc

from capplan.errors import InputError

_EXACT: Final = 128  # integers summed one by one; beyond, the sum is an integral to within 0.003 tokens
_SHAPE_RANGE: Final = 4.0
_MIN_SHAPE: Final = 0.05  # std = 4.5 mean; below, the scale that reaches a mean outgrows floating point
_MAX_SCALE: Final = 1e140


def gamma_probabilities(mean: float, std: float, limit: int) -> NDArray[np.float64]:
    """Return the probabilities of 1, 2, ... ``limit`` tokens.

    Parameters
    ----------
    mean, std : float
        Wanted moments in tokens; 1 < mean < limit and std >= 0.5.
    limit : int
        Largest length in tokens.

    Returns
    -------
    ndarray of float64, shape (limit,)
        Their mean is ``mean``; their standard deviation is ``std`` where the clip allows it.

    Raises
    ------
    InputError
        When no gamma has this mean after the clip.
    """
    shape = _solve_shape(mean, std, limit)
    upper = np.arange(1, limit) + 0.5
    survival = np.asarray(gammaincc(shape, upper / _solve_scale(shape, mean, limit)), dtype=np.float64)
    return -np.diff(survival, prepend=1.0, append=0.0)


def _solve_shape(mean: float, std: float, limit: int) -> float:
    """Return the shape whose realised standard deviation is ``std``, or the nearest in range."""
    plain = (mean / std) ** 2
    low = max(plain / _SHAPE_RANGE, _MIN_SHAPE)
    high = max(plain * _SHAPE_RANGE, low)

    def excess(shape: float) -> float:
        first, second = _moments(shape, _solve_scale(shape, mean, limit), limit)
        return second - first**2 - std**2

    if excess(low) <= 0:
        return low
    if excess(high) >= 0:
        return high
    return float(brentq(excess, low, high, rtol=1e-5))


def _solve_scale(shape: float, mean: float, limit: int) -> float:
    """Return the scale whose realised mean is ``mean``: the mean grows with the scale from 1 to ``limit``."""

    def excess(scale: float) -> float:
        return _moments(shape, scale, limit)[0] - mean

    low = high = mean / shape
    while excess(low) > 0:
        low /= 2
    while excess(high) < 0:
        high *= 2
        if high > _MAX_SCALE:
            raise InputError(
                f"mean cannot be reached with lengths clipped to [1, {limit}]", mean, "Lengths.mean"
            )
    return float(brentq(excess, low, high, xtol=1e-300, rtol=1e-13)) if low < high else low


def _moments(shape: float, scale: float, limit: int) -> tuple[float, float]:
    """Return mean and mean square of the rounded, clipped variable.

    With S(x) the gamma's survival function, P(X > j) = S(j + 1/2) for 1 <= j < limit, so that
    E[X] = 1 + sum S(j + 1/2) and E[X^2] = 1 + sum 2 (j + 1/2) S(j + 1/2).
    """
    middles = np.arange(1, min(_EXACT, limit)) + 0.5
    survival = gammaincc(shape, middles / scale)
    first, second = 1 + survival.sum(), 1 + (2 * middles * survival).sum()
    if limit > _EXACT:  # midpoint rule backwards: the rest of each sum is an integral, which is known
        a, b = float(_EXACT), float(limit)
        at_a, at_b = gammaincc(shape, a / scale), gammaincc(shape, b / scale)
        inside_1 = gammainc(shape + 1, b / scale) - gammainc(shape + 1, a / scale)
        inside_2 = gammainc(shape + 2, b / scale) - gammainc(shape + 2, a / scale)
        first += b * at_b - a * at_a + shape * scale * inside_1
        second += b * b * at_b - a * a * at_a + shape * (shape + 1) * scale**2 * inside_2
    return float(first), float(second)
