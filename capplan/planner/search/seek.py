"""The search: on which of the fleets, most wanted first, the twin confirms a placement."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

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
_SMALL: Final = 16
"""Instances up to which all starts are tried, and the best taken."""
_FEW: Final = 8
"""Fleets that are tried one after the other, rather than by bisection."""
_HOPE: Final = 1.9
"""Strain up to which the twin is asked about an instance although the guess is that it fails."""


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

        Where there are many fleets, guesses say by bisection where to begin; from there on it goes down as
        long as that succeeds, or else up.
        """
        plausible = [fleet for fleet in order if self._plausible(fleet)]
        at = 0 if len(plausible) <= _FEW else self._first_promising(plausible)
        found = None
        while at < len(plausible) and found is None and not self.late:
            found = self.attempt(plausible[at])
            at += 1
        misses, at = 0, at - 2
        while found is not None and at >= 0 and misses < _NEAR and len(plausible) > _FEW and not self.late:
            better = self.attempt(plausible[at])
            found, misses, at = (found, misses + 1, at - 1) if better is None else (better, 0, at - 1)
        return found

    def attempt(self, fleet: Fleet) -> tuple[Assignment, ...] | None:
        """Return a placement on a fleet that the twin confirms; None without any.

        On a small fleet that with the shortest requests, else the first.
        """
        return self.fastest(fleet) if sum(fleet) <= _SMALL else next(self._answers(fleet), None)

    def fastest(self, fleet: Fleet) -> tuple[Assignment, ...] | None:
        """Return the confirmed placement with the shortest mean time from arrival to last token."""
        return min(self._answers(fleet), key=self._mean_s, default=None)

    def _mean_s(self, answer: Sequence[Assignment]) -> float:
        """Return the mean over requests."""
        rates = [sum(part.rate_rps for part in each.parts) for each in answer]
        times = [self.judge.exact(each).e2e_s_mean for each in answer]
        return sum(rate * time for rate, time in zip(rates, times, strict=True)) / max(sum(rates), 1e-12)

    def _answers(self, fleet: Fleet) -> Iterator[tuple[Assignment, ...]]:
        """Yield a confirmed placement for every start from which there is one."""
        for board in self._boards(fleet):
            if self.late:
                return
            answer = self._confirmed(board)
            if answer is not None:
                yield answer

    def _boards(self, fleet: Fleet) -> Iterator[Board]:
        """Yield the placements to begin with that leave no unit out."""
        for start in self.starts:
            board = start(self.ground, instances(fleet))
            if board is not None:
                yield board

    def _confirmed(self, board: Board) -> tuple[Assignment, ...] | None:
        """Return the board once the twin confirms every instance; what it refuses is mended."""
        rounds = 16 + 4 * len(board)
        if not mend(board, self.judge, rounds) and self._strain(board) > _HOPE:
            return None
        for _ in range(3 + len(board)):
            answers = self.judge.confirm(board)
            confirmed = tuple(answer for answer in answers if answer is not None)
            if len(confirmed) == len(answers):
                return confirmed
            if self.late or not mend(board, self.judge, rounds):
                return None
        return None

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

    def _plausible(self, fleet: Fleet) -> bool:
        """Tell whether a fleet has every pool that units need, room for shares, and about enough of all."""
        ground, used = self.ground, {pool for pool, count in enumerate(fleet) if count}
        if any(unit.pools.isdisjoint(used) for unit in ground.units):
            return False
        if sum(fleet) <= max(part.number for unit in ground.units for part in unit.parts):
            return False
        columns = np.arange(len(ground.units))
        whole = ground.takes[:, ground.rank, columns].sum(axis=1)  # instances of one pool that all would take
        return float((np.array(fleet) / whole).sum()) >= 1.0 / _OVERFULL
