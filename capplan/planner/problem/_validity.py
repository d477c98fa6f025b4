"""Rules that every placement keeps: all traffic is placed, on available instances, within the constraints.

And that of a problem: all pools serve in one way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from capplan.errors import InputError
from capplan.planner.problem._problem import Assignment, Problem
from capplan.twin.instance import choose_policies

_TOLERANCE: Final = 1e-6
"""Rounding error of the fractions of one adapter."""


def require_valid(problem: Problem, assignments: Sequence[Assignment], solver: str) -> None:
    """Check the placement of a solver.

    A single instance is simulated with the adapters that it has, so an adapter that is placed nowhere would
    not show in the simulation.

    Raises
    ------
    InputError
        For the first rule that is broken.
    """
    broken = next(broken_rules(problem, assignments), None)
    if broken is not None:
        raise InputError(f"must return a valid placement: {broken}", location=f"solver {solver}")


def require_one_kind(problem: Problem) -> None:
    """Check that all pools have a scheduler and an adapter cache, or none has.

    The cluster twin, which verifies a plan, simulates one kind of memory. Without this rule the search would
    end in its refusal.

    Raises
    ------
    InputError
        For the first pool that differs.
    """
    pooled = [choose_policies(problem.workload, pool.profile).pooled for pool in problem.pools]
    for pool, own in zip(problem.pools, pooled, strict=True):
        if own != pooled[0]:
            rule = "must serve with a scheduler and an adapter cache, or without, like the first pool"
            raise InputError(rule, pool.profile.engine.rules, f"pools: {pool.name}.profile")


def broken_rules(problem: Problem, assignments: Sequence[Assignment]) -> Iterator[str]:
    """Yield the rules that a placement breaks, as text."""
    used = Counter(assignment.pool for assignment in assignments)
    for number, count in used.items():
        available = problem.pools[number].instances if number < len(problem.pools) else 0
        if count > available:
            yield f"{count} instances of pool {number}, which has {available}"
    yield from _misplaced_traffic(problem, assignments)
    yield from _broken_constraints(problem, assignments)


def _misplaced_traffic(problem: Problem, assignments: Sequence[Assignment]) -> Iterator[str]:
    placed: dict[str, float] = {item.name: 0.0 for item in problem.traffic}
    for assignment in assignments:
        for share in assignment.shares:
            if share.name not in placed:
                yield f"{share.name} is not in the workload"
                return
            placed[share.name] += share.fraction
    for name, fraction in placed.items():
        if abs(fraction - 1.0) > _TOLERANCE:
            yield f"{fraction:.6g} of the requests of {name} are placed"


def _broken_constraints(problem: Problem, assignments: Sequence[Assignment]) -> Iterator[str]:
    constraints = problem.constraints
    instances: dict[str, set[int]] = {}
    for number, assignment in enumerate(assignments):
        pool, names = problem.pools[assignment.pool].name, {share.name for share in assignment.shares}
        for name in sorted(names):
            leader = constraints.leader[name]
            instances.setdefault(name, set()).add(number)
            if constraints.pinned_pool.get(leader, pool) != pool:
                yield f"{name} is in pool {pool}, pinned to {constraints.pinned_pool[leader]}"
            if names & constraints.conflicts.get(name, frozenset()):
                yield f"{name} is with an adapter that it is apart_from"
    for name, numbers in sorted(instances.items()):
        leader = constraints.leader[name]
        if numbers != instances.get(leader):
            yield f"{name} is not with {leader}, together_with it"
        if len(numbers) > constraints.max_replicas.get(leader, len(numbers)):
            yield f"{name} is on {len(numbers)} instances, more than max_replicas"
