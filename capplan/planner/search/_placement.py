"""Placement state and initial solutions of the local search.

Balanced instances have equal slack, with hot and cold adapters that share slots well. By rank, requests of
small ranks take neither the memory nor, with a kernel that pads, the time of the largest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.planner.search._data import SearchData

_WIDENING: Final = 1.25
_LEVEL_PRECISION: Final = 0.01
"""Step from the least possible level of load upwards, and relative precision of the bisected level."""


class PlacementState:
    """Mutable placement of adapter groups on instances of these pools."""

    def __init__(self, data: SearchData, pools: Sequence[int]) -> None:
        self.data = data
        self.pools = np.array(pools, dtype=np.int64)
        self.members: list[set[int]] = [set() for _ in pools]
        """Groups on each instance."""
        self.load_limit = np.full(len(pools), np.inf)
        """Upper bound on the load of each instance, set when the twin refuses it."""
        self._all = np.arange(len(pools))
        self._loads = np.zeros((len(pools), len(data.ranks)))  # with slots of every rank
        self._count = np.zeros((len(pools), len(data.ranks)), dtype=np.int64)  # groups by rank
        self._rank = np.full(len(pools), -1)  # index of the largest rank
        self._pool_masks: dict[frozenset[int], NDArray[np.bool_]] = {}

    def __len__(self) -> int:
        return len(self.members)

    def add(self, group: int, instance: int) -> None:
        """Place a group on an instance."""
        self.members[instance].add(group)
        self._loads[instance] += self.data.loads[self.pools[instance], :, group]
        self._count[instance, self.data.rank[group]] += 1
        self._rank[instance] = max(self._rank[instance], self.data.rank[group])

    def remove(self, group: int, instance: int) -> None:
        """Remove a group from an instance."""
        self.members[instance].remove(group)
        self._loads[instance] -= self.data.loads[self.pools[instance], :, group]
        self._count[instance, self.data.rank[group]] -= 1
        present = np.flatnonzero(self._count[instance])
        self._rank[instance] = present[-1] if present.size else -1

    def move(self, group: int, source: int, target: int) -> None:
        """Move a group from one instance to another."""
        self.remove(group, source)
        self.add(group, target)

    def loads(self) -> NDArray[np.float64]:
        """Return the load of every instance, shape (instances,)."""
        loads: NDArray[np.float64] = self._loads[self._all, np.maximum(self._rank, 0)]
        return loads

    def loads_with(self, group: int) -> NDArray[np.float64]:
        """Return the load of every instance with the group added, shape (instances,); inf if not allowed."""
        rank = np.maximum(self._rank, self.data.rank[group])
        loads = self._loads[self._all, rank] + self.data.loads[self.pools, rank, group]
        allowed: NDArray[np.float64] = np.where(self._allowed(group), loads, np.inf)
        return allowed

    def excess(self, load: float, instance: int) -> float:
        """Return the relative excess of a load over the limit of an instance, at least 0."""
        return max(0.0, load / float(self.load_limit[instance]) - 1.0)

    def is_allowed(self, group: int, instance: int, leaving: int | None = None) -> bool:
        """Tell whether constraints allow a group on an instance that another group leaves."""
        conflicts = self.data.conflicts.get(group, frozenset()) - {leaving}
        right_pool = int(self.pools[instance]) in self.data.groups[group].pools
        return right_pool and conflicts.isdisjoint(self.members[instance])

    def _allowed(self, group: int) -> NDArray[np.bool_]:
        pools, conflicts = self.data.groups[group].pools, self.data.conflicts.get(group)
        if pools not in self._pool_masks:
            self._pool_masks[pools] = np.isin(self.pools, list(pools))
        allowed = self._pool_masks[pools]
        if conflicts:
            allowed = allowed & np.array([conflicts.isdisjoint(members) for members in self.members])
        return allowed


InitialSolution = Callable[[SearchData, Sequence[int]], PlacementState | None]
"""Builds a placement on instances of these pools; None if a group has no place."""


def placement_of(data: SearchData, pools: Sequence[int], members: Iterable[Iterable[int]]) -> PlacementState:
    """Return the placement with these groups on each instance."""
    state = PlacementState(data, pools)
    for instance, groups in enumerate(members):
        for group in groups:
            state.add(group, instance)
    return state


def greedy_insert(state: PlacementState, groups: Sequence[int]) -> bool:
    """Insert each group where the load is least afterwards; False if one has no place."""
    for group in groups:
        loads = state.loads_with(group)
        if not np.isfinite(loads).any():
            return False
        state.add(group, int(np.argmin(loads)))
    return True


def balanced(data: SearchData, pools: Sequence[int]) -> PlacementState | None:
    """Insert groups from the heaviest to the lightest."""
    state = PlacementState(data, pools)
    order = sorted(range(len(data.groups)), key=lambda g: (-data.weight[g], -data.rank[g], g))
    return state if greedy_insert(state, order) else None


def by_rank(data: SearchData, pools: Sequence[int]) -> PlacementState | None:
    """Fill instances by falling rank, to the lowest level at which every group has a place.

    First-fit decreasing under a bisected level (MULTIFIT: Coffman, Garey and Johnson, 1978).
    """
    memory = [pool.profile.gpu.memory_bytes for pool in data.problem.pools]
    ordered = sorted(pools, key=lambda pool: -memory[pool])
    order = sorted(range(len(data.groups)), key=lambda g: (-data.rank[g], -data.weight[g], g))
    low = high = max(float(data.weight.sum()) / len(pools), float(data.weight.max(initial=0.0)))
    best = _first_fit(data, ordered, order, high)
    most = float(data.loads.max(axis=(0, 1)).sum())
    while best is None and high <= most:
        low, high = high, _WIDENING * high
        best = _first_fit(data, ordered, order, high)
    while best is not None and high > (1.0 + _LEVEL_PRECISION) * low:
        level = 0.5 * (low + high)
        filled = _first_fit(data, ordered, order, level)
        if filled is None:
            low = level
        else:
            best, high = filled, level
    return best


def balanced_by_rank(data: SearchData, pools: Sequence[int]) -> PlacementState | None:
    """Fill as `by_rank`, then insert greedily among instances with the same ranks."""
    filled = by_rank(data, pools)
    if filled is None:
        return None
    same_ranks: dict[frozenset[int], list[int]] = {}
    for instance, members in enumerate(filled.members):
        same_ranks.setdefault(frozenset(data.rank[list(members)].tolist()), []).append(instance)
    state = PlacementState(data, filled.pools.tolist())
    for instances in same_ranks.values():
        there = np.isin(np.arange(len(state)), instances)
        groups = [group for instance in instances for group in filled.members[instance]]
        for group in sorted(groups, key=lambda g: (-data.weight[g], -data.rank[g], g)):
            anywhere = state.loads_with(group)
            loads = np.where(there, anywhere, np.inf)
            loads = loads if np.isfinite(loads).any() else anywhere
            if not np.isfinite(loads).any():
                return None
            state.add(group, int(np.argmin(loads)))
    return state


INITIAL_SOLUTIONS: tuple[InitialSolution, ...] = (balanced_by_rank, balanced, by_rank)


def _first_fit(
    data: SearchData, pools: Sequence[int], order: Sequence[int], level: float
) -> PlacementState | None:
    """Insert each group on the first instance whose load stays within the level; None if one has no place."""
    state = PlacementState(data, pools)
    for group in order:
        loads = state.loads_with(group)
        fits = np.flatnonzero(np.isfinite(loads) & (loads <= level))
        if not fits.size:
            return None
        state.add(group, int(fits[0]))
    return state
