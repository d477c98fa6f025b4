"""Algorithm 1 as one pure function: adapters with their demand in, the servers' shares of traffic out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from capplan.errors import InputError
from capplan.planner.loraserve.budgets import server_budgets
from capplan.planner.loraserve.filling import AdapterLoad, Filling, Rest
from capplan.planner.loraserve.leftovers import place_leftovers, place_leftovers_literally
from capplan.planner.loraserve.packing import pack
from capplan.planner.loraserve.permutation import assign_bins


@dataclass(frozen=True)
class Variants:
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
class Placement:
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
    adapters: Sequence[AdapterLoad],
    operating_points: Mapping[int, float],
    servers: int,
    *,
    stored: Sequence[Collection[str]] | None = None,
    variants: Variants | None = None,
) -> Placement:
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
    _require(adapters, operating_points, servers, stored)
    variants = variants or Variants()
    by_rank: dict[int, list[AdapterLoad]] = {}
    for load in sorted(adapters, key=lambda load: (-load.rank, load.name)):
        by_rank.setdefault(load.rank, []).append(load)
    used = {r: math.fsum(load.tok_s for load in loads) / operating_points[r] for r, loads in by_rank.items()}
    target = math.fsum(used.values()) / servers
    budgets = server_budgets(used, servers, largest_remainder=variants.largest_remainder)
    filled, rest = [Filling(operating_points) for _ in range(servers)], Rest()
    first = 0
    for rank, loads in by_rank.items():
        own = filled[first : first + budgets[rank]]
        if own:
            pack(loads, own, target, rest)
        first += budgets[rank]
    cap = target
    if variants.literal_leftovers:
        place_leftovers_literally(adapters, filled, rest)
    else:
        cap = place_leftovers(
            adapters, filled, cap, rest, cap_step=variants.cap_step, least_rest=variants.least_rest
        )
    return _labelled(adapters, filled, stored, target, cap, budgets)


def _labelled(
    adapters: Sequence[AdapterLoad],
    filled: Sequence[Filling],
    stored: Sequence[Collection[str]] | None,
    target: float,
    cap: float,
    budgets: Mapping[int, int],
) -> Placement:
    bytes_of = {load.name: load.bytes for load in adapters}
    there = stored if stored is not None else [()] * len(filled)
    bin_of, bytes_to_copy = assign_bins([server.phi for server in filled], there, bytes_of)
    total = dict.fromkeys(bytes_of, 0.0)
    for server in filled:
        for name, phi in server.phi.items():
            total[name] += phi
    shares = [{name: phi / total[name] for name, phi in filled[i].phi.items()} for i in bin_of]
    return Placement(
        tuple(shares), bytes_to_copy, target, cap, tuple(filled[i].utilization() for i in bin_of), budgets
    )


def _require(
    adapters: Sequence[AdapterLoad],
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
