"""Repair of placements of which instances fail the verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, TypeAlias

from capplan.planner.problem._problem import AdapterShare, Assignment, Estimator, Problem, broken_rules
from capplan.planner.problem._settings import KNOBS, choose_slots, has_open_knobs, slot_candidates, tune_knobs
from capplan.planner.search._placement import AdapterGroup, adapter_groups
from capplan.planner.verification._verify import InstanceVerification, Verifier

Placement: TypeAlias = frozenset[tuple[frozenset[AdapterShare], int, int]]

_ROUNDS: Final = 12
_ROUNDS_PER_GPU: Final = 2
_MOST_MOVES: Final = 12
"""Moves of load that are verified in a round."""


@dataclass(frozen=True)
class RepairResult:
    """Repaired assignments, their verification, and the changes."""

    assignments: tuple[Assignment, ...]
    verifications: tuple[InstanceVerification, ...]
    changes: tuple[str, ...]


def fit_slots_in_memory(
    problem: Problem, assignments: Sequence[Assignment], twin: Estimator
) -> tuple[tuple[Assignment, ...], tuple[str, ...]]:
    """Replace numbers of slots that do not fit in memory; return assignments and changes."""
    fitted, changes = list(assignments), []
    for gpu, assignment in enumerate(assignments):
        if problem.fits_in_memory(assignment):
            continue
        fitting = slot_candidates(problem, assignment.shares, twin, assignment.pool, assignment)
        if fitting:
            fitted[gpu] = replace(assignment, a_max=fitting[0])
            changes.append(f"gpu {gpu}: {assignment.a_max} -> {fitting[0]} slots, for want of memory")
    return tuple(fitted), tuple(changes)


@dataclass(frozen=True)
class _Fleet:
    """Instances and their verdicts by number."""

    assignments: Mapping[int, Assignment]
    verdicts: Mapping[int, InstanceVerification]

    @property
    def failing(self) -> int | None:
        """Return the first instance that fails."""
        return next((number for number, verdict in self.verdicts.items() if not verdict.ok), None)

    @property
    def cost(self) -> tuple[int, float]:
        """Return the number of instances that fail, and of their broken bounds per seed."""
        failing = [verdict for verdict in self.verdicts.values() if not verdict.ok]
        return len(failing), sum(len(each.violations) / max(1, len(each.results)) for each in failing)

    @property
    def placement(self) -> Placement:
        """Return what is placed together, with how many slots, in which pool."""
        instances = self.assignments.values()
        return frozenset((frozenset(each.shares), each.a_max, each.pool) for each in instances)

    def changed(
        self, assignments: Mapping[int, Assignment], verdicts: Mapping[int, InstanceVerification]
    ) -> _Fleet:
        """Return the fleet with some instances changed."""
        return _Fleet({**self.assignments, **assignments}, {**self.verdicts, **verdicts})


def repair(
    verifier: Verifier,
    assignments: Sequence[Assignment],
    verifications: Sequence[InstanceVerification],
    twin: Estimator,
    before: Sequence[str] = (),
) -> RepairResult:
    """Change failing instances until all hold or no change is left; return the best placement seen.

    A failing instance first gets every other number of slots that holds by the twin on the search's seed,
    then the open knobs of the least utilization. If none is verified, load moves: a quarter of it to an
    unused instance or the one with the least load, else its lightest group to any that holds with it. If none
    holds, the quarter moves nevertheless, but no placement is tried twice.
    `before` lists the changes made so far.
    """
    problem = verifier.problem
    fleet = best = _Fleet(dict(enumerate(assignments)), dict(enumerate(verifications)))
    seen, changes = {fleet.placement}, list(before)
    kept = len(changes)
    for _ in range(_ROUNDS + _ROUNDS_PER_GPU * problem.gpus):
        failing = fleet.failing
        if failing is None:
            break
        old = fleet.assignments[failing]
        other = _other_slots(old, verifier, twin) or _other_knobs(old, verifier, twin)
        if other is not None:
            changes.append(f"gpu {failing}: {_changed_settings(problem, old, other[0])}")
            fleet = fleet.changed({failing: other[0]}, {failing: other[1]})
        else:
            moved = _with_load_moved(verifier, fleet, failing, twin, seen)
            if moved is None:
                break
            changes.append(_moved_adapters(fleet, moved, failing))
            fleet = moved
        seen.add(fleet.placement)
        if fleet.cost < best.cost:
            best, kept = fleet, len(changes)
    return RepairResult(
        tuple(best.assignments.values()), tuple(best.verdicts.values()), tuple(changes[:kept])
    )


def _moved_adapters(before: _Fleet, after: _Fleet, source: int) -> str:
    """Return a move of load as text."""
    count = len(before.assignments[source].shares) - len(after.assignments[source].shares)
    target = next(n for n, a in after.assignments.items() if n != source and a != before.assignments.get(n))
    return f"gpu {source}: {count} adapter{'' if count == 1 else 's'} moved to gpu {target}"


def _other_slots(
    assignment: Assignment, verifier: Verifier, twin: Estimator
) -> tuple[Assignment, InstanceVerification] | None:
    for a_max in slot_candidates(verifier.problem, assignment.shares, twin, assignment.pool, assignment):
        candidate = replace(assignment, a_max=a_max)
        if a_max != assignment.a_max and not twin(candidate).starved:
            (verification,) = verifier([candidate])
            if verification.ok:
                return candidate, verification
    return None


def _other_knobs(
    assignment: Assignment, verifier: Verifier, twin: Estimator
) -> tuple[Assignment, InstanceVerification] | None:
    """Return the instance with the open knobs of the least utilization, if it is verified with them."""
    if not has_open_knobs(verifier.problem, assignment.pool):
        return None
    candidate, estimate = tune_knobs(verifier.problem, assignment, twin)
    if candidate == assignment or estimate.starved:
        return None
    (verification,) = verifier([candidate])
    return (candidate, verification) if verification.ok else None


def _changed_settings(problem: Problem, before: Assignment, after: Assignment) -> str:
    """Return the change of an instance's settings as text."""
    if after.a_max != before.a_max:
        return f"{before.a_max} -> {after.a_max} slots"
    old, new = problem.engine_args(before), problem.engine_args(after)
    changed = [knob for knob in KNOBS if getattr(old, knob) != getattr(new, knob)]
    return ", ".join(f"{knob} {getattr(old, knob)} -> {getattr(new, knob)}" for knob in changed)


