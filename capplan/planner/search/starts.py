"""Placements to begin with: evenly mixed, by rank, and as the plan in force has it.

Instances that share the load evenly leave each the same slack. By rank, small ranks do not pay for slots of
the largest one; mixed, every instance gets hot and cold adapters, so that slots are shared well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from capplan.planner.search.board import Board
from capplan.planner.search.ground import Ground

Start = Callable[[Ground, Sequence[int]], Board | None]


def mixed(ground: Ground, pools: Sequence[int]) -> Board | None:
    """Return units dealt from the heaviest down, each to where least is taken afterwards.

    None when some unit has no place.
    """
    board = Board(ground, pools)
    return board if deal(board, _heaviest_first(ground)) else None


def by_rank(ground: Ground, pools: Sequence[int]) -> Board | None:
    """Return units by rank, cut into runs that take equally much; what has no place there is dealt.

    None when some unit has no place at all.
    """
    board = Board(ground, _largest_memory_first(ground, pools))
    order = sorted(range(len(ground.units)), key=lambda u: (-ground.rank[u], -ground.weight[u], u))
    for instance in range(len(board)):
        goal = float(ground.weight[order].sum()) / (len(board) - instance)
        order = _fill(board, instance, order, goal)
    return board if deal(board, order) else None


def by_rank_and_mixed(ground: Ground, pools: Sequence[int]) -> Board | None:
    """Return runs of ranks as `by_rank` cuts them, dealt anew among instances with the same ranks.

    None when some unit has no place at all.
    """
    cut = by_rank(ground, pools)
    if cut is None:
        return None
    alike: dict[frozenset[int], list[int]] = {}
    for instance, members in enumerate(cut.members):
        alike.setdefault(frozenset(ground.rank[list(members)].tolist()), []).append(instance)
    board = Board(ground, cut.pools.tolist())
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


EVEN: tuple[Start, ...] = (by_rank_and_mixed, mixed, by_rank)


def _heaviest_first(ground: Ground) -> list[int]:
    return sorted(range(len(ground.units)), key=lambda u: (-ground.weight[u], -ground.rank[u], u))


def _largest_memory_first(ground: Ground, pools: Sequence[int]) -> list[int]:
    return sorted(pools, key=lambda pool: -ground.problem.pools[pool].profile.gpu.memory_bytes)


def deal(board: Board, units: Sequence[int]) -> bool:
    """Put each unit where least is taken afterwards; False when one has no place."""
    for unit in units:
        taken = board.taken_with(unit)
        if not np.isfinite(taken).any():
            return False
        board.add(unit, int(np.argmin(taken)))
    return True


def _fill(board: Board, instance: int, units: Sequence[int], goal: float) -> list[int]:
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
