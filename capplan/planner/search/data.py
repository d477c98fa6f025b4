"""Search data: adapter groups and the share of an instance that each of them takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.models.surrogates.features import FEATURES, feature_vector
from capplan.planner.problem import AdapterShare, Assignment, Problem, merge_shares, whole_adapters
from capplan.planner.splitting import split_evenly
from capplan.spec import Adapter, allowed_lora_rank


@dataclass(frozen=True)
class AdapterGroup:
    """Parts that are placed together; mostly one.

    Attributes
    ----------
    shares
        Of different adapters, each the same share.
    pools
        Numbers of the pools that it may be in.
    foes
        Adapters that must not be on its instance.
    """

    shares: tuple[AdapterShare, ...]
    pools: frozenset[int]
    foes: frozenset[str]

    @property
    def names(self) -> frozenset[str]:
        """Adapters in it."""
        return frozenset(share.name for share in self.shares)


def adapter_groups(problem: Problem) -> tuple[AdapterGroup, ...]:
    """Return the units of a problem, in the order of its shares."""
    constraints = problem.constraints
    grouped: dict[tuple[str, int], list[AdapterShare]] = {}
    for share in problem.shares:
        grouped.setdefault((constraints.bundle[share.name], share.number), []).append(share)
    everywhere = frozenset(range(len(problem.pools)))
    units = []
    for (first, _), shares in grouped.items():
        pin = constraints.pool.get(first)
        pools = everywhere if pin is None else {n for n in everywhere if problem.pools[n].name == pin}
        foes = frozenset[str]().union(*(constraints.apart.get(share.name, ()) for share in shares))
        units.append(AdapterGroup(tuple(shares), frozenset(pools), foes))
    return tuple(units)


_SAMPLE_ADAPTERS: Final = 32

"""Adapters of one kind whose capacity is taken as that of the kind."""

_MIN_LOAD: Final = 1e-6

"""What an idle adapter takes: so that idle ones are spread, too."""

_LOAD_OVER_CAPACITY: Final = FEATURES.index("load_over_capacity")


@dataclass(frozen=True)
class SearchData:
    """The facts that placements are weighed by.

    Attributes
    ----------
    problem, units
        What is placed.
    ranks
        Ranks that slots may be sized for, ascending.
    rank
        Of every unit, the number of its largest rank in `ranks`, shape (units,).
    takes
        Share of an instance that a unit takes, shape (pools, ranks, units).
    weight
        Share of an instance that a unit takes among its like, where that is least, shape (units,).
    kind
        Number of what a unit asks of an instance, shape (units,): equal for units that differ in name only.
    foes
        Numbers of units that may not be on an instance with a unit, for those that have any.
    """

    problem: Problem
    units: tuple[AdapterGroup, ...]
    ranks: tuple[int, ...]
    rank: NDArray[np.int64]
    takes: NDArray[np.float64]
    weight: NDArray[np.float64]
    kind: NDArray[np.int64]
    foes: dict[int, frozenset[int]]

    def taken(self, members: frozenset[int], pool: int) -> float:
        """Return the share of an instance that some units take."""
        if not members:
            return 0.0
        columns = np.fromiter(members, np.int64, len(members))
        return float(self.takes[pool, self.rank[columns].max(), columns].sum())

    def kinds(self, members: frozenset[int]) -> bytes:
        """Return what some units ask of an instance together, whatever their names."""
        return np.sort(self.kind[np.fromiter(members, np.int64, len(members))]).tobytes()

    def shares(self, members: frozenset[int]) -> tuple[AdapterShare, ...]:
        """Return the shares of some units, in the order of the problem; shares of one adapter add up."""
        return merge_shares(share for unit in sorted(members) for share in self.units[unit].shares)


def build_search_data(problem: Problem) -> SearchData:
    """Return the ground that a problem is solved on."""
    units = adapter_groups(problem)
    slots = [[problem.s_max([share]) for share in unit.shares] for unit in units]
    ranks = tuple(sorted({rank for each in slots for rank in each}))
    takes = np.full((len(problem.pools), len(ranks), len(units)), _MIN_LOAD)
    per_rps = _LoadPerRps(problem)
    for pool in range(len(problem.pools)):
        for row, rank in enumerate(ranks):
            for column, unit in enumerate(units):
                takes[pool, row, column] += sum(
                    share.rate_rps * per_rps(pool, rank, share) for share in unit.shares
                )
    largest = np.array([ranks.index(max(each)) for each in slots], dtype=np.int64)
    own = takes[:, largest, np.arange(len(units))]
    closed = np.array([[pool not in unit.pools for unit in units] for pool in range(len(problem.pools))])
    weight = np.where(closed, np.inf, own).min(axis=0)
    return SearchData(
        problem, units, ranks, largest, takes, weight, _group_kinds(problem, units), _group_conflicts(units)
    )


class _LoadPerRps:
    """Share of an instance that one request per second of a kind of adapter takes."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._adapters = {adapter.name: adapter for adapter in problem.workload.adapters}
        self._lengths = {a.name: problem.workload.lengths_of(a) for a in problem.workload.adapters}
        self._known: dict[object, float] = {}

    def __call__(self, pool: int, rank: int, share: AdapterShare) -> float:
        """Return the share, with slots of a rank, or of the share's own where that is larger."""
        s_max = max(rank, self._problem.s_max([share]))
        key = (pool, s_max, share.rank, self._lengths[share.name])
        if key not in self._known:
            self._known[key] = self._measured(pool, s_max, self._adapters[share.name])
        return self._known[key]

    def _measured(self, pool: int, s_max: int, adapter: Adapter) -> float:
        problem, profile = self._problem, self._problem.pools[pool].profile
        once = {"rate_rps": 1.0, "apart_from": (), "together_with": ()}
        alike = tuple(adapter.model_copy(update={"name": str(i), **once}) for i in range(_SAMPLE_ADAPTERS))
        workload = problem.workload.model_copy(update={"adapters": alike, "trace": None})
        share = AdapterShare(adapter.name, s_max, 1.0)
        fitting = (
            slots for slots in (32, 16, 8, 4, 2, 1) if problem.fits_in_memory(_single(share, slots, pool))
        )
        features = feature_vector(
            workload,
            profile,
            a_max=next(fitting, 1),
            s_max=allowed_lora_rank(s_max),
            max_num_seqs=problem.engine.max_num_seqs,
            max_num_batched_tokens=problem.engine.max_num_batched_tokens,
            gpu_memory_utilization=problem.engine.gpu_memory_utilization,
        )
        return float(features[_LOAD_OVER_CAPACITY]) / _SAMPLE_ADAPTERS


