"""The instances of a plan, one fewer of them, and one more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from capplan.errors import InfeasibleError
from capplan.planner.problem import GpuPool, Problem
from capplan.spec import Workload


@dataclass(frozen=True)
class Fleet:
    """Instances to plan on.

    Attributes
    ----------
    problem
        With the pools that they come from.
    pools
        Number of the pool of every instance.
    change
        How it differs from the instances of the plan, in words.
    """

    problem: Problem
    pools: tuple[int, ...]
    change: str

    @property
    def gpus(self) -> int:
        """GPUs of all instances together."""
        return sum(self.problem.pools[pool].profile.tp for pool in self.pools)

    @property
    def workload(self) -> Workload:
        """The workload with these instances as all that there are.

        Raises
        ------
        InfeasibleError
            When an adapter is pinned to a pool that has none left.
        """
        workload = self.problem.workload
        if self.problem.pools[0].name is None:
            return workload
        left = Counter(self.problem.pools[pool].name for pool in self.pools)
        for adapter in workload.adapters:
            if adapter.pool is not None and not left[adapter.pool]:
                words = f"gpus: adapter {adapter.name} is pinned to pool {adapter.pool}, which has none left"
                raise InfeasibleError(words, reason="gpus")
        tp = {pool.name: pool.profile.tp for pool in self.problem.pools}
        pools = tuple(p.replace(count=left[p.name] * tp[p.name]) for p in workload.pools if left[p.name])
        return workload.replace(pools=pools)


def one_fewer(problem: Problem, pools: Sequence[int]) -> Fleet | None:
    """Return the fleet without an instance of the dearest pool; None when that would leave nothing."""
    if len(pools) == 1:
        return None
    gone = _extreme(problem, pools, dearest=True)
    left = list(pools)
    left.remove(gone)
    return Fleet(problem, tuple(left), f"one {_kind(problem.pools[gone])} fewer")


def one_more(problem: Problem, pools: Sequence[int]) -> Fleet:
    """Return the fleet with another instance, of the cheapest pool."""
    added = _extreme(problem, pools, dearest=False)
    return Fleet(problem, tuple(sorted([*pools, added])), f"one {_kind(problem.pools[added])} more")


def _extreme(problem: Problem, pools: Sequence[int], *, dearest: bool) -> int:
    """Return the dearest pool in use or the cheapest of all; without prices, the one that is used most."""
    prices = {number: pool.usd_per_hour for number, pool in enumerate(problem.pools)}
    known = {number: price for number, price in prices.items() if price is not None}
    if len(known) < len(prices):
        return min(Counter(pools).items(), key=lambda each: (-each[1], each[0]))[0]
    if dearest:
        return _first(known, set(pools), -1.0)
    return _first(known, known, 1.0)


def _first(prices: dict[int, float], among: Iterable[int], sign: float) -> int:
    return min(among, key=lambda number: (sign * prices[number], number))


def _kind(pool: GpuPool) -> str:
    """Return what an instance of a pool is called."""
    gpus = "GPU" if pool.profile.tp == 1 else f"instance of {pool.profile.tp} GPUs"
    return gpus if pool.name is None else f"{gpus} of pool {pool.name}"
