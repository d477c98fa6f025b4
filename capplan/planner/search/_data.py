"""Search data: adapter groups and the load that each of them puts on an instance.

The fluid model gives the requests per second of one kind (rank, lengths) that an instance completes with
slots of a given rank. The load of a group is its rate over that. Surrogate and twin decide on feasibility.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.models.surrogates import FEATURES, feature_vector
from capplan.planner.problem._problem import AdapterShare, Assignment, Problem, merge_shares, whole_adapters
from capplan.planner.problem._splitting import split_evenly
from capplan.spec import Adapter, Kernel, Lengths, allowed_lora_rank

_SAMPLE_ADAPTERS: Final = 32
"""Adapters of one kind whose capacity is taken as that of the kind."""
_MIN_LOAD: Final = 1e-6
"""Load of an idle adapter, so that idle adapters are spread as well."""
_LOAD_OVER_CAPACITY: Final = FEATURES.index("load_over_capacity")
_HEAVY_LOAD: Final = 0.1
"""Load from which an adapter is divided."""
_SHARE_LOAD: Final = 0.05
"""Approximate load of each of its shares."""


@dataclass(frozen=True)
class AdapterGroup:
    """Shares of different adapters that are placed together, each the same fraction; mostly one."""

    shares: tuple[AdapterShare, ...]
    """Members."""
    pools: frozenset[int]
    """Indices of the pools that are allowed."""
    conflicts: frozenset[str]
    """Names of adapters that must not be on the same instance."""

    @property
    def names(self) -> frozenset[str]:
        """Names of its adapters."""
        return frozenset(share.name for share in self.shares)


def adapter_groups(problem: Problem) -> tuple[AdapterGroup, ...]:
    """Return the groups of a problem, in the order of its shares."""
    constraints = problem.constraints
    grouped: dict[tuple[str, int], list[AdapterShare]] = {}
    for share in problem.shares:
        grouped.setdefault((constraints.leader[share.name], share.number), []).append(share)
    everywhere = frozenset(range(len(problem.pools)))
    groups = []
    for (leader, _), shares in grouped.items():
        pin = constraints.pinned_pool.get(leader)
        pools = everywhere if pin is None else {n for n in everywhere if problem.pools[n].name == pin}
        conflicts = frozenset[str]().union(*(constraints.conflicts.get(share.name, ()) for share in shares))
        groups.append(AdapterGroup(tuple(shares), frozenset(pools), conflicts))
    return tuple(groups)


@dataclass(frozen=True)
class SearchData:
    """Immutable inputs of the search."""

    problem: Problem
    groups: tuple[AdapterGroup, ...]
    """Problem and its adapter groups."""
    ranks: tuple[int, ...]
    """Ranks that slots may have, ascending."""
    rank: NDArray[np.int64]
    """Index in `ranks` of the largest rank of each group, shape (groups,)."""
    loads: NDArray[np.float64]
    """Share of an instance that each group takes, shape (pools, ranks, groups)."""
    weight: NDArray[np.float64]
    """Load with slots of the group's own rank in its best pool, shape (groups,)."""
    kind: NDArray[np.int64]
    """Equal for groups that differ in name only, shape (groups,)."""
    conflicts: dict[int, frozenset[int]]
    """Groups that must not share an instance with a group, if there are any."""

    def load(self, members: frozenset[int], pool: int) -> float:
        """Return the load of an instance with these groups."""
        if not members:
            return 0.0
        columns = np.fromiter(members, np.int64, len(members))
        return float(self.loads[pool, self.rank[columns].max(), columns].sum())

    def kind_key(self, members: frozenset[int]) -> bytes:
        """Return a key that is equal for sets of groups that differ in names only."""
        return np.sort(self.kind[np.fromiter(members, np.int64, len(members))]).tobytes()

    def shares(self, members: frozenset[int]) -> tuple[AdapterShare, ...]:
        """Return the shares of these groups in the problem's order; shares of one adapter add up."""
        return merge_shares(share for group in sorted(members) for share in self.groups[group].shares)


def build_search_data(problem: Problem) -> SearchData:
    """Return the search data of a problem."""
    groups = adapter_groups(problem)
    slots = [[problem.s_max([share]) for share in group.shares] for group in groups]
    ranks = tuple(sorted({rank for each in slots for rank in each}))
    lengths = {a.name: problem.workload.lengths_of(a) for a in problem.traffic}
    adapters = {a.name: a for a in problem.traffic}
    loads = np.full((len(problem.pools), len(ranks), len(groups)), _MIN_LOAD)
    known: dict[object, float] = {}

    def load_per_rps(pool: int, rank: int, share: AdapterShare) -> float:
        s_max = max(rank, problem.s_max([share]))
        key = (pool, s_max, share.rank, lengths[share.name])
        if key not in known:
            known[key] = _load_per_rps(problem, pool, s_max, adapters[share.name])
        return known[key]

    for (pool, row, column), _ in np.ndenumerate(loads):
        shares = groups[column].shares
        loads[pool, row, column] += sum(s.rate_rps * load_per_rps(pool, ranks[row], s) for s in shares)
    largest = np.array([ranks.index(max(each)) for each in slots], dtype=np.int64)
    own = loads[:, largest, np.arange(len(groups))]
    closed = np.array([[pool not in group.pools for group in groups] for pool in range(len(problem.pools))])
    weight = np.where(closed, np.inf, own).min(axis=0)
    kinds, conflicts = _group_kinds(problem, groups), _group_conflicts(groups)
    return SearchData(problem, groups, ranks, largest, loads, weight, kinds, conflicts)


