"""Local search over placements and fleet sizes."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from capplan.planner.parallel import parallel_map
from capplan.planner.problem import Assignment, Problem
from capplan.planner.search.data import SearchData
from capplan.planner.search.evaluator import Evaluator
from capplan.planner.search.placement import INITIAL_SOLUTIONS, InitialSolution, PlacementState
from capplan.spec import Objective

_MAX_FLEET_LOAD: Final = 1.25

"""How full a fleet may be by the fluid estimate before it is passed over unasked."""

_MAX_MISSES: Final = 2

"""More wanted fleets than the first that should hold which are tried all the same: guesses err."""

_SMALL_FLEETS: Final = 8

"""Fleets that are tried one after the other, rather than by bisection."""

_ROUNDS: Final = 16

_MAX_UTILIZATION: Final = 1.9

"""Strain up to which the twin is asked, where instances are few, although the guess is that one fails."""


@dataclass(frozen=True)
class LocalSearch:
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

    ground: SearchData
    judge: Evaluator
    until_s: float
    starts: tuple[InitialSolution, ...] = INITIAL_SOLUTIONS

    @property
    def late(self) -> bool:
        """Whether time is over."""
        return time.monotonic() > self.until_s

    def seek(self, order: Sequence[FleetSize]) -> tuple[Assignment, ...] | None:
        """Return a placement on the most wanted fleet found; None without any.

        Where many fleets are of one pool, guesses say by bisection where to begin; from there on it goes
        down as long as that succeeds, or else up.
        """
        possible = [fleet for fleet in order if self._possible(fleet)]
        plausible = (
            possible if len(possible) <= _SMALL_FLEETS else [f for f in possible if self._plausible(f)]
        )
        in_a_row = (
            len(plausible) <= _SMALL_FLEETS or len(plausible[0]) > 1
        )  # pools: more wanted is not always less
        begin = 0 if in_a_row else self._first_promising(plausible)
        found, misses, at = None, 0, begin
        while at < len(plausible) and found is None and not self.late:
            found = self.attempt(plausible[at])
            at += 1
        down = begin if at == begin + 1 else 0  # what is more wanted than one that failed fails, too
        for fleet in reversed(plausible[:down]):
            if found is None or misses == _MAX_MISSES or self.late:
                break
            better = self.attempt(fleet)
            found, misses = (found, misses + 1) if better is None else (better, 0)
        return found

    def attempt(self, fleet: FleetSize) -> tuple[Assignment, ...] | None:
        """Return a placement on a fleet that the twin confirms; None without any.

        Placements of which guesses say that their requests are short come first.
        """
        return next(self._answers(fleet), None)

    def fastest(self, fleet: FleetSize) -> tuple[Assignment, ...] | None:
        """Return the confirmed placement with the shortest mean time from arrival to last token."""
        answers = (self.polished(answer) for answer in self._answers(fleet))
        return min(answers, key=self.mean_s, default=None)

    def polished(self, answer: tuple[Assignment, ...]) -> tuple[Assignment, ...]:
        """Return the placement with the best slots next to those it has, as the twin sees it."""
        return tuple(parallel_map(self.judge.polished, answer))

    def mean_s(self, answer: Sequence[Assignment]) -> float:
        """Return the mean time of all requests from arrival to last token, as the twin sees it."""
        rates = [sum(share.rate_rps for share in each.shares) for each in answer]
        times = [self.judge.exact(each).e2e_s_mean for each in answer]
        return _weighted_mean(times, rates)

    def _answers(self, fleet: FleetSize) -> Iterator[tuple[Assignment, ...]]:
        """Yield a confirmed placement for every start from which there is one, short requests first."""
        rounds = _ROUNDS + 4 * sum(fleet)
        held: list[PlacementState] = []
        others: list[PlacementState] = []
        for board in self._boards(fleet):
            (held if improve(board, self.judge, rounds) else others).append(board)
        near = [
            board
            for board in others
            if len(board) <= _SMALL_FLEETS and self._strain(board) <= _MAX_UTILIZATION
        ]
        for board in sorted(held, key=self._guessed_s) + sorted(near, key=self._guessed_s):
            answer = None if self.late else self._confirmed(board, rounds)
            if answer is not None:
                yield answer
        if others and not held and not near and sum(fleet) <= _SMALL_FLEETS and not self.late:
            answer = self.judge.confirm_in_turn(min(others, key=self._strain))  # guesses err
            if answer is not None:
                yield answer

    def _boards(self, fleet: FleetSize) -> Iterator[PlacementState]:
        """Yield the placements to begin with that leave no unit out."""
        for start in self.starts:
            board = start(self.ground, instance_pools(fleet))
            if board is not None and not self.late:
                yield board

    def _confirmed(self, board: PlacementState, rounds: int) -> tuple[Assignment, ...] | None:
        """Return the board once the twin confirms every instance; what it refuses is mended."""
        for _ in range(3 + len(board)):
            answers = self.judge.confirm(board)
            confirmed = tuple(answer for answer in answers if answer is not None)
            if len(confirmed) == len(answers):
                return confirmed
            if self.late or not improve(board, self.judge, rounds):
                return None
        return None

    def _guessed_s(self, board: PlacementState) -> float:
        """Return the mean time of requests that guesses expect."""
        rates = [sum(share.rate_rps for share in self.ground.shares(frozenset(m))) for m in board.members]
        times = [self.judge.outlook(board, instance).e2e_s for instance in range(len(board))]
        return _weighted_mean(times, rates)

    def _strain(self, board: PlacementState) -> float:
        return max(self.judge.outlook(board, instance).utilization for instance in range(len(board)))

    def _first_promising(self, plausible: Sequence[FleetSize]) -> int:
        """Return the first fleet on which guesses say that a placement holds, as if later ones all did."""
        low, high = 0, len(plausible) - 1
        while low < high and not self.late:
            middle = (low + high) // 2
            if self._promising(plausible[middle]):
                high = middle
            else:
                low = middle + 1
        return low

    def _promising(self, fleet: FleetSize) -> bool:
        rounds = 8 + len(instance_pools(fleet)) // 4
        return any(improve(board, self.judge, rounds) for board in self._boards(fleet))

    def _possible(self, fleet: FleetSize) -> bool:
        """Tell whether a fleet has every pool that units need."""
        used = {pool for pool, count in enumerate(fleet) if count}
        return not any(unit.pools.isdisjoint(used) for unit in self.ground.units)

    def _plausible(self, fleet: FleetSize) -> bool:
        """Tell whether a fleet has about enough instances by the fluid estimate."""
        ground = self.ground
        columns = np.arange(len(ground.units))
        whole = ground.takes[:, ground.rank, columns].sum(axis=1)  # instances of one pool that all would take
        return float((np.array(fleet) / whole).sum()) >= 1.0 / _MAX_FLEET_LOAD


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / max(sum(weights), 1e-12)


_WIDE_NEIGHBOURHOOD: Final = (8, 4, 3)

_NARROW_NEIGHBOURHOOD: Final = (5, 2, 2)

"""Units of a failing instance that are tried, from the lightest to the heaviest; instances that each might go
to; lighter units there that are tried in exchange. Wide on few instances, where there are few ways out."""

_SMALL_FLEET: Final = 8

_LOAD_WEIGHT: Final = 0.05

"""What an instance costs for being taken, beside its strain: moves towards empty instances are a gain."""

_LIMIT_WEIGHT: Final = 10.0

"""What it costs to take a multiple of what the twin refused to confirm: more than any guess says."""

_MIN_GAIN: Final = 1e-9


class SearchMove(NamedTuple):
    """A unit goes elsewhere; another may come back for it."""

    unit: int
    source: int
    target: int
    back: int | None


def improve(board: PlacementState, judge: Evaluator, rounds: int) -> bool:
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


def _failing(board: PlacementState, judge: Evaluator) -> dict[int, float]:
    """Return the strain of every instance that does not hold."""
    failing: dict[int, float] = {}
    for instance, taken in enumerate(board.taken().tolist()):
        outlook, beyond = judge.outlook(board, instance), board.over_limit(taken, instance)
        if beyond or not outlook.holds:
            failing[instance] = outlook.utilization + _LIMIT_WEIGHT * beyond
    return failing


def _best_move(board: PlacementState, judge: Evaluator, source: int) -> SearchMove | None:
    best, most = None, _MIN_GAIN
    for move in _moves(board, source):
        gain = _gain(board, judge, move)
        if gain > most:
            best, most = move, gain
    return best


def _gain(board: PlacementState, judge: Evaluator, move: SearchMove) -> float:
    """Return by how much a move lowers what its two instances cost."""
    back = frozenset() if move.back is None else frozenset({move.back})
    here, there = frozenset(board.members[move.source]), frozenset(board.members[move.target])
    unit = frozenset({move.unit})
    after = ((here - unit) | back, move.source), ((there - back) | unit, move.target)
    before = (here, move.source), (there, move.target)
    return sum(_cost(board, judge, *each) for each in before) - sum(
        _cost(board, judge, *each) for each in after
    )


def _cost(board: PlacementState, judge: Evaluator, members: frozenset[int], instance: int) -> float:
    pool = int(board.pools[instance])
    taken = board.ground.taken(members, pool)
    outlook = judge.outlook_of(members, pool, like=judge.outlook(board, instance))
    return (
        outlook.utilization + _LIMIT_WEIGHT * board.over_limit(taken, instance) + _LOAD_WEIGHT * taken * taken
    )


def _moves(board: PlacementState, source: int) -> Iterator[SearchMove]:
    """Yield moves and exchanges that constraints allow, to the instances with most room for each unit."""
    units, targets, backs = _WIDE_NEIGHBOURHOOD if len(board) <= _SMALL_FLEET else _NARROW_NEIGHBOURHOOD
    for unit in _spaced(board, board.members[source], units):
        taken = board.taken_with(unit)
        taken[source] = np.inf
        for target in np.argsort(taken, kind="stable")[:targets].tolist():
            if not np.isfinite(taken[target]):
                break
            yield SearchMove(unit, source, target, None)
            weight = board.ground.weight[unit]
            lighter = [other for other in board.members[target] if board.ground.weight[other] < weight]
            for back in _spaced(board, lighter, backs):
                if board.may(back, source, leaving=unit):
                    yield SearchMove(unit, source, target, back)


def _spaced(board: PlacementState, units: set[int] | list[int], count: int) -> list[int]:
    """Return some of the units, evenly from the lightest to the heaviest."""
    ordered = sorted(units, key=lambda u: (board.ground.weight[u], board.ground.rank[u], u))
    if len(ordered) <= count:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]


FleetSize = tuple[int, ...]

"""Instances of every pool."""

_MAX_FLEETS: Final = 200_000


def fleet_sizes(problem: Problem, units: int, objective: Objective) -> list[FleetSize]:
    """Return the fleets to try, the most wanted first; only the whole one where all GPUs are to be used.

    Parameters
    ----------
    problem
        With its pools.
    units
        What is placed: more instances than that are of no use.
    objective
        Fewest GPUs, then least price; or the other way round.
    """
    most = [min(pool.instances, units) for pool in problem.pools]
    if objective in (Objective.MIN_LATENCY, Objective.MAX_THROUGHPUT):
        return [tuple(most)]
    counts = [
        sorted({*range(0, count + 1, step), count}) for count, step in zip(most, _steps(most), strict=True)
    ]
    every = (fleet for fleet in itertools.product(*counts) if any(fleet))
    return sorted(every, key=lambda fleet: fleet_cost(problem, fleet, objective))


def fleet_cost(problem: Problem, fleet: FleetSize, objective: Objective) -> tuple[float, float, FleetSize]:
    """Return the key by which fleets are ordered, least for the most wanted."""
    gpus, price = float(fleet_gpus(problem, fleet)), fleet_usd_per_hour(problem, fleet)
    ahead = (price, gpus) if objective is Objective.MIN_COST else (gpus, price)
    return (*ahead, tuple(-count for count in fleet))


def instance_pools(fleet: FleetSize) -> list[int]:
    """Return the pool of every instance of a fleet."""
    return [pool for pool, count in enumerate(fleet) for _ in range(count)]


def fleet_size_of(problem: Problem, answer: Iterable[Assignment]) -> FleetSize:
    """Return the fleet that a placement uses."""
    used = Counter(assignment.pool for assignment in answer)
    return tuple(used[pool] for pool in range(len(problem.pools)))


def fleet_gpus(problem: Problem, fleet: FleetSize) -> int:
    """Return how many GPUs a fleet has."""
    return sum(count * pool.profile.tp for pool, count in zip(problem.pools, fleet, strict=True))


def fleet_usd_per_hour(problem: Problem, fleet: FleetSize) -> float:
    """Return what a fleet costs; pools without a price cost nothing."""
    return sum(count * (pool.usd_per_hour or 0.0) for pool, count in zip(problem.pools, fleet, strict=True))


def _steps(most: Sequence[int]) -> list[int]:
    """Return the steps in which pools are counted: 1, unless there are too many combinations."""
    steps = [1] * len(most)
    while len(most) > 1 and _combinations(most, steps) > _MAX_FLEETS:
        widest = max(range(len(most)), key=lambda i: most[i] / steps[i])
        steps[widest] *= 2
    return steps


def _combinations(most: Sequence[int], steps: Sequence[int]) -> int:
    total = 1
    for count, step in zip(most, steps, strict=True):
        total *= count // step + 2
    return total
