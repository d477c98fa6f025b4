"""Placement near the one in force: moves between servers, with a price on copied bytes.

A server's utilization is its demand over the operating point of its largest rank, as in LoRAServe's
placement. From each server, the most utilized first, the best move of an adapter, or of a part of its demand,
is made as long as it pays: it reduces the sum of squared utilizations, over twice the server's, by more than
the price of the bytes to copy. Shares stay where no move pays, so few bytes move; LoRAServe packs all of them
each time.

Such moves do not lead out of every placement, such as one with a high rank on all servers. LoRAServe's
placement, improved by the same moves, replaces the result if it reduces the highest utilization by more than
the price of its bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.serving.rebalancing._placement import AdapterDemand, place

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
