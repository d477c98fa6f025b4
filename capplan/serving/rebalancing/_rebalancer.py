"""Re-balancing of adapters over servers: demand by window, forecast, placement, server labels.

The demand of a window is the tokens of the requests that arrived in it. Served tokens would hide an overload.
Its forecast is EXTRAPOLATE of LoRAServe, section IV-A, which is not defined there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from capplan.errors import InputError
from capplan.serving.rebalancing._placement import (
    AdapterDemand,
    covering_points,
    label_servers,
    place,
    place_near,
    require_points,
)
from capplan.spec import FORECASTS, Forecast, RebalanceSettings


def posterior_tok_s(tok_s: NDArray[np.float64], requests: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the demand of the next window by the Gamma-Poisson model, in tokens/s, shape (adapters,).

    It is the last window, shrunk to the mean of the recent ones. A window with few requests of an adapter
    says little about its rate. The number of its requests is Poisson; its rate varies over windows by a Gamma
    distribution of mean m and squared coefficient of variation k. Given n requests in the last window, the
    mean of the posterior is ``m + z (n - m)`` with ``z = k m / (1 + k m)`` (empirical Bayes). Hot adapters
    follow their last window, cold ones their mean, and all follow their mean if their counts vary no more
    than Poisson counts do.

    The mean m is that of the adapter, k is that of all adapters together, by the method of moments of the
    negative binomial distribution. Tokens per request are those of the adapter over all windows, at least two
    of one length; shape (windows, adapters) of both arguments.
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


Shares: TypeAlias = Sequence[Mapping[str, float]]
"""Per server, the share of each adapter that it serves."""


@dataclass(frozen=True)
class ReplanRequest:
    """Input of a solver that re-plans: the available servers, in order."""

    adapters: Sequence[AdapterDemand]
    """Adapters with their forecast demand."""
    operating_points: Mapping[int, float]
    """Highest token rate that one server sustains, by rank."""
    stored: Sequence[Collection[str]]
    """Names of the adapters that each server stores."""
    shares: Shares
    """Shares in force."""
    price_per_gb: float


Replan: TypeAlias = Callable[[ReplanRequest], Shares]
"""A solver that re-plans: returns the shares of every server, in the order of the request."""


def replan_near(request: ReplanRequest) -> Shares:
    """Return the shares by `place_near`."""
    return place_near(
        request.adapters, request.operating_points, request.stored, request.shares, request.price_per_gb
    )


def without_refused(
    shares: Sequence[Mapping[str, float]],
    refused: Sequence[Collection[str]],
    stored: Sequence[Collection[str]],
    work: Mapping[str, float],
) -> list[dict[str, float]]:
    """Return shares in which no server serves an adapter that it refuses, if another one can.

    Its share goes to the other servers of the adapter in proportion, or else to one that stores it, or else
    to the one with the least work. `work` is the utilization of a server by the whole demand of each adapter.
    """
    new = [dict(own) for own in shares]
    for server, names in enumerate(refused):
        for name in sorted(new[server].keys() & set(names)):
            able = [i for i in range(len(new)) if i != server and name not in refused[i]]
            holders = [i for i in able if new[i].get(name, 0.0) > 0.0]
            if not able:
                continue
            share = new[server].pop(name)
            if not holders:
                chosen = min(able, key=lambda i: (name not in stored[i], _work(new[i], work), i))
                new[chosen][name] = share
                continue
            total = sum(new[i][name] for i in holders)
            for i in holders:
                new[i][name] += share * new[i][name] / total
    return new


def _work(shares: Mapping[str, float], work: Mapping[str, float]) -> float:
    return sum(share * work[name] for name, share in shares.items())


@dataclass(frozen=True)
class Rebalanced:
    """New routing table. Nothing has moved yet: servers fetch an adapter with its first request."""

    shares: tuple[Mapping[str, float], ...]
    """Share of every adapter that each server serves, none of 0. Over servers they sum to 1; servers that are
    not available serve none."""
    moved_bytes: int
    """Size of the adapters that their servers do not store yet."""
    unpermuted_bytes: int
    """The same if servers had not been permuted."""
    target: float
    """Mean utilization of the available servers if the forecast demand were spread evenly."""
    demand_tok_s: Mapping[str, float]
    """Forecast demand, from which the shares follow."""

    @property
    def is_overloaded(self) -> bool:
        """Whether the servers do not sustain the demand; the shares are balanced nevertheless."""
        return self.target > 1.0


class Rebalancer:
    """Periodic re-balancing of adapters over equal servers (LoRAServe, section IV-A).

    The result depends on the arguments of all calls alone, so twin and running cluster share this class.

    Parameters
    ----------
    adapters
        Adapters with their declared demand, which holds until the first window is closed. The base model is
        one of rank 0 and 0 bytes.
    servers
        Number of equal servers.
    operating_points
        Highest token rate (input and output) that one server sustains within the SLO, by rank.
    settings
        Settings.
    replan
        Solver for settings with ``solver="capplan"``; None: `place_near`.

    Raises
    ------
    InputError
        For no server, an adapter given twice, or a rank without operating point.
    """

    def __init__(
        self,
        adapters: Sequence[AdapterDemand],
        servers: int,
        operating_points: Mapping[int, float],
        settings: RebalanceSettings,
        replan: Replan | None = None,
    ) -> None:
        if servers < 1:
            raise InputError("must be >= 1", servers, "servers")
        require_points(operating_points, (adapter.rank for adapter in adapters))
        self.settings = settings
        self.servers = servers
        self._measured = operating_points
        self._replan = None if settings.solver == "loraserve" else replan or replan_near
        self._history = DemandHistory(len(adapters), settings.forecast)
        self._set_adapters(adapters)

    def _set_adapters(self, adapters: Sequence[AdapterDemand]) -> None:
        number = {adapter.name: i for i, adapter in enumerate(adapters)}
        if len(number) < len(adapters):
            raise InputError("must be given once", sorted(a.name for a in adapters), "adapters")
        self._points = covering_points(self._measured, {adapter.rank for adapter in adapters})
        self._adapters, self._number = tuple(adapters), number
        self._declared = np.array([adapter.tok_s for adapter in adapters])

    @property
    def adapters(self) -> tuple[AdapterDemand, ...]:
        """Adapters with their declared demand."""
        return self._adapters

    def replace_adapters(self, adapters: Sequence[AdapterDemand]) -> None:
        """Place other adapters from the next step on.

        Those that stay keep the demand of the closed windows, in which new ones had none. A rank without
        operating point has that of the next larger rank, or else of the largest.

        Raises
        ------
        InputError
            For an adapter given twice, or a base model without operating point.
        """
        former = [self._number.get(adapter.name, -1) for adapter in adapters]
        self._set_adapters(adapters)
        self._history.renumber(former)

    def step(
        self,
        arrived_tok_s: Mapping[str, float] | NDArray[np.float64] | None,
        stored: Sequence[Collection[str]],
        shares: Shares,
        available: Sequence[int] | None = None,
        arrived_requests: Mapping[str, float] | NDArray[np.float64] | None = None,
        refused: Sequence[Collection[str]] | None = None,
    ) -> Rebalanced:
        """Close a window and return the shares of the next one.

        Parameters
        ----------
        arrived_tok_s
            Tokens (input and output) per second of the requests that arrived in the window, by adapter, or
            in the order of the adapters; adapters that are missing had none. None: no window has passed, as
            after a server failed.
        stored
            Names of the adapters that each server stores, shape (servers,).
        shares
            Shares in force, shape (servers,).
        available
            Numbers of the servers that may serve; None: all.
        arrived_requests
            Number of the requests that arrived in the window, as `arrived_tok_s`; only the forecast
            ``gamma-poisson`` needs it.
        refused
            Adapters that each server cannot store for now, shape (servers,): other servers serve them if one
            can. None: none.

        Raises
        ------
        InputError
            For an unknown adapter, an invalid demand or number of servers, or a solver's invalid shares.
        """
        for name, given in (("stored", stored), ("shares", shares)):
            if len(given) != self.servers:
                raise InputError(f"must have an entry for each of {self.servers} servers", len(given), name)
        up = self._available(available)
        if arrived_tok_s is not None:
            requests = (
                None if arrived_requests is None else self._in_order(arrived_requests, "arrived_requests")
            )
            self._history.close(self._in_order(arrived_tok_s, "arrived_tok_s"), requests)
        demand = self._history.forecast(self._declared).tolist()
        adapters = [replace(a, tok_s=tok_s) for a, tok_s in zip(self._adapters, demand, strict=True)]
        there = [stored[server] for server in up]
        new: Shares
        if self._replan is None:
            made = place(adapters, self._points, len(up), stored=there, permute=self.settings.permute)
            new, moved, unpermuted = made.shares, made.bytes_to_copy, made.unpermuted_bytes
        else:
            request = ReplanRequest(
                adapters, self._points, there, [shares[server] for server in up], self.settings.price_per_gb
            )
            new, moved, unpermuted = self._labelled(self._replan(request), there)
        if refused is not None and any(refused[server] for server in up):
            work = {each.name: each.tok_s / self._points[each.rank] for each in adapters}
            new = without_refused(new, [refused[server] for server in up], there, work)
            moved = self._missing_bytes(new, there)
            unpermuted = max(moved, unpermuted)
        everywhere: list[Mapping[str, float]] = [{} for _ in range(self.servers)]
        for server, served in zip(up, new, strict=True):
            everywhere[server] = served
        used = math.fsum(
            tok_s / self._points[a.rank] for a, tok_s in zip(self._adapters, demand, strict=True)
        )
        names = (adapter.name for adapter in self._adapters)
        return Rebalanced(
            tuple(everywhere), moved, unpermuted, used / len(up), dict(zip(names, demand, strict=True))
        )

    def _missing_bytes(self, shares: Shares, stored: Sequence[Collection[str]]) -> int:
        """Return the size of the adapters that their servers do not store yet."""
        return sum(
            self._adapters[self._number[name]].size_bytes
            for own, there in zip(shares, stored, strict=True)
            for name in own
            if name not in there
        )

    def _available(self, available: Sequence[int] | None) -> list[int]:
        up = list(range(self.servers)) if available is None else sorted(set(available))
        if not up or up[0] < 0 or up[-1] >= self.servers:
            raise InputError(f"must be numbers of the {self.servers} servers, at least one", up, "available")
        return up

    def _in_order(
        self, arrived: Mapping[str, float] | NDArray[np.float64], argument: str
    ) -> NDArray[np.float64]:
        if isinstance(arrived, np.ndarray):
            return arrived
        in_order = np.zeros(len(self._adapters))
        for name, number in arrived.items():
            if name not in self._number:
                raise InputError("must be an adapter of the cluster", name, argument)
            in_order[self._number[name]] = number
        return in_order

    def _labelled(self, shares: Shares, stored: Sequence[Collection[str]]) -> tuple[Shares, int, int]:
        """Return the checked shares of a solver with the labels that copy the fewest bytes."""
        if len(shares) != len(stored):
            raise InputError(f"must be shares of {len(stored)} servers", len(shares), "replan")
        served = [{name: share for name, share in own.items() if share > 0.0} for own in shares]
        total = dict.fromkeys(self._number, 0.0)
        for own in served:
            for name, share in own.items():
                if name not in total:
                    raise InputError("must be an adapter of the cluster", name, "replan")
                total[name] += share
        if not np.allclose([*total.values()], 1.0, atol=1e-6):
            worst = max(total, key=lambda name: abs(total[name] - 1.0))
            raise InputError("shares must sum to 1", total[worst], f"replan: adapter {worst}")
        bytes_of = {adapter.name: adapter.size_bytes for adapter in self._adapters}
        labels = label_servers(served, stored, bytes_of, permute=self.settings.permute)
        normalised = [{name: share / total[name] for name, share in own.items()} for own in served]
        return [normalised[i] for i in labels.bin_of], labels.bytes_to_copy, labels.unpermuted_bytes
