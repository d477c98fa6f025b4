"""Local search over placements and fleet sizes, and near the plan in force, with a price on moves.

Instances are estimated by the surrogate, with a cache, and confirmed by the twin.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from capplan.planner.problem._execution import NEVER, Deadline, no_progress, parallel_map
from capplan.planner.problem._previous import PreviousInstance, count_moves
from capplan.planner.problem._problem import Assignment, Estimator, Problem, estimate_all
from capplan.planner.problem._settings import (
    best_slots,
    fallback_running_requests,
    knob_grid,
    knobs_of,
    neighbouring_slots,
    rank_slots,
    tune_knobs,
)
from capplan.planner.search._placement import INITIAL_SOLUTIONS, InitialSolution, PlacementState, SearchData
from capplan.spec import EngineArgs, EngineConfig, Objective

InstanceContent = tuple[frozenset[int], int]
"""Groups of an instance, and its pool."""
InstanceKind = tuple[bytes, int]
"""Kinds of the groups, and the pool; equal for instances that perform alike."""


class InstanceSetting(NamedTuple):
    """Engine settings of an instance."""

    a_max: int
    knobs: EngineConfig = EngineConfig()
    """Settings beside the slots, where they differ from the problem's."""


_MAX_OTHER_SETTINGS: Final = 3
"""Settings with other knobs to try on an instance."""
_MAX_SLOT_VALUES: Final = 4
"""Maximum number of values of A_max that the twin simulates."""
_SLOW_RATIO: Final = 1.2
"""Ratio of request times from which the surrogate rules out a number of slots."""
_MIN_SAMPLES: Final = 3
_SAMPLE_EVERY: Final = 6
"""Simulated instances of one kind: a minimum number, and one in every six."""
_REFUSAL_PENALTY: Final = 2.0
_MIN_OVERLOAD: Final = 0.003
_MAX_OVERLOAD: Final = 0.1
"""Bounds on the overload assumed for an instance that the twin refuses."""


@dataclass(frozen=True)
class InstanceEstimate:
    """Surrogate's estimate of an instance with its best number of slots."""

    slots: tuple[int, ...]
    """Values of A_max that fit in memory, best first; empty: none does."""
    holds: bool
    utilization: float
    e2e_s: float = 0.0
    """Mean time of a request; 0 if unknown."""


@dataclass(frozen=True)
class Confirmation:
    """Result of the twin for a kind of instance."""

    setting: InstanceSetting | None
    """Setting with which it holds; None: refused."""
    overload: float = 0.0
    """Share of the load that is too much."""