def _with_load_moved(
    verifier: Verifier,
    fleet: _Fleet,
    failing: int,
    twin: Estimator,
    seen: Container[Placement],
) -> _Fleet | None:
    """Return the fleet after the first move of load with which the target holds, else after the first move.

    None if every move leads to a placement that was seen, breaks a rule or does not fit.
    """
    problem, first = verifier.problem, None
    moves = _moves(problem, fleet.assignments, failing)
    for moving, target, pool in islice(moves, _MOST_MOVES):
        moved = _move(problem, fleet.assignments, failing, moving, (target, pool), twin)
        after = fleet.changed(moved, {})
        if not moved or after.placement in seen or any(broken_rules(problem, [*after.assignments.values()])):
            continue
        verdicts = dict(zip(moved, verifier([*moved.values()]), strict=True))
        after = after.changed({}, verdicts)
        if verdicts[target].ok:
            return after
        first = first or after
    return first


def _moves(
    problem: Problem, current: Mapping[int, Assignment], failing: int
) -> Iterator[tuple[tuple[AdapterShare, ...], int, int]]:
    """Yield the shares to move from a failing instance, the target and its pool, in the order of trial."""
    shares = current[failing].shares
    quarter = _lightest_quarter(problem, shares)
    if quarter:
        yield from ((quarter, *place) for place in islice(_targets(problem, current, failing, quarter), 1))
    for group in _by_weight(problem, shares):
        if group.shares != quarter and len(group.shares) < len(shares) and _load_tok_s(problem, group.shares):
            for place in _targets(problem, current, failing, group.shares):
                yield group.shares, *place


def _move(
    problem: Problem,
    current: Mapping[int, Assignment],
    failing: int,
    moving: Sequence[AdapterShare],
    place: tuple[int, int],
    twin: Estimator,
) -> dict[int, Assignment]:
    """Return both instances after a move of shares to an instance and its pool; empty if one does not fit."""
    target, pool = place
    staying = tuple(share for share in current[failing].shares if share not in moving)
    # An unused instance starts with the engine settings of the failing one.
    there = current[target] if target in current else replace(current[failing], shares=(), pool=pool)
    moved: dict[int, Assignment] = {}
    for gpu, before, shares in (
        (failing, current[failing], staying),
        (target, there, (*there.shares, *moving)),
    ):
        a_max = choose_slots(problem, shares, twin, twin, before.pool, before)
        fitting = (
            [a_max] if a_max is not None else slot_candidates(problem, shares, twin, before.pool, before)
        )
        if not fitting:
            return {}
        moved[gpu] = replace(before, shares=shares, a_max=fitting[0])
    return moved


def _load_tok_s(problem: Problem, shares: Iterable[AdapterShare]) -> float:
    return sum(map(problem.offered_tok_s, shares))


def _by_weight(problem: Problem, shares: Sequence[AdapterShare]) -> list[AdapterGroup]:
    """Return the groups of shares, the lightest first."""

    def weight(group: AdapterGroup) -> tuple[float, str, int]:
        first = group.shares[0]
        return _load_tok_s(problem, group.shares), first.name, first.number

    return sorted(adapter_groups(replace(problem, shares=tuple(shares))), key=weight)


def _lightest_quarter(problem: Problem, shares: Sequence[AdapterShare]) -> tuple[AdapterShare, ...]:
    """Return the lightest groups that make a quarter of the load, but never all shares."""
    quarter = _load_tok_s(problem, shares) / 4
    moving: list[AdapterShare] = []
    for group in _by_weight(problem, shares):
        if len(moving) + len(group.shares) < len(shares) and _load_tok_s(problem, moving) < quarter:
            moving += group.shares
    return tuple(moving)


def _targets(
    problem: Problem, current: Mapping[int, Assignment], failing: int, moving: Sequence[AdapterShare]
) -> Iterator[tuple[int, int]]:
    """Yield targets and their pools: an unused instance, else the allowed ones, the least loaded first."""
    groups = adapter_groups(replace(problem, shares=tuple(moving)))
    pools = frozenset(range(len(problem.pools))).intersection(*(group.pools for group in groups))
    used = Counter(assignment.pool for assignment in current.values())
    free = [pool for pool in sorted(pools) if used[pool] < problem.pools[pool].instances]
    if free:
        own = current[failing].pool
        yield len(current), own if own in free else free[0]
        return
    conflicts = frozenset[str]().union(*(group.conflicts | group.names for group in groups))
    others = [
        (_load_tok_s(problem, assignment.shares), gpu)
        for gpu, assignment in current.items()
        if gpu != failing
        and assignment.pool in pools
        and conflicts.isdisjoint(p.name for p in assignment.shares)
    ]
    for _, gpu in sorted(others):
        yield gpu, current[gpu].pool
