"""Mending a placement: units leave instances that fail for others, until all hold or no move helps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from capplan.planner.search.board import Board
from capplan.planner.search.judge import Judge

_WIDE: Final = (8, 4, 3)
_NARROW: Final = (5, 2, 2)
"""Units of a failing instance that are tried, from the lightest to the heaviest; instances that each might go
to; lighter units there that are tried in exchange. Wide on few instances, where there are few ways out."""
_FEW: Final = 8
_CROWDING: Final = 0.05
"""What an instance costs for being taken, beside its strain: moves towards empty instances are a gain."""
_BEYOND: Final = 10.0
"""What it costs to take a multiple of what the twin refused to confirm: more than any guess says."""
_GAIN: Final = 1e-9


class Move(NamedTuple):
    """A unit goes elsewhere; another may come back for it."""

    unit: int
    source: int
    target: int
    back: int | None


def mend(board: Board, judge: Judge, rounds: int) -> bool:
    """Move units until the guesses say that every instance holds; False when no move helps any more.

    Each round takes the failing instance under the greatest strain, and makes the move, or the exchange for a
    lighter unit, that lowers the cost of the two instances most.
    """
    for _ in range(rounds):
        failing = _failing(board, judge)
        if not failing:
            return True
        if 2 * len(failing) > max(len(board), 2):
            return False  # there is no room for so much
        move = _best_move(board, judge, max(failing, key=lambda i: (failing[i], -i)))
        if move is None:
            return False
        board.move(move.unit, move.source, move.target)
        if move.back is not None:
            board.move(move.back, move.target, move.source)
    return not _failing(board, judge)


def _failing(board: Board, judge: Judge) -> dict[int, float]:
    """Return the strain of every instance that does not hold."""
    failing: dict[int, float] = {}
    for instance, taken in enumerate(board.taken().tolist()):
        outlook, beyond = judge.outlook(board, instance), board.over_limit(taken, instance)
        if beyond or not outlook.holds:
            failing[instance] = outlook.strain + _BEYOND * beyond
    return failing


def _best_move(board: Board, judge: Judge, source: int) -> Move | None:
    best, most = None, _GAIN
    for move in _moves(board, source):
        gain = _gain(board, judge, move)
        if gain > most:
            best, most = move, gain
    return best


def _gain(board: Board, judge: Judge, move: Move) -> float:
    """Return by how much a move lowers what its two instances cost."""
    back = frozenset() if move.back is None else frozenset({move.back})
    here, there = frozenset(board.members[move.source]), frozenset(board.members[move.target])
    unit = frozenset({move.unit})
    after = ((here - unit) | back, move.source), ((there - back) | unit, move.target)
    before = (here, move.source), (there, move.target)
    return sum(_cost(board, judge, *each) for each in before) - sum(
        _cost(board, judge, *each) for each in after
    )


def _cost(board: Board, judge: Judge, members: frozenset[int], instance: int) -> float:
    pool = int(board.pools[instance])
    taken = board.ground.taken(members, pool)
    outlook = judge.outlook_of(members, pool, like=judge.outlook(board, instance))
    return outlook.strain + _BEYOND * board.over_limit(taken, instance) + _CROWDING * taken * taken


def _moves(board: Board, source: int) -> Iterator[Move]:
    """Yield moves and exchanges that constraints allow, to the instances with most room for each unit."""
    units, targets, backs = _WIDE if len(board) <= _FEW else _NARROW
    for unit in _spread(board, board.members[source], units):
        taken = board.taken_with(unit)
        taken[source] = np.inf
        for target in np.argsort(taken, kind="stable")[:targets].tolist():
            if not np.isfinite(taken[target]):
                break
            yield Move(unit, source, target, None)
            weight = board.ground.weight[unit]
            lighter = [other for other in board.members[target] if board.ground.weight[other] < weight]
            for back in _spread(board, lighter, backs):
                if board.may(back, source, leaving=unit):
                    yield Move(unit, source, target, back)


def _spread(board: Board, units: set[int] | list[int], count: int) -> list[int]:
    """Return some of the units, evenly from the lightest to the heaviest."""
    ordered = sorted(units, key=lambda u: (board.ground.weight[u], board.ground.rank[u], u))
    if len(ordered) <= count:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]
