"""Repair: where the twin disagrees with a solver, other slots first, then fewer adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from capplan.planner.problem import Assignment, Estimator, Part, Problem
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
        if problem.fits_in_memory(assignment.parts, assignment.a_max):
            continue
        fitting = slot_candidates(problem, assignment.parts, exact)
        if fitting:
            fitted[gpu] = Assignment(assignment.parts, fitting[0])
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
    for a_max in slot_candidates(problem, assignment.parts, exact):
        if a_max != assignment.a_max and not exact(assignment.parts, a_max).starved:
            candidate = Assignment(assignment.parts, a_max)
            (verdict,) = verifier([candidate])
            if verdict.ok:
                return candidate, verdict
    return None


def _move_load(
    problem: Problem, current: Mapping[int, Assignment], failing: int, exact: Estimator
) -> dict[int, Assignment]:
    """Return the two GPUs after a move of load from one to the other; nothing when there is no place."""
    moving = _quarter(problem, current[failing].parts)
    target = _target(problem, current, failing, moving)
    if not moving or target is None:
        return {}
    staying = tuple(part for part in current[failing].parts if part not in moving)
    there = current[target].parts if target in current else ()
    moved: dict[int, Assignment] = {}
    for gpu, parts in ((failing, staying), (target, (*there, *moving))):
        a_max = choose_slots(problem, parts, exact, exact)
        fitting = [a_max] if a_max is not None else slot_candidates(problem, parts, exact)
        if not fitting:
            return {}
        moved[gpu] = Assignment(parts, fitting[0])
    return moved


def _quarter(problem: Problem, parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the lightest parts that together make a quarter of the load, but never all parts."""
    total = sum(map(problem.offered_tok_s, parts))
    moving: list[Part] = []
    for part in sorted(parts, key=lambda p: (problem.offered_tok_s(p), p.name, p.number)):
        if len(moving) + 1 < len(parts) and sum(map(problem.offered_tok_s, moving)) < total / 4:
            moving.append(part)
    return tuple(moving)


def _target(
    problem: Problem, current: Mapping[int, Assignment], failing: int, moving: Sequence[Part]
) -> int | None:
    """Return an unused GPU, else the lightest one without a share of what moves."""
    if len(current) < problem.gpus:
        return len(current)
    names = {part.name for part in moving}
    others = [
        gpu
        for gpu, assignment in current.items()
        if gpu != failing and names.isdisjoint(part.name for part in assignment.parts)
    ]
    return min(others, key=lambda i: (sum(map(problem.offered_tok_s, current[i].parts)), i), default=None)
