"""Constraints of adapters on their placement: apart, together, in one pool, on few instances."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from capplan.errors import InputError
from capplan.spec import Adapter


@dataclass(frozen=True)
class Constraints:
    """Placement constraints of all adapters."""

    leader: Mapping[str, str]
    """First adapter, in the workload's order, of the group that each adapter is placed with."""
    groups: frozenset[str]
    """Leaders of groups of several adapters."""
    conflicts: Mapping[str, frozenset[str]]
    """Adapters that must not be on an instance with an adapter; symmetric."""
    pinned_pool: Mapping[str, str]
    """Pool that a group is pinned to, by leader."""
    max_replicas: Mapping[str, int]
    """Maximum number of instances of a group, by leader."""


def read_constraints(adapters: Sequence[Adapter], traffic: Sequence[Adapter]) -> Constraints:
    """Return the constraints of adapters; `traffic` also has the base model as one of rank 0 if it has any.

    Raises
    ------
    InputError
        If constraints contradict each other.
    """
    leader = _group_leaders(traffic)
    conflicts = _conflicts(adapters)
    for name, others in conflicts.items():
        for other in others:
            if leader[name] == leader[other]:
                rule = f"must not name {other}, which together_with keeps on the GPU of {name}"
                raise InputError(rule, other, f"adapters: {name}.apart_from")
    pinned_pool: dict[str, str] = {}
    max_replicas: dict[str, int] = {}
    for adapter in adapters:
        first = leader[adapter.name]
        if adapter.pool is not None and pinned_pool.setdefault(first, adapter.pool) != adapter.pool:
            rule = (
                f"must be {pinned_pool[first]}, where an adapter is pinned that together_with keeps on the "
                "same GPU"
            )
            raise InputError(rule, adapter.pool, f"adapters: {adapter.name}.pool")
        if adapter.max_replicas is not None:
            max_replicas[first] = min(adapter.max_replicas, max_replicas.get(first, adapter.max_replicas))
    groups = frozenset(first for name, first in leader.items() if name != first)
    return Constraints(leader, groups, conflicts, pinned_pool, max_replicas)


def _group_leaders(adapters: Iterable[Adapter]) -> dict[str, str]:
    """Return the first member of the connected component of every adapter."""
    parent = {adapter.name: adapter.name for adapter in adapters}
    order = {name: position for position, name in enumerate(parent)}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    for adapter in adapters:
        for other in adapter.together_with:
            low, high = sorted((root(adapter.name), root(other)), key=order.__getitem__)
            parent[high] = low
    return {name: root(name) for name in parent}


def _conflicts(adapters: Iterable[Adapter]) -> dict[str, frozenset[str]]:
    conflicts: dict[str, set[str]] = {}
    for adapter in adapters:
        for other in adapter.apart_from:
            conflicts.setdefault(adapter.name, set()).add(other)
            conflicts.setdefault(other, set()).add(adapter.name)
    return {name: frozenset(others) for name, others in conflicts.items()}
