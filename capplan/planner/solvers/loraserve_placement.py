"""LoRAServe's placement (section IV-A, Algorithm 1): server budgets, packing, leftovers, server labels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from scipy.optimize import linear_sum_assignment

from capplan.errors import InputError

_CAP_STEP: Final = 0.05
"""Increase of the utilization cap if no server has room for a leftover, relative to the target. Smaller steps
balance better, but split adapters into more replicas."""
_MIN_REST: Final = 0.01
"""Share of an adapter below which its rest stays with its last server."""
_NEGLIGIBLE: Final = 1e-9
"""Share of an adapter, or of a server, that is rounding error."""


@dataclass(frozen=True)
class AdapterDemand:
    """An adapter to place."""

    name: str
    rank: int
    """As in the workload; 0 for the base model."""
    tok_s: float
    """Expected input and output tokens per second."""
    bytes: int = 0
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
    literal_leftovers
        Put leftovers on the server of the largest rank even if it has no room, as printed in the paper.

    Raises
    ------
    InputError
        If a rank has no positive operating point, there is no server, an adapter is given twice, or `stored`
        has another length.
    """
    _validate(adapters, operating_points, servers, stored)
    by_rank: dict[int, list[PendingAdapter]] = {}
    for adapter in sorted(adapters, key=lambda adapter: (-adapter.rank, adapter.name)):
        by_rank.setdefault(adapter.rank, []).append(PendingAdapter(adapter))
    demand = {
        rank: math.fsum(each.demand.tok_s for each in pending) / operating_points[rank]
        for rank, pending in by_rank.items()
    }
    target = math.fsum(demand.values()) / servers
    budgets = server_budgets(demand, servers)
    filled = [ServerBin(operating_points) for _ in range(servers)]
    first = 0
    for rank, pending in by_rank.items():
        if budgets[rank]:
            _pack(pending, filled[first : first + budgets[rank]], target)
        first += budgets[rank]
    everything = [each for pending in by_rank.values() for each in pending]
    cap = _place_leftovers(everything, filled, target, literal=literal_leftovers)
    bytes_of = {adapter.name: adapter.bytes for adapter in adapters}
    bin_of, bytes_to_copy = _label_servers([server.phi for server in filled], stored, bytes_of)
    total = dict.fromkeys(bytes_of, 0.0)
    for server in filled:
        for name, phi in server.phi.items():
            total[name] += phi
    shares = tuple({name: phi / total[name] for name, phi in filled[i].phi.items()} for i in bin_of)
    used = tuple(filled[i].utilization() for i in bin_of)
    return LoraservePlacement(shares, bytes_to_copy, target, cap, used, budgets)


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
    for rank in sorted({adapter.rank for adapter in adapters}):
        point = operating_points.get(rank)
        if point is None or not 0.0 < point < math.inf:
            raise InputError("must be given, above 0 and finite", point, f"operating point of rank {rank}")
    names = Counter(adapter.name for adapter in adapters)
    if len(names) < len(adapters):
        raise InputError("must be given once", names.most_common(1)[0][0], "adapters")


class ServerBin:
    """Shares on one server, all charged at the operating point of the largest rank with demand."""

    def __init__(self, operating_points: Mapping[int, float]) -> None:
        self._points = operating_points
        self._tok_s = 0.0
        self._bytes = 0
        self.phi: dict[str, float] = {}
        """Share of each adapter."""
        self.max_rank = 0
        """Largest rank with demand; 0 without demand."""

    @property
    def stored(self) -> tuple[int, int]:
        """Bytes of the adapters, and their number."""
        return self._bytes, len(self.phi)

    def utilization(self, rank: int = 0) -> float:
        """Return demand over operating point, as with an adapter of this rank on the server."""
        return self._tok_s / self._points[max(self.max_rank, rank)] if self._tok_s > 0.0 else 0.0

    def room_tok_s(self, cap: float, rank: int) -> float:
        """Return the demand of an adapter of this rank that fits below a cap; 0 if negligible."""
        full = cap * self._points[max(self.max_rank, rank)]
        room = full - self._tok_s
        return room if room > _NEGLIGIBLE * full else 0.0

    def take(self, adapter: AdapterDemand, share: float) -> None:
        """Add a share of an adapter."""
        if adapter.name not in self.phi:
            self._bytes += adapter.bytes
        self.phi[adapter.name] = self.phi.get(adapter.name, 0.0) + share
        if adapter.tok_s > 0.0:
            self._tok_s += share * adapter.tok_s
            self.max_rank = max(self.max_rank, adapter.rank)


