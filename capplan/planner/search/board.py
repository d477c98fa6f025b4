"""A placement in the making: which unit is on which instance, and how much of each instance is taken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from capplan.planner.search.ground import Ground


class Board:
    """Units on instances.

    Parameters
    ----------
    ground
        What is placed.
    pools
        Number of the pool of every instance.
    """

    def __init__(self, ground: Ground, pools: Sequence[int]) -> None:
        self.ground = ground
        self.pools = np.array(pools, dtype=np.int64)
        self._all = np.arange(len(pools))
        self.members: list[set[int]] = [set() for _ in pools]
        self.limit = np.full(len(pools), np.inf)  # what may be taken of an instance, where more was refused
        self._taken = np.zeros((len(pools), len(ground.ranks)))  # for every rank that slots might have
        self._of_rank = np.zeros((len(pools), len(ground.ranks)), dtype=np.int64)  # units, by their rank
        self._rank = np.full(len(pools), -1)  # of the slots as it is
        self._in_pools: dict[frozenset[int], NDArray[np.bool_]] = {}  # instances of some pools

    def __len__(self) -> int:
        return len(self.members)

    def add(self, unit: int, instance: int) -> None:
        """Put a unit on an instance."""
        self.members[instance].add(unit)
        self._taken[instance] += self.ground.takes[self.pools[instance], :, unit]
        self._of_rank[instance, self.ground.rank[unit]] += 1
        self._rank[instance] = max(self._rank[instance], self.ground.rank[unit])

    def remove(self, unit: int, instance: int) -> None:
        """Take a unit from an instance."""
        self.members[instance].remove(unit)
        self._taken[instance] -= self.ground.takes[self.pools[instance], :, unit]
        self._of_rank[instance, self.ground.rank[unit]] -= 1
        present = np.flatnonzero(self._of_rank[instance])
        self._rank[instance] = present[-1] if present.size else -1

    def move(self, unit: int, source: int, target: int) -> None:
        """Move a unit from one instance to another."""
        self.remove(unit, source)
        self.add(unit, target)

    def taken(self) -> NDArray[np.float64]:
        """Return the share of every instance that is taken, shape (instances,)."""
        taken: NDArray[np.float64] = self._taken[self._all, np.maximum(self._rank, 0)]
        return taken

    def over_limit(self, taken: float, instance: int) -> float:
        """Return by how much of its limit an instance would be beyond it; 0 where it is not."""
        return max(0.0, taken / float(self.limit[instance]) - 1.0)

    def taken_with(self, unit: int) -> NDArray[np.float64]:
        """Return what would be taken of every instance if it got the unit; infinite where it must not be."""
        rank = np.maximum(self._rank, self.ground.rank[unit])
        shares = self._taken[self._all, rank] + self.ground.takes[self.pools, rank, unit]
        allowed: NDArray[np.float64] = np.where(self._allowed(unit), shares, np.inf)
        return allowed

    def may(self, unit: int, instance: int, leaving: int | None = None) -> bool:
        """Tell whether a unit may be on an instance, beside what is there but for the one that leaves."""
        foes = self.ground.foes.get(unit, frozenset()) - {leaving}
        right_pool = int(self.pools[instance]) in self.ground.units[unit].pools
        return right_pool and foes.isdisjoint(self.members[instance])

    def _allowed(self, unit: int) -> NDArray[np.bool_]:
        pools, foes = self.ground.units[unit].pools, self.ground.foes.get(unit)
        if pools not in self._in_pools:
            self._in_pools[pools] = np.isin(self.pools, list(pools))
        allowed = self._in_pools[pools]
        if foes:
            allowed = allowed & np.array([foes.isdisjoint(members) for members in self.members])
        return allowed


def placed(ground: Ground, pools: Sequence[int], members: Iterable[Iterable[int]]) -> Board:
    """Return a board with units on it."""
    board = Board(ground, pools)
    for instance, units in enumerate(members):
        for unit in units:
            board.add(unit, instance)
    return board
