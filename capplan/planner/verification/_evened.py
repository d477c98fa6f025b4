"""Fewer instances for a router that evens out the load among them.

A search by shares keeps every instance within the bounds by its own part of the traffic, with its bursts.
Where all instances store all adapters, a router that reads their state sends the requests of a burst
elsewhere, so that fewer instances may keep the bounds together; each is then beyond them at its shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from capplan.planner.problem._bound import lower_bound_instances
from capplan.planner.problem._execution import OutOfTimeError, no_progress
from capplan.planner.problem._problem import Assignment, Estimator, Problem, distinct_adapters, whole_adapters
from capplan.planner.problem._settings import max_fitting_slots, slot_candidates
from capplan.planner.search._placement import balanced, balanced_by_rank, build_search_data
from capplan.planner.verification._repair import RepairResult
from capplan.planner.verification._verify import Verifier
from capplan.spec import Objective


def evened_out(
    verifier: Verifier,
    outcome: RepairResult,
    twin: Estimator,
    progress: Callable[[int, int], None] = no_progress,
) -> RepairResult:
    """Return a placement with more slots if that of the outcome fails, and on the fewest instances.

    Requests come of adapters that are not placed, too. For the fewest GPUs of one pool, without a plan in
    force, one instance less at a time is tried, with a balanced placement, of equal ranks if it holds.
    """
    problem = verifier.problem
    workload, bound = problem.workload, lower_bound_instances(problem)
    if workload.objective is not Objective.MIN_GPUS or len(problem.pools) > 1 or workload.previous_plan:
        bound = len(outcome.assignments)
    try:
        if not all(each.ok for each in outcome.verifications):
            found = _verified(verifier, outcome, _with_slots(problem, outcome.assignments), progress)
            if found is None:
                return outcome
            outcome = found
        while len(outcome.assignments) > bound:
            fewer = _verified(verifier, outcome, _on_one_less(problem, outcome, twin), progress)
            if fewer is None:
                break
            outcome = fewer
    except OutOfTimeError:
        pass
    return outcome


def _verified(
    verifier: Verifier,
    before: RepairResult,
    placements: Iterable[tuple[Assignment, ...]],
    progress: Callable[[int, int], None],
) -> RepairResult | None:
    """Return the first placement that is verified; None if there is none."""
    for assignments in placements:
        verdicts = tuple(verifier.whole(assignments, progress))
        if all(each.ok for each in verdicts):
            slots = ", ".join(str(each.a_max) for each in assignments)
            change = f"{len(assignments)} GPUs with {slots} slots, among which the router evens out the load"
            return RepairResult(assignments, verdicts, (*before.changes, change))
    return None


def _on_one_less(
    problem: Problem, outcome: RepairResult, twin: Estimator
) -> Iterator[tuple[Assignment, ...]]:
    """Yield placements of whole adapters on one instance less, with the other settings of the first one."""
    data = build_search_data(replace(problem, shares=whole_adapters(problem)))
    like, pools = outcome.assignments[0], [0] * (len(outcome.assignments) - 1)
    tried: list[list[set[int]]] = []
    for initial in (balanced_by_rank, balanced):
        state = initial(data, pools)
        if state is None or not all(state.members) or state.members in tried:
            continue
        tried.append(state.members)
        placed = [replace(like, shares=data.shares(frozenset(members))) for members in state.members]
        slots = [slot_candidates(problem, each.shares, twin, 0, like)[:1] for each in placed]
        if all(slots):
            best = tuple(replace(each, a_max=own[0]) for each, own in zip(placed, slots, strict=True))
            yield best
            yield from _with_slots(problem, best)


def _with_slots(problem: Problem, assignments: Sequence[Assignment]) -> Iterator[tuple[Assignment, ...]]:
    """Yield the placement with slots for all adapters placed, and for all stored, as far as memory allows."""
    if problem.fixed_a_max is not None or not problem.has_slots:
        return
    tried = {tuple(each.a_max for each in assignments)}
    for limits in (
        [distinct_adapters(each.shares) for each in assignments],
        [len(problem.stored(each).keys() - {problem.workload.base_model}) for each in assignments],
    ):
        pairs = zip(assignments, limits, strict=True)
        slots = tuple(max_fitting_slots(problem, each, limit) for each, limit in pairs)
        if all(slots) and slots not in tried:
            tried.add(slots)
            yield tuple(replace(each, a_max=own) for each, own in zip(assignments, slots, strict=True))
