"""Placement of adapters on servers: LoRAServe's, and near the one in force.

LoRAServe's placement (section IV-A, Algorithm 1) has server budgets, packing, leftovers, and server labels
(PERMUTEASSIGNMENT): the bin of each server with the fewest bytes to copy.

The other one makes moves between servers, with a price on copied bytes. A server's utilization is its demand
over the operating point of its largest rank, as in LoRAServe's placement. From each server, the most utilized
first, the best move of an adapter, or of a part of its demand, is made as long as it pays: it reduces the sum
of squared utilizations, over twice the server's, by more than the price of the bytes to copy. Shares stay
where no move pays, so few bytes move; LoRAServe packs all of them each time.

Such moves do not lead out of every placement, such as one with a high rank on all servers. LoRAServe's
placement, improved by the same moves, replaces the result if it reduces the highest utilization by more than
the price of its bytes.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array

from capplan.errors import InputError


class ServerLabels(NamedTuple):
    """Bins of servers, and the size of the adapters that they do not store yet."""

    bin_of: list[int]
    """Bin of each server."""
    bytes_to_copy: int
    unpermuted_bytes: int
    """Bytes to copy if each bin went to the server of its number."""


def label_servers(
    bins: Sequence[Collection[str]],
    stored: Sequence[Collection[str]] | None,
    bytes_of: Mapping[str, int],
    *,
    permute: bool = True,
) -> ServerLabels:
    """Return the bin of each server, with the fewest bytes to copy by the Hungarian method.

    Ties go to the labelling that leaves most bins at their index: costs are integers in units of their common
    divisor, and an index that changes costs less than one unit. Floats represent these exactly. Without
    `permute`, each bin goes to the server of its number.

    `bins` and `stored` are names of adapters, of each bin and of those that each server stores (None:
    nothing); adapters without a size in `bytes_of` are ignored.
    """
    cost = _bytes_to_copy(bins, stored or [()] * len(bins), bytes_of)
    unpermuted = int(np.trace(cost))
    if not permute:
        return ServerLabels(list(range(len(bins))), unpermuted, unpermuted)
    unit = max(1, int(np.gcd.reduce(cost, axis=None)))
    elsewhere = 1 - np.eye(len(cost), dtype=np.int64)
    rows, servers = linear_sum_assignment(((cost // unit) * (len(cost) + 1) + elsewhere).astype(np.float64))
    bin_of = rows[np.argsort(servers)].tolist()
    return ServerLabels(bin_of, int(cost[rows, servers].sum()), unpermuted)


def _bytes_to_copy(
    bins: Sequence[Collection[str]], stored: Sequence[Collection[str]], bytes_of: Mapping[str, int]
) -> NDArray[np.int64]:
    """Return the bytes that each server lacks of each bin, shape (bins, servers)."""
    column = {name: i for i, name in enumerate(bytes_of)}
    sizes = np.array([*bytes_of.values()], np.int64)
    needed, held = _members(bins, column), _members(stored, column)
    needed = needed.multiply(sizes[np.newaxis, :]).tocsr()
    everything = np.asarray(needed.sum(axis=1), np.int64).reshape(-1, 1)
    return np.asarray(everything - (needed @ held.T).toarray(), np.int64)


def _members(sets: Sequence[Collection[str]], column: Mapping[str, int]) -> csr_array:
    """Return the matrix of sets and members, of zeros and ones."""
    columns = [[column[name] for name in frozenset(names) if name in column] for names in sets]
    ends = np.cumsum([0, *map(len, columns)])
    flat = np.array([i for own in columns for i in own], np.int64)
    return csr_array((np.ones(flat.size, np.int64), flat, ends), shape=(len(sets), len(column)))


_CAP_STEP: Final = 0.05
"""Increase of the utilization cap if no server has room for a leftover, relative to the target. Smaller steps
balance better, but split adapters into more replicas."""
_MIN_REST: Final = 0.01
"""Share of an adapter below which its rest stays with its last server."""
_NEGLIGIBLE: Final = 1e-9
"""Share of an adapter, or of a server, that is rounding error."""
_LEAST_TOK_S: Final = 1e-9
"""Demand below which an adapter has none: a token in 30 years."""


@dataclass(frozen=True)
class AdapterDemand:
    """An adapter to place."""

    name: str
    rank: int
    """As in the workload; 0 for the base model."""
    tok_s: float
    """Expected input and output tokens per second."""
    size_bytes: int = 0
    """Size of the weights."""
    max_replicas: int | None = None
    """Maximum number of servers that share its traffic; None: any number. The paper has no such bound."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise InputError("must be a whole number >= 0", self.rank, f"rank of adapter {self.name}")
        if not 0.0 <= self.tok_s < math.inf:
            raise InputError("must be a finite number >= 0", self.tok_s, f"demand of adapter {self.name}")


