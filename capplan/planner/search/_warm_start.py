"""Initial solutions of the local search that keep adapters where the plan in force has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from capplan.planner.problem._execution import parallel_map
from capplan.planner.problem._previous import PreviousInstance
from capplan.planner.problem._problem import AdapterShare, Problem
from capplan.planner.search._data import SearchData
from capplan.planner.search._placement import InitialSolution, PlacementState, greedy_insert

_SHARE_TOLERANCE: Final = 1e-9
_BISECTIONS: Final = 6
_MAX_ROUNDS: Final = 4
"""Rounds in which instances give up groups and others take them."""


def keep_shares(problem: Problem, old: Sequence[PreviousInstance]) -> Problem:
    """Return the problem with adapters in the shares of the plan in force.

    An adapter with more shares in the problem is divided further, until no share is larger than those.
    Adapters that are placed together keep equal shares.
    """
    constraints = problem.constraints
    held: dict[str, list[float]] = {}
    for instance in old:
        for name, fraction in instance.fractions.items():
            held.setdefault(name, []).append(fraction)
    given: dict[str, list[AdapterShare]] = {}
    for share in problem.shares:
        given.setdefault(share.name, []).append(share)
    fractions = {name: _divide(held.get(name, [1.0]), len(shares)) for name, shares in given.items()}
    even = set()
    for name, leader in constraints.leader.items():
        most = min(constraints.max_replicas.get(leader, math.inf), problem.gpus)
        if len(fractions[name]) > most or fractions[name] != fractions[leader]:
            even.add(leader)
    shares: list[AdapterShare] = []
    for adapter in problem.traffic:
        if constraints.leader[adapter.name] in even:
            shares += given[adapter.name]
        else:
            parts = enumerate(fractions[adapter.name])
            shares += [AdapterShare.of(adapter, fraction, number) for number, fraction in parts]
    return problem if set(shares) == set(problem.shares) else replace(problem, shares=tuple(shares))


def _divide(fractions: Sequence[float], count: int) -> tuple[float, ...]:
    """Return fractions of an adapter, largest first, divided until none exceeds 1 / count."""
    total = math.fsum(fractions)
    parts: list[float] = []
    for fraction in fractions:
        pieces = max(1, math.ceil(fraction / total * count - _SHARE_TOLERANCE))
        parts += [fraction / total / pieces] * pieces
    return tuple(sorted(parts, reverse=True))


def warm_start(old: Sequence[PreviousInstance]) -> InitialSolution:
    """Return the initial solution that leaves every group where the plan in force has it.

    Of more previous instances than the fleet has, those with the most adapters are kept.
    """

    def start(data: SearchData, pools: Sequence[int]) -> PlacementState | None:
        state, rest = _kept(data, pools, old)
        return state if greedy_insert(state, rest) else None

    return start


def relieved_start(
    old: Sequence[PreviousInstance],
    holds: Callable[[frozenset[int], int], bool],
    is_overloaded: Callable[[PlacementState], bool],
) -> InitialSolution:
    """Return the initial solution that moves groups only from instances that do not hold.

    These give up their heaviest groups, and no more than necessary. The others take them. `holds` tells
    whether an instance of a pool holds with these groups, `is_overloaded` whether a placement is hopeless.
    """

    def start(data: SearchData, pools: Sequence[int]) -> PlacementState | None:
        state, rest = _kept(data, pools, old)
        full: set[int] = set()
        for _ in range(_MAX_ROUNDS):
            rest += _relieve(state, full, holds)
            if not rest:
                return state
            for group in _by_falling_weight(data, rest):
                loads = state.loads_with(group)
                loads[list(full)] = np.inf
                if not np.isfinite(loads).any():
                    return None
                state.add(group, int(np.argmin(loads)))
            if is_overloaded(state):
                return None
            rest = []
        return None

    return start


def levelled_start(old: Sequence[PreviousInstance]) -> InitialSolution:
    """Return the initial solution that moves the heaviest groups from instances above the mean load."""

    def start(data: SearchData, pools: Sequence[int]) -> PlacementState | None:
        state, rest = _kept(data, pools, old)
        mean = (float(state.loads().sum()) + float(data.weight[rest].sum())) / len(state)
        for instance in range(len(state)):
            for group in _heaviest_over(state, instance, mean):
                state.remove(group, instance)
                rest.append(group)
        return state if greedy_insert(state, _by_falling_weight(data, rest)) else None

    return start


def _kept(
    data: SearchData, pools: Sequence[int], old: Sequence[PreviousInstance]
) -> tuple[PlacementState, list[int]]:
    """Return the placement of the groups that stay in place, and the other groups, heaviest first."""
    state = PlacementState(data, pools)
    return state, _by_falling_weight(data, _keep_in_place(state, _match_instances(data, pools, old)))


def _match_instances(
    data: SearchData, pools: Sequence[int], old: Sequence[PreviousInstance]
) -> dict[int, PreviousInstance]:
    """Return the previous instance that each new one continues."""
    names = [pool.name for pool in data.problem.pools]
    continued: dict[int, PreviousInstance] = {}
    for previous in sorted(old, key=lambda each: -len(each.fractions)):
        free = (at for at, pool in enumerate(pools) if at not in continued and names[pool] == previous.pool)
        at = next(free, None)
        if at is not None:
            continued[at] = previous
    return continued


def _keep_in_place(state: PlacementState, continued: Mapping[int, PreviousInstance]) -> list[int]:
    """Add groups to instances that had their adapters with as much traffic; return the other groups."""
    unused = {at: dict(previous.fractions) for at, previous in continued.items()}
    rest = []
    for group in sorted(
        range(len(state.data.groups)), key=lambda g: -state.data.groups[g].shares[0].fraction
    ):
        shares = state.data.groups[group].shares
        fitting = (
            at
            for at, fractions in unused.items()
            if all(fractions.get(s.name, 0.0) >= s.fraction - _SHARE_TOLERANCE for s in shares)
            and state.is_allowed(group, at)
        )
        at = min(fitting, key=lambda at: unused[at][shares[0].name], default=None)
        if at is None:
            rest.append(group)
            continue
        state.add(group, at)
        for share in shares:
            unused[at][share.name] -= share.fraction
    return rest


def _by_falling_weight(data: SearchData, groups: Sequence[int]) -> list[int]:
    return sorted(groups, key=lambda group: (-data.weight[group], group))


def _heaviest_over(state: PlacementState, instance: int, limit: float) -> list[int]:
    """Return the groups to take off an instance to reach a load limit, the heaviest that fit first."""
    data, pool = state.data, int(state.pools[instance])
    excess = data.load(frozenset(state.members[instance]), pool) - limit
    taken = []
    for group in _by_falling_weight(data, list(state.members[instance])):
        load = float(data.loads[pool, data.rank[group], group])
        if load <= excess:
            taken.append(group)
            excess -= load
    return taken


def _relieve(
    state: PlacementState, full: set[int], holds: Callable[[frozenset[int], int], bool]
) -> list[int]:
    """Take groups off instances that do not hold, and add these instances to the full ones."""
    others = sorted(set(range(len(state))) - full)
    excess = parallel_map(partial(_excess_groups, state, holds), others)
    for instance, groups in zip(others, excess, strict=True):
        for group in groups:
            state.remove(group, instance)
        if groups:
            full.add(instance)
    return [group for groups in excess for group in groups]


def _excess_groups(
    state: PlacementState, holds: Callable[[frozenset[int], int], bool], instance: int
) -> list[int]:
    """Return the fewest groups to take off an instance so that it holds, by bisection over its load."""
    members, pool = frozenset(state.members[instance]), int(state.pools[instance])
    if holds(members, pool):
        return []
    best, holding, failing = list(members), 0.0, state.data.load(members, pool)
    for _ in range(_BISECTIONS):
        limit = (holding + failing) / 2.0
        taken = _heaviest_over(state, instance, limit)
        if taken and holds(members - frozenset(taken), pool):
            best, holding = taken, limit
        else:
            failing = limit
    return best
