"""What a workload says about where adapters may be: pools, who stays together, who stays apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from capplan.errors import InputError
from capplan.spec import Adapter, Workload


@dataclass(frozen=True)
class Constraints:
    """The wishes of all adapters, made explicit.

    Attributes
    ----------
    bundle
        Of every adapter, the first adapter (in the workload's order) of those that stay with it.
    apart
        Of every adapter, those that must not be on an instance with it, whoever of the two said so.
    pool
        Names of the pools that adapters are pinned to, by the first adapter of their bundle.
    max_replicas
        Most instances that may share an adapter's traffic, by the first adapter of its bundle.
    """

    bundle: Mapping[str, str]
    apart: Mapping[str, frozenset[str]]
    pool: Mapping[str, str]
    max_replicas: Mapping[str, int]


def constraints_of(workload: Workload) -> Constraints:
    """Return the constraints of a workload.

    Raises
    ------
    InputError
        Where they contradict each other.
    """
    bundle = _bundles(workload.adapters)
    apart = _apart(workload.adapters)
    for name, others in apart.items():
        for other in others:
            if bundle[name] == bundle[other]:
                rule = f"must not name {other}, which together_with keeps on the GPU of {name}"
                raise InputError(rule, other, f"adapters: {name}.apart_from")
    return Constraints(bundle, apart, _pins(workload.adapters, bundle), _replicas(workload.adapters, bundle))


def _bundles(adapters: Iterable[Adapter]) -> dict[str, str]:
    """Return the first member of the connected component of every adapter."""
    first = {adapter.name: adapter.name for adapter in adapters}
    order = {name: position for position, name in enumerate(first)}

    def root(name: str) -> str:
        while first[name] != name:
            name = first[name]
        return name

    for adapter in adapters:
        for other in adapter.together_with:
            low, high = sorted((root(adapter.name), root(other)), key=order.__getitem__)
            first[high] = low
    return {name: root(name) for name in first}


def _apart(adapters: Iterable[Adapter]) -> dict[str, frozenset[str]]:
    apart: dict[str, set[str]] = {}
    for adapter in adapters:
        for other in adapter.apart_from:
            apart.setdefault(adapter.name, set()).add(other)
            apart.setdefault(other, set()).add(adapter.name)
    return {name: frozenset(others) for name, others in apart.items()}


def _pins(adapters: Iterable[Adapter], bundle: Mapping[str, str]) -> dict[str, str]:
    pins: dict[str, str] = {}
    for adapter in adapters:
        if adapter.pool is None:
            continue
        pinned = pins.setdefault(bundle[adapter.name], adapter.pool)
        if pinned != adapter.pool:
            rule = f"must be {pinned}, where an adapter is pinned that together_with keeps on the same GPU"
            raise InputError(rule, adapter.pool, f"adapters: {adapter.name}.pool")
    return pins


def _replicas(adapters: Iterable[Adapter], bundle: Mapping[str, str]) -> dict[str, int]:
    most: dict[str, int] = {}
    for adapter in adapters:
        if adapter.max_replicas is not None:
            first = bundle[adapter.name]
            most[first] = min(adapter.max_replicas, most.get(first, adapter.max_replicas))
    return most