@dataclass(frozen=True)
class LoraservePlacement:
    """Placement of adapters on servers."""

    shares: tuple[Mapping[str, float], ...]
    """Share of every adapter that each server serves. Over servers they sum to 1; an adapter without demand
    is on one server."""
    bytes_to_copy: int
    """Size of the adapters that their servers do not store yet."""
    unpermuted_bytes: int
    """The same if servers were not permuted."""
    target: float
    """Mean utilization of the servers if the demand were spread evenly. Above 1 there are too few servers."""
    cap: float
    """Utilization up to which servers were filled, at least `target`; not an upper bound with literal
    leftovers."""
    utilization: tuple[float, ...]
    """Utilization of each server, charged at its largest rank with demand."""
    budgets: Mapping[int, int]
    """Number of servers reserved for each rank."""


def place(
    adapters: Sequence[AdapterDemand],
    operating_points: Mapping[int, float],
    servers: int,
    *,
    stored: Sequence[Collection[str]] | None = None,
    permute: bool = True,
    literal_leftovers: bool = False,
) -> LoraservePlacement:
    """Place adapters on all servers of a cluster, also if the demand exceeds what they sustain.

    Parameters
    ----------
    adapters
        Adapters with their demand in the next time step.
    operating_points
        Highest token rate (input and output) that one server sustains, by rank.
    servers
        Number of equal servers.
    stored
        Names of the adapters that each server stores; None: nothing.
    permute
        Label servers such that the fewest bytes are copied; else in the order of packing.
    literal_leftovers
        Put leftovers on the server of the largest rank even if it has no room, as printed in the paper.

    Raises
    ------
    InputError
        If a rank has no positive operating point, there is no server, an adapter is given twice, or `stored`
        has another length.
    """
    _validate(adapters, operating_points, servers, stored)
    adapters = [replace(a, tok_s=0.0) if a.tok_s < _LEAST_TOK_S else a for a in adapters]
    by_rank: dict[int, list[PendingAdapter]] = {}
    for adapter in sorted(adapters, key=lambda adapter: (-adapter.rank, adapter.name)):
        by_rank.setdefault(adapter.rank, []).append(PendingAdapter(adapter))
    demand = {
        rank: math.fsum(each.demand.tok_s for each in pending) / operating_points[rank]
        for rank, pending in by_rank.items()
    }
    target = math.fsum(demand.values()) / servers
    budgets = server_budgets(demand, servers)
    bins = ServerBins(servers, operating_points)
    first = 0
    for rank, pending in by_rank.items():
        if budgets[rank]:
            _pack(pending, bins, range(first, first + budgets[rank]), target)
        first += budgets[rank]
    everything = [each for pending in by_rank.values() for each in pending]
    cap = _place_leftovers(everything, bins, target, literal=literal_leftovers)
    labels = label_servers(bins.phi, stored, {a.name: a.size_bytes for a in adapters}, permute=permute)
    used = bins.utilization()[labels.bin_of].tolist()
    shares = _normalised(bins.phi)
    return LoraservePlacement(
        shares=tuple(shares[i] for i in labels.bin_of),
        bytes_to_copy=labels.bytes_to_copy,
        unpermuted_bytes=labels.unpermuted_bytes,
        target=target,
        cap=cap,
        utilization=tuple(used),
        budgets=budgets,
    )


def _validate(
    adapters: Sequence[AdapterDemand],
    operating_points: Mapping[int, float],
    servers: int,
    stored: Sequence[Collection[str]] | None,
) -> None:
    if servers < 1:
        raise InputError("must be >= 1", servers, "servers")
    if stored is not None and len(stored) != servers:
        raise InputError(f"must have an entry for each of the {servers} servers", len(stored), "stored")
    require_points(operating_points, (adapter.rank for adapter in adapters))
    names = Counter(adapter.name for adapter in adapters)
    if len(names) < len(adapters):
        raise InputError("must be given once", names.most_common(1)[0][0], "adapters")


