"""Plan in force: its instances, and the moves of a new plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from capplan.errors import InputError
from capplan.planner.problem._problem import Assignment, Problem
from capplan.spec import Move, Plan, Workload

_MIN_SHARE = 1e-5
"""Smallest share that counts as a move; the shares of an adapter add up to 1 within less."""


@dataclass(frozen=True)
class PreviousInstance:
    """One instance of the plan in force."""

    name: str
    """Its group, with the number of the replica if there are several."""
    pool: str | None
    fractions: Mapping[str, float]
    """Share of the traffic of each of its adapters, and of the base model under its name."""


def read_previous(workload: Workload) -> Plan | None:
    """Return the plan in force, which must be for the workload's base model; None without one."""
    if workload.previous_plan is None:
        return None
    plan = Plan.from_json(workload.previous_plan)
    if plan.base_model != workload.base_model:
        raise InputError(f"must be for base model {workload.base_model}", plan.base_model, "previous_plan")
    return plan


def previous_instances(plan: Plan) -> tuple[PreviousInstance, ...]:
    """Return the instances of a plan; replicas share the traffic of their group."""
    return tuple(
        PreviousInstance(
            group.id if group.replicas == 1 else f"{group.id}-{replica}",
            group.pool,
            {name: share / group.replicas for name, share in plan.shares_of(group).items() if share > 0},
        )
        for group in plan.groups
        for replica in range(group.replicas)
    )


def name_groups(
    problem: Problem, assignments: Sequence[Assignment], old: Sequence[PreviousInstance]
) -> tuple[tuple[str, ...], tuple[Move, ...]]:
    """Return the names of the new groups, and the moves from the instances of the plan in force.

    Each new instance takes the name of an old one of its pool, such that the fewest bytes are copied. Shares
    of the base model are routing only: nothing moves when they change. Without a plan in force there are no
    moves.
    """
    if not old:
        return tuple(f"gpu-{number}" for number in range(len(assignments))), ()
    names = _match_names(problem, assignments, old)
    return names, _moves(problem, assignments, names, old)


def count_moves(problem: Problem, assignments: Sequence[Assignment], old: Sequence[PreviousInstance]) -> int:
    """Return the number of adapters that assignments move from the instances of the plan in force."""
    return moved_adapters(name_groups(problem, assignments, old)[1])


def moved_adapters(moves: Sequence[Move]) -> int:
    """Return the number of adapters that move; newly placed and removed ones do not count."""
    return len({move.adapter for move in moves if move.from_group is not None and move.to_group is not None})


def moved_bytes(problem: Problem, moves: Sequence[Move], old: Sequence[PreviousInstance]) -> int:
    """Return the bytes of adapters that are copied to instances without them."""
    size = {a.name: problem.adapter_bytes(a) for a in problem.workload.adapters}
    held = {(name, instance.name) for instance in old for name in instance.fractions}
    copies = {(move.adapter, move.to_group) for move in moves if move.to_group is not None} - held
    return sum(size[adapter] for adapter, _ in copies)


def _match_names(
    problem: Problem, assignments: Sequence[Assignment], old: Sequence[PreviousInstance]
) -> tuple[str, ...]:
    """Return the names of the new instances by the Hungarian method; the cost is the bytes to copy."""
    size = {a.name: float(problem.adapter_bytes(a)) for a in problem.traffic}
    new_names = [{share.name for share in assignment.shares} for assignment in assignments]
    columns = len(old) + len(assignments)
    cost = np.empty((len(assignments), columns))
    for row, (assignment, names) in enumerate(zip(assignments, new_names, strict=True)):
        everything = sum(size[name] for name in names)
        cost[row] = everything
        for column, instance in enumerate(old):
            kept = sum(size[name] for name in names & instance.fractions.keys())
            same_pool = instance.pool == problem.pools[assignment.pool].name
            cost[row, column] = everything - kept if same_pool else everything + 1.0
        cost[row, len(old) :] += 0.5  # old names are preferred
    _, chosen = linear_sum_assignment(cost)
    taken = {instance.name for instance in old}
    fresh = (name for name in (f"gpu-{number}" for number in range(columns)) if name not in taken)
    return tuple(old[column].name if column < len(old) else next(fresh) for column in chosen.tolist())


def _moves(
    problem: Problem, assignments: Sequence[Assignment], names: Sequence[str], old: Sequence[PreviousInstance]
) -> tuple[Move, ...]:
    after = {name: assignment.fractions for name, assignment in zip(names, assignments, strict=True)}
    before = {instance.name: dict(instance.fractions) for instance in old}
    deployed = dict.fromkeys(adapter.name for adapter in problem.workload.adapters)
    held = (name for instance in old for name in instance.fractions)
    removed = dict.fromkeys(name for name in held if name != problem.workload.base_model)
    moves: list[Move] = []
    for adapter in deployed | removed:
        change = {
            group: after.get(group, {}).get(adapter, 0.0) - before.get(group, {}).get(adapter, 0.0)
            for group in sorted({*after, *before})
        }
        moves += _flows(adapter, change)
    return tuple(moves)


def _flows(adapter: str, change: Mapping[str, float]) -> list[Move]:
    """Return the moves from groups that lose shares to groups that gain.

    Shares of a new adapter have no source, those of a removed one no target.
    """
    losing = deque((group, -share) for group, share in change.items() if share < -_MIN_SHARE)
    moves: list[Move] = []
    for group, gain in change.items():
        while gain > _MIN_SHARE:
            source, left = losing.popleft() if losing else (None, gain)
            taken = min(gain, left)
            moves.append(Move(adapter=adapter, from_group=source, to_group=group, share=min(1.0, taken)))
            gain -= taken
            if source is not None and left - taken > _MIN_SHARE:
                losing.appendleft((source, left - taken))
    moves += [Move(adapter=adapter, from_group=source, share=min(1.0, left)) for source, left in losing]
    return moves
