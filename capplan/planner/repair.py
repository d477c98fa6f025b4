"""Repair: where the twin disagrees with a solver, other slots first, then fewer adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from capplan.planner.balanced import choose_slots, slot_candidates
from capplan.planner.problem import Assignment, Estimator, Part, Problem
from capplan.planner.verify import Verdict, Verifier

_ROUNDS = 12


@dataclass(frozen=True)
class Repaired:
    """An assignment with its verdicts, and what was done to it."""

    assignments: tuple[Assignment, ...]
    verdicts: tuple[Verdict, ...]
    changes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every GPU holds."""
        return all(verdict.ok for verdict in self.verdicts)


def repair(
    problem: Problem,
    assignments: Sequence[Assignment],
    verdicts: Sequence[Verdict],
    verifier: Verifier,
    exact: Estimator,
) -> Repaired:
    """Change GPUs that fail until all hold, or nothing more can be tried.

    A failing GPU first gets every other number of slots. If none holds, a quarter of its load goes to the lightest
    other GPU, or to an unused one.
    """
    current, judged = list(assignments), list(verdicts)
    changes: list[str] = []
    for _ in range(_ROUNDS):
        failing = next((i for i, verdict in enumerate(judged) if not verdict.ok), None)
        if failing is None:
            break
        other = _other_slots(problem, current[failing], verifier, exact)
        if other is not None:
            changes.append(f"gpu {failing}: {current[failing].a_max} -> {other[0].a_max} slots")
            current[failing], judged[failing] = other
            continue
        moved = _move_load(problem, current, failing, exact)
        if moved is None:
            break
        target, note = moved
        changes.append(note)
        if target == len(judged):
            judged.append(judged[failing])
        judged[failing], judged[target] = verifier([current[failing], current[target]])
    return Repaired(tuple(current), tuple(judged), tuple(changes))


def _other_slots(
    problem: Problem, assignment: Assignment, verifier: Verifier, exact: Estimator
) -> tuple[Assignment, Verdict] | None:
    for a_max in slot_candidates(problem, assignment.parts, exact):
        if a_max != assignment.a_max:
            candidate = Assignment(assignment.parts, a_max)
            (verdict,) = verifier([candidate])
            if verdict.ok:
                return candidate, verdict
    return None


def _move_load(
    problem: Problem, current: list[Assignment], failing: int, exact: Estimator
) -> tuple[int, str] | None:
    """Move about a quarter of a GPU's load away; return where to, or None when there is no place or nothing to move."""
    parts = current[failing].parts
    if len(parts) < 2:
        return None
    total = sum(map(problem.offered_tok_s, parts))
    moving: list[Part] = []
    for part in sorted(parts, key=lambda p: (problem.offered_tok_s(p), p.name)):
        if len(moving) + 1 < len(parts) and sum(map(problem.offered_tok_s, moving)) < total / 4:
            moving.append(part)
    staying = tuple(part for part in parts if part not in moving)
    if len(current) < problem.gpus:
        target = len(current)
        current.append(Assignment((), 1))
    else:
        names = {part.name for part in moving}
        others = [
            i
            for i, a in enumerate(current)
            if i != failing and names.isdisjoint(part.name for part in a.parts)
        ]
        if not others:
            return None
        target = min(others, key=lambda i: (sum(map(problem.offered_tok_s, current[i].parts)), i))
    for at, load in ((failing, staying), (target, current[target].parts + tuple(moving))):
        distinct = len({part.name for part in load})
        current[at] = Assignment(load, choose_slots(problem, load, exact, exact) or distinct)
    return target, f"gpu {failing}: {len(moving)} adapters moved to gpu {target}"