def require_points(operating_points: Mapping[int, float], ranks: Iterable[int]) -> None:
    """Raise `InputError` unless each rank has a positive, finite operating point."""
    for rank in sorted(set(ranks)):
        point = operating_points.get(rank)
        if point is None or not 0.0 < point < math.inf:
            raise InputError("must be given, above 0 and finite", point, f"operating point of rank {rank}")


def covering_points(operating_points: Mapping[int, float], ranks: Iterable[int]) -> dict[int, float]:
    """Return the operating points of ranks: of the rank itself, of the next larger one, or of the largest.

    Raise `InputError` if there is no point of an adapter, or none of the base model, whose rank is 0.
    """
    known = sorted(rank for rank in operating_points if rank > 0)
    found = {}
    for rank in set(ranks):
        at_least = next((each for each in known if each >= rank), known[-1] if known else rank)
        chosen = rank if rank in operating_points or rank == 0 else at_least
        require_points(operating_points, (chosen,))
        found[rank] = operating_points[chosen]
    return found


def _normalised(phi: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return shares that sum to 1 over the servers."""
    total: dict[str, float] = {}
    for served in phi:
        for name, share in served.items():
            total[name] = total.get(name, 0.0) + share
    return [{name: share / total[name] for name, share in served.items()} for served in phi]


class ServerBins:
    """Shares on servers, all those of a server charged at the operating point of its largest busy rank."""

    def __init__(self, servers: int, operating_points: Mapping[int, float]) -> None:
        self._points = operating_points
        self._point = np.full(servers, operating_points.get(0, math.inf))
        self._tok_s = np.zeros(servers)
        self._bytes = [0] * servers
        self.phi: list[dict[str, float]] = [{} for _ in range(servers)]
        """Share of each adapter, by server."""
        self.max_rank = np.zeros(servers, np.int64)
        """Largest rank with demand; 0 without demand."""

    def stored(self, server: int) -> tuple[int, int]:
        """Return the bytes of the adapters of a server, and their number."""
        return self._bytes[server], len(self.phi[server])

    def utilization(self, rank: int = 0) -> NDArray[np.float64]:
        """Return demand over operating point, as with an adapter of this rank on each server."""
        return np.asarray(self._tok_s / self._points_with(rank))

    def room_tok_s(self, cap: float, rank: int) -> NDArray[np.float64]:
        """Return the demand of an adapter of this rank that fits below a cap; 0 if negligible."""
        full = cap * self._points_with(rank)
        room = full - self._tok_s
        return np.where(room > _NEGLIGIBLE * full, room, 0.0)

    def room_of_tok_s(self, server: int, cap: float, rank: int) -> float:
        """Return the room of one server."""
        full = cap * (self._point[server] if self.max_rank[server] >= rank else self._points[rank])
        room = float(full - self._tok_s[server])
        return room if room > _NEGLIGIBLE * full else 0.0

    def take(self, server: int, adapter: AdapterDemand, share: float) -> None:
        """Add a share of an adapter to a server."""
        phi = self.phi[server]
        if adapter.name not in phi:
            self._bytes[server] += adapter.size_bytes
        phi[adapter.name] = phi.get(adapter.name, 0.0) + share
        if adapter.tok_s > 0.0:
            self._tok_s[server] += share * adapter.tok_s
            if adapter.rank > self.max_rank[server]:
                self.max_rank[server] = adapter.rank
                self._point[server] = self._points[adapter.rank]

    def _points_with(self, rank: int) -> NDArray[np.float64]:
        if rank == 0:
            return self._point
        return np.where(self.max_rank >= rank, self._point, self._points[rank])


@dataclass
class PendingAdapter:
    """An adapter during placement."""

    demand: AdapterDemand
    left: float = 1.0
    """Share that is not placed yet."""
    servers: list[int] = field(default_factory=list)
    """Servers with a share, in the order of their last one."""

    def place(self, bins: ServerBins, server: int, share: float) -> None:
        """Place up to this share on a server; everything if no other replica is allowed or little is left."""
        last = self._is_full(len(self.servers) + (server not in self.servers))
        taken = self.left if last or self.left - share <= _NEGLIGIBLE else share
        bins.take(server, self.demand, taken)
        if server in self.servers:
            self.servers.remove(server)
        self.servers.append(server)
        self.left -= taken

    @property
    def has_all_replicas(self) -> bool:
        """Whether `max_replicas` allows no other server."""
        return self._is_full(len(self.servers))

    def _is_full(self, replicas: int) -> bool:
        return self.demand.max_replicas is not None and replicas >= self.demand.max_replicas


def server_budgets(demand: Mapping[int, float], servers: int) -> dict[int, int]:
    """Return the number of servers of each rank, at most `servers` in total.

    `demand` is in servers. The share of each rank is rounded; five ranks of equal traffic on four servers
    round to five. Then servers are taken back one at a time, from the rank whose rounding gained most, the
    lowest of equals. The paper does not say which.
    """
    total = math.fsum(demand.values())
    if total <= 0.0:
        return dict.fromkeys(demand, 0)
    exact = {rank: value / total * servers for rank, value in demand.items()}
    budgets = {rank: math.floor(value + 0.5) for rank, value in exact.items()}
    for _ in range(sum(budgets.values()) - servers):
        budgets[min(budgets, key=lambda rank: (exact[rank] - budgets[rank], rank))] -= 1
    return budgets


def _pack(pending: Sequence[PendingAdapter], bins: ServerBins, servers: range, cap: float) -> None:
    """Fill the servers of one rank in turn, hottest adapters first, with an adapter split at each edge.

    This is next fit with splitting: at most one more replica per server than there are adapters, few hot
    adapters on the first server and the long tail on the last (figure 12 of the paper). Adapters without
    demand go to the server that stores the fewest bytes.
    """
    ordered = sorted(pending, key=lambda each: (-each.demand.tok_s, each.demand.name))
    at = servers.start
    for each in ordered:
        tok_s = each.demand.tok_s
        while tok_s > 0.0 and each.left > 0.0 and at < servers.stop:
            room_tok_s = bins.room_of_tok_s(at, cap, each.demand.rank)
            if room_tok_s > 0.0:
                each.place(bins, at, room_tok_s / tok_s)
            if each.left > 0.0:
                at += 1
    _balance_bytes([each for each in ordered if each.demand.tok_s == 0.0], bins, servers)


def _balance_bytes(pending: Iterable[PendingAdapter], bins: ServerBins, servers: Iterable[int]) -> None:
    """Place each adapter on the server that stores the fewest bytes, then the fewest adapters."""
    heap = [(*bins.stored(server), server) for server in servers]
    heapq.heapify(heap)
    for each in pending:
        server = heap[0][-1]
        each.place(bins, server, 1.0)
        heapq.heapreplace(heap, (*bins.stored(server), server))


def _place_leftovers(
    pending: Sequence[PendingAdapter], bins: ServerBins, cap: float, *, literal: bool
) -> float:
    """Place what is left, largest rank first, then largest demand; return the final cap."""
    step = _CAP_STEP * cap

    def order(each: PendingAdapter) -> tuple[int, float, str]:
        return -each.demand.rank, -each.demand.tok_s * each.left, each.demand.name

    left = sorted((each for each in pending if each.left > 0.0), key=order)
    for each in left:
        rank, tok_s = each.demand.rank, each.demand.tok_s
        while tok_s > 0.0 and each.left > 0.0:
            if literal:
                each.place(bins, _literal_choice(each, bins), each.left)
            elif each.servers and each.left < _MIN_REST:
                each.place(bins, each.servers[-1], each.left)
            elif each.has_all_replicas:
                used = bins.utilization()
                each.place(bins, min(each.servers, key=lambda server: used[server]), each.left)
            elif (server := _with_room(rank, bins, cap)) is not None:
                each.place(bins, server, bins.room_of_tok_s(server, cap, rank) / tok_s)
            else:
                cap = _raise_cap(rank, bins, cap, step)
    idle = (each for each in left if each.demand.tok_s == 0.0)
    for rank, group in groupby(idle, key=lambda each: each.demand.rank):
        is_lower = (bins.max_rank > 0) & (bins.max_rank < rank)  # second choice
        chosen = np.flatnonzero(is_lower if is_lower.all() else ~is_lower)
        _balance_bytes(group, bins, chosen.tolist())
    return cap


def _literal_choice(each: PendingAdapter, bins: ServerBins) -> int:
    used = bins.utilization()
    allowed = each.servers if each.has_all_replicas else range(used.size)
    return min(allowed, key=lambda server: (-bins.max_rank[server], used[server]))


def _with_room(rank: int, bins: ServerBins, cap: float) -> int | None:
    """Return the server with room that has the largest rank, then the least utilization.

    A server whose largest rank is lower than the adapter's is second choice.
    """
    free = bins.room_tok_s(cap, rank) > 0.0
    if not free.any():
        return None
    preferred = free & (bins.max_rank >= rank)
    if preferred.any():
        largest = bins.max_rank[preferred].max()
        among = preferred & (bins.max_rank == largest)
        return int(np.argmin(np.where(among, bins.utilization(), math.inf)))
    return int(np.argmin(np.where(free, bins.utilization(rank), math.inf)))


def _raise_cap(rank: int, bins: ServerBins, cap: float, step: float) -> float:
    """Return the cap after the fewest steps with which a server has room."""
    least = float(bins.utilization(rank).min())
    cap += step * max(1, math.floor((least - cap) / step))
    while not bins.room_tok_s(cap, rank).any():
        cap += step
    return cap


_LEAST_GAIN: Final = 1e-3
"""Least reduction of the utilization by a move."""
_LEAST_PART: Final = 0.02
"""Least part of an adapter's demand that moves alone."""
_PASSES: Final = 4
_MOVES_PER_SERVER: Final = 32
"""Most moves from a server in a pass."""
_BYTES_PER_GB: Final = 1e9


def place_near(
    adapters: Sequence[AdapterDemand],
    operating_points: Mapping[int, float],
    stored: Sequence[Collection[str]],
    shares: Sequence[Mapping[str, float]],
    price_per_gb: float,
) -> list[dict[str, float]]:
    """Return the shares of each server, from those in force.

    Parameters
    ----------
    adapters
        Adapters with their forecast demand.
    operating_points
        Highest token rate that one server sustains, by rank.
    stored, shares
        Adapters that each server stores, and their shares in force. What no server serves is placed first.
    price_per_gb
        Least gain of a move per GB to copy: reduction of the sum of squared utilizations, over twice the
        utilization of the server that it relieves; and of LoRAServe's placement: reduction of the highest
        utilization.
    """

    def improved(start: Sequence[Mapping[str, float]]) -> _Search:
        search = _Search(adapters, operating_points, stored, start, price_per_gb)
        search.place_unserved()
        for _ in range(_PASSES):
            if not search.improve():
                break
        return search

    moved = improved(shares)
    packed = improved(place(adapters, operating_points, len(shares), stored=stored).shares)
    return (packed if packed.price() < moved.price() - _LEAST_GAIN else moved).result()


class _Search:
    def __init__(
        self,
        adapters: Sequence[AdapterDemand],
        operating_points: Mapping[int, float],
        stored: Sequence[Collection[str]],
        shares: Sequence[Mapping[str, float]],
        price_per_gb: float,
    ) -> None:
        self.adapters = adapters
        number = {adapter.name: i for i, adapter in enumerate(adapters)}
        self.ranks = np.array([adapter.rank for adapter in adapters])
        self.tok_s = np.array([adapter.tok_s for adapter in adapters])
        self.per_tok_s = {rank: 1.0 / operating_points[rank] for rank in set(self.ranks.tolist())}
        self._known = np.array(sorted({0, *self.per_tok_s}))
        self._values = np.array([self.per_tok_s.get(int(rank), 0.0) for rank in self._known])
        self.cost = price_per_gb / _BYTES_PER_GB * np.array([adapter.size_bytes for adapter in adapters])
        self.most = np.array([adapter.max_replicas or len(shares) for adapter in adapters])
        self.shares = [
            {number[name]: share for name, share in own.items() if name in number and share > 0.0}
            for own in shares
        ]
        self.stored = np.zeros((len(shares), len(adapters)), np.bool_)
        for row, names in zip(self.stored, stored, strict=True):
            row[[number[name] for name in names if name in number]] = True
        self.serves = np.zeros_like(self.stored)
        for row, own in zip(self.serves, self.shares, strict=True):
            row[list(own)] = True
        self.load = np.zeros(len(shares))
        self.rank = np.zeros(len(shares), np.int64)
        for server in range(len(shares)):
            self._update(server)

    def place_unserved(self) -> None:
        """Complete the shares of adapters: those served in part where they are, others on a new server."""
        total = np.zeros(len(self.adapters))
        for own in self.shares:
            for adapter, share in own.items():
                total[adapter] += share
        for own in self.shares:
            for adapter in own:
                own[adapter] /= total[adapter]
        for server in range(len(self.shares)):
            self._update(server)
        for adapter in sorted(np.flatnonzero(total == 0.0).tolist(), key=lambda a: (-self.tok_s[a], a)):
            after = self._with(np.array([adapter]), np.array([self.tok_s[adapter]]))[0]
            server = int(np.argmin(after + np.where(self.stored[:, adapter], 0.0, self.cost[adapter])))
            self.shares[server][adapter] = 1.0
            self.serves[server, adapter] = True
            self._update(server)

    def improve(self) -> bool:
        """Make moves from each server while they pay, the most utilized first; return whether one did."""
        improved = False
        for source in np.argsort(-self.utilization(), kind="stable").tolist():
            for _ in range(_MOVES_PER_SERVER):
                if not self._improve(source):
                    break
                improved = True
        return improved

    def _improve(self, source: int) -> bool:
        used, own = self.utilization(), self.shares[source]
        if used[source] <= _LEAST_GAIN:
            return False
        here = np.array([adapter for adapter in own if self.tok_s[adapter] > 0.0], np.int64)
        loads = np.array([own[adapter] for adapter in here.tolist()]) * self.tok_s[here]
        per_target = self._per_tok_s(np.maximum(self.rank[np.newaxis, :], self.ranks[here, np.newaxis]))
        per_source = float(self._per_tok_s(self.rank[source : source + 1])[0])
        even = (used[source] - self.load * per_target) / (per_source + per_target)
        part = np.minimum(loads[:, np.newaxis], np.maximum(even, 0.0))
        is_served = self.serves[:, here].T
        is_whole = part >= loads[:, np.newaxis] * (1.0 - _LEAST_PART)
        part = np.where(is_whole, loads[:, np.newaxis], part)
        per_left = np.where(is_whole, self._per_tok_s(self._ranks_left(here))[:, np.newaxis], per_source)
        left, there = (self.load[source] - part) * per_left, (self.load + part) * per_target
        before, after = used[source] ** 2 + used**2, left**2 + there**2
        gain = (before - after) / (2.0 * used[source])
        gain -= np.where(is_served | self.stored[:, here].T, 0.0, self.cost[here, np.newaxis])
        allowed = is_whole | is_served | (is_served.sum(axis=1) < self.most[here])[:, np.newaxis]
        allowed &= part >= _LEAST_PART * self.tok_s[here, np.newaxis]
        gain[~allowed] = -np.inf
        gain[:, source] = -np.inf
        at, target = np.unravel_index(int(np.argmax(gain)), gain.shape)
        if gain[at, target] <= _LEAST_GAIN:
            return False
        self._move(int(here[at]), source, int(target), float(part[at, target]), bool(is_whole[at, target]))
        return True

    def _ranks_left(self, here: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the largest rank of a server's busy adapters without each of them."""
        ranks = self.ranks[here]
        first, second = (0, *sorted(ranks.tolist()))[-1], (0, 0, *sorted(ranks.tolist()))[-2]
        return np.asarray(np.where(ranks == first, second, first))

    def result(self) -> list[dict[str, float]]:
        """Return the shares by name."""
        return [{self.adapters[adapter].name: share for adapter, share in own.items()} for own in self.shares]

    def price(self) -> float:
        """Return the highest utilization, and the price of the bytes to copy."""
        copied = (self.serves & ~self.stored).sum(axis=0)
        return float(self.utilization().max() + copied @ self.cost)

    def utilization(self) -> NDArray[np.float64]:
        return np.asarray(self.load * self._per_tok_s(self.rank))

    def _move(self, adapter: int, source: int, target: int, tok_s: float, whole: bool) -> None:
        own, other = self.shares[source], self.shares[target]
        share = own[adapter] if whole else tok_s / float(self.tok_s[adapter])
        other[adapter] = other.get(adapter, 0.0) + share
        if whole:
            del own[adapter]
        else:
            own[adapter] -= share
        self.serves[source, adapter], self.serves[target, adapter] = not whole, True
        self._update(source)
        self._update(target)

    def _with(self, adapters: NDArray[np.int64], tok_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the utilization of servers with more demand, shape (adapters, servers)."""
        ranks = np.maximum(self.rank[np.newaxis, :], self.ranks[adapters, np.newaxis])
        return np.asarray((self.load + tok_s[:, np.newaxis]) * self._per_tok_s(ranks))

    def _per_tok_s(self, ranks: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the utilization per token per second, at the operating points of ranks; 0: no demand."""
        return np.asarray(self._values[np.searchsorted(self._known, ranks)])

    def _update(self, server: int) -> None:
        own = self.shares[server]
        busy = [adapter for adapter in own if self.tok_s[adapter] > 0.0]
        self.load[server] = sum(own[adapter] * self.tok_s[adapter] for adapter in busy)
        self.rank[server] = max((int(self.ranks[adapter]) for adapter in busy), default=0)
