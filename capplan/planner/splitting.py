"""Splitting of hot adapters into equal shares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from capplan.errors import InfeasibleError
from capplan.planner.bound import lower_bound_instances
from capplan.planner.problem import AdapterShare, Assignment, Estimator, Problem
from capplan.spec import Adapter

AdapterSet = tuple[Adapter, ...]
"""Adapters that stay together; most are alone."""


def in_input_order(problem: Problem) -> list[AdapterShare]:
    """Return the shares as the workload lists their adapters, shares of one adapter by their number."""
    position = {adapter.name: at for at, adapter in enumerate(problem.workload.adapters)}
    return sorted(problem.shares, key=lambda share: (position[share.name], share.number))


def split_hot_adapters(problem: Problem, estimator: Estimator) -> tuple[AdapterShare, ...]:
    """Return the shares of the problem, those that starve an instance by themselves in the fewest shares.

    Adapters that stay together are split together. Among adapters that differ in nothing but their rates, the
    hottest are tried first, until one needs no split: a colder one needs none either.

    Raises
    ------
    InfeasibleError
        When adapters that stay together do not fit in memory, or when `max_replicas` or the instances allow
        too few shares.
    """
    split: dict[str, int] = {}
    for kind in _kinds(problem):
        for bundle in _hottest_first(kind):
            count = _shares_needed(problem, estimator, bundle)
            if count == 1:
                break
            split |= {adapter.name: count for adapter in bundle}
    if not split:
        return problem.shares
    return tuple(each for share in problem.shares for each in split_evenly(share, split.get(share.name, 1)))


def split_evenly(share: AdapterShare, count: int) -> tuple[AdapterShare, ...]:
    """Return an adapter as that many equal shares of its traffic."""
    if count == 1:
        return (share,)
    return tuple(
        AdapterShare(share.name, share.rank, share.rate_rps / count, share.fraction / count, number)
        for number in range(count)
    )


def require_memory(problem: Problem) -> None:
    """Check that an instance of some pool starts with nothing but the adapter of the largest rank.

    Raises
    ------
    InfeasibleError
        When none does: then no solver has an answer.
    """
    largest = min(problem.shares, key=lambda share: (-share.rank, share.name))
    slots = problem.fixed_a_max or 1
    pools = range(len(problem.pools))
    if not any(problem.fits_in_memory(Assignment((largest,), slots, pool=pool)) for pool in pools):
        kinds = " or ".join(dict.fromkeys(pool.profile.gpu.name for pool in problem.pools))
        raise InfeasibleError(
            f"memory: {slots} adapter slot(s) of rank {problem.s_max([largest])}, which adapter "
            f"{largest.name} needs, leave no room for one request of max_model_len "
            f"{problem.engine.max_model_len} on {kinds}",
            reason="memory",
        )


def _hottest_first(kind: list[AdapterSet]) -> Iterator[AdapterSet]:
    """Yield bundles by falling rate; mostly the first is all that anybody wants to see."""
    hottest = min(kind, key=_by_falling_rate)
    yield hottest
    yield from (bundle for bundle in sorted(kind, key=_by_falling_rate) if bundle is not hottest)


def _by_falling_rate(bundle: AdapterSet) -> tuple[float, str]:
    """Return what bundles are sorted by, hottest first."""
    first = bundle[0]
    rate_rps = first.rate_rps if len(bundle) == 1 else sum([adapter.rate_rps for adapter in bundle])
    return -rate_rps, first.name


def _kinds(problem: Problem) -> Iterable[list[AdapterSet]]:
    """Return bundles by kind: single adapters that differ in name and rate only; any other is a kind."""
    pools, replicas = problem.constraints.pinned_pool, problem.constraints.max_replicas
    traced = problem.workload.trace is not None
    kinds: dict[object, list[AdapterSet]] = {}
    for first, bundle in _adapter_sets(problem).items():
        adapter = bundle[0]
        own = first if traced or len(bundle) > 1 or first in replicas else None
        key = (adapter.rank, adapter.prompt_tokens, adapter.output_tokens, pools.get(first), own)
        known = kinds.get(key)
        if known is None:
            kinds[key] = [bundle]
        else:
            known.append(bundle)
    return kinds.values()


def _adapter_sets(problem: Problem) -> Mapping[str, AdapterSet]:
    """Return the adapters that stay together, by the first of them."""
    adapters, first_of = problem.workload.adapters, problem.constraints.leader
    if len(set(first_of.values())) == len(adapters):
        return {adapter.name: (adapter,) for adapter in adapters}
    bundles: dict[str, AdapterSet] = {}
    for adapter in adapters:
        first = first_of[adapter.name]
        bundles[first] = (*bundles.get(first, ()), adapter)
    return bundles


def _shares_needed(problem: Problem, estimator: Estimator, bundle: AdapterSet) -> int:
    """Return the fewest equal shares of a bundle that hold on an instance of a pool that it may use."""
    first = bundle[0].name
    pin = problem.constraints.pinned_pool.get(first)
    pools = [number for number, pool in enumerate(problem.pools) if pin is None or pool.name == pin]
    available = sum(problem.pools[number].instances for number in pools)
    most = min(available, problem.constraints.max_replicas.get(first, available))
    shares = [AdapterShare(a.name, a.rank, a.rate_rps) for a in bundle]
    settings = [
        (pool, slots)
        for pool in pools
        for slots in _slot_numbers(problem, len(shares))
        if problem.fits_in_memory(Assignment(tuple(shares), slots, pool=pool))
    ]
    if not settings:
        raise _memory_error(problem, bundle, pools)

    def holds(count: int) -> bool:
        first_shares = tuple(split_evenly(share, count)[0] for share in shares)
        return any(
            not estimator(Assignment(first_shares, slots, pool=pool)).starved for pool, slots in settings
        )

    if holds(1):
        return 1
    for count in range(max(2, _fewest_shares(problem, bundle)), most + 1):
        if holds(count):
            return count
    raise _load_error(problem, bundle, most)


def _slot_numbers(problem: Problem, adapters: int) -> Sequence[int]:
    """Return numbers of slots that are worth a try: one each, or else half of them."""
    if problem.fixed_a_max is not None:
        return (problem.fixed_a_max,)
    return sorted({adapters, max(1, adapters // 2), 1}, reverse=True)


def _fewest_shares(problem: Problem, bundle: AdapterSet) -> int:
    """Return a number of instances below which the bundle alone cannot be served."""
    workload = problem.workload.subset([adapter.name for adapter in bundle])
    return lower_bound_instances(replace(problem, workload=workload))


def _describe(bundle: AdapterSet) -> str:
    others = f" (with {', '.join(a.name for a in bundle[1:])})" if len(bundle) > 1 else ""
    return f"adapter {bundle[0].name}{others}"


def _memory_error(problem: Problem, bundle: AdapterSet, pools: Sequence[int]) -> InfeasibleError:
    kinds = " or ".join(dict.fromkeys(problem.pools[pool].profile.gpu.name for pool in pools))
    rank = max(adapter.rank for adapter in bundle)
    return InfeasibleError(
        f"memory: slots of rank {rank} for {_describe(bundle)} leave no room for one request of "
        f"max_model_len {problem.engine.max_model_len} on {kinds}",
        reason="memory",
    )


def _load_error(problem: Problem, bundle: AdapterSet, most: int) -> InfeasibleError:
    slo = problem.workload.slo
    bounds = slo.latency_bounds() or slo.tpt_over_base
    rate_rps = sum(adapter.rate_rps for adapter in bundle)
    return InfeasibleError(
        f"{'slo' if bounds else 'starvation'}: {_describe(bundle)} at {rate_rps:g} req/s breaks "
        f"{'a latency bound or ' if bounds else ''}served_fraction {slo.served_fraction:g} even when spread "
        f"over {most} instance(s) of its own with headroom {problem.workload.headroom:g}",
        reason="slo" if bounds else "starvation",
    )