def _load_per_rps(problem: Problem, pool: int, s_max: int, adapter: Adapter) -> float:
    """Return the load of one request per second of an adapter, in slots of a rank.

    The base model counts as one adapter in one slot, whatever its rate. With a kernel that pads to the
    largest rank of a batch, the slots' rank is that of every request.
    """
    once = {"rate_rps": 1.0, "apart_from": (), "together_with": ()}
    if adapter.rank and problem.pools[pool].profile.engine.kernel is Kernel.BGMV:
        once["rank"] = s_max
    copies = tuple(adapter.model_copy(update={"name": str(i), **once}) for i in range(_SAMPLE_ADAPTERS))
    numbers: tuple[int, ...] = (32, 16, 8, 4, 2, 1)
    if adapter.rank == 0:
        s_max, numbers = max(1, s_max), (1,)
        copies = (adapter.model_copy(update={"rank": 1, "rate_rps": float(_SAMPLE_ADAPTERS)}),)
    changes: dict[str, object] = {"adapters": copies, "base": None, "trace": None}
    if cached := problem.cached_prefix_tokens(pool):
        # The prefix is computed and stored once; the rest of a prompt varies as before.
        prompt = problem.workload.lengths_of(adapter)[0]
        rest = max(1.0, prompt.mean_tokens - cached)
        short = Lengths(mean=rest, std=min(prompt.std_tokens, rest))
        changes["adapters"] = tuple(each.model_copy(update={"prompt_tokens": short}) for each in copies)
    workload = problem.workload.model_copy(update=changes)
    shares = (AdapterShare(adapter.name, s_max, 1.0),)
    fitting = (n for n in numbers if problem.fits_in_memory(Assignment(shares, n, pool=pool)))
    args = problem.engine.replace(max_loras=next(fitting, 1), max_lora_rank=allowed_lora_rank(s_max))
    features = feature_vector(workload, problem.pools[pool].profile, args)
    return float(features[_LOAD_OVER_CAPACITY]) / _SAMPLE_ADAPTERS


def _group_kinds(problem: Problem, groups: tuple[AdapterGroup, ...]) -> NDArray[np.int64]:
    """Return the kind of each group.

    In a trace every adapter is a kind, with its own arrivals. So are the shares of one adapter, since two of
    them take one slot together.
    """
    if problem.workload.trace is not None:
        return np.arange(len(groups))
    lengths = {a.name: problem.workload.lengths_of(a) for a in problem.traffic}
    known: dict[object, int] = {}

    def key(share: AdapterShare) -> object:
        name = share.name if share.fraction < 1.0 else None
        return share.rank, share.rate_rps, lengths[share.name], name

    kinds = [tuple(map(key, group.shares)) for group in groups]
    return np.array([known.setdefault(kind, len(known)) for kind in kinds], dtype=np.int64)


def _group_conflicts(groups: tuple[AdapterGroup, ...]) -> dict[int, frozenset[int]]:
    holders: dict[str, set[int]] = {}
    for number, group in enumerate(groups):
        for name in group.names:
            holders.setdefault(name, set()).add(number)
    conflicts = {
        number: frozenset().union(*(holders.get(name, ()) for name in group.conflicts)) - {number}
        for number, group in enumerate(groups)
    }
    return {number: others for number, others in conflicts.items() if others}


def split_heavy_adapters(data: SearchData, only: str | None = None) -> Problem:
    """Return the problem with heavy adapters, or `only` that one, in light shares; the same if none is heavy.

    Light shares fill instances that heavy adapters leave partly empty, at the cost of a slot for each. The
    adapters of a group are divided equally, into at most `max_replicas` shares and no fewer than before.
    """
    problem = data.problem
    constraints, scale = problem.constraints, 1.0 / (1.0 - problem.workload.headroom)
    load: dict[str, float] = {}
    count: dict[str, int] = {}
    for group, weight in zip(data.groups, data.weight.tolist(), strict=True):
        leader = constraints.leader[group.shares[0].name]
        load[leader] = load.get(leader, 0.0) + weight * scale
        count[leader] = count.get(leader, 0) + 1
    for leader, total in load.items():
        if total > _HEAVY_LOAD and only in (None, leader):
            limit = constraints.max_replicas.get(leader, math.inf)
            count[leader] = max(count[leader], int(min(limit, math.ceil(total / _SHARE_LOAD))))
    shares = tuple(
        share
        for adapter in whole_adapters(problem)
        for share in split_evenly(adapter, count[constraints.leader[adapter.name]])
    )
    return problem if len(shares) == len(problem.shares) else replace(problem, shares=shares)
