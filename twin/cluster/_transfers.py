"""Adapters stored by the instances of a cluster, and transfers between them (LoRAServe, section IV-B).

An adapter is stored by at least one instance. Another one fetches it with its first request from a holder, or
from the adapter's location if no holder is up. An instance has a link for each direction, and so has the
location; a link carries one transfer at a time, in the order of their starts. A failed transfer leaves source
and table as they were, and the next holder is tried, the location last. A copy that serves no share is
removed when no request uses it and no transfer reads it, never the last one of instances that are up.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.twin.instance._host_link import NEVER_NS
from capplan.twin.instance._scenario import NS_PER_S

LOCATION: Final = -1
"""Source of a transfer from the adapter's location."""


@dataclass(frozen=True)
class TransferLink:
    """Costs of a transfer: latency, and size over bandwidth.

    The defaults are assumptions: 100 Gbit/s between servers, about the speed of a copy from host memory to a
    GPU (figure 14 of the paper), and a slower store.
    """

    latency_s: float = 0.001
    bytes_per_s: float = 12.5e9
    location_latency_s: float = 0.05
    location_bytes_per_s: float = 1e9

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0.0 <= value < math.inf or (value == 0.0 and name.endswith("bytes_per_s")):
                raise InputError("must be finite and not below 0, a bandwidth above 0", value, name)

    def duration_ns(self, size_bytes: int, source: int) -> int:
        """Return the time of a transfer."""
        if source == LOCATION:
            return round((self.location_latency_s + size_bytes / self.location_bytes_per_s) * NS_PER_S)
        return round((self.latency_s + size_bytes / self.bytes_per_s) * NS_PER_S)


@dataclass(frozen=True)
class Crash:
    """An instance that is down for a time. Its requests are lost, its stored adapters are not."""

    instance: int
    at_s: float
    for_s: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.at_s < math.inf or not self.for_s > 0.0:
            raise InputError("must be at a finite time >= 0, for a time above 0", self, "crash")


