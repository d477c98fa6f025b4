"""Re-balancing of adapters over servers: demand by window, forecast, placement, server labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.serving.rebalancing._demand import DemandHistory
from capplan.serving.rebalancing._near import place_near
from capplan.serving.rebalancing._placement import (
    AdapterDemand,
    covering_points,
    label_servers,
    place,
    require_points,
)
from capplan.spec import RebalanceSettings

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
    to the one with the least work.

    Parameters
    ----------
    shares
        By server.
    refused, stored
        Adapters that each server cannot store, and those that it stores.
    work
        Utilization of a server by the whole demand of each adapter.
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
