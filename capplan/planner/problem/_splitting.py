"""Splitting of hot adapters into equal shares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Final

from capplan.errors import InfeasibleError
from capplan.planner.problem._bound import lower_bound_instances
from capplan.planner.problem._evaluate import describe_failure
from capplan.planner.problem._problem import (
    AdapterShare,
    Assignment,
    Estimator,
    Problem,
    estimate_all,
    infeasible,
)
from capplan.planner.problem._settings import has_open_knobs, tune_knobs
from capplan.spec import Adapter

_KIND: Final = attrgetter("rank", "prompt_tokens", "output_tokens")
_RANK: Final = attrgetter("rank")
_PROMPT: Final = attrgetter("prompt_tokens")
_OUTPUT: Final = attrgetter("output_tokens")
_NAME: Final = attrgetter("name")
_RATE: Final = attrgetter("rate_rps")

AdapterSet = tuple[Adapter, ...]
"""Adapters that are placed together; mostly one."""


def in_input_order(problem: Problem) -> list[AdapterShare]:
    """Return the shares in the order of the workload, shares of one adapter by number."""
    position = {adapter.name: at for at, adapter in enumerate(problem.traffic)}
    return sorted(problem.shares, key=lambda share: (position[share.name], share.number))


def split_hot_adapters(problem: Problem, estimator: Estimator) -> tuple[AdapterShare, ...]:
    """Return the shares of the problem, with adapters that starve an instance alone split into the fewest.

    Adapters that are placed together are split together. Of adapters that differ in rate only, the hottest
    are tried first, until one needs no split.

    Raises
    ------
    InfeasibleError
        If adapters that are placed together do not fit in memory, or `max_replicas` or the instances allow
        too few shares.
    """
    split: dict[str, int] = {}
    for kind in _doubtful_kinds(problem, estimator):
        for members in kind:
            count = _shares_needed(problem, estimator, members)
            if count == 1:
                break
            split |= {adapter.name: count for adapter in members}
    if not split:
        return problem.shares
    return tuple(each for share in problem.shares for each in split_evenly(share, split.get(share.name, 1)))


def split_evenly(share: AdapterShare, count: int) -> tuple[AdapterShare, ...]:
    """Return equal shares of an adapter."""
    if count == 1:
        return (share,)
    return tuple(
        AdapterShare(share.name, share.rank, share.rate_rps / count, share.fraction / count, number)
        for number in range(count)
    )


def require_memory(problem: Problem) -> None:
    """Raise `InfeasibleError` unless an instance of some pool starts with the adapter of the largest rank."""
    largest = max(problem.shares, key=_RANK)
    alone = Assignment((largest,), problem.fixed_a_max or 1)
    pools = range(len(problem.pools))
    if not any(problem.fits_in_memory(replace(alone, pool=pool)) for pool in pools):
        largest = min((s for s in problem.shares if s.rank == largest.rank), key=_NAME)
        slots, rank = problem.slots(alone)
        raise infeasible(
            "memory",
            f"{slots} adapter slot(s) of rank {rank}, which {_kind(largest)} {largest.name} needs,"
            f" leave no room for one request of max_model_len {problem.engine.max_model_len} on "
            f"{_gpu_names(problem, pools)}",
        )


def _doubtful_kinds(problem: Problem, estimator: Estimator) -> Iterator[Iterable[AdapterSet]]:
    """Yield the kinds whose hottest adapter does not hold on an instance of its own, or was not tested.

    One batch of estimates tests single adapters on instances of the only pool.
    """
    if _is_plain(problem) and _hold_alone(problem, estimator, _hottest_by_rank(problem.shares)):
        return
    kinds = [(next(kind), kind) for kind in map(iter, _kinds(problem))]
    tested: dict[str, Assignment] = {}
    if len(problem.pools) == 1 and not problem.constraints.pinned_pool:
        for (hottest, *others), _ in kinds:
            alone = Assignment((AdapterShare.of(hottest),), problem.fixed_a_max or 1)
            if not others and problem.fits_in_memory(alone):
                tested[hottest.name] = alone
    estimates = zip(tested, estimate_all(estimator, list(tested.values())), strict=True)
    holding = {name for name, estimate in estimates if not estimate.starved}
    for first, rest in kinds:
        if first[0].name not in holding:
            yield chain((first,), rest)


def _is_plain(problem: Problem) -> bool:
    """Tell whether the shares are whole adapters that differ in rank and rate only, on GPUs of one kind."""
    rules = problem.constraints
    constrained = rules.groups or rules.max_replicas or rules.pinned_pool
    whole = len(problem.shares) == len(problem.traffic)
    return whole and not constrained and len(problem.pools) == 1 and problem.has_common_lengths


def _hottest_by_rank(shares: Sequence[AdapterShare]) -> list[AdapterShare]:
    hottest: dict[int, AdapterShare] = {}
    for share in shares:
        other = hottest.get(share.rank)
        if other is None or share.rate_rps > other.rate_rps:
            hottest[share.rank] = share
    return list(hottest.values())


def _hold_alone(problem: Problem, estimator: Estimator, shares: Sequence[AdapterShare]) -> bool:
    """Tell whether each share holds on an instance of its own; one batch of estimates."""
    alone = [Assignment((share,), problem.fixed_a_max or 1) for share in shares]
    if not all(map(problem.fits_in_memory, alone)):
        return False
    return not any(estimate.starved for estimate in estimate_all(estimator, alone))


def _kinds(problem: Problem) -> Iterator[Iterable[AdapterSet]]:
    """Yield adapter sets by kind, hottest first.

    A kind is single adapters that differ in name and rate only, or any other set.
    """
    constraints, adapters = problem.constraints, problem.traffic
    leader, pins = constraints.leader, constraints.pinned_pool
    apart = constraints.groups | constraints.max_replicas.keys()
    if problem.workload.trace is not None:
        apart = frozenset(leader.values())
    alone: defaultdict[object, list[Adapter]] = defaultdict(list)
    together: defaultdict[str, list[Adapter]] = defaultdict(list)
    if apart or pins:
        for adapter in adapters:
            first = leader[adapter.name]
            if first in apart:
                together[first].append(adapter)
            else:
                alone[_KIND(adapter), pins.get(first)].append(adapter)
    else:
        kind = _KIND if any(map(_PROMPT, adapters)) or any(map(_OUTPUT, adapters)) else _RANK
        for adapter in adapters:
            alone[kind(adapter)].append(adapter)
    yield from ([tuple(members)] for members in together.values())
    yield from map(_hottest_first, alone.values())


def _hottest_first(same: Sequence[Adapter]) -> Iterator[AdapterSet]:
    """Yield single adapters by falling rate; they are sorted only if the first one is not enough."""
    hottest = max(same, key=_RATE)
    yield (hottest,)
    for adapter in sorted(same, key=_RATE, reverse=True):
        if adapter is not hottest:
            yield (adapter,)


def _shares_needed(problem: Problem, estimator: Estimator, members: AdapterSet) -> int:
    """Return the fewest equal shares of an adapter set that hold on an instance of an allowed pool.

    If none do with the default knobs, those that hold with others count.
    """
    leader = members[0].name
    pin = problem.constraints.pinned_pool.get(leader)
    pools = [number for number, pool in enumerate(problem.pools) if pin is None or pool.name == pin]
    available = sum(problem.pools[number].instances for number in pools)
    most = min(available, problem.constraints.max_replicas.get(leader, available))
    shares = tuple(map(AdapterShare.of, members))
    numbers = sorted({len(shares), max(1, len(shares) // 2), 1}, reverse=True)
    settings = [
        (pool, slots)
        for pool in pools
        for slots in ((problem.fixed_a_max,) if problem.fixed_a_max is not None else numbers)
        if problem.fits_in_memory(Assignment(shares, slots, pool=pool))
    ]
    if not settings:
        rank = max(adapter.rank for adapter in members)
        raise infeasible(
            "memory",
            f"slots of rank {rank} for {_describe(members)} leave no room for one request of max_model_len "
            f"{problem.engine.max_model_len} on {_gpu_names(problem, pools)}",
        )

    def holds(count: int, opens_knobs: bool = False) -> bool:
        divided = tuple(split_evenly(share, count)[0] for share in shares)
        instances = (Assignment(divided, slots, pool=pool) for pool, slots in settings)
        if opens_knobs:
            tuned = (tune_knobs(problem, each, estimator, until_it_holds=True) for each in instances)
            return any(not each.estimate.starved for each in tuned)
        return any(not estimator(each).starved for each in instances)

    if holds(1):
        return 1
    alone = replace(problem, workload=problem.workload.subset([adapter.name for adapter in members]))
    for count in range(max(2, lower_bound_instances(alone)), most + 1):
        if holds(count):
            return count
    if any(has_open_knobs(problem, pool) for pool in pools):
        for count in range(lower_bound_instances(alone), most + 1):
            if holds(count, opens_knobs=True):
                return count
    pool, slots = settings[0]
    lightest = Assignment(tuple(split_evenly(share, most)[0] for share in shares), slots, pool=pool)
    raise _load_error(problem, members, most, lightest)


def _describe(members: AdapterSet) -> str:
    others = f" (with {', '.join(a.name for a in members[1:])})" if len(members) > 1 else ""
    return f"{_kind(members[0])} {members[0].name}{others}"


def _kind(item: Adapter | AdapterShare) -> str:
    return "adapter" if item.rank else "base model"


def _gpu_names(problem: Problem, pools: Iterable[int]) -> str:
    return " or ".join(dict.fromkeys(problem.pools[pool].profile.gpu.name for pool in pools))


def _load_error(problem: Problem, members: AdapterSet, most: int, lightest: Assignment) -> InfeasibleError:
    """Return the error of an adapter set that fails in as many shares as it may have.

    `lightest` is an instance with one of these shares.
    """
    rate_rps = sum(adapter.rate_rps for adapter in members)
    return infeasible(
        "slo" if problem.bounds_latency else "starvation",
        f"{_describe(members)} at {rate_rps:g} req/s fails even when spread over {most} instance(s) of its "
        f"own with headroom {problem.workload.headroom:g}: {describe_failure(problem, lightest)}",
    )
