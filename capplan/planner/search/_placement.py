"""Search data, placements, and initial solutions of the local search.

The fluid model gives the requests per second of one kind (rank, lengths) that an instance completes with
slots of a given rank. The load of a group is its rate over that. Surrogate and twin decide on feasibility.

Balanced instances have equal slack, with hot and cold adapters that share slots well. By rank, requests of
small ranks take neither the memory nor, with a kernel that pads, the time of the largest rank. With a plan in
force, adapters stay where it has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.models.surrogates import FEATURES, feature_vector
from capplan.planner.problem._execution import parallel_map
from capplan.planner.problem._previous import PreviousInstance
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
    adapters = {a.name: a for a in problem.traffic}
    loads = np.full((len(problem.pools), len(ranks), len(groups)), _MIN_LOAD)
    known: dict[object, float] = {}

    def load_per_rps(pool: int, rank: int, share: AdapterShare) -> float:
        s_max = max(rank, problem.s_max([share]))
        key = (pool, s_max, share.rank, problem.lengths[share.name])
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
    known: dict[object, int] = {}

    def key(share: AdapterShare) -> object:
        name = share.name if share.fraction < 1.0 else None
        return share.rank, share.rate_rps, problem.lengths[share.name], name

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
    constraints, scale = problem.constraints, problem.load_with_headroom
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


_WIDENING: Final = 1.25
_LEVEL_PRECISION: Final = 0.01
"""Step from the least possible level of load upwards, and relative precision of the bisected level."""


class PlacementState:
    """Mutable placement of adapter groups on instances of these pools."""

    def __init__(self, data: SearchData, pools: Sequence[int]) -> None:
        self.data = data
        self.pools = np.array(pools, dtype=np.int64)
        self.members: list[set[int]] = [set() for _ in pools]
        """Groups on each instance."""
        self.load_limit = np.full(len(pools), np.inf)
        """Upper bound on the load of each instance, set when the twin refuses it."""
        self._all = np.arange(len(pools))
        self._loads = np.zeros((len(pools), len(data.ranks)))  # with slots of every rank
        self._count = np.zeros((len(pools), len(data.ranks)), dtype=np.int64)  # groups by rank
        self._rank = np.full(len(pools), -1)  # index of the largest rank
        self._pool_masks: dict[frozenset[int], NDArray[np.bool_]] = {}

    def __len__(self) -> int:
        return len(self.members)

    def add(self, group: int, instance: int) -> None:
        """Place a group on an instance."""
        self.members[instance].add(group)
        self._loads[instance] += self.data.loads[self.pools[instance], :, group]
        self._count[instance, self.data.rank[group]] += 1
        self._rank[instance] = max(self._rank[instance], self.data.rank[group])

    def remove(self, group: int, instance: int) -> None:
        """Remove a group from an instance."""
        self.members[instance].remove(group)
        self._loads[instance] -= self.data.loads[self.pools[instance], :, group]
        self._count[instance, self.data.rank[group]] -= 1
        present = np.flatnonzero(self._count[instance])
        self._rank[instance] = present[-1] if present.size else -1

    def move(self, group: int, source: int, target: int) -> None:
        """Move a group from one instance to another."""
        self.remove(group, source)
        self.add(group, target)

    def loads(self) -> NDArray[np.float64]:
        """Return the load of every instance, shape (instances,)."""
        loads: NDArray[np.float64] = self._loads[self._all, np.maximum(self._rank, 0)]
        return loads

    def loads_with(self, group: int) -> NDArray[np.float64]:
        """Return the load of every instance with the group added, shape (instances,); inf if not allowed."""
        rank = np.maximum(self._rank, self.data.rank[group])
        loads = self._loads[self._all, rank] + self.data.loads[self.pools, rank, group]
        allowed: NDArray[np.float64] = np.where(self._allowed(group), loads, np.inf)
        return allowed

    def excess(self, load: float, instance: int) -> float:
        """Return the relative excess of a load over the limit of an instance, at least 0."""
        return max(0.0, load / float(self.load_limit[instance]) - 1.0)

    def is_allowed(self, group: int, instance: int, leaving: int | None = None) -> bool:
        """Tell whether constraints allow a group on an instance that another group leaves."""
        conflicts = self.data.conflicts.get(group, frozenset()) - {leaving}
        right_pool = int(self.pools[instance]) in self.data.groups[group].pools
        return right_pool and conflicts.isdisjoint(self.members[instance])

    def _allowed(self, group: int) -> NDArray[np.bool_]:
        pools, conflicts = self.data.groups[group].pools, self.data.conflicts.get(group)
        if pools not in self._pool_masks:
            self._pool_masks[pools] = np.isin(self.pools, list(pools))
        allowed = self._pool_masks[pools]
        if conflicts:
            allowed = allowed & np.array([conflicts.isdisjoint(members) for members in self.members])
        return allowed


InitialSolution = Callable[[SearchData, Sequence[int]], PlacementState | None]
"""Builds a placement on instances of these pools; None if a group has no place."""


def placement_of(data: SearchData, pools: Sequence[int], members: Iterable[Iterable[int]]) -> PlacementState:
    """Return the placement with these groups on each instance."""
    state = PlacementState(data, pools)
    for instance, groups in enumerate(members):
        for group in groups:
            state.add(group, instance)
    return state


def greedy_insert(state: PlacementState, groups: Sequence[int]) -> bool:
    """Insert each group where the load is least afterwards; False if one has no place."""
    for group in groups:
        loads = state.loads_with(group)
        if not np.isfinite(loads).any():
            return False
        state.add(group, int(np.argmin(loads)))
    return True


def balanced(data: SearchData, pools: Sequence[int]) -> PlacementState | None:
    """Insert groups from the heaviest to the lightest."""
    state = PlacementState(data, pools)
    order = sorted(range(len(data.groups)), key=lambda g: (-data.weight[g], -data.rank[g], g))
    return state if greedy_insert(state, order) else None


def by_rank(data: SearchData, pools: Sequence[int]) -> PlacementState | None:
    """Fill instances by falling rank, to the lowest level at which every group has a place.

    First-fit decreasing under a bisected level (MULTIFIT: Coffman, Garey and Johnson, 1978).
    """
    memory = [pool.profile.gpu.memory_bytes for pool in data.problem.pools]
    ordered = sorted(pools, key=lambda pool: -memory[pool])
    order = sorted(range(len(data.groups)), key=lambda g: (-data.rank[g], -data.weight[g], g))
    low = high = max(float(data.weight.sum()) / len(pools), float(data.weight.max(initial=0.0)))
    best = _first_fit(data, ordered, order, high)
    most = float(data.loads.max(axis=(0, 1)).sum())
    while best is None and high <= most:
        low, high = high, _WIDENING * high
        best = _first_fit(data, ordered, order, high)
    while best is not None and high > (1.0 + _LEVEL_PRECISION) * low:
        level = 0.5 * (low + high)
        filled = _first_fit(data, ordered, order, level)
        if filled is None:
            low = level
        else:
            best, high = filled, level
    return best


def balanced_by_rank(data: SearchData, pools: Sequence[int]) -> PlacementState | None:
    """Fill as `by_rank`, then insert greedily among instances with the same ranks."""
    filled = by_rank(data, pools)
    if filled is None:
        return None
    same_ranks: dict[frozenset[int], list[int]] = {}
    for instance, members in enumerate(filled.members):
        same_ranks.setdefault(frozenset(data.rank[list(members)].tolist()), []).append(instance)
    state = PlacementState(data, filled.pools.tolist())
    for instances in same_ranks.values():
        there = np.isin(np.arange(len(state)), instances)
        groups = [group for instance in instances for group in filled.members[instance]]
        for group in sorted(groups, key=lambda g: (-data.weight[g], -data.rank[g], g)):
            anywhere = state.loads_with(group)
            loads = np.where(there, anywhere, np.inf)
            loads = loads if np.isfinite(loads).any() else anywhere
            if not np.isfinite(loads).any():
                return None
            state.add(group, int(np.argmin(loads)))
    return state


INITIAL_SOLUTIONS: tuple[InitialSolution, ...] = (balanced_by_rank, balanced, by_rank)


def _first_fit(
    data: SearchData, pools: Sequence[int], order: Sequence[int], level: float
) -> PlacementState | None:
    """Insert each group on the first instance whose load stays within the level; None if one has no place."""
    state = PlacementState(data, pools)
    for group in order:
        loads = state.loads_with(group)
        fits = np.flatnonzero(np.isfinite(loads) & (loads <= level))
        if not fits.size:
            return None
        state.add(group, int(fits[0]))
    return state


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
