"""The search: on which of the fleets, most wanted first, the twin confirms a placement."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from capplan.planner.parallel import in_parallel
from capplan.planner.problem import Assignment
from capplan.planner.search.board import Board
from capplan.planner.search.fleets import Fleet, instances
from capplan.planner.search.ground import Ground
from capplan.planner.search.judge import Judge
from capplan.planner.search.mend import mend
from capplan.planner.search.starts import EVEN, Start

_OVERFULL: Final = 1.25
"""How full a fleet may be by the fluid estimate before it is passed over unasked."""
_NEAR: Final = 2
"""More wanted fleets than the first that should hold which are tried all the same: guesses err."""
_FEW: Final = 8
"""Fleets that are tried one after the other, rather than by bisection."""
_ROUNDS: Final = 16
_HOPE: Final = 1.9
"""Strain up to which the twin is asked, where instances are few, although the guess is that one fails."""


@dataclass(frozen=True)
class Seeker:
    """Tries fleets until time is over.

    Attributes
    ----------
    ground, judge
        What is placed, and who knows whether it holds.
    until_s
        Value of `time.monotonic` at which to stop.
    starts
        Placements to begin with.
    """

    ground: Ground
    judge: Judge
    until_s: float
    starts: tuple[Start, ...] = EVEN

    @property
    def late(self) -> bool:
        """Whether time is over."""
        return time.monotonic() > self.until_s

    def seek(self, order: Sequence[Fleet]) -> tuple[Assignment, ...] | None:
        """Return a placement on the most wanted fleet found; None without any.

        Where many fleets are of one pool, guesses say by bisection where to begin; from there on it goes
        down as long as that succeeds, or else up.
        """
        possible = [fleet for fleet in order if self._possible(fleet)]
        plausible = possible if len(possible) <= _FEW else [f for f in possible if self._plausible(f)]
        in_a_row = len(plausible) <= _FEW or len(plausible[0]) > 1  # pools: more wanted is not always less
        begin = 0 if in_a_row else self._first_promising(plausible)
        found, misses, at = None, 0, begin
        while at < len(plausible) and found is None and not self.late:
            found = self.attempt(plausible[at])
            at += 1
        down = begin if at == begin + 1 else 0  # what is more wanted than one that failed fails, too
        for fleet in reversed(plausible[:down]):
            if found is None or misses == _NEAR or self.late:
                break
            better = self.attempt(fleet)
            found, misses = (found, misses + 1) if better is None else (better, 0)
        return found

    def attempt(self, fleet: Fleet) -> tuple[Assignment, ...] | None:
        """Return a placement on a fleet that the twin confirms; None without any.

        Placements of which guesses say that their requests are short come first.
        """
        return next(self._answers(fleet), None)

    def fastest(self, fleet: Fleet) -> tuple[Assignment, ...] | None:
        """Return the confirmed placement with the shortest mean time from arrival to last token."""
        answers = (self.polished(answer) for answer in self._answers(fleet))
        return min(answers, key=self.mean_s, default=None)

    def polished(self, answer: tuple[Assignment, ...]) -> tuple[Assignment, ...]:
        """Return the placement with the best slots next to those it has, as the twin sees it."""
        return tuple(in_parallel(self.judge.polished, answer))

    def mean_s(self, answer: Sequence[Assignment]) -> float:
        """Return the mean time of all requests from arrival to last token, as the twin sees it."""
        rates = [sum(part.rate_rps for part in each.parts) for each in answer]
        times = [self.judge.exact(each).e2e_s_mean for each in answer]
        return _mean(times, rates)

    def _answers(self, fleet: Fleet) -> Iterator[tuple[Assignment, ...]]:
        """Yield a confirmed placement for every start from which there is one, short requests first."""
        rounds = _ROUNDS + 4 * sum(fleet)
        held: list[Board] = []
        others: list[Board] = []
        for board in self._boards(fleet):
            (held if mend(board, self.judge, rounds) else others).append(board)
        near = [board for board in others if len(board) <= _FEW and self._strain(board) <= _HOPE]
        for board in sorted(held, key=self._guessed_s) + sorted(near, key=self._guessed_s):
            answer = None if self.late else self._confirmed(board, rounds)
            if answer is not None:
                yield answer
        if others and not held and not near and sum(fleet) <= _FEW and not self.late:
            answer = self.judge.confirm_in_turn(min(others, key=self._strain))  # guesses err
            if answer is not None:
                yield answer

    def _boards(self, fleet: Fleet) -> Iterator[Board]:
        """Yield the placements to begin with that leave no unit out."""
        for start in self.starts:
            board = start(self.ground, instances(fleet))
            if board is not None and not self.late:
                yield board

    def _confirmed(self, board: Board, rounds: int) -> tuple[Assignment, ...] | None:
        """Return the board once the twin confirms every instance; what it refuses is mended."""
        for _ in range(3 + len(board)):
            answers = self.judge.confirm(board)
            confirmed = tuple(answer for answer in answers if answer is not None)
            if len(confirmed) == len(answers):
                return confirmed
            if self.late or not mend(board, self.judge, rounds):
                return None
        return None

    def _guessed_s(self, board: Board) -> float:
        """Return the mean time of requests that guesses expect."""
        rates = [sum(part.rate_rps for part in self.ground.parts(frozenset(m))) for m in board.members]
        times = [self.judge.outlook(board, instance).e2e_s for instance in range(len(board))]
        return _mean(times, rates)

    def _strain(self, board: Board) -> float:
        return max(self.judge.outlook(board, instance).strain for instance in range(len(board)))

    def _first_promising(self, plausible: Sequence[Fleet]) -> int:
        """Return the first fleet on which guesses say that a placement holds, as if later ones all did."""
        low, high = 0, len(plausible) - 1
        while low < high and not self.late:
            middle = (low + high) // 2
            if self._promising(plausible[middle]):
                high = middle
            else:
                low = middle + 1
        return low

    def _promising(self, fleet: Fleet) -> bool:
        rounds = 8 + len(instances(fleet)) // 4
        return any(mend(board, self.judge, rounds) for board in self._boards(fleet))

    def _possible(self, fleet: Fleet) -> bool:
        """Tell whether a fleet has every pool that units need."""
        used = {pool for pool, count in enumerate(fleet) if count}
        return not any(unit.pools.isdisjoint(used) for unit in self.ground.units)

    def _plausible(self, fleet: Fleet) -> bool:
        """Tell whether a fleet has about enough instances by the fluid estimate."""
        ground = self.ground
        columns = np.arange(len(ground.units))
        whole = ground.takes[:, ground.rank, columns].sum(axis=1)  # instances of one pool that all would take
        return float((np.array(fleet) / whole).sum()) >= 1.0 / _OVERFULL


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / max(sum(weights), 1e-12)
