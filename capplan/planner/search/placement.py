"""Placement state and initial solutions of the local search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.planner.previous import PreviousInstance
from capplan.planner.problem import traffic_fractions
from capplan.planner.search.data import SearchData


class PlacementState:
    """Units on instances.

    Parameters
    ----------
    ground
        What is placed.
    pools
        Number of the pool of every instance.
    """

    def __init__(self, ground: SearchData, pools: Sequence[int]) -> None:
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
        loads = self._taken[self._all, rank] + self.ground.takes[self.pools, rank, unit]
        allowed: NDArray[np.float64] = np.where(self._allowed(unit), loads, np.inf)
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


def placement_of(
    ground: SearchData, pools: Sequence[int], members: Iterable[Iterable[int]]
) -> PlacementState:
    """Return a board with units on it."""
    board = PlacementState(ground, pools)
    for instance, units in enumerate(members):
        for unit in units:
            board.add(unit, instance)
    return board


InitialSolution = Callable[[SearchData, Sequence[int]], PlacementState | None]


def balanced(ground: SearchData, pools: Sequence[int]) -> PlacementState | None:
    """Return units dealt from the heaviest down, each to where least is taken afterwards.

    None when some unit has no place.
    """
    board = PlacementState(ground, pools)
    return board if greedy_insert(board, _heaviest_first(ground)) else None


def by_rank(ground: SearchData, pools: Sequence[int]) -> PlacementState | None:
    """Return units by rank, cut into runs that take equally much; what has no place there is dealt.

    None when some unit has no place at all.
    """
    board = PlacementState(ground, _largest_memory_first(ground, pools))
    order = sorted(range(len(ground.units)), key=lambda u: (-ground.rank[u], -ground.weight[u], u))
    for instance in range(len(board)):
        goal = float(ground.weight[order].sum()) / (len(board) - instance)
        order = _fill_instance(board, instance, order, goal)
    return board if greedy_insert(board, order) else None


def balanced_by_rank(ground: SearchData, pools: Sequence[int]) -> PlacementState | None:
    """Return runs of ranks as `by_rank` cuts them, dealt anew among instances with the same ranks.

    None when some unit has no place at all.
    """
    cut = by_rank(ground, pools)
    if cut is None:
        return None
    alike: dict[frozenset[int], list[int]] = {}
    for instance, members in enumerate(cut.members):
        alike.setdefault(frozenset(ground.rank[list(members)].tolist()), []).append(instance)
    board = PlacementState(ground, cut.pools.tolist())
    for instances in alike.values():
        there = np.isin(np.arange(len(board)), instances)
        units = [unit for instance in instances for unit in cut.members[instance]]
        for unit in sorted(units, key=lambda u: (-ground.weight[u], -ground.rank[u], u)):
            taken = np.where(there, board.taken_with(unit), np.inf)
            taken = taken if np.isfinite(taken).any() else board.taken_with(unit)
            if not np.isfinite(taken).any():
                return None
            board.add(unit, int(np.argmin(taken)))
    return board


INITIAL_SOLUTIONS: tuple[InitialSolution, ...] = (balanced_by_rank, balanced, by_rank)


def _heaviest_first(ground: SearchData) -> list[int]:
    return sorted(range(len(ground.units)), key=lambda u: (-ground.weight[u], -ground.rank[u], u))


def _largest_memory_first(ground: SearchData, pools: Sequence[int]) -> list[int]:
    return sorted(pools, key=lambda pool: -ground.problem.pools[pool].profile.gpu.memory_bytes)


def greedy_insert(board: PlacementState, units: Sequence[int]) -> bool:
    """Put each unit where least is taken afterwards; False when one has no place."""
    for unit in units:
        taken = board.taken_with(unit)
        if not np.isfinite(taken).any():
            return False
        board.add(unit, int(np.argmin(taken)))
    return True


def _fill_instance(board: PlacementState, instance: int, units: Sequence[int], goal: float) -> list[int]:
    """Put units on an instance until the goal is reached, to within half a unit; return the rest."""
    rest: list[int] = []
    weight = 0.0
    for position, unit in enumerate(units):
        own = float(board.ground.weight[unit])
        if weight > 0.0 and weight + own / 2.0 > goal:
            return [*rest, *units[position:]]
        if board.may(unit, instance):
            board.add(unit, instance)
            weight += own
        else:
            rest.append(unit)
    return rest


_SHARE_TOLERANCE: Final = 1e-9


def warm_start(old: Sequence[PreviousInstance]) -> InitialSolution:
    """Return the start that leaves units where they are.

    Of more old instances than the fleet has of their pool, those with the most adapters are kept.
    """

    def start(ground: SearchData, pools: Sequence[int]) -> PlacementState | None:
        board = PlacementState(ground, pools)
        seats = _match_instances(ground, pools, old)
        left = [unit for unit in range(len(ground.units)) if not _keep_in_place(board, unit, seats)]
        left.sort(key=lambda unit: (-ground.weight[unit], unit))
        return board if greedy_insert(board, left) else None

    return start


def _match_instances(
    ground: SearchData, pools: Sequence[int], old: Sequence[PreviousInstance]
) -> dict[int, PreviousInstance]:
    """Return which old instance each new one continues."""
    names = [pool.name for pool in ground.problem.pools]
    seats: dict[int, PreviousInstance] = {}
    for instance in sorted(old, key=lambda each: -len(each.fractions)):
        free = (at for at, pool in enumerate(pools) if at not in seats and names[pool] == instance.pool)
        at = next(free, None)
        if at is not None:
            seats[at] = instance
    return seats


def _keep_in_place(board: PlacementState, unit: int, seats: dict[int, PreviousInstance]) -> bool:
    """Put a unit on an instance that has all its adapters, and as much of their traffic to spare."""
    shares = board.ground.units[unit].shares
    for at, instance in seats.items():
        there = traffic_fractions(board.ground.shares(frozenset(board.members[at])))
        spare = (
            instance.fractions.get(p.name, 0.0) - there.get(p.name, 0.0) >= p.fraction - _SHARE_TOLERANCE
            for p in shares
        )
        if all(spare) and board.may(unit, at):
            board.add(unit, at)
            return True
    return False
