"""Demand of adapters by window, and its forecast (LoRAServe IV-A, EXTRAPOLATE, not defined there).

The demand of a window is the tokens of the requests that arrived in it. Served tokens would hide an overload.

Demand by the Gamma-Poisson model: the last window, shrunk to the mean of the recent ones.

A window with few requests of an adapter says little about its rate. The number of its requests is Poisson;
its rate varies over windows by a Gamma distribution of mean m and squared coefficient of variation k. Given
n requests in the last window, the mean of the posterior is ``m + z (n - m)`` with ``z = k m / (1 + k m)``
(empirical Bayes). Hot adapters follow their last window, cold ones their mean, and all follow their mean if
their counts vary no more than Poisson counts do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from capplan.errors import InputError
from capplan.spec import FORECASTS, Forecast


def posterior_tok_s(tok_s: NDArray[np.float64], requests: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the demand of the next window in tokens per second, shape (adapters,).

    The mean m is that of the adapter, k is that of all adapters together, by the method of moments of the
    negative binomial distribution. Tokens per request are those of the adapter over all windows.

    Parameters
    ----------
    tok_s, requests
        Tokens per second, and number of requests, by window and adapter, shape (windows, adapters); at least
        two windows of one length.
    """
    mean = requests.mean(axis=0)
    excess = float((requests.var(axis=0, ddof=1) - mean).sum())
    squares = float((mean**2).sum())
    variation = max(0.0, excess) / squares if squares else 0.0
    weight = variation * mean / (1.0 + variation * mean)
    expected = mean + weight * (requests[-1] - mean)
    tok_s_per_request = np.divide(
        tok_s.sum(axis=0), requests.sum(axis=0), out=np.zeros_like(mean), where=mean > 0.0
    )
    return np.asarray(expected * tok_s_per_request)


_HOLT_LEVEL: Final = 0.5
"""Weight of the newest window in the level, also of `ewma`."""
_HOLT_TREND: Final = 0.3
"""Weight of the newest change in the trend."""
_RECENT_WINDOWS: Final = 12
"""Number of windows whose largest demand bounds the forecast; `linear` and `gamma-poisson` use no others."""
_MAX_GROWTH: Final = 2.0
_MIN_WINDOWS: Final = 3
_NS_PER_S: Final = 1e9


