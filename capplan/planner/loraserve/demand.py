"""Step 1 of Algorithm 1: the tokens per second that each adapter will ask for in the next time step.

The history counts tokens of requests that *arrived*: served tokens would hide an overload. The paper does not
say how it extrapolates (PAPER_NOTES section 2, item 1); Holt's linear trend is the default.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.workload import Requests

LEVEL: Final = 0.5
"""Weight of the newest step in the level, for Holt's trend and for the moving average."""
TREND: Final = 0.3
"""Weight of the newest change in Holt's trend."""
RECENT_STEPS: Final = 12
"""Steps whose largest demand bounds the forecast, and that a line is fitted to."""
_LARGEST_GROWTH: Final = 2.0
_FEWEST_STEPS: Final = 3
_NS_PER_S: Final = 1e9


class Extrapolation(StrEnum):
    """How the next step's demand follows from those before."""

    HOLT = "holt"
    """Level and linear trend, both smoothed."""
    LAST = "last"
    EWMA = "ewma"
    """Exponentially weighted moving average."""
    LINEAR = "linear"
    """Least-squares line through the recent steps."""


def extrapolate(
    history: Sequence[float], declared: float, method: Extrapolation = Extrapolation.HOLT
) -> float:
    """Return the demand of the step that follows, at least 0 and at most twice the largest recent one.

    Parameters
    ----------
    history
        Tokens per second of the steps so far, oldest first; the one that just ended is the last.
    declared
        What is said of the adapter beforehand, in tokens per second: the answer without a history.
    method
        Fewer than three steps are too few for any: the last one then stands for the next.
    """
    values = np.asarray(history, dtype=np.float64)
    if values.size == 0:
        return declared
    if values.size < _FEWEST_STEPS or method is Extrapolation.LAST:
        return float(values[-1])
    largest = _LARGEST_GROWTH * float(values[-RECENT_STEPS:].max())
    return min(max(0.0, _FORECAST[method](values)), largest)


def _holt(values: NDArray[np.float64]) -> float:
    level, trend = float(values[0]), float(values[1] - values[0])
    for value in values[1:].tolist():
        before = level
        level = LEVEL * value + (1.0 - LEVEL) * (level + trend)
        trend = TREND * (level - before) + (1.0 - TREND) * trend
    return level + trend


def _ewma(values: NDArray[np.float64]) -> float:
    level = float(values[0])
    for value in values[1:].tolist():
        level += LEVEL * (value - level)
    return level


def _linear(values: NDArray[np.float64]) -> float:
    recent = values[-RECENT_STEPS:]
    slope, intercept = np.polyfit(np.arange(recent.size), recent, 1)
    return float(intercept + slope * recent.size)


_FORECAST: Final = {Extrapolation.HOLT: _holt, Extrapolation.EWMA: _ewma, Extrapolation.LINEAR: _linear}


def arrived_tok_s(requests: Requests, adapters: int, step_s: float, duration_s: float) -> NDArray[np.float64]:
    """Return the input and output tokens per second of the requests that arrive in each whole time step.

    Parameters
    ----------
    requests
        Sorted by arrival; adapters are numbered from 1.
    adapters
        How many there are.
    step_s, duration_s
        Length of a step and of the whole; what is left beyond the last whole step is not counted.

    Returns
    -------
    ndarray, shape (steps, adapters)

    Raises
    ------
    InputError
        Unless ``0 < step_s <= duration_s``.
    """
    if not 0.0 < step_s <= duration_s:
        raise InputError(f"must be above 0 and at most the duration, {duration_s:g}", step_s, "step_s")
    steps = int(duration_s // step_s)
    step = (requests.arrival_ns / (step_s * _NS_PER_S)).astype(np.int64)
    counted = (step < steps) & (requests.adapter > 0)
    cell = step[counted] * adapters + requests.adapter[counted] - 1
    tokens = requests.prompt_tokens[counted].astype(np.float64) + requests.output_tokens[counted]
    sums = np.bincount(cell, tokens, minlength=steps * adapters)
    per_second: NDArray[np.float64] = sums.reshape(steps, adapters) / step_s
    return per_second
