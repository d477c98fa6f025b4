"""What is known of instances during the search: guesses at little cost, and what the twin has confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from capplan.planner.parallel import in_parallel
from capplan.planner.problem import Assignment, Estimate, Estimator
from capplan.planner.search.board import Board
from capplan.planner.search.ground import Ground
from capplan.planner.slots import best_slots, ranked_slots, slots_near

Place = tuple[frozenset[int], int]
"""Units of an instance, and its pool."""

_TRIED: Final = 4
"""Numbers of slots that the twin is asked about, until one holds."""
_SEATS: Final = (128, 512)
"""Other values of max_num_seqs that are tried before an instance is given up."""
_REFUSED: Final = 2.0


@dataclass(frozen=True)
class Outlook:
    """What the quick estimator makes of an instance with the best number of slots."""

    slots: tuple[int, ...]
    """Numbers of slots that fit in memory, best first; none: it would not start."""
    holds: bool
    strain: float
    """Grows with the load, from about 0 to 1 and, where more is known, beyond."""
    e2e_s: float = 0.0
    """Mean time of a request, 0 where the guess does not say."""


@dataclass
class Judge:
    """Asks quick and exact estimators, and remembers what they said.

    Parameters
    ----------
    ground
        What is placed.
    quick
        A guess, at little cost.
    exact
        Decides.
    """

    ground: Ground
    quick: Estimator
    exact: Estimator
    _outlooks: dict[Place, Outlook] = field(default_factory=dict)
    _confirmed: dict[Place, Assignment | None] = field(default_factory=dict)

    def outlook(self, board: Board, instance: int) -> Outlook:
        """Return the guess for an instance as it is."""
        return self._outlook((frozenset(board.members[instance]), int(board.pools[instance])))

    def outlook_of(self, members: frozenset[int], pool: int, like: Outlook) -> Outlook:
        """Return the guess for an instance with these units, which are nearly those of another one."""
        return self._outlook((members, pool), like.slots[0] if like.slots else None)

    def confirm(self, board: Board) -> list[Assignment | None]:
        """Return what the twin confirms of every instance that is used; None for one that fails.

        One that fails is remembered as failing in the guesses, too.
        """
        places = _places(board)
        new = [place for place in dict.fromkeys(places) if place not in self._confirmed]
        for place, answer in zip(new, in_parallel(self._first, new), strict=True):
            self._confirmed[place] = answer
            if answer is None:
                outlook = self._outlook(place)
                self._outlooks[place] = replace(outlook, holds=False, strain=outlook.strain + _REFUSED)
        return [self._confirmed[place] for place in places]

    def confirm_in_turn(self, board: Board) -> tuple[Assignment, ...] | None:
        """Return what the twin confirms of every instance that is used; None once one fails."""
        answers = []
        for place in sorted(_places(board), key=lambda place: -self._outlook(place).strain):
            answer = self._first(place)
            if answer is None:
                return None
            answers.append(answer)
        return tuple(answers)

    def polished(self, assignment: Assignment) -> Assignment:
        """Return a confirmed instance with the best number of slots next to its own, as the twin sees it."""
        problem, parts = self.ground.problem, assignment.parts
        values = slots_near(problem, parts, assignment.a_max)
        others = [replace(assignment, a_max=value) for value in values]
        fitting = [other for other in others if problem.fits_in_memory(other)]
        estimates = dict(zip((each.a_max for each in fitting), map(self.exact, fitting), strict=True))
        return replace(assignment, a_max=best_slots(estimates) or assignment.a_max)

    def _outlook(self, place: Place, near: int | None = None) -> Outlook:
        if place not in self._outlooks:
            self._outlooks[place] = self._guess(place, near)
        return self._outlooks[place]

    def _guess(self, place: Place, near: int | None) -> Outlook:
        members, pool = place
        if not members:
            return Outlook((), holds=True, strain=0.0)
        ranked = ranked_slots(self.ground.problem, self.ground.parts(members), self.quick, pool, near)
        if not ranked:
            return Outlook((), holds=False, strain=_REFUSED + len(members))
        best = next(iter(ranked.values()))
        return Outlook(tuple(ranked), not best.starved, best.strain + best.starved, best.e2e_s_mean)

    def _first(self, place: Place) -> Assignment | None:
        """Return the instance with the first number of slots that holds, best guess first."""
        slots = self._outlook(place).slots[:_TRIED]
        for value in slots:
            if not self._asked(place, value).starved:
                return self._set(place, value)
        return self._with_other_seats(place, slots)

    def _with_other_seats(self, place: Place, slots: Sequence[int]) -> Assignment | None:
        """Return the instance with another max_num_seqs, where the workload leaves that open."""
        problem = self.ground.problem
        if problem.workload.engine.max_num_seqs is not None or not slots:
            return None
        for seats in _SEATS:
            assignment = self._set(place, slots[0], seats)
            starts = seats <= problem.engine.max_num_batched_tokens and problem.fits_in_memory(assignment)
            if starts and not self.exact(assignment).starved:
                return assignment
        return None

    def _asked(self, place: Place, slots: int) -> Estimate:
        return self.exact(self._set(place, slots))

    def _set(self, place: Place, slots: int, seats: int | None = None) -> Assignment:
        members, pool = place
        return Assignment(self.ground.parts(members), slots, seats, pool)


def _places(board: Board) -> list[Place]:
    """Return the instances of a board that are used."""
    pairs = zip(board.members, board.pools.tolist(), strict=True)
    return [(frozenset(members), pool) for members, pool in pairs if members]
