"""Cached estimates of instances, and their confirmation by the twin."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from capplan.planner.problem._execution import NEVER, Deadline, parallel_map
from capplan.planner.problem._problem import Assignment, Estimator, estimate_all
from capplan.planner.problem._settings import (
    best_slots,
    fallback_running_requests,
    knob_grid,
    knobs_of,
    neighbouring_slots,
    rank_slots,
    tune_knobs,
)
from capplan.planner.search._placement import PlacementState, SearchData
from capplan.spec import EngineArgs, EngineConfig

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
        ranked = rank_slots(self.data.problem, self.data.shares(members), self.surrogate, pool, near)
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
