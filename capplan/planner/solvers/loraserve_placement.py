"""LoRAServe's placement (section IV-A, Algorithm 1): budgets, packing, remaining shares, bin labels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from capplan.errors import InputError


@dataclass(frozen=True)
class PlacementVariants:
    """Readings of what the paper leaves open (PAPER_NOTES section 2); the defaults are ours.

    Attributes
    ----------
    largest_remainder
        Share out servers among ranks by largest remainder instead of rounding and repairing.
    literal_leftovers
        Put leftovers on the server of the highest max rank whether it has room or not, as printed.
    cap_step
        By how much the cap of all servers rises when no server has room for a leftover, as a share of the
        target utilisation.
    least_rest
        A smaller rest of an adapter stays with the last server used.
    """

    largest_remainder: bool = False
    literal_leftovers: bool = False
    cap_step: float = 0.05
    least_rest: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 < self.cap_step <= 1.0:
            raise InputError("must be above 0 and at most 1", self.cap_step, "cap_step")
        if not 0.0 <= self.least_rest < 1.0:
            raise InputError("must be at least 0 and below 1", self.least_rest, "least_rest")


@dataclass(frozen=True)
class LoraservePlacement:
    """Who serves what.

    Attributes
    ----------
    shares
        Of each server: the share phi of every adapter that it serves. Over servers they sum to 1; an adapter
        without demand is on one server, with 1.
    bytes_to_copy
        Of adapters that a server serves but does not store yet.
    target
        Demand in servers' worth over servers: the utilisation that all would have if it could be spread
        evenly. Above 1 the servers are too few.
    cap
        Utilisation up to which servers were filled in the end, at least `target`; with literal leftovers it
        does not hold.
    utilization
        Of each server, charged at its largest rank with demand.
    budgets
        Servers that each rank got for itself.
    """

    shares: tuple[Mapping[str, float], ...]
    bytes_to_copy: int
    target: float
    cap: float
    utilization: tuple[float, ...]
    budgets: Mapping[int, int]


def place(
    adapters: Sequence[AdapterDemand],
    operating_points: Mapping[int, float],
    servers: int,
    *,
    stored: Sequence[Collection[str]] | None = None,
    variants: PlacementVariants | None = None,
) -> LoraservePlacement:
    """Place adapters on all servers of a cluster (LoRAServe, Algorithm 1).

    Where the demand is more than the servers sustain (`target` above 1) the overload is spread evenly, as an
    orchestrator has to do; a planner looks at `target`.

    Parameters
    ----------
    adapters
        What is to be placed, with the demand of the next time step.
    operating_points
        Highest token rate (input and output) that one server sustains within the objectives, by the rank
        that it serves.
    servers
        How many equal ones there are.
    stored
        Names of the adapters that each server stores now; None: nothing anywhere.
    variants
        Readings of the algorithm.

    Raises
    ------
    InputError
        For a rank without a positive operating point, no server, an adapter given twice, or a `stored` of
        another length.
    """
    _validate(adapters, operating_points, servers, stored)
    variants = variants or PlacementVariants()
    by_rank: dict[int, list[AdapterDemand]] = {}
    for load in sorted(adapters, key=lambda load: (-load.rank, load.name)):
        by_rank.setdefault(load.rank, []).append(load)
    used = {r: math.fsum(load.tok_s for load in loads) / operating_points[r] for r, loads in by_rank.items()}
    target = math.fsum(used.values()) / servers
    budgets = server_budgets(used, servers, largest_remainder=variants.largest_remainder)
    filled, rest = [ServerBin(operating_points) for _ in range(servers)], UnplacedShares()
    first = 0
    for rank, loads in by_rank.items():
        own = filled[first : first + budgets[rank]]
        if own:
            pack(loads, own, target, rest)
        first += budgets[rank]
    cap = target
    if variants.literal_leftovers:
        place_remaining_literally(adapters, filled, rest)
    else:
        cap = place_remaining(
            adapters, filled, cap, rest, cap_step=variants.cap_step, least_rest=variants.least_rest
        )
    return _label_servers(adapters, filled, stored, target, cap, budgets)


def _label_servers(
    adapters: Sequence[AdapterDemand],
    filled: Sequence[ServerBin],
    stored: Sequence[Collection[str]] | None,
    target: float,
    cap: float,
    budgets: Mapping[int, int],
) -> LoraservePlacement:
    bytes_of = {load.name: load.bytes for load in adapters}
    there = stored if stored is not None else [()] * len(filled)
    bin_of, bytes_to_copy = assign_bins([server.phi for server in filled], there, bytes_of)
    total = dict.fromkeys(bytes_of, 0.0)
    for server in filled:
        for name, phi in server.phi.items():
            total[name] += phi
    shares = [{name: phi / total[name] for name, phi in filled[i].phi.items()} for i in bin_of]
    return LoraservePlacement(
        tuple(shares), bytes_to_copy, target, cap, tuple(filled[i].utilization() for i in bin_of), budgets
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
    for rank in sorted({load.rank for load in adapters}):
        point = operating_points.get(rank)
        if point is None or not 0.0 < point < math.inf:
            raise InputError("must be given, above 0 and finite", point, f"operating point of rank {rank}")
    names = Counter(load.name for load in adapters)
    if len(names) < len(adapters):
        raise InputError("must be given once", names.most_common(1)[0][0], "adapters")


NEGLIGIBLE = 1e-9
"""Share of an adapter, or of a server, that counts as none: what rounding leaves."""


@dataclass(frozen=True)
class AdapterDemand:
    """An adapter to place.

    Attributes
    ----------
    name, rank
        As in the workload.
    tok_s
        Input and output tokens per second that it will ask for.
    bytes
        Of its weights: what a server that does not store it has to copy.
    max_replicas
        Most servers that may share its traffic; None: any number. The paper has no such bound.
    """

    name: str
    rank: int
    tok_s: float
    bytes: int = 0
    max_replicas: int | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError("must be a whole number >= 1", self.rank, f"rank of adapter {self.name}")
        if not 0.0 <= self.tok_s < float("inf"):
            raise InputError("must be a finite number >= 0", self.tok_s, f"demand of adapter {self.name}")


class ServerBin:
    """One server: the shares that it takes, charged at the operating point of the largest rank among them.

    A low rank pays for a high one beside it, so the whole demand of a server counts at the operating point of
    its largest rank, also what came before that rank did.
    """

    def __init__(self, operating_points: Mapping[int, float]) -> None:
        """Start empty; `operating_points` gives tokens per second by rank."""
        self._points = operating_points
        self.phi: dict[str, float] = {}
        self.tok_s = 0.0
        self.max_rank = 0
        """Of adapters with demand; 0 without any."""
        self._bytes = 0

    def utilization(self, rank: int = 0) -> float:
        """Return demand over operating point, as it would be with an adapter of that rank beside."""
        return self.tok_s / self._points[max(self.max_rank, rank)] if self.tok_s > 0.0 else 0.0

    def room_tok_s(self, cap: float, rank: int) -> float:
        """Return the demand of an adapter of that rank that still fits below a cap; 0 for next to nothing."""
        full = cap * self._points[max(self.max_rank, rank)]
        room = full - self.tok_s
        return room if room > NEGLIGIBLE * full else 0.0

    def stored(self) -> tuple[int, int]:
        """Return the bytes of the adapters here, and how many they are."""
        return self._bytes, len(self.phi)

    def take(self, load: AdapterDemand, share: float) -> None:
        """Take that share of an adapter's traffic, and store the adapter."""
        if load.name not in self.phi:
            self._bytes += load.bytes
        self.phi[load.name] = self.phi.get(load.name, 0.0) + share
        if load.tok_s > 0.0:
            self.tok_s += share * load.tok_s
            self.max_rank = max(self.max_rank, load.rank)