@dataclass
class Evaluator:
    """Estimates instances with the surrogate, confirms them with the twin, and caches both by kind."""

    data: SearchData
    """Search data."""
    surrogate: Estimator
    twin: Estimator
    """Fast and deciding estimator."""
    opens_knobs: bool = False
    """Whether an instance that the twin refuses is tried with other values of its open knobs."""
    other_settings: tuple[InstanceSetting, ...] = ()
    """Settings with other knobs, at any number of slots, that are tried on an instance that is refused."""
    deadline: Deadline = NEVER
    """Time at which a new estimate raises `OutOfTimeError`."""
    _knobs: InstanceSetting | None = None
    """First setting with other knobs that was confirmed; the next descent begins there as well."""
    _estimates: dict[InstanceKind, InstanceEstimate] = field(default_factory=dict)
    _confirmations: dict[InstanceKind, Confirmation] = field(default_factory=dict)

    def estimate(self, state: PlacementState, instance: int) -> InstanceEstimate:
        """Return the estimate of an instance of a placement."""
        return self._estimate((frozenset(state.members[instance]), int(state.pools[instance])))

    def estimate_similar(
        self, members: frozenset[int], pool: int, like: InstanceEstimate
    ) -> InstanceEstimate:
        """Return the estimate of an instance that differs little from one already estimated."""
        return self._estimate((members, pool), like.slots[0] if like.slots else None)

    def confirm(self, state: PlacementState) -> list[Assignment | None]:
        """Return the confirmed assignment of every used instance; None for one that the twin refuses.

        A refused instance is marked as failing in the estimates. Its load limit drops by the overload.
        """
        contents = _used_instances(state)
        new: dict[InstanceKind, list[InstanceContent]] = {}
        for content in contents.values():
            if self._kind(content) not in self._confirmations:
                new.setdefault(self._kind(content), []).append(content)
        samples = [same[: max(_MIN_SAMPLES, len(same) // _SAMPLE_EVERY)] for same in new.values()]
        found = parallel_map(self._confirm_kind, samples)
        self._confirmations.update(zip(new, found, strict=True))
        settings = (each.setting for each in found if each.setting is not None)
        self._knobs = self._knobs or next((s for s in settings if s.knobs.max_num_batched_tokens), None)
        loads = state.loads()
        confirmed: list[Assignment | None] = []
        for instance, content in contents.items():
            confirmation = self._confirmations[self._kind(content)]
            if confirmation.setting is None:
                confirmed.append(None)
                state.load_limit[instance] = loads[instance] * (1.0 - confirmation.overload)
            else:
                confirmed.append(self._assignment(content, confirmation.setting))
        return confirmed

    def confirm_all(self, state: PlacementState) -> tuple[Assignment, ...] | None:
        """Return the confirmed assignments, most utilized instance first; None at the first refusal."""
        assignments = []
        contents = _used_instances(state).values()
        for content in sorted(contents, key=lambda content: -self._estimate(content).utilization):
            setting = self._confirm_kind([content]).setting
            if setting is None:
                return None
            assignments.append(self._assignment(content, setting))
        return tuple(assignments)

    def refuses_all(self, state: PlacementState) -> bool:
        """Tell whether the twin refuses even the instance with the least load, so that no move helps.

        The surrogate ignores latency bounds. Without one, or with several pools, the answer is False.
        """
        problem = self.data.problem
        contents = _used_instances(state)
        if not (problem.bounds_latency and len(problem.pools) == 1 and contents):
            return False
        loads = state.loads()
        content = contents[min(contents, key=lambda instance: float(loads[instance]))]
        kind = self._kind(content)
        if kind not in self._confirmations:
            confirmation = self._confirm_kind([content])
            if confirmation.setting is None:
                self._confirmations[kind] = confirmation
            return confirmation.setting is None
        return self._confirmations[kind].setting is None

    def holds(self, members: frozenset[int], pool: int) -> bool:
        """Tell whether the twin confirms an instance of a pool with these groups."""
        return not members or self._confirm_kind([(members, pool)]).setting is not None

    def is_mostly_overloaded(self, state: PlacementState) -> bool:
        """Tell whether the instances that do not hold are too many for moves among them."""
        failing = sum(not self.estimate(state, instance).holds for instance in range(len(state)))
        return are_too_many(failing, len(state))

    def tune_slots(self, assignment: Assignment) -> Assignment:
        """Return a confirmed assignment with the best of the neighbouring numbers of slots, by the twin.

        Numbers with much slower requests by the surrogate are left out.
        """
        problem = self.data.problem
        values = neighbouring_slots(problem, assignment.shares, assignment.a_max)
        candidates = [replace(assignment, a_max=value) for value in values]
        candidates = [each for each in candidates if problem.fits_in_memory(each)]
        times_s = [estimate.e2e_s_mean for estimate in estimate_all(self.surrogate, candidates)]
        limit_s = _SLOW_RATIO * min(times_s, default=0.0)
        estimates = {
            each.a_max: self.twin(each)
            for each, time_s in zip(candidates, times_s, strict=True)
            if time_s <= limit_s or each.a_max == assignment.a_max
        }
        return replace(assignment, a_max=best_slots(estimates) or assignment.a_max)

    def tune_knobs(self, assignment: Assignment) -> Assignment:
        """Return a confirmed assignment with the knobs of the least utilization, by the twin."""
        return tune_knobs(self.data.problem, assignment, self.twin).assignment

    def _kind(self, content: InstanceContent) -> InstanceKind:
        return self.data.kind_key(content[0]), content[1]

    def _estimate(self, content: InstanceContent, near: int | None = None) -> InstanceEstimate:
        kind = self._kind(content)
        if kind not in self._estimates:
            self.deadline.check()
            self._estimates[kind] = self._compute_estimate(content, near)
        return self._estimates[kind]

    def _compute_estimate(self, content: InstanceContent, near: int | None) -> InstanceEstimate:
        members, pool = content
        if not members:
            return InstanceEstimate((), holds=True, utilization=0.0)
        instance = Assignment(self.data.shares(members), 1, pool)
        ranked = rank_slots(self.data.problem, instance, self.surrogate, near)
        if not ranked:
            return InstanceEstimate((), holds=False, utilization=_REFUSAL_PENALTY + len(members))
        best = next(iter(ranked.values()))
        return InstanceEstimate(
            tuple(ranked), not best.starved, best.utilization + best.starved, best.e2e_s_mean
        )

    def _confirm_kind(self, same: Sequence[InstanceContent]) -> Confirmation:
        """Return the first setting with which all sampled instances of one kind hold."""
        estimate = self._estimate(same[0])
        overload = 1.0
        for slots in estimate.slots[:_MAX_SLOT_VALUES]:
            worst = max(self._overloads(same, InstanceSetting(slots)))
            if worst < 0.0:
                return Confirmation(InstanceSetting(slots))
            overload = min(overload, worst)
        fallback = bool(estimate.slots) and not self.opens_knobs
        other = self._try_max_num_seqs(same, estimate.slots[0]) if fallback else None
        other = other or self._try_other_settings(same, estimate.slots[:_MAX_SLOT_VALUES])
        if other is None and self.opens_knobs:
            other = self._try_knobs(same, estimate.slots[:_MAX_SLOT_VALUES])
        if other is None:
            self._estimates[self._kind(same[0])] = replace(
                estimate, holds=False, utilization=estimate.utilization + _REFUSAL_PENALTY
            )
        return Confirmation(other, min(_MAX_OVERLOAD, _MIN_OVERLOAD + overload))

    def _try_max_num_seqs(self, same: Sequence[InstanceContent], slots: int) -> InstanceSetting | None:
        """Return a setting with another max_num_seqs that holds, if the workload leaves it open.

        The first sample is simulated with all of them side by side: mostly none holds.
        """
        problem = self.data.problem
        knobs = (EngineConfig(max_num_seqs=seqs) for seqs in fallback_running_requests(problem))
        settings = [InstanceSetting(slots, each) for each in knobs]
        first = (self._assignment(same[0], setting) for setting in settings)
        estimate_all(self.twin, list(filter(problem.fits_in_memory, first)))
        return next((each for each in settings if max(self._overloads(same, each)) < 0.0), None)

    def _try_other_settings(
        self, same: Sequence[InstanceContent], slots: Sequence[int]
    ) -> InstanceSetting | None:
        """Return one of the other settings that holds, as far as the workload leaves its knobs open."""
        grid, engine = knob_grid(self.data.problem, same[0][1]), self.data.problem.engine
        for other, a_max in itertools.product(self.other_settings, slots):
            is_open = all(getattr(other.knobs, name) in values for name, values in grid.items())
            is_default = all(getattr(other.knobs, name) == getattr(engine, name) for name in grid)
            setting = other._replace(a_max=a_max)
            if is_open and not is_default and max(self._overloads(same, setting)) < 0.0:
                return setting
        return None

    def _try_knobs(self, same: Sequence[InstanceContent], slots: Sequence[int]) -> InstanceSetting | None:
        """Return a setting with other knobs that holds: the best slots, then knobs, then slots again."""
        problem = self.data.problem

        def best_of(settings: Iterable[InstanceSetting]) -> Assignment | None:
            candidates = (self._assignment(same[0], setting) for setting in settings)
            fitting = list(filter(problem.fits_in_memory, candidates))
            estimates = dict(zip(fitting, estimate_all(self.twin, fitting), strict=True))
            return min(estimates, key=lambda each: estimates[each].utilization, default=None)

        start = best_of(map(InstanceSetting, slots))
        if start is None:
            return None
        known = () if self._knobs is None else (self._knobs._replace(a_max=start.a_max),)
        start = best_of((InstanceSetting(start.a_max), *known)) or start
        best, estimate = tune_knobs(problem, start, self.twin, until_it_holds=True)
        setting = InstanceSetting(best.a_max, best.knobs)
        if estimate.starved and best != start:
            other = best_of(setting._replace(a_max=value) for value in slots)
            setting = setting if other is None else setting._replace(a_max=other.a_max)
        return setting if max(self._overloads(same, setting)) < 0.0 else None

    def _overloads(self, same: Sequence[InstanceContent], setting: InstanceSetting) -> Iterator[float]:
        """Yield -1 for every instance that holds, and the overload of the first that does not."""
        for content in same:
            assignment = self._assignment(content, setting)
            fits = self.data.problem.fits_in_memory(assignment)
            estimate = self.twin(assignment) if fits else None
            if estimate is None or estimate.starved:
                yield estimate.overload if estimate else 1.0
                return
            yield -1.0

    def _assignment(self, content: InstanceContent, setting: InstanceSetting) -> Assignment:
        members, pool = content
        return Assignment(self.data.shares(members), setting.a_max, pool, setting.knobs)


def are_too_many(failing: int, instances: int) -> bool:
    """Tell whether failing instances are too many for moves among a placement's instances to help."""
    return 2 * failing > max(instances, 2)


def frequent_settings(engines: Iterable[EngineArgs]) -> tuple[InstanceSetting, ...]:
    """Return the most frequent settings of knobs, without regard to slots."""
    count = Counter(InstanceSetting(0, knobs_of(each)) for each in engines)
    return tuple(setting for setting, _ in count.most_common(_MAX_OTHER_SETTINGS))


def _used_instances(state: PlacementState) -> dict[int, InstanceContent]:
    pairs = zip(state.members, state.pools.tolist(), strict=True)
    return {at: (frozenset(members), pool) for at, (members, pool) in enumerate(pairs) if members}


_LATENCY_GAIN: Final = 0.05
"""Relative gain in mean request time that is worth moving all adapters, for the objective min_latency."""
_MAX_EQUAL_FLEETS: Final = 4
"""Fleet sizes of equal cost to try."""
_MAX_ALTERNATIVES: Final = 2
"""Placements with fewer moves than the answer."""

Placement = tuple[Assignment, ...]


def placement_cost(
    problem: Problem, placement: Placement, old: Sequence[PreviousInstance]
) -> tuple[float, float, int]:
    """Return GPUs or price with the price of moves, the other of the two, and the number of moves."""
    moves = count_moves(problem, placement, old)
    first, second, _ = fleet_cost(problem, fleet_size_of(problem, placement))
    return first + (problem.workload.move_cost or 0.0) * moves, second, moves


@dataclass(frozen=True)
class MoveSearch:
    """Search for the placement of least cost, with `move_cost` added for every adapter that moves."""

    problem: Problem
    old: tuple[PreviousInstance, ...]
    """Problem, and instances of the plan in force."""
    local: LocalSearch
    """Search from initial solutions with more and more moves."""
    _unchanged: dict[FleetSize, UnchangedSearch] = field(default_factory=dict)
    """Results of the initial solutions as they are, which a second search does not try again."""

    def search(self, known: Placement | None) -> Placement | None:
        """Return a placement near the plan in force if it costs less than the known one, else that.

        If none is known, return the first on the size in force or a larger one.
        """
        best = known
        least = (math.inf, math.inf, len(self.problem.shares)) if known is None else self.cost(known)
        for fleet in self._fleets(known):
            if self.local.timed_out or least[2] == 0 or self._least_cost(fleet) > least[0]:
                return best
            found = self._search_fleet(fleet, improving=known is not None)
            if found is not None and self.cost(found) < least:
                best, least = found, self.cost(found)
        return best

    def alternatives(self, answer: Placement) -> Iterator[Placement]:
        """Yield confirmed placements with ever fewer moves than the answer, on ever costlier fleets.

        Tried are the next two costlier sizes, the size in force, and the next one that contains it.
        """
        cost, least, found = self._costs(fleet_size_of(self.problem, answer)), self.count_moves(answer), 0
        costlier = [fleet for fleet in self._fleets(answer) if self._costs(fleet) > cost]
        current = self._size_in_force()
        larger = [fleet for fleet in costlier if all(map(operator.ge, fleet, current))]
        for fleet in sorted({*costlier[:2], *larger[:2]}, key=self._costs):
            if self.local.timed_out or not least or found == _MAX_ALTERNATIVES:
                return
            other = self._search_fleet(fleet, improving=False)
            if other is not None and self.count_moves(other) < least:
                least, found = self.count_moves(other), found + 1
                yield other

    def _search_fleet(self, fleet: FleetSize, improving: bool) -> Placement | None:
        """Return an initial solution on a fleet that holds as it is or, if `improving`, improved."""
        if fleet not in self._unchanged:
            self._unchanged[fleet] = self.local.search_unchanged(fleet)
        unchanged = self._unchanged[fleet]
        if unchanged.confirmed is not None or not improving:
            return unchanged.confirmed
        return self.local.search_improved(unchanged.refused)

    def count_moves(self, placement: Sequence[Assignment]) -> int:
        """Return the number of adapters that a placement moves."""
        return count_moves(self.problem, placement, self.old)

    def cost(self, placement: Placement) -> tuple[float, float, int]:
        """Return the cost of a placement with the price of its moves, its second cost, and the moves."""
        workload = self.problem.workload
        if workload.objective is not Objective.MIN_LATENCY:
            return placement_cost(self.problem, placement, self.old)
        moves = self.count_moves(placement)
        price = _LATENCY_GAIN * moves / max(1, len(workload.adapters))
        return self.local.mean_e2e_s(placement) * (1.0 + price), 0.0, moves

    def _least_cost(self, fleet: FleetSize) -> float:
        """Return the cost of a fleet without moves."""
        return 0.0 if self.problem.workload.objective is Objective.MIN_LATENCY else self._costs(fleet)[0]

    def _costs(self, fleet: FleetSize) -> tuple[float, float]:
        """Return GPUs and price of a fleet, in the order of the objective."""
        return fleet_cost(self.problem, fleet)[:2]

    def _order(self) -> list[FleetSize]:
        return fleet_sizes(self.problem, len(self.local.data.groups))

    def _size_in_force(self) -> FleetSize:
        """Return the instances in force by pool, at most as many as there can be."""
        names = [pool.name for pool in self.problem.pools]
        held = Counter(instance.pool for instance in self.old)
        return tuple(min(held[name], most) for name, most in zip(names, self._order()[-1], strict=True))

    def _fleets(self, known: Placement | None) -> list[FleetSize]:
        """Return the fleet sizes that can cost less than the known placement, cheapest first.

        These are the size in force, and those that cost no less than the known placement, or than the size in
        force if none is known. Of equal ones, those closest to the size in force come first.
        """
        current = self._size_in_force()

        def distance(fleet: FleetSize) -> int:
            return sum(abs(new - old) for new, old in zip(fleet, current, strict=True))

        least = self._costs(current if known is None else fleet_size_of(self.problem, known))
        fleets = [fleet for fleet in self._order() if fleet == current or self._costs(fleet) >= least]
        equal: Counter[tuple[float, float]] = Counter()
        nearest = []
        for fleet in sorted(fleets, key=lambda fleet: (self._costs(fleet), distance(fleet))):
            equal[self._costs(fleet)] += 1
            if equal[self._costs(fleet)] <= _MAX_EQUAL_FLEETS:
                nearest.append(fleet)
        return nearest


FleetSize = tuple[int, ...]
"""Instances of every pool."""

_MAX_FLEETS: Final = 200_000
_MAX_FLEET_LOAD: Final = 1.25
"""Load per instance, by the fluid model, above which a fleet size is skipped."""
_MAX_MISSES: Final = 2
"""Failures in a row that end the search for smaller fleets."""
_SMALL_FLEET: Final = 8
"""Fleet sizes that are tried in order instead of by bisection, and instances of a small fleet."""
_ROUNDS: Final = 16
_MAX_UTILIZATION: Final = 1.9
"""Utilization up to which the twin simulates a failing placement on a small fleet."""

_WIDE_NEIGHBOURHOOD: Final = (8, 4, 3)
_NARROW_NEIGHBOURHOOD: Final = (5, 2, 2)
"""Numbers of moved groups, of targets for each, and of lighter groups in exchange, on small and larger
fleets."""
_LOAD_WEIGHT: Final = 0.05
"""Cost of the squared load, beside the utilization: moves towards empty instances are a gain."""
_LIMIT_WEIGHT: Final = 10.0
"""Cost of exceeding a load limit; larger than any estimated utilization."""
_MIN_GAIN: Final = 1e-9


def fleet_sizes(problem: Problem, groups: int) -> list[FleetSize]:
    """Return the fleet sizes to try, best first; all GPUs only, if the objective uses them all.

    The number of adapter groups is an upper bound on useful instances. MIN_COST orders by price, then GPUs;
    any other objective by GPUs, then price.
    """
    most = [min(pool.instances, groups) for pool in problem.pools]
    if problem.workload.objective in (Objective.MIN_LATENCY, Objective.MAX_THROUGHPUT):
        return [tuple(most)]
    steps = _fleet_steps(most)
    counts = [sorted({*range(0, count + 1, step), count}) for count, step in zip(most, steps, strict=True)]
    sizes = (fleet for fleet in itertools.product(*counts) if any(fleet))
    return sorted(sizes, key=lambda fleet: fleet_cost(problem, fleet))


def fleet_cost(problem: Problem, fleet: FleetSize) -> tuple[float, float, FleetSize]:
    """Return the sort key of a fleet size, least for the best."""
    gpus = float(fleet_gpus(problem, fleet))
    price = sum(count * (pool.usd_per_hour or 0.0) for pool, count in zip(problem.pools, fleet, strict=True))
    first = (price, gpus) if problem.workload.objective is Objective.MIN_COST else (gpus, price)
    return (*first, tuple(-count for count in fleet))


def fleet_gpus(problem: Problem, fleet: FleetSize) -> int:
    """Return the number of GPUs of a fleet."""
    return sum(count * pool.profile.tp for pool, count in zip(problem.pools, fleet, strict=True))


def available_gpus(problem: Problem) -> int:
    """Return the number of GPUs of all instances of a problem."""
    return fleet_gpus(problem, tuple(pool.instances for pool in problem.pools))


def fleet_size_of(problem: Problem, assignments: Iterable[Assignment]) -> FleetSize:
    """Return the fleet size that a placement uses."""
    used = Counter(assignment.pool for assignment in assignments)
    return tuple(used[pool] for pool in range(len(problem.pools)))


def _fleet_steps(most: Sequence[int]) -> list[int]:
    """Return the step of each pool's count: 1, unless there are too many combinations."""
    steps = [1] * len(most)
    while len(most) > 1:
        if math.prod(n // step + 2 for n, step in zip(most, steps, strict=True)) <= _MAX_FLEETS:
            break
        steps[max(range(len(most)), key=lambda i: most[i] / steps[i])] *= 2
    return steps


class UnchangedSearch(NamedTuple):
    """Result of trying the initial solutions of a fleet as they are."""

    confirmed: tuple[Assignment, ...] | None
    """Confirmed placement, if there is one."""
    refused: tuple[PlacementState, ...]
    """Otherwise all of them."""


@dataclass(frozen=True)
class LocalSearch:
    """Search for a placement that the twin confirms, until a deadline."""

    data: SearchData
    evaluator: Evaluator
    """Search data and evaluator."""
    deadline_s: float
    """Value of `time.monotonic` at which to stop."""
    initial_solutions: tuple[InitialSolution, ...] = INITIAL_SOLUTIONS
    """Constructions of initial placements, in order."""
    on_answer: Callable[[Sequence[Assignment]], None] = no_progress
    """Called with each confirmed placement."""

    @property
    def timed_out(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline_s

    def search(self, order: Sequence[FleetSize]) -> tuple[Assignment, ...] | None:
        """Return a placement on the best fleet size found; None without any.

        With many sizes of one pool, bisection by the surrogate gives the first size to try. The search then
        goes down while it succeeds, or else up.
        """
        fleets = [fleet for fleet in order if self._has_required_pools(fleet)]
        if len(fleets) > _SMALL_FLEET:
            fleets = [fleet for fleet in fleets if self._has_capacity(fleet)]
        in_order = len(fleets) <= _SMALL_FLEET and not self.data.problem.bounds_latency
        in_order = in_order or len(self.data.problem.pools) > 1  # of these, better is not always smaller
        begin = 0 if in_order else self._bisect(fleets)
        found, misses, at = None, 0, begin
        while at < len(fleets) and found is None and not self.timed_out:
            found = self.search_fleet(fleets[at])
            at += 1
        down = begin if at == begin + 1 else 0  # sizes below one that failed fail, too
        for fleet in reversed(fleets[:down]):
            if found is None or misses == _MAX_MISSES or self.timed_out:
                break
            better = self.search_fleet(fleet)
            found, misses = (found, misses + 1) if better is None else (better, 0)
        return found

    def shrink(self, order: Sequence[FleetSize]) -> tuple[Assignment, ...] | None:
        """Return a placement on the best of these fleet sizes found; None without any.

        Sizes of one pool are bisected. Those of several pools are tried from the worst until one fails.
        """
        fleets, found = [fleet for fleet in order if self._has_required_pools(fleet)], None
        single = len(self.data.problem.pools) == 1
        low, high = 0, len(fleets)
        while low < high and not self.timed_out:
            at = (low + high) // 2 if single else high - 1
            smaller = self.search_fleet(fleets[at])
            if smaller is not None:
                found, high = smaller, at
            else:
                low = at + 1
        return found

    def search_fleet(self, fleet: FleetSize) -> tuple[Assignment, ...] | None:
        """Return the first confirmed placement on a fleet; None without any."""
        found = next(self._placements(fleet), None)
        return None if found is None else self._reported(found)

    def search_unchanged(self, fleet: FleetSize) -> UnchangedSearch:
        """Return the first initial solution on a fleet that the twin confirms as it is."""
        refused: list[PlacementState] = []
        for state in self._initial_placements(fleet):
            confirmed = self.evaluator.confirm_all(state)
            if confirmed is not None:
                return UnchangedSearch(self._reported(confirmed), ())
            refused.append(state)
        return UnchangedSearch(None, tuple(refused))

    def search_improved(self, refused: Sequence[PlacementState]) -> tuple[Assignment, ...] | None:
        """Return the first of these placements of one fleet that is confirmed after improvement."""
        for state in refused:
            rounds = _ROUNDS + 4 * len(state)
            if not self.timed_out and improve(state, self.evaluator, rounds):
                confirmed = self._confirm(state, rounds)
                if confirmed is not None:
                    return self._reported(confirmed)
        return None

    def min_latency(self, fleet: FleetSize) -> tuple[Assignment, ...] | None:
        """Return the confirmed placement with the shortest mean time from arrival to last token."""
        placements = (self._reported(self.tune_slots(each)) for each in self._placements(fleet))
        return min(placements, key=self.mean_e2e_s, default=None)

    def tune_slots(self, assignments: tuple[Assignment, ...]) -> tuple[Assignment, ...]:
        """Return the placement with the best of the neighbouring numbers of slots on each instance."""
        return tuple(parallel_map(self.evaluator.tune_slots, assignments))

    def mean_e2e_s(self, assignments: Sequence[Assignment]) -> float:
        """Return the mean time of all requests from arrival to last token, by the twin."""
        rates = [sum(share.rate_rps for share in each.shares) for each in assignments]
        times = [self.evaluator.twin(each).e2e_s_mean for each in assignments]
        return _weighted_mean(times, rates)

    def _reported(self, answer: tuple[Assignment, ...]) -> tuple[Assignment, ...]:
        self.on_answer(answer)
        return answer

    def _placements(self, fleet: FleetSize) -> Iterator[tuple[Assignment, ...]]:
        """Yield a confirmed placement per initial solution that has one, shortest estimated time first."""
        rounds = _ROUNDS + 4 * sum(fleet)
        holding: list[PlacementState] = []
        failing: list[PlacementState] = []
        for state in self._initial_placements(fleet):
            (holding if improve(state, self.evaluator, rounds) else failing).append(state)
        close = [
            state
            for state in failing
            if len(state) <= _SMALL_FLEET and self._max_utilization(state) <= _MAX_UTILIZATION
        ]
        for state in sorted(holding, key=self._estimated_e2e_s) + sorted(close, key=self._estimated_e2e_s):
            confirmed = None if self.timed_out else self._confirm(state, rounds)
            if confirmed is not None:
                yield confirmed
        if failing and not holding and not close and sum(fleet) <= _SMALL_FLEET and not self.timed_out:
            confirmed = self.evaluator.confirm_all(min(failing, key=self._max_utilization))
            if confirmed is not None:
                yield confirmed

    def _initial_placements(self, fleet: FleetSize) -> Iterator[PlacementState]:
        pools = [pool for pool, count in enumerate(fleet) for _ in range(count)]
        for construct in self.initial_solutions:
            state = construct(self.data, pools)
            if state is not None and not self.timed_out:
                yield state

    def _confirm(self, state: PlacementState, rounds: int) -> tuple[Assignment, ...] | None:
        """Confirm every instance with the twin; improve the placement after each refusal."""
        if self.evaluator.refuses_all(state):
            return None
        for _ in range(3 + len(state)):
            results = self.evaluator.confirm(state)
            confirmed = tuple(result for result in results if result is not None)
            if len(confirmed) == len(results):
                return confirmed
            if self.timed_out or not improve(state, self.evaluator, rounds):
                return None
        return None

    def _estimated_e2e_s(self, state: PlacementState) -> float:
        rates = [sum(share.rate_rps for share in self.data.shares(frozenset(m))) for m in state.members]
        times = [self.evaluator.estimate(state, instance).e2e_s for instance in range(len(state))]
        return _weighted_mean(times, rates)

    def _max_utilization(self, state: PlacementState) -> float:
        return max(self.evaluator.estimate(state, instance).utilization for instance in range(len(state)))

    def _bisect(self, fleets: Sequence[FleetSize]) -> int:
        """Return the first fleet with a placement by the surrogate, as if all later ones had one.

        The twin refuses placements in which no instance keeps the latency bounds.
        """
        low, high = 0, len(fleets) - 1
        while low < high and not self.timed_out:
            middle = (low + high) // 2
            rounds = 8 + sum(fleets[middle]) // 4
            states = self._initial_placements(fleets[middle])
            if any(improve(s, self.evaluator, rounds) and not self.evaluator.refuses_all(s) for s in states):
                high = middle
            else:
                low = middle + 1
        return low

    def _has_required_pools(self, fleet: FleetSize) -> bool:
        used = {pool for pool, count in enumerate(fleet) if count}
        return not any(group.pools.isdisjoint(used) for group in self.data.groups)

    def _has_capacity(self, fleet: FleetSize) -> bool:
        """Tell whether a fleet has about enough instances by the fluid model."""
        columns = np.arange(len(self.data.groups))
        total = self.data.loads[:, self.data.rank, columns].sum(axis=1)  # instances of one pool alone
        return float((np.array(fleet) / total).sum()) >= 1.0 / _MAX_FLEET_LOAD


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / max(sum(weights), 1e-12)


class SearchMove(NamedTuple):
    """Relocation of a group, or its exchange for a lighter one."""

    group: int
    source: int
    target: int
    exchange: int | None


def improve(state: PlacementState, evaluator: Evaluator, rounds: int) -> bool:
    """Move groups until the estimates of all instances hold; False if no move helps.

    Each round takes the failing instance with the highest utilization, and applies the move that lowers the
    cost of its two instances most.
    """
    for _ in range(rounds):
        failing = _failing(state, evaluator)
        if not failing:
            return True
        if are_too_many(len(failing), len(state)):
            return False
        move = _best_move(state, evaluator, max(failing, key=lambda i: (failing[i], -i)))
        if move is None:
            return False
        state.move(move.group, move.source, move.target)
        if move.exchange is not None:
            state.move(move.exchange, move.target, move.source)
    return not _failing(state, evaluator)


def _failing(state: PlacementState, evaluator: Evaluator) -> dict[int, float]:
    """Return the utilization of every instance that does not hold."""
    failing: dict[int, float] = {}
    for instance, load in enumerate(state.loads().tolist()):
        estimate, excess = evaluator.estimate(state, instance), state.excess(load, instance)
        if excess or not estimate.holds:
            failing[instance] = estimate.utilization + _LIMIT_WEIGHT * excess
    return failing


def _best_move(state: PlacementState, evaluator: Evaluator, source: int) -> SearchMove | None:
    best, most = None, _MIN_GAIN
    for move in _moves(state, source):
        gain = _gain(state, evaluator, move)
        if gain > most:
            best, most = move, gain
    return best


def _gain(state: PlacementState, evaluator: Evaluator, move: SearchMove) -> float:
    """Return the decrease in the cost of the two instances of a move."""
    back = frozenset() if move.exchange is None else frozenset({move.exchange})
    here, there = frozenset(state.members[move.source]), frozenset(state.members[move.target])
    group = frozenset({move.group})
    after = ((here - group) | back, move.source), ((there - back) | group, move.target)
    before = (here, move.source), (there, move.target)
    return sum(_cost(state, evaluator, *each) for each in before) - sum(
        _cost(state, evaluator, *each) for each in after
    )


def _cost(state: PlacementState, evaluator: Evaluator, members: frozenset[int], instance: int) -> float:
    pool = int(state.pools[instance])
    load = state.data.load(members, pool)
    estimate = evaluator.estimate_similar(members, pool, like=evaluator.estimate(state, instance))
    return estimate.utilization + _LIMIT_WEIGHT * state.excess(load, instance) + _LOAD_WEIGHT * load * load


def _moves(state: PlacementState, source: int) -> Iterator[SearchMove]:
    """Yield the allowed moves from an instance, to the targets with the least load for each group."""
    weight = state.data.weight
    groups, targets, exchanges = _WIDE_NEIGHBOURHOOD if len(state) <= _SMALL_FLEET else _NARROW_NEIGHBOURHOOD
    for group in _spaced(state, state.members[source], groups):
        loads = state.loads_with(group)
        loads[source] = np.inf
        for target in np.argsort(loads, kind="stable")[:targets].tolist():
            if not np.isfinite(loads[target]):
                break
            yield SearchMove(group, source, target, None)
            lighter = [other for other in state.members[target] if weight[other] < weight[group]]
            for exchange in _spaced(state, lighter, exchanges):
                if state.is_allowed(exchange, source, leaving=group):
                    yield SearchMove(group, source, target, exchange)


def _spaced(state: PlacementState, groups: Iterable[int], count: int) -> list[int]:
    """Return a number of groups, evenly spaced from the lightest to the heaviest."""
    ordered = sorted(groups, key=lambda g: (state.data.weight[g], state.data.rank[g], g))
    if len(ordered) <= count:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]
