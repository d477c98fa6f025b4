"""Cached estimates of instances, and confirmation by the twin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from capplan.planner.parallel import estimate_all, parallel_map
from capplan.planner.problem import Assignment, Estimator
from capplan.planner.search.data import SearchData
from capplan.planner.search.placement import PlacementState
from capplan.planner.slots import best_slots, neighbouring_slots, rank_slots

InstanceContent = tuple[frozenset[int], int]

"""Units of an instance, and its pool."""

InstanceKind = tuple[bytes, int]

"""Kinds of the units of an instance, and its pool: instances that are alike do alike."""

InstanceSetting = tuple[int, int | None]

"""A_max and max_num_seqs of an instance."""

_MAX_SLOT_VALUES: Final = 4

"""Numbers of slots that the twin is asked about, until one holds."""

_MAX_NUM_SEQS: Final = (128, 512)

"""Other values of max_num_seqs that are tried before an instance is given up."""

_SLOW_RATIO: Final = 1.2

"""Times of requests, over the least, from which on guesses are trusted to tell slots that are no good."""

_MIN_SAMPLES: Final = 3

_SAMPLE_EVERY: Final = 6

"""Instances that are alike of which the twin must confirm every one, each with other requests: so many, or
one in so many."""

_REFUSAL_PENALTY: Final = 2.0

_MIN_OVERLOAD: Final = 0.003

_MAX_OVERLOAD: Final = 0.1

"""By how much of its load an instance that is refused is taken to be too full, at least and at most."""


@dataclass(frozen=True)
class InstanceEstimate:
    """What the quick estimator makes of an instance with the best number of slots."""

    slots: tuple[int, ...]
    """Numbers of slots that fit in memory, best first; none: it would not start."""
    holds: bool
    utilization: float
    """Grows with the load, from about 0 to 1 and, where more is known, beyond."""
    e2e_s: float = 0.0
    """Mean time of a request, 0 where the guess does not say."""


@dataclass(frozen=True)
class Confirmation:
    """What the twin says of an instance and its like."""

    setting: InstanceSetting | None
    """With which they hold; None without any."""
    overload: float = 0.0
    """Share of the load that is too much."""


@dataclass
class Evaluator:
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

    ground: SearchData
    quick: Estimator
    exact: Estimator
    _outlooks: dict[InstanceKind, InstanceEstimate] = field(default_factory=dict)
    _answers: dict[InstanceKind, Confirmation] = field(default_factory=dict)

    def outlook(self, board: PlacementState, instance: int) -> InstanceEstimate:
        """Return the guess for an instance as it is."""
        return self._outlook((frozenset(board.members[instance]), int(board.pools[instance])))

    def outlook_of(self, members: frozenset[int], pool: int, like: InstanceEstimate) -> InstanceEstimate:
        """Return the guess for an instance with these units, which are nearly those of another one."""
        return self._outlook((members, pool), like.slots[0] if like.slots else None)

    def confirm(self, board: PlacementState) -> list[Assignment | None]:
        """Return what the twin confirms of every instance that is used; None for one that fails.

        One that fails is remembered as failing in the guesses, too; and its instance must take as much less
        as it fell short, since guesses that err do so for its like.
        """
        places = _used_instances(board)
        new: dict[InstanceKind, list[InstanceContent]] = {}
        for place in places.values():
            if self._like(place) not in self._answers:
                new.setdefault(self._like(place), []).append(place)
        samples = [alike[: max(_MIN_SAMPLES, len(alike) // _SAMPLE_EVERY)] for alike in new.values()]
        self._answers.update(zip(new, parallel_map(self._ask, samples), strict=True))
        taken = board.taken()
        confirmed: list[Assignment | None] = []
        for instance, place in places.items():
            answer = self._answers[self._like(place)]
            confirmed.append(None if answer.setting is None else self._set(place, answer.setting))
            if answer.setting is None:
                board.limit[instance] = taken[instance] * (1.0 - answer.overload)
        return confirmed

    def confirm_in_turn(self, board: PlacementState) -> tuple[Assignment, ...] | None:
        """Return what the twin confirms of every instance that is used; None once one fails."""
        answers = []
        for place in sorted(
            _used_instances(board).values(), key=lambda place: -self._outlook(place).utilization
        ):
            setting = self._ask([place]).setting
            if setting is None:
                return None
            answers.append(self._set(place, setting))
        return tuple(answers)

    def polished(self, assignment: Assignment) -> Assignment:
        """Return a confirmed instance with the best number of slots next to its own, as the twin sees it.

        It is not asked about numbers that guesses say make requests slower by far.
        """
        problem, shares = self.ground.problem, assignment.shares
        values = neighbouring_slots(problem, shares, assignment.a_max)
        others = [replace(assignment, a_max=value) for value in values]
        near = [other for other in others if problem.fits_in_memory(other)]
        guesses = [estimate.e2e_s_mean for estimate in estimate_all(self.quick, near)]
        least = min(guesses, default=0.0)
        fitting = [
            other
            for other, guess in zip(near, guesses, strict=True)
            if guess <= _SLOW_RATIO * least or other.a_max == assignment.a_max
        ]
        estimates = dict(zip((each.a_max for each in fitting), map(self.exact, fitting), strict=True))
        return replace(assignment, a_max=best_slots(estimates) or assignment.a_max)

    def _like(self, place: InstanceContent) -> InstanceKind:
        return self.ground.kinds(place[0]), place[1]

    def _outlook(self, place: InstanceContent, near: int | None = None) -> InstanceEstimate:
        like = self._like(place)
        if like not in self._outlooks:
            self._outlooks[like] = self._guess(place, near)
        return self._outlooks[like]

    def _guess(self, place: InstanceContent, near: int | None) -> InstanceEstimate:
        members, pool = place
        if not members:
            return InstanceEstimate((), holds=True, utilization=0.0)
        ranked = rank_slots(self.ground.problem, self.ground.shares(members), self.quick, pool, near)
        if not ranked:
            return InstanceEstimate((), holds=False, utilization=_REFUSAL_PENALTY + len(members))
        best = next(iter(ranked.values()))
        return InstanceEstimate(
            tuple(ranked), not best.starved, best.utilization + best.starved, best.e2e_s_mean
        )

    def _ask(self, alike: Sequence[InstanceContent]) -> Confirmation:
        """Return the first setting with which all of some like instances hold, best guess first."""
        outlook = self._outlook(alike[0])
        short = 1.0
        for slots in outlook.slots[:_MAX_SLOT_VALUES]:
            most = max(self._strains(alike, (slots, None)))
            if most < 0.0:
                return Confirmation((slots, None))
            short = min(short, most)
        other = self._other_seats(alike, outlook.slots[0]) if outlook.slots else None
        if other is None:
            self._outlooks[self._like(alike[0])] = replace(
                outlook, holds=False, utilization=outlook.utilization + _REFUSAL_PENALTY
            )
        return Confirmation(other, min(_MAX_OVERLOAD, _MIN_OVERLOAD + short))

    def _other_seats(self, alike: Sequence[InstanceContent], slots: int) -> InstanceSetting | None:
        """Return a setting with another max_num_seqs, where the workload leaves that open."""
        problem = self.ground.problem
        if problem.workload.engine.max_num_seqs is not None:
            return None
        for seats in _MAX_NUM_SEQS:
            starts = seats <= problem.engine.max_num_batched_tokens
            if starts and max(self._strains(alike, (slots, seats))) < 0.0:
                return slots, seats
        return None

    def _strains(self, alike: Sequence[InstanceContent], setting: InstanceSetting) -> Iterator[float]:
        """Yield the share of the load by which like instances fall short, up to the first; -1: by none."""
        for place in alike:
            assignment = self._set(place, setting)
            fits = self.ground.problem.fits_in_memory(assignment)
            estimate = self.exact(assignment) if fits else None
            if estimate is None or estimate.starved:
                yield estimate.overload if estimate else 1.0
                return
            yield -1.0

    def _set(self, place: InstanceContent, setting: InstanceSetting) -> Assignment:
        members, pool = place
        slots, seats = setting
        return Assignment(self.ground.shares(members), slots, seats, pool)


def _used_instances(board: PlacementState) -> dict[int, InstanceContent]:
    """Return the instances of a board that are used, by their number."""
    pairs = zip(board.members, board.pools.tolist(), strict=True)
    return {at: (frozenset(members), pool) for at, (members, pool) in enumerate(pairs) if members}
