"""Repair: where the twin disagrees with a solver, other slots first, then fewer adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from capplan.planner.problem import Assignment, Estimator, Part, Problem
from capplan.planner.search.units import Unit, units_of
from capplan.planner.slots import choose_slots, slot_candidates
from capplan.planner.verify import Verdict, Verifier

_ROUNDS = 12
_ROUNDS_PER_GPU = 2


@dataclass(frozen=True)
class Repaired:
    """An assignment with its verdicts, and what was done to it."""

    assignments: tuple[Assignment, ...]
    verdicts: tuple[Verdict, ...]
    changes: tuple[str, ...]


def fit_slots(
    problem: Problem, assignments: Sequence[Assignment], exact: Estimator
) -> tuple[tuple[Assignment, ...], tuple[str, ...]]:
    """Return the assignments, with other slots where theirs do not fit in memory, and the changes made.

    Where no number fits, an assignment stays as it is.
    """
    fitted, changes = list(assignments), []
    for gpu, assignment in enumerate(assignments):
        if problem.fits_in_memory(assignment):
            continue
        fitting = slot_candidates(problem, assignment.parts, exact, assignment.pool)
        if fitting:
            fitted[gpu] = replace(assignment, a_max=fitting[0])
            changes.append(f"gpu {gpu}: {assignment.a_max} -> {fitting[0]} slots, for want of memory")
    return tuple(fitted), tuple(changes)


def repair(
    problem: Problem,
    assignments: Sequence[Assignment],
    verdicts: Sequence[Verdict],
    verifier: Verifier,
    exact: Estimator,
    before: Sequence[str] = (),
) -> Repaired:
    """Change GPUs that fail until all hold, or nothing more can be tried.

    A failing GPU first gets every other number of slots with which `exact` believes in it. If none holds, a
    quarter of its load goes to an unused GPU, or to the lightest of the others.

    Parameters
    ----------
    problem, assignments, verdicts
        What was asked and answered, and what the twin said of it.
    verifier, exact
        Whom changes are tried on.
    before
        Changes that were made already.
    """
    current, judged = dict(enumerate(assignments)), dict(enumerate(verdicts))
    changes = list(before)
    for _ in range(_ROUNDS + _ROUNDS_PER_GPU * problem.gpus):
        failing = next((i for i, verdict in judged.items() if not verdict.ok), None)
        if failing is None:
            break
        other = _other_slots(problem, current[failing], verifier, exact)
        if other is not None:
            changes.append(f"gpu {failing}: {current[failing].a_max} -> {other[0].a_max} slots")
            current[failing], judged[failing] = other
            continue
        moved = _move_load(problem, current, failing, exact)
        if not moved:
            break
        target = next(i for i in moved if i != failing)
        gone = len(current[failing].parts) - len(moved[failing].parts)
        changes.append(f"gpu {failing}: {gone} adapters moved to gpu {target}")
        current |= moved
        judged |= dict(zip(moved, verifier(list(moved.values())), strict=True))
    return Repaired(tuple(current.values()), tuple(judged.values()), tuple(changes))


def _other_slots(
    problem: Problem, assignment: Assignment, verifier: Verifier, exact: Estimator
) -> tuple[Assignment, Verdict] | None:
    for a_max in slot_candidates(problem, assignment.parts, exact, assignment.pool):
        candidate = replace(assignment, a_max=a_max)
        if a_max != assignment.a_max and not exact(candidate).starved:
            (verdict,) = verifier([candidate])
            if verdict.ok:
                return candidate, verdict
    return None


def _move_load(
    problem: Problem, current: Mapping[int, Assignment], failing: int, exact: Estimator
) -> dict[int, Assignment]:
    """Return the two GPUs after a move of load from one to the other; nothing when there is no place."""
    moving = _quarter(problem, current[failing].parts)
    place = _target(problem, current, failing, moving)
    if not moving or place is None:
        return {}
    target, pool = place
    staying = tuple(part for part in current[failing].parts if part not in moving)
    there = current[target].parts if target in current else ()
    moved: dict[int, Assignment] = {}
    for gpu, parts, of in ((failing, staying, current[failing].pool), (target, (*there, *moving), pool)):
        a_max = choose_slots(problem, parts, exact, exact, of)
        fitting = [a_max] if a_max is not None else slot_candidates(problem, parts, exact, of)
        if not fitting:
            return {}
        moved[gpu] = Assignment(parts, fitting[0], pool=of)
    return moved


def _quarter(problem: Problem, parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the lightest units that together make a quarter of the load, but never all parts."""
    total = sum(map(problem.offered_tok_s, parts))
    units = units_of(replace(problem, parts=tuple(parts)))
    moving: list[Part] = []

    def load(unit: Unit) -> float:
        return sum(map(problem.offered_tok_s, unit.parts))

    for unit in sorted(units, key=lambda u: (load(u), u.parts[0].name, u.parts[0].number)):
        if len(moving) + len(unit.parts) < len(parts) and sum(map(problem.offered_tok_s, moving)) < total / 4:
            moving += unit.parts
    return tuple(moving)


def _target(
    problem: Problem, current: Mapping[int, Assignment], failing: int, moving: Sequence[Part]
) -> tuple[int, int] | None:
    """Return where to, and in which pool: an unused instance, else the lightest that may have what moves."""
    units = units_of(replace(problem, parts=tuple(moving)))
    pools = frozenset(range(len(problem.pools))).intersection(*(unit.pools for unit in units))
    used = Counter(assignment.pool for assignment in current.values())
    free = [pool for pool in sorted(pools) if used[pool] < problem.pools[pool].instances]
    if free:
        own = current[failing].pool
        return len(current), own if own in free else free[0]
    foes = frozenset[str]().union(*(unit.foes | unit.names for unit in units))
    others = [
        (sum(map(problem.offered_tok_s, assignment.parts)), gpu)
        for gpu, assignment in current.items()
        if gpu != failing and assignment.pool in pools and foes.isdisjoint(p.name for p in assignment.parts)
    ]
    gpu = min(others, default=(0.0, None))[1]
    return None if gpu is None else (gpu, current[gpu].pool)
