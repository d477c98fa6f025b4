"""The plan in force as a placement to begin with: what is there stays, what is new goes where room is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from capplan.planner.previous import Instance
from capplan.planner.problem import shares_of
from capplan.planner.search.board import Board
from capplan.planner.search.ground import Ground
from capplan.planner.search.starts import Start, deal

_SAME: Final = 1e-9


def kept(old: Sequence[Instance]) -> Start:
    """Return the start that leaves units where they are.

    Of more old instances than the fleet has of their pool, those with the most adapters are kept.
    """

    def start(ground: Ground, pools: Sequence[int]) -> Board | None:
        board = Board(ground, pools)
        seats = _seats(ground, pools, old)
        left = [unit for unit in range(len(ground.units)) if not _stays(board, unit, seats)]
        left.sort(key=lambda unit: (-ground.weight[unit], unit))
        return board if deal(board, left) else None

    return start


def _seats(ground: Ground, pools: Sequence[int], old: Sequence[Instance]) -> dict[int, Instance]:
    """Return which old instance each new one continues."""
    names = [pool.name for pool in ground.problem.pools]
    seats: dict[int, Instance] = {}
    for instance in sorted(old, key=lambda each: -len(each.shares)):
        free = (at for at, pool in enumerate(pools) if at not in seats and names[pool] == instance.pool)
        at = next(free, None)
        if at is not None:
            seats[at] = instance
    return seats


def _stays(board: Board, unit: int, seats: dict[int, Instance]) -> bool:
    """Put a unit on an instance that has all its adapters, and as much of their traffic to spare."""
    parts = board.ground.units[unit].parts
    for at, instance in seats.items():
        there = shares_of(board.ground.parts(frozenset(board.members[at])))
        spare = (instance.shares.get(p.name, 0.0) - there.get(p.name, 0.0) >= p.share - _SAME for p in parts)
        if all(spare) and board.may(unit, at):
            board.add(unit, at)
            return True
    return False