@dataclass
class PendingAdapter:
    """An adapter during placement."""

    demand: AdapterDemand
    left: float = 1.0
    """Share that is not placed yet."""
    servers: list[ServerBin] = field(default_factory=list)
    """Servers with a share, in the order of their last one."""

    def place(self, server: ServerBin, share: float) -> None:
        """Place up to this share on a server; everything if no other replica is allowed or little is left."""
        last = self._is_full(len(self.servers) + (server not in self.servers))
        taken = self.left if last or self.left - share <= _NEGLIGIBLE else share
        server.take(self.demand, taken)
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


def _pack(pending: Sequence[PendingAdapter], servers: Sequence[ServerBin], cap: float) -> None:
    """Fill the servers of one rank in turn, hottest adapters first, with an adapter split at each edge.

    This is next fit with splitting: at most one more replica per server than there are adapters, few hot
    adapters on the first server and the long tail on the last (figure 12 of the paper). Adapters without
    demand go to the server that stores the fewest bytes.
    """
    at = 0
    for each in sorted(pending, key=lambda each: (-each.demand.tok_s, each.demand.name)):
        tok_s = each.demand.tok_s
        if tok_s == 0.0:
            each.place(min(servers, key=lambda server: server.stored), 1.0)
            continue
        while each.left > 0.0 and at < len(servers):
            room_tok_s = servers[at].room_tok_s(cap, each.demand.rank)
            if room_tok_s > 0.0:
                each.place(servers[at], room_tok_s / tok_s)
            if each.left > 0.0:
                at += 1


def _place_leftovers(
    pending: Sequence[PendingAdapter], servers: Sequence[ServerBin], cap: float, *, literal: bool
) -> float:
    """Place what is left, largest rank first, then largest demand; return the final cap."""
    step = _CAP_STEP * cap

    def order(each: PendingAdapter) -> tuple[int, float, str]:
        return -each.demand.rank, -each.demand.tok_s * each.left, each.demand.name

    for each in sorted((each for each in pending if each.left > 0.0), key=order):
        rank = each.demand.rank
        if each.demand.tok_s == 0.0:
            continue
        while each.left > 0.0:
            allowed = each.servers if each.has_all_replicas else servers
            if literal:
                each.place(min(allowed, key=_by_max_rank), each.left)
            elif each.servers and each.left < _MIN_REST:
                each.place(each.servers[-1], each.left)
            elif each.has_all_replicas:
                each.place(min(allowed, key=ServerBin.utilization), each.left)
            elif (server := _with_room(rank, servers, cap)) is not None:
                each.place(server, server.room_tok_s(cap, rank) / each.demand.tok_s)
            else:
                cap = _raise_cap(rank, servers, cap, step)
    for each in sorted((each for each in pending if each.left > 0.0), key=order):
        rank = each.demand.rank  # a server whose largest rank is lower is second choice
        each.place(min(servers, key=lambda s: (0 < s.max_rank < rank, *s.stored)), 1.0)
    return cap


def _by_max_rank(server: ServerBin) -> tuple[int, float]:
    return -server.max_rank, server.utilization()


def _with_room(rank: int, servers: Iterable[ServerBin], cap: float) -> ServerBin | None:
    """Return the server with room that has the largest rank, then the least utilization.

    A server whose largest rank is lower than the adapter's is second choice.
    """
    free = [server for server in servers if server.room_tok_s(cap, rank) > 0.0]
    preferred = [server for server in free if server.max_rank >= rank]
    if preferred:
        return min(preferred, key=_by_max_rank)
    return min(free, key=lambda server: server.utilization(rank), default=None)


def _raise_cap(rank: int, servers: Iterable[ServerBin], cap: float, step: float) -> float:
    """Return the cap after the fewest steps with which a server has room."""
    least = min(server.utilization(rank) for server in servers)
    cap += step * max(1, math.floor((least - cap) / step))
    while all(server.room_tok_s(cap, rank) == 0.0 for server in servers):
        cap += step
    return cap


def _label_servers(
    bins: Sequence[Collection[str]], stored: Sequence[Collection[str]] | None, bytes_of: Mapping[str, int]
) -> tuple[list[int], int]:
    """Return the bin of each server and the bytes to copy, fewest by the Hungarian method.

    Ties go to the labelling that leaves most bins at their index: costs are integers in units of their
    common divisor, and an index that changes costs less than one unit. Floats represent these exactly.
    """
    sets = [frozenset(names) for names in stored or [()] * len(bins)]
    cost = np.array(
        [[sum(bytes_of[name] for name in names if name not in there) for there in sets] for names in bins]
    )
    unit = math.gcd(*cost.ravel().tolist()) or 1
    elsewhere = 1 - np.eye(len(cost), dtype=np.int64)
    rows, servers = linear_sum_assignment(((cost // unit) * (len(cost) + 1) + elsewhere).astype(np.float64))
    bin_of = dict(zip(servers.tolist(), rows.tolist(), strict=True))
    return [bin_of[server] for server in range(len(bins))], int(cost[rows, servers].sum())