class UnplacedShares:
    """What of each adapter is not placed yet, and who took what is."""

    def __init__(self) -> None:
        """Start with nothing placed."""
        self._left: dict[str, float] = {}
        self._holders: dict[str, list[ServerBin]] = {}

    def of(self, load: AdapterDemand) -> float:
        """Return the share that is left, 0 when all is placed."""
        return self._left.get(load.name, 1.0)

    def holders(self, load: AdapterDemand) -> list[ServerBin]:
        """Return the servers that have a share, in the order in which they got it."""
        return self._holders.get(load.name, [])

    def place(self, load: AdapterDemand, server: ServerBin, share: float) -> None:
        """Give a server up to that share of what is left: all of it where this is the last replica allowed.

        What rounding leaves goes along.
        """
        left, holders = self.of(load), self._holders.setdefault(load.name, [])
        last = load.max_replicas is not None and len({*map(id, holders), id(server)}) >= load.max_replicas
        taken = left if last or left - share <= NEGLIGIBLE else share
        server.take(load, taken)
        if server in holders:
            holders.remove(server)
        holders.append(server)
        self._left[load.name] = left - taken


def server_budgets(
    utilization: Mapping[int, float], servers: int, *, largest_remainder: bool = False
) -> dict[int, int]:
    """Return the servers of each rank; together at most `servers`, and what is missing stays empty.

    The exact ratios ``u[r] / target`` sum to the servers, the rounded ones may not: five ranks of equal
    traffic on four servers round to five. Then one server is taken back at a time, from the rank whose
    rounding gained most, the lowest one of several (the paper is silent: PAPER_NOTES section 2, item 3).

    Parameters
    ----------
    utilization
        Servers' worth of demand per rank: demand over operating point.
    servers
        How many there are.
    largest_remainder
        Round down instead, and give the servers that remain to the largest fractions, to the highest rank
        of several: every server then has a rank.
    """
    total = math.fsum(utilization.values())
    if total <= 0.0:
        return dict.fromkeys(utilization, 0)
    ratio = {rank: value / total * servers for rank, value in utilization.items()}
    if largest_remainder:
        return _by_largest_remainder(ratio, servers)
    budgets = {rank: math.floor(value + 0.5) for rank, value in ratio.items()}
    for _ in range(sum(budgets.values()) - servers):
        budgets[min(budgets, key=lambda rank: (ratio[rank] - budgets[rank], rank))] -= 1
    return budgets


