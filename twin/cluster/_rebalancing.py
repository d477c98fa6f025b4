"""Re-balancing, transfers and crashes as events of the cluster twin.

At each event the loop pauses with all instances advanced to it. A re-balancing replaces the routing table and
nothing moves: the first request of an adapter at an instance that does not store it starts a transfer, and
the requests of that adapter there wait until it ends. Requests in place stay where they are.

Transfers are those of LoRAServe, section IV-B. An adapter is stored by at least one instance. Another one
fetches it with its first request from a holder, or from the adapter's location if no holder is up. An
instance has a link for each direction, and so has the location; a link carries one transfer at a time, in the
order of their starts. A failed transfer leaves source and table as they were, and the next holder is tried,
the location last. A copy that serves no share is removed when no request uses it and no transfer reads it,
never the last one of instances that are up.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import jit
from capplan.errors import InputError
from capplan.serving import NONE
from capplan.serving.rebalancing import Rebalanced, Rebalancer, Replan
from capplan.serving.routers import Fleet, Placement, adapter_of_places, placement_of, places_in_both
from capplan.spec import RebalanceSettings
from capplan.twin.cluster._scenario import ClusterScenario, MovableAdapters
from capplan.twin.cluster._steps import (
    Cluster,
    Laid,
    advance_instances,
    end_wait,
    grow,
    hand_to,
    lacks_row,
    places_by_instance,
    report_state,
    restart_member,
    start_wait,
)
from capplan.twin.instance import _trace as t
from capplan.twin.instance._clock import NEVER_NS
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


class Transfer(NamedTuple):
    """A copy of an adapter that is under way; ordered by its end and its number, which no other has."""

    end_ns: int
    number: int
    adapter: int
    source: int
    """Instance, or LOCATION."""
    instance: int
    """Receiver."""
    tried: frozenset[int]
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

    `stored`: whether each instance stores each adapter, shape (instances, adapters + 1); column 0, of the
    base model, is 1. It is changed in place. `sizes_bytes` are the sizes of adapters, shape (adapters + 1,);
    `failure` is the probability that a transfer between instances fails, with draws by `seed`.
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

        `is_used`: an instance serves a share of an adapter or has requests of it, shape of `stored`. Only
        `adapters` are looked at, if given.
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
        transfer = Transfer(end_ns, self._count, adapter, source, instance, tried)
        self._count += 1
        heapq.heappush(self._under_way, transfer)
        self._note(now_ns, "start", transfer)

    def _note(self, at_ns: int, kind: EventKind, transfer: Transfer) -> None:
        self.events.append(
            StorageEvent(at_ns, kind, transfer.adapter, transfer.instance, transfer.source, transfer.number)
        )


Reason = Literal["period", "crash", "restart"]

_PERIOD: Final = 3  # kinds of events in their order at one time, after transfers
_RESTART: Final = 1
_CRASH: Final = 2
CHANGES: Final = ("stored", "removed")
"""Kinds of events that change the stored adapters."""


@dataclass(frozen=True)
class Rebalancing:
    """Re-balancing of a cluster.

    Parameters
    ----------
    settings
        Period, forecast and solver.
    operating_points
        Highest token rate (input and output) that one instance sustains within the SLO, by rank.
    link
        Costs of transfers.
    faults
        Crashes of instances, and failures of transfers.
    replan
        Solver of settings with ``solver="capplan"``.
    """

    settings: RebalanceSettings
    operating_points: Mapping[int, float]
    link: TransferLink = field(default_factory=TransferLink)
    faults: Faults = field(default_factory=Faults)
    replan: Replan | None = None


@dataclass(frozen=True)
class RebalanceRound:
    """A new routing table."""

    at_s: float
    reason: Reason
    moved_bytes: int
    """Size of the adapters that their instances do not store yet: what is copied if all get requests."""
    unpermuted_bytes: int
    """The same if instances had not been permuted."""
    target: float
    """Forecast demand relative to what the instances sustain. Above 1 they are overloaded."""


@dataclass(frozen=True)
class FleetMoves:
    """Re-balancings, transfers and crashes of a simulated cluster."""

    rounds: tuple[RebalanceRound, ...]
    transfers: int
    """Transfers that ended well; the bytes and seconds are theirs."""
    transferred_bytes: int
    transfer_s: float
    """Sum of their times, without waits for the links."""
    failed_transfers: int
    """Transfers that failed, or were aborted by a crash."""
    waited: int
    """Requests that waited for a transfer."""
    lost: int
    """Requests that a crash ended."""
    stored_mean: float
    """Adapters stored per instance, mean over time."""
    events: tuple[StorageEvent, ...]
    """Every change of the stored adapters, and every transfer, in order."""


class FleetChanges:
    """Changes of a cluster in memory, made by `build_movable_cluster`, in the order of time.

    `seed` is that of the failures of transfers. Raise `InputError` for invalid settings, operating points or
    crashes.
    """

    route: Callable[[int, int], None]
    """Routes a request again at a time; set by the loop."""
    on_swap: Callable[[Placement, int], None]
    """Gets the placement before a swap, and the time; set by the loop."""

    def __init__(self, scenario: ClusterScenario, laid: Laid, rebalancing: Rebalancing, seed: int) -> None:
        if scenario.movable is None:
            raise InputError("must be built for re-balancing", None, "scenario")
        self.laid = laid
        """The cluster, whose arrays of places a new routing table replaces."""
        self._movable: MovableAdapters = scenario.movable
        self._requests = scenario.requests
        self._faults = rebalancing.faults
        demands = self._movable.demands
        self._rebalancer = Rebalancer(
            demands,
            scenario.instances,
            rebalancing.operating_points,
            rebalancing.settings,
            rebalancing.replan,
        )
        sizes = np.array([0, *(demand.size_bytes for demand in demands)], np.int64)
        adapters = scenario.rank.size
        self._storage = AdapterStorage(
            laid.cluster.stored, sizes[:adapters], rebalancing.link, rebalancing.faults.transfer_failure, seed
        )
        self._stored_first = int(laid.cluster.stored[:, 1:].sum())
        self._shares: Sequence[Mapping[str, float]] = shares_of(
            scenario.placement, self._movable, scenario.instances
        )
        self._period_ns = max(1, round(rebalancing.settings.every_s * NS_PER_S))
        self._counted = 0
        self._events = self._schedule(scenario.instances)
        self._rounds: list[RebalanceRound] = []
        self._waited = self._lost = 0

    def _schedule(self, instances: int) -> list[tuple[int, int, int]]:
        """Return the heap of times, kinds and instances of periods and crashes."""
        events = [(self._period_ns, _PERIOD, 0)]
        for crash in self._faults.crashes:
            if not 0 <= crash.instance < instances:
                raise InputError(f"must be below {instances}", crash.instance, "crash.instance")
            down_ns = round(crash.at_s * NS_PER_S)
            events.append((down_ns, _CRASH, crash.instance))
            if crash.for_s * NS_PER_S < NEVER_NS:
                events.append((down_ns + max(1, round(crash.for_s * NS_PER_S)), _RESTART, crash.instance))
        _require_survivors(self._faults.crashes, instances)
        heapq.heapify(events)
        return events

    @property
    def next_ns(self) -> int:
        """Time of the next change."""
        return min(self._events[0][0], self._storage.next_ns)

    @property
    def waiting(self) -> Mapping[tuple[int, int], Sequence[int]]:
        """Requests that wait for a transfer, by instance and adapter."""
        return self._storage.waiting

    def fetch(self, request: int, instance: int, now_ns: int) -> None:
        """Let a routed request wait for its adapter, which the instance does not store."""
        cluster = self.laid.cluster
        cluster.instance[request] = instance
        self._waited += 1
        start_wait(cluster, instance, request)
        self._storage.fetch(int(cluster.adapter[request]), instance, request, now_ns)

    def apply(self, now_ns: int) -> None:
        """Do the changes of a time."""
        advance_instances(self.laid.cluster, 0, len(self.laid.members), now_ns)
        while self.next_ns <= now_ns:
            if self._storage.next_ns <= now_ns:
                self._end_transfer(now_ns)
                continue
            _, kind, instance = heapq.heappop(self._events)
            if kind == _CRASH:
                self._crash(instance, now_ns)
            elif kind == _RESTART:
                self._storage.up[instance] = True
                self._rebalance(now_ns, "restart")
            else:
                self._rebalance(now_ns, "period")
                heapq.heappush(self._events, (now_ns + self._period_ns, _PERIOD, 0))

    def moves(self, horizon_ns: int) -> FleetMoves:
        """Return what happened up to the horizon."""
        events = self._storage.events
        sizes = self._storage.sizes_bytes
        ended = [event for event in events if event.kind == "stored"]
        began = {event.number: event for event in events if event.kind == "start"}
        link = self._storage.link
        transfer_ns = sum(link.duration_ns(int(sizes[each.adapter]), each.source) for each in ended)
        change = [
            (event.at_ns, 1 if event.kind == "stored" else -1) for event in events if event.kind in CHANGES
        ]
        stored_ns = self._stored_first * horizon_ns + sum(
            sign * (horizon_ns - at_ns) for at_ns, sign in change if at_ns < horizon_ns
        )
        return FleetMoves(
            rounds=tuple(self._rounds),
            transfers=len(ended),
            transferred_bytes=int(sum(sizes[each.adapter] for each in ended)),
            transfer_s=transfer_ns / NS_PER_S,
            failed_transfers=len(began) - len(ended) - len(self._storage.under_way),
            waited=self._waited,
            lost=self._lost,
            stored_mean=stored_ns / horizon_ns / len(self._storage.up),
            events=tuple(events),
        )

    def _end_transfer(self, now_ns: int) -> None:
        adapter, instance = self._storage.first
        for request in self._storage.end_first():
            self._hand_over(request, instance, adapter, now_ns)
        self._remove_unused(now_ns, {adapter})

    def _hand_over(self, request: int, instance: int, adapter: int, now_ns: int) -> None:
        """Hand over a request whose adapter has arrived; instances number all adapters alike."""
        end_wait(self.laid.cluster, instance, request)
        if lacks_row(self.laid.cluster, instance):
            grow(self.laid, instance)
        hand_to(self.laid.cluster, instance, adapter, request, now_ns)

    def _crash(self, instance: int, now_ns: int) -> None:
        """Take an instance down at the end of its step; the requests that it has are lost.

        The router of a served plan sends no request again that an instance has received.
        """
        trace = self.laid.members[instance].trace
        self._storage.take_down(instance, now_ns)
        is_here = self.laid.cluster.instance == instance
        lost = np.flatnonzero(is_here & (trace.finish_ns == t.NEVER) & (trace.status == 0))
        trace.status[lost] = t.STATUS_LOST
        restart_member(self.laid, instance)
        self._lost += lost.size
        self._rebalance(now_ns, "crash")

    def _rebalance(self, now_ns: int, reason: Reason) -> None:
        """Replace the routing table; the demand of a period is that of the requests that arrived in it."""
        up = np.flatnonzero(self._storage.up).tolist()
        names = [demand.name for demand in self._movable.demands]
        stored = [{names[number] for number in np.flatnonzero(row[1:])} for row in self._storage.stored]
        tok_s, requests = self._arrived(now_ns) if reason == "period" else (None, None)
        made = self._rebalancer.step(tok_s, stored, self._shares, up, requests)
        self._rounds.append(
            RebalanceRound(now_ns / NS_PER_S, reason, made.moved_bytes, made.unpermuted_bytes, made.target)
        )
        self._swap(made, up, now_ns)
        self._remove_unused(now_ns)

    def _arrived(self, now_ns: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return tokens per second and number of the requests since the last period, by adapter."""
        requests = self._requests
        upto = int(np.searchsorted(requests.arrival_ns, now_ns, side="right"))
        rows = slice(self._counted, upto)
        self._counted = upto
        adapter, adapters = requests.adapter[rows], self.laid.cluster.rank.size
        tokens = requests.prompt_tokens[rows].astype(np.float64) + requests.output_tokens[rows]
        tok_s = np.bincount(adapter, tokens, minlength=adapters) / (self._period_ns / NS_PER_S)
        count = np.bincount(adapter, minlength=adapters).astype(np.float64)
        return self._base_last(tok_s), self._base_last(count)

    def _base_last(self, of: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return numbers by adapter in the order of the re-balancer: the base model last, if it has any."""
        return np.append(of[1:], of[0])[: len(self._movable.demands)]

    def _swap(self, made: Rebalanced, up: Sequence[int], now_ns: int) -> None:
        cluster = self.laid.cluster
        before, after = cluster.placement, routing_table(made.shares, self._movable, up)
        standing = np.zeros(after.instance.size if cluster.fleet.standing.size else 0, np.int64)
        fleet = cluster.fleet._replace(standing=standing)
        seen = fleet if cluster.seen is cluster.fleet else _carried_reports(cluster.seen, before, after)
        own_places, own_start = places_by_instance(after, fleet)
        cluster = cluster._replace(
            placement=after, fleet=fleet, seen=seen, own_places=own_places, own_start=own_start
        )
        self.laid = self.laid._replace(cluster=cluster)
        self._shares = made.shares
        if seen is not fleet:
            returned = np.setdiff1d(after.instance, before.instance).astype(np.int64)
            read_states(self.laid.cluster, returned, now_ns)
        self.on_swap(before, now_ns)

    def _remove_unused(self, now_ns: int, adapters: set[int] | None = None) -> None:
        cluster = self.laid.cluster
        used = np.zeros(cluster.stored.shape, np.bool_)
        used[cluster.placement.instance, adapter_of_places(cluster.placement)] = True
        trace = self.laid.members[0].trace
        unfinished = (trace.finish_ns == t.NEVER) | (trace.finish_ns > now_ns)
        rows = np.flatnonzero((cluster.instance != NONE) & unfinished & (trace.status == 0))
        used[cluster.instance[rows], cluster.adapter[rows]] = True
        self._storage.remove_unused(used, now_ns, adapters)


def _carried_reports(seen: Fleet, before: Placement, after: Placement) -> Fleet:
    """Return the last reports by the places of a new table; of adapters at new holders nothing is known."""
    standing = np.zeros(after.instance.size if seen.standing.size else 0, np.int64)
    if standing.size:
        here, there = places_in_both(before, after)
        standing[there] = seen.standing[here]
    return seen._replace(standing=standing)


@jit
def read_states(cluster: Cluster, instances: NDArray[np.int64], now_ns: int) -> None:
    """Let the router read the state of instances, which have run up to now."""
    for instance in instances:
        report_state(cluster, instance, now_ns)


def _require_survivors(crashes: Sequence[Crash], instances: int) -> None:
    """Check that an instance is up at any time, and none crashes while it is down."""
    down: dict[int, float] = {}
    for crash in sorted(crashes, key=lambda crash: crash.at_s):
        down = {instance: end_s for instance, end_s in down.items() if end_s > crash.at_s}
        if crash.instance in down:
            raise InputError("must not crash while it is down", crash.instance, "crash.instance")
        down[crash.instance] = crash.at_s + crash.for_s
        if len(down) == instances:
            raise InputError("must leave an instance that is up", crash.at_s, "crash.at_s")


def shares_of(placement: Placement, movable: MovableAdapters, instances: int) -> list[dict[str, float]]:
    """Return the shares of each instance by name, those of the base model only if it has traffic."""
    names = movable.names
    adapter = adapter_of_places(placement)
    shares: list[dict[str, float]] = [{} for _ in range(instances)]
    places = zip(placement.instance.tolist(), adapter.tolist(), placement.share.tolist(), strict=True)
    for instance, number, share in places:
        if share > 0.0 and number in names:
            shares[instance][names[number]] = share
    return shares


def routing_table(
    shares: Sequence[Mapping[str, float]], movable: MovableAdapters, up: Sequence[int]
) -> Placement:
    """Return the placement of shares above 0; instances that are up have the base model, and number alike."""
    number = {name: i for i, name in movable.names.items()}
    base = movable.names.get(0)
    rows = [(0, i, 1.0 / len(up) if base is None else shares[i].get(base, 0.0)) for i in up]
    for i, served in enumerate(shares):
        rows += [(number[name], i, share) for name, share in served.items() if share > 0.0 and name != base]
    adapter, instance, share = (np.array(column) for column in zip(*rows, strict=True))
    return placement_of(adapter, instance, adapter, share, movable.stored.shape[1] - 1)