def _single(share: AdapterShare, slots: int, pool: int) -> Assignment:
    return Assignment((share,), slots, pool=pool)


def _group_kinds(problem: Problem, units: tuple[AdapterGroup, ...]) -> NDArray[np.int64]:
    """Return numbers of kinds; in a trace every adapter has arrivals of its own.

    Shares of one adapter are of its own kind, since two of them ask for one slot together.
    """
    if problem.workload.trace is not None:
        return np.arange(len(units))
    lengths = {a.name: problem.workload.lengths_of(a) for a in problem.workload.adapters}
    known: dict[object, int] = {}

    def asked(share: AdapterShare) -> object:
        return share.rank, share.rate_rps, lengths[share.name], share.name if share.fraction < 1.0 else None

    kinds = [tuple(map(asked, unit.shares)) for unit in units]
    return np.array([known.setdefault(kind, len(known)) for kind in kinds], dtype=np.int64)


def _group_conflicts(units: tuple[AdapterGroup, ...]) -> dict[int, frozenset[int]]:
    holders: dict[str, set[int]] = {}
    for number, unit in enumerate(units):
        for name in unit.names:
            holders.setdefault(name, set()).add(number)
    foes = {
        number: frozenset().union(*(holders.get(name, ()) for name in unit.foes)) - {number}
        for number, unit in enumerate(units)
    }
    return {number: others for number, others in foes.items() if others}


_HEAVY_LOAD: Final = 0.1

"""Share of an instance from which an adapter is divided."""

_SHARE_LOAD: Final = 0.05

"""Share of an instance that each of its shares then takes, about."""


def split_heavy_adapters(ground: SearchData) -> Problem:
    """Return the problem with heavy adapters in light shares; the same where none is heavy.

    Adapters that stay together are divided together, into no more shares than `max_replicas` allows, and no
    fewer than there are.
    """
    problem = ground.problem
    constraints, scale = problem.constraints, 1.0 / (1.0 - problem.workload.headroom)
    weight: dict[str, float] = {}
    count: dict[str, int] = {}
    for unit, own in zip(ground.units, ground.weight.tolist(), strict=True):
        first = constraints.bundle[unit.shares[0].name]
        weight[first] = weight.get(first, 0.0) + own * scale
        count[first] = count.get(first, 0) + 1
    for first, taken in weight.items():
        if taken > _HEAVY_LOAD:
            most = constraints.max_replicas.get(first, math.inf)
            count[first] = max(count[first], int(min(most, math.ceil(taken / _SHARE_LOAD))))
    shares = tuple(
        each
        for share in whole_adapters(problem)
        for each in split_evenly(share, count[constraints.bundle[share.name]])
    )
    return problem if len(shares) == len(problem.shares) else replace(problem, shares=shares)