def _by_largest_remainder(ratio: Mapping[int, float], servers: int) -> dict[int, int]:
    budgets = {rank: math.floor(value) for rank, value in ratio.items()}
    asking = [rank for rank, value in ratio.items() if value > 0.0]
    by_remainder = sorted(asking, key=lambda rank: (budgets[rank] - ratio[rank], -rank))
    for rank in by_remainder[: servers - sum(budgets.values())]:
        budgets[rank] += 1
    return budgets


def pack(
    loads: Sequence[AdapterDemand], servers: Sequence[ServerBin], cap: float, rest: UnplacedShares
) -> None:
    """Fill the servers one after the other, hottest adapters first; who crosses an edge is split there.

    Next fit with splitting: at most one more replica per server than there are adapters, few hot adapters on
    the first server and the long tail on the last (the paper's figure 12). What does not fit below the cap
    stays in `rest`. Adapters without demand go to the server that stores fewest bytes: each lives somewhere.

    Parameters
    ----------
    loads
        All adapters of one rank.
    servers
        Those that the rank has for itself, at least one.
    cap
        Utilisation up to which a server is filled.
    rest
        What is left of every adapter; changed.
    """
    asking = sorted((load for load in loads if load.tok_s > 0.0), key=lambda load: (-load.tok_s, load.name))
    at = 0
    for load in asking:
        while rest.of(load) > 0.0 and at < len(servers):
            room_tok_s = servers[at].room_tok_s(cap, load.rank)
            if room_tok_s > 0.0:
                rest.place(load, servers[at], room_tok_s / load.tok_s)
            if rest.of(load) > 0.0:
                at += 1
    for load in sorted((load for load in loads if load.tok_s == 0.0), key=lambda load: load.name):
        rest.place(load, min(servers, key=ServerBin.stored), 1.0)


def place_remaining(
    loads: Sequence[AdapterDemand],
    servers: Sequence[ServerBin],
    cap: float,
    rest: UnplacedShares,
    *,
    cap_step: float,
    least_rest: float,
) -> float:
    """Place what is left, largest rank first, then largest demand; return the cap that it took.

    Parameters
    ----------
    loads
        All adapters.
    servers
        All servers.
    cap
        Utilisation up to which servers are filled at first.
    rest
        What is left of every adapter; afterwards nothing.
    cap_step
        By how much the cap rises when nobody has room, as a share of the first cap. Finer steps balance
        better, but split adapters into more replicas.
    least_rest
        A smaller rest of an adapter stays with the server that took its last share, cap or not.
    """
    step = cap_step * cap
    for load in _remaining_order(loads, rest):
        while rest.of(load) > 0.0:
            holders = rest.holders(load)
            if holders and rest.of(load) < least_rest:
                rest.place(load, holders[-1], rest.of(load))
            elif _has_all_replicas(load, holders):
                rest.place(load, min(holders, key=ServerBin.utilization), rest.of(load))
            else:
                server = _with_room(load, servers, cap)
                if server is None:
                    cap = _raise_cap(load, servers, cap, step)
                else:
                    rest.place(load, server, server.room_tok_s(cap, load.rank) / load.tok_s)
    _place_idle(loads, servers, rest)
    return cap


