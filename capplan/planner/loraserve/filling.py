"""A server while it is being filled: whose traffic it takes, how full it is, what more fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from capplan.errors import InputError

NOTHING = 1e-9
"""Share of an adapter, or of a server, that counts as none: what rounding leaves."""


@dataclass(frozen=True)
class AdapterLoad:
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


class Filling:
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
        return room if room > NOTHING * full else 0.0

    def stored(self) -> tuple[int, int]:
        """Return the bytes of the adapters here, and how many they are."""
        return self._bytes, len(self.phi)

    def take(self, load: AdapterLoad, share: float) -> None:
        """Take that share of an adapter's traffic, and store the adapter."""
        if load.name not in self.phi:
            self._bytes += load.bytes
        self.phi[load.name] = self.phi.get(load.name, 0.0) + share
        if load.tok_s > 0.0:
            self.tok_s += share * load.tok_s
            self.max_rank = max(self.max_rank, load.rank)


class Rest:
    """What of each adapter is not placed yet, and who took what is."""

    def __init__(self) -> None:
        """Start with nothing placed."""
        self._left: dict[str, float] = {}
        self._holders: dict[str, list[Filling]] = {}

    def of(self, load: AdapterLoad) -> float:
        """Return the share that is left, 0 when all is placed."""
        return self._left.get(load.name, 1.0)

    def holders(self, load: AdapterLoad) -> list[Filling]:
        """Return the servers that have a share, in the order in which they got it."""
        return self._holders.get(load.name, [])

    def place(self, load: AdapterLoad, server: Filling, share: float) -> None:
        """Give a server up to that share of what is left: all of it where this is the last replica allowed.

        What rounding leaves goes along.
        """
        left, holders = self.of(load), self._holders.setdefault(load.name, [])
        last = load.max_replicas is not None and len({*map(id, holders), id(server)}) >= load.max_replicas
        taken = left if last or left - share <= NOTHING else share
        server.take(load, taken)
        if server in holders:
            holders.remove(server)
        holders.append(server)
        self._left[load.name] = left - taken