@dataclass(frozen=True)
class Faults:
    """Faults of a cluster."""

    crashes: tuple[Crash, ...] = ()
    transfer_failure: float = 0.0
    """Probability that a transfer between servers fails at its end."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.transfer_failure <= 1.0:
            raise InputError("must be from 0 to 1", self.transfer_failure, "transfer_failure")


@dataclass(order=True)
class Transfer:
    """A copy of an adapter that is under way."""

    end_ns: int
    number: int
    adapter: int = field(compare=False)
    source: int = field(compare=False)
    """Instance, or LOCATION."""
    instance: int = field(compare=False)
    """Receiver."""
    start_ns: int = field(compare=False)
    tried: frozenset[int] = field(compare=False, default=frozenset())
    """Sources that failed."""


EventKind = Literal["start", "stored", "failed", "aborted", "removed"]


@dataclass(frozen=True)
class StorageEvent:
    """A change of the stored adapters, or of a transfer."""

    at_ns: int
    kind: EventKind
    adapter: int
    instance: int
    source: int = LOCATION
    """Of a transfer."""
    number: int = -1
    """Of the transfer; -1: a removal."""


class AdapterStorage:
    """Stored adapters and transfers of a cluster.

    Parameters
    ----------
    stored
        Whether each instance stores each adapter, shape (instances, adapters + 1); column 0, of the base
        model, is 1. It is changed in place.
    sizes_bytes
        Size of each adapter, shape (adapters + 1,).
    link
        Costs of transfers.
    failure, seed
        Probability that a transfer between instances fails, and seed of the draws.
    """

    def __init__(
        self,
        stored: NDArray[np.int8],
        sizes_bytes: NDArray[np.int64],
        link: TransferLink,
        failure: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.stored = stored
        self.sizes_bytes = sizes_bytes
        self.up = np.ones(len(stored), np.bool_)
        """Instances that are up."""
        self.waiting: dict[tuple[int, int], list[int]] = {}
        """Requests that wait for a transfer, by instance and adapter."""
        self.events: list[StorageEvent] = []
        self.link = link
        self._failure = failure
        self._draws = np.random.default_rng([seed, 2])
        self._in_free_ns = [0] * len(stored)
        self._out_free_ns = dict.fromkeys(range(LOCATION, len(stored)), 0)
        self._under_way: list[Transfer] = []
        self._count = 0

    @property
    def next_ns(self) -> int:
        """End of the first transfer; NEVER_NS without any."""
        return self._under_way[0].end_ns if self._under_way else NEVER_NS

    @property
    def first(self) -> tuple[int, int]:
        """Adapter and receiver of the transfer that ends first."""
        return self._under_way[0].adapter, self._under_way[0].instance

    @property
    def under_way(self) -> list[Transfer]:
        """Transfers that have not ended, in order of their numbers."""
        return sorted(self._under_way, key=lambda transfer: transfer.number)

    def fetch(self, adapter: int, instance: int, request: int, now_ns: int) -> None:
        """Let a request wait for an adapter; its first one starts the transfer."""
        requests = self.waiting.setdefault((instance, adapter), [])
        requests.append(request)
        if len(requests) == 1:
            self._start(adapter, instance, now_ns)

    def end_first(self) -> list[int]:
        """End the first transfer; return the requests that waited for it, none if it failed."""
        transfer = heapq.heappop(self._under_way)
        now_ns = transfer.end_ns
        if transfer.source != LOCATION and self._draws.random() < self._failure:
            self._note(now_ns, "failed", transfer)
            self._start(transfer.adapter, transfer.instance, now_ns, transfer.tried | {transfer.source})
            return []
        self.stored[transfer.instance, transfer.adapter] = 1
        self._note(now_ns, "stored", transfer)
        return self.waiting.pop((transfer.instance, transfer.adapter))

    def take_down(self, instance: int, now_ns: int) -> None:
        """Abort the transfers of an instance that crashes; those from it are tried with other holders."""
        self.up[instance] = False
        aborted = [each for each in self.under_way if instance in (each.source, each.instance)]
        self._under_way = [each for each in self._under_way if each not in aborted]
        heapq.heapify(self._under_way)
        for transfer in aborted:
            self._note(now_ns, "aborted", transfer)
            if transfer.instance == instance:
                del self.waiting[instance, transfer.adapter]
            else:
                self._start(transfer.adapter, transfer.instance, now_ns, transfer.tried)
        self._in_free_ns[instance] = self._out_free_ns[instance] = now_ns

    def remove_unused(
        self, is_used: NDArray[np.bool_], now_ns: int, adapters: Collection[int] | None = None
    ) -> None:
        """Remove copies that are not in use, and of which another instance that is up has one.

        Parameters
        ----------
        is_used
            Whether an instance serves a share of an adapter or has requests of it, shape of `stored`.
        adapters
            Adapters to look at; None: all.
        """
        keep = is_used.copy()
        for transfer in self._under_way:
            if transfer.source != LOCATION:
                keep[transfer.source, transfer.adapter] = True
        idle = (self.stored == 1) & ~keep & self.up[:, np.newaxis]
        idle[:, 0] = False
        holders = self.stored[self.up].sum(axis=0, dtype=np.int64)
        for instance, adapter in np.argwhere(idle).tolist():
            if holders[adapter] > 1 and (adapters is None or adapter in adapters):
                holders[adapter] -= 1
                self.stored[instance, adapter] = 0
                self.events.append(StorageEvent(now_ns, "removed", adapter, instance))

    def _start(self, adapter: int, instance: int, now_ns: int, tried: frozenset[int] = frozenset()) -> None:
        """Start a transfer from the holder that ends it first, from the location if none is left."""
        holders = np.flatnonzero((self.stored[:, adapter] == 1) & self.up).tolist()
        sources = [holder for holder in holders if holder not in tried] or [LOCATION]
        size = int(self.sizes_bytes[adapter])
        begin_ns, source = min(
            (max(now_ns, self._out_free_ns[source], self._in_free_ns[instance]), source) for source in sources
        )
        end_ns = begin_ns + self.link.duration_ns(size, source)
        self._out_free_ns[source] = self._in_free_ns[instance] = end_ns
        transfer = Transfer(end_ns, self._count, adapter, source, instance, begin_ns, tried)
        self._count += 1
        heapq.heappush(self._under_way, transfer)
        self._note(now_ns, "start", transfer)

    def _note(self, at_ns: int, kind: EventKind, transfer: Transfer) -> None:
        self.events.append(
            StorageEvent(at_ns, kind, transfer.adapter, transfer.instance, transfer.source, transfer.number)
        )