def place_remaining_literally(
    loads: Sequence[AdapterDemand], servers: Sequence[ServerBin], rest: UnplacedShares
) -> None:
    """Place what is left to the letter: all of it on the server of the highest max rank, cap or not."""
    for load in _remaining_order(loads, rest):
        open_to_it = rest.holders(load) if _has_all_replicas(load, rest.holders(load)) else servers
        highest = min(open_to_it, key=lambda server: (-server.max_rank, server.utilization()))
        rest.place(load, highest, rest.of(load))
    _place_idle(loads, servers, rest)


def _remaining_order(loads: Sequence[AdapterDemand], rest: UnplacedShares) -> list[AdapterDemand]:
    left = (load for load in loads if load.tok_s > 0.0 and rest.of(load) > 0.0)
    return sorted(left, key=lambda load: (-load.rank, -load.tok_s * rest.of(load), load.name))


def _has_all_replicas(load: AdapterDemand, holders: Sequence[ServerBin]) -> bool:
    return load.max_replicas is not None and len(holders) >= load.max_replicas


def _with_room(load: AdapterDemand, servers: Sequence[ServerBin], cap: float) -> ServerBin | None:
    """Return the server of the highest max rank, then the least utilised, that has room.

    One whose max rank the adapter would raise, or an empty one, is second choice.
    """
    free = [server for server in servers if server.room_tok_s(cap, load.rank) > 0.0]
    at_home = [server for server in free if server.max_rank >= load.rank]
    if at_home:
        return min(at_home, key=lambda server: (-server.max_rank, server.utilization()))
    return min(free, key=lambda server: server.utilization(load.rank), default=None)


def _raise_cap(load: AdapterDemand, servers: Sequence[ServerBin], cap: float, step: float) -> float:
    """Return the cap after the fewest steps with which a server has room."""
    least = min(server.utilization(load.rank) for server in servers)
    raised = cap + step * max(1, math.floor((least - cap) / step))
    while all(server.room_tok_s(raised, load.rank) == 0.0 for server in servers):
        raised += step
    return raised


def _place_idle(loads: Sequence[AdapterDemand], servers: Sequence[ServerBin], rest: UnplacedShares) -> None:
    """Give adapters without demand a home: where their rank disturbs nobody, with fewest bytes stored."""
    idle = [load for load in loads if load.tok_s == 0.0 and rest.of(load) > 0.0]
    for load in sorted(idle, key=lambda load: (-load.rank, load.name)):
        rest.place(load, min(servers, key=lambda s: (0 < s.max_rank < load.rank, *s.stored())), 1.0)


def assign_bins(
    bins: Sequence[Collection[str]], stored: Sequence[Collection[str]], bytes_of: Mapping[str, int]
) -> tuple[list[int], int]:
    """Return the bin of each server, and the bytes of adapters that it then lacks, summed over servers.

    The Hungarian method; among maps of the same cost one that leaves most bins in their place.

    Parameters
    ----------
    bins
        Names of the adapters that each bin serves.
    stored
        Names of those that each server stores, served or not: a copy that lies idle there need not be
        fetched. As many as bins; the servers are alike.
    bytes_of
        Size of every adapter.
    """
    sets = [frozenset(names) for names in stored]
    cost = np.array([[_missing_bytes(wanted, there, bytes_of) for there in sets] for wanted in bins])
    chosen_bins, servers = linear_sum_assignment(_break_ties(cost))
    bin_of = dict(zip(servers.tolist(), chosen_bins.tolist(), strict=True))
    return [bin_of[server] for server in range(len(stored))], int(cost[chosen_bins, servers].sum())


def _missing_bytes(wanted: Collection[str], there: frozenset[str], bytes_of: Mapping[str, int]) -> int:
    return sum(bytes_of[name] for name in wanted if name not in there)


def _break_ties(cost: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return costs in which leaving a bin in its place is worth less than the smallest saving of bytes.

    In units of the common divisor they stay far below what a floating-point number holds exactly.
    """
    unit = math.gcd(*cost.ravel().tolist()) or 1
    elsewhere = 1 - np.eye(len(cost), dtype=np.int64)
    exact: NDArray[np.float64] = ((cost // unit) * (len(cost) + 1) + elsewhere).astype(np.float64)
    return exact
