"""Repair of placements of which instances fail the verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from capplan.errors import InfeasibleError
from capplan.planner.knobs import KNOBS, knob_grid, tune_knobs
from capplan.planner.problem import AdapterShare, Assignment, Estimator, Problem
from capplan.planner.queues import with_queues
from capplan.planner.search.data import AdapterGroup, adapter_groups
from capplan.planner.slots import choose_slots, slot_candidates
from capplan.planner.validity import broken_rules
from capplan.planner.verify import InstanceVerification, Verifier

_ROUNDS = 12
_ROUNDS_PER_GPU = 2


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


def repair(
    verifier: Verifier,
    assignments: Sequence[Assignment],
    verifications: Sequence[InstanceVerification],
    twin: Estimator,
    before: Sequence[str] = (),
) -> RepairResult:
    """Change failing instances until all hold or no change is left.

    A failing instance first gets every other number of slots that holds by the twin on the search's seed,
    then the open knobs of the least utilization. If none is verified, a quarter of its load moves to an
    unused instance, or to the one with the least load.
    `before` lists the changes made so far.
    """
    problem = verifier.problem
    current, current_verifications = dict(enumerate(assignments)), dict(enumerate(verifications))
    changes = list(before)
    for _ in range(_ROUNDS + _ROUNDS_PER_GPU * problem.gpus):
        failing = next((i for i, verification in current_verifications.items() if not verification.ok), None)
        if failing is None:
            break
        other = _other_slots(current[failing], verifier, twin) or _other_knobs(
            current[failing], verifier, twin
        )
        if other is not None:
            changes.append(f"gpu {failing}: {_changed_settings(problem, current[failing], other[0])}")
            current[failing], current_verifications[failing] = other
            continue
        moved = _move_load(problem, current, failing, twin)
        if not moved or any(broken_rules(problem, list((current | moved).values()))):
            break
        target = next(i for i in moved if i != failing)
        moving = len(current[failing].shares) - len(moved[failing].shares)
        changes.append(f"gpu {failing}: {moving} adapters moved to gpu {target}")
        current |= moved
        current_verifications |= dict(zip(moved, verifier(list(moved.values())), strict=True))
    return RepairResult(tuple(current.values()), tuple(current_verifications.values()), tuple(changes))


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
    if not knob_grid(verifier.problem, assignment.pool).is_open:
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


def _move_load(
    problem: Problem, current: Mapping[int, Assignment], failing: int, twin: Estimator
) -> dict[int, Assignment]:
    """Return both instances after a move of load; empty if there is no target."""
    moving = _lightest_quarter(problem, current[failing].shares)
    place = _target(problem, current, failing, moving)
    if not moving or place is None:
        return {}
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
        if not _has_quotas(problem, moved[gpu]):
            return {}
    return moved


def _has_quotas(problem: Problem, assignment: Assignment) -> bool:
    """Tell whether the minimum quotas of the instance's queues fit."""
    try:
        with_queues(problem, assignment)
    except InfeasibleError:
        return False
    return True


def _load_tok_s(problem: Problem, shares: Iterable[AdapterShare]) -> float:
    return sum(map(problem.offered_tok_s, shares))


def _lightest_quarter(problem: Problem, shares: Sequence[AdapterShare]) -> tuple[AdapterShare, ...]:
    """Return the lightest groups that make a quarter of the load, but never all shares."""
    quarter = _load_tok_s(problem, shares) / 4
    groups = adapter_groups(replace(problem, shares=tuple(shares)))
    moving: list[AdapterShare] = []

    def weight(group: AdapterGroup) -> tuple[float, str, int]:
        first = group.shares[0]
        return _load_tok_s(problem, group.shares), first.name, first.number

    for group in sorted(groups, key=weight):
        if len(moving) + len(group.shares) < len(shares) and _load_tok_s(problem, moving) < quarter:
            moving += group.shares
    return tuple(moving)


def _target(
    problem: Problem, current: Mapping[int, Assignment], failing: int, moving: Sequence[AdapterShare]
) -> tuple[int, int] | None:
    """Return the target and its pool: an unused instance, else the allowed one with the least load."""
    groups = adapter_groups(replace(problem, shares=tuple(moving)))
    pools = frozenset(range(len(problem.pools))).intersection(*(group.pools for group in groups))
    used = Counter(assignment.pool for assignment in current.values())
    free = [pool for pool in sorted(pools) if used[pool] < problem.pools[pool].instances]
    if free:
        own = current[failing].pool
        return len(current), own if own in free else free[0]
    conflicts = frozenset[str]().union(*(group.conflicts | group.names for group in groups))
    others = [
        (_load_tok_s(problem, assignment.shares), gpu)
        for gpu, assignment in current.items()
        if gpu != failing
        and assignment.pool in pools
        and conflicts.isdisjoint(p.name for p in assignment.shares)
    ]
    gpu = min(others, default=(0.0, None))[1]
    return None if gpu is None else (gpu, current[gpu].pool)