class DemandHistory:
    """Demand of every adapter in closed windows of one length, and its forecast for the next one.

    Parameters
    ----------
    adapters
        Number of adapters.
    forecast
        ``holt``: smoothed level and trend; ``last``: the last window; ``ewma``: smoothed level; ``linear``:
        a line through the last 12 windows; ``gamma-poisson``: the last window, shrunk to the mean of the last
        12 by its number of requests. With ``holt``, ``linear`` and ``gamma-poisson`` the last of fewer than 3
        windows.
    """

    def __init__(self, adapters: int, forecast: Forecast = "holt") -> None:
        if forecast not in FORECASTS:
            raise InputError(f"must be one of {', '.join(FORECASTS)}", forecast, "forecast")
        self._forecast = forecast
        self._level = np.zeros(adapters)
        self._trend = np.zeros(adapters)
        self._recent: deque[NDArray[np.float64]] = deque(maxlen=_RECENT_WINDOWS)
        self._requests: deque[NDArray[np.float64]] = deque(maxlen=_RECENT_WINDOWS)
        self.windows = 0
        """Number of closed windows."""

    def close(self, tok_s: ArrayLike, requests: ArrayLike | None = None) -> None:
        """Close a window with the demand of each adapter, in tokens per second.

        Parameters
        ----------
        tok_s
            Tokens per second of the requests that arrived.
        requests
            Number of these requests; only ``gamma-poisson`` needs it.

        Raises
        ------
        InputError
            If they are not one finite number >= 0 per adapter, or `requests` is missing.
        """
        demand = self._per_adapter(tok_s, "tok_s")
        if self._forecast == "gamma-poisson":
            if requests is None:
                raise InputError("are required by the forecast gamma-poisson", location="requests")
            self._requests.append(self._per_adapter(requests, "requests"))
        if self.windows == 0:
            self._level = demand
        else:
            if self.windows == 1 and self._forecast == "holt":
                self._trend = demand - self._level
            before = self._level
            self._level = _HOLT_LEVEL * demand + (1.0 - _HOLT_LEVEL) * (before + self._trend)
            if self._forecast == "holt":
                self._trend = _HOLT_TREND * (self._level - before) + (1.0 - _HOLT_TREND) * self._trend
        self._recent.append(demand)
        self.windows += 1

    def renumber(self, former: ArrayLike) -> None:
        """Change the adapters; `former` has the number of each before, -1 for a new one without demand."""
        numbers = np.array(former, np.intp)

        def moved(demand: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.append(demand, 0.0)[numbers]

        self._level, self._trend = moved(self._level), moved(self._trend)
        for recent in (self._recent, self._requests):
            windows = [moved(each) for each in recent]
            recent.clear()
            recent.extend(windows)

    def forecast(self, declared: ArrayLike) -> NDArray[np.float64]:
        """Return the demand of the next window in tokens per second; the declared one without a window.

        It is between 0 and twice the largest of the last 12 windows.
        """
        if self.windows == 0:
            return np.array(declared, np.float64)
        if self._forecast == "ewma":
            return self._level.copy()
        if self._forecast == "last" or self.windows < _MIN_WINDOWS:
            return self._recent[-1].copy()
        return np.clip(self._ahead(), 0.0, _MAX_GROWTH * np.max(self._recent, axis=0))

    def _per_adapter(self, numbers: ArrayLike, name: str) -> NDArray[np.float64]:
        found = np.array(numbers, np.float64)
        if found.shape != self._level.shape:
            raise InputError(f"must be one number for each of {self._level.size} adapters", found.shape, name)
        if not (np.isfinite(found) & (found >= 0.0)).all():
            raise InputError("must be finite numbers >= 0", float(found.min()), name)
        return found

    def _ahead(self) -> NDArray[np.float64]:
        if self._forecast == "linear":
            return self._line()
        if self._forecast == "gamma-poisson":
            return posterior_tok_s(np.array(self._recent), np.array(self._requests))
        return self._level + self._trend

    def _line(self) -> NDArray[np.float64]:
        """Return the next value of the least-squares lines through the recent windows."""
        recent = np.array(self._recent)
        at = np.arange(len(recent)) - (len(recent) - 1) / 2.0
        slope = (at[:, np.newaxis] * recent).sum(axis=0) / (at @ at)
        return np.asarray(recent.mean(axis=0) + slope * (len(recent) + 1) / 2.0)


def extrapolate(history: Sequence[float], declared: float, forecast: Forecast = "holt") -> float:
    """Return the demand of the next window of one adapter, in tokens per second.

    `history` is its demand by window; `declared` is the result without any. Rules as in `DemandHistory`, but
    for ``gamma-poisson``, which needs the requests of all adapters.
    """
    demand = DemandHistory(1, forecast)
    for tok_s in history:
        demand.close([tok_s])
    return float(demand.forecast([declared])[0])


def arrived_tok_s(
    arrival_ns: NDArray[np.int64],
    adapter: NDArray[np.int32],
    tokens: NDArray[np.int64],
    adapters: int,
    window_s: float,
    duration_s: float,
) -> NDArray[np.float64]:
    """Return the tokens per second of adapters 1, 2, ... by window of arrival, shape (windows, adapters).

    A partial window at the end is not counted.

    Raises
    ------
    InputError
        Unless ``0 < window_s <= duration_s``.
    """
    if not 0.0 < window_s <= duration_s:
        raise InputError(f"must be above 0 and at most the duration, {duration_s:g}", window_s, "window_s")
    windows = int(duration_s // window_s)
    window = (arrival_ns / (window_s * _NS_PER_S)).astype(np.int64)
    counted = (window < windows) & (adapter > 0)
    cell = window[counted] * adapters + adapter[counted] - 1
    sums = np.bincount(cell, tokens[counted].astype(np.float64), minlength=windows * adapters)
    per_second: NDArray[np.float64] = sums.reshape(windows, adapters) / window_s
    return per_second
