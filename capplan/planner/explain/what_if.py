"""Plans with one instance fewer and one more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Final

from capplan.errors import InfeasibleError
from capplan.planner.api import plan as make_plan
from capplan.planner.estimate import SEARCH_DURATION_S, TwinEstimator
from capplan.planner.evaluate import Evaluation, evaluate
from capplan.planner.explain.rebuild import RebuiltPlan
from capplan.planner.parallel import parallel_map
from capplan.planner.problem import Assignment, GpuPool, Problem
from capplan.planner.search.data import build_search_data
from capplan.planner.search.placement import balanced
from capplan.planner.slots import rank_slots
from capplan.spec import Objective, Plan, Workload

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PlanOutcome:
    """What a plan does, over all its GPUs.

    Attributes
    ----------
    gpus, usd_per_hour
        Its size and price.
    ttft_p99_s, tpot_mean_ms
        Of the instance where they are longest; None where no request was served.
    throughput_tok_s
        Input and output tokens per second, all instances together.
    holds_until
        Multiple of the planned load up to which every instance holds; None without any load.
    fails
        Whether an instance was found to fail beyond; otherwise nothing larger was tried.
    """

    gpus: int
    usd_per_hour: float | None
    ttft_p99_s: float | None
    tpot_mean_ms: float | None
    throughput_tok_s: float
    holds_until: float | None
    fails: bool


@dataclass(frozen=True)
class WhatIf:
    """One instance fewer, or one more.

    Attributes
    ----------
    change
        Which instance, in words.
    gpus
        GPUs there would be.
    outcome
        Of the plan that the solver `capplan` makes of them; None when there is none.
    holds
        Whether the twin confirms that plan.
    words
        What follows, in a sentence; where there is no plan, why, and what breaks where the load is spread
        evenly all the same.
    """

    change: str
    gpus: int
    outcome: PlanOutcome | None
    holds: bool
    words: str


def plan_outcome(plan: Plan) -> PlanOutcome:
    """Return what a plan says of itself."""
    predicted = [group.predicted for group in plan.groups]
    loads = [each.load_over_capacity for each in predicted if each.load_over_capacity]
    return PlanOutcome(
        gpus=plan.totals.gpus,
        usd_per_hour=plan.totals.usd_per_hour,
        ttft_p99_s=max((p.ttft_s.p99 for p in predicted if p.ttft_s.p99 is not None), default=None),
        tpot_mean_ms=max((p.tpot_ms.mean for p in predicted if p.tpot_ms.mean is not None), default=None),
        throughput_tok_s=sum(group.replicas * group.predicted.throughput_tok_s for group in plan.groups),
        holds_until=1.0 / max(loads) if loads else None,
        fails=any(group.binds is not None for group in plan.groups),
    )


def what_if(rebuilt: RebuiltPlan, seed: int, progress: Progress) -> tuple[WhatIf, ...]:
    """Return what one instance fewer and one more would do; nothing fewer than one instance.

    Parameters
    ----------
    rebuilt
        The plan as the planner saw it.
    seed
        Of the search; verification is on one fresh seed.
    progress
        Called with (stage, done, total).
    """
    fewer = one_fewer(rebuilt.problem, rebuilt.pools)
    answers = [] if fewer is None else [_plan_fewer(rebuilt, fewer, seed, progress)]
    return (*answers, _plan_more(one_more(rebuilt.problem, rebuilt.pools), seed, progress))


def _plan_fewer(rebuilt: RebuiltPlan, fleet: FleetChange, seed: int, progress: Progress) -> WhatIf:
    try:
        answer = _replan(fleet, fleet.problem.workload.objective, seed, progress)
    except InfeasibleError as error:
        spread = even_spread(rebuilt, fleet, seed)
        return _no_plan(fleet, f"{error}; {spread}" if spread else str(error))
    return _describe_plan(answer, fleet)


def _plan_more(fleet: FleetChange, seed: int, progress: Progress) -> WhatIf:
    try:
        # The fewest GPUs would leave it idle: what it is good for shows where latency counts.
        answer = _replan(fleet, Objective.MIN_LATENCY, seed, progress)
    except InfeasibleError as error:
        return _no_plan(fleet, str(error))
    return _describe_plan(answer, fleet, "placed for the shortest mean time to the last token")


def _replan(fleet: FleetChange, objective: Objective, seed: int, progress: Progress) -> Plan:
    def report(stage: str, done: int, total: int) -> None:
        progress(f"{fleet.change}: {stage}", done, total)

    wishes = fleet.workload.replace(objective=objective, previous_plan=None)
    only = None if wishes.pools else fleet.problem.profile
    gpus = None if wishes.pools else fleet.gpus
    return make_plan(wishes, gpus=gpus, profile=only, seed=seed, seeds=1, progress=report)


def _no_plan(fleet: FleetChange, words: str) -> WhatIf:
    return WhatIf(fleet.change, fleet.gpus, None, holds=False, words=words)


def _describe_plan(answer: Plan, fleet: FleetChange, aim: str = "") -> WhatIf:
    outcome = plan_outcome(answer)
    failed = [f"{check.id}: {check.note}" for check in answer.verification.groups if not check.ok]
    words = [f"fails, {failed[0]}" if failed else "holds", aim]
    if outcome.gpus < fleet.gpus:
        words.append(f"{outcome.gpus} of them suffice, more are of no use")
    told = "; ".join(word for word in words if word)
    return WhatIf(fleet.change, fleet.gpus, outcome, holds=answer.verification.ok, words=told)


@dataclass(frozen=True)
class FleetChange:
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


def one_fewer(problem: Problem, pools: Sequence[int]) -> FleetChange | None:
    """Return the fleet without an instance of the dearest pool; None when that would leave nothing."""
    if len(pools) == 1:
        return None
    gone = _extreme_pool(problem, pools, dearest=True)
    left = list(pools)
    left.remove(gone)
    return FleetChange(problem, tuple(left), f"one {_kind(problem.pools[gone])} fewer")


def one_more(problem: Problem, pools: Sequence[int]) -> FleetChange:
    """Return the fleet with another instance, of the cheapest pool."""
    added = _extreme_pool(problem, pools, dearest=False)
    return FleetChange(problem, tuple(sorted([*pools, added])), f"one {_kind(problem.pools[added])} more")


def _extreme_pool(problem: Problem, pools: Sequence[int], *, dearest: bool) -> int:
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


_MAX_SPREAD_INSTANCES: Final = 16
"""Beyond, it takes too many simulations for what it tells."""


def even_spread(rebuilt: RebuiltPlan, fleet: FleetChange, seed: int) -> str:
    """Return in words what breaks with the load of a plan on a fleet; empty where it cannot be spread.

    Every instance gets the number of slots that the twin likes best, of those near the plan's.
    """
    if len(fleet.pools) > _MAX_SPREAD_INSTANCES:
        return ""
    problem = replace(rebuilt.problem, shares=rebuilt.shares)
    near = median_low(each.assignment.a_max for each in rebuilt.groups)
    assignments = _spread_assignments(problem, fleet, near, seed)
    if not assignments:
        return ""
    return _describe_spread(
        parallel_map(lambda each: evaluate(problem, each, seed, SEARCH_DURATION_S), assignments)
    )


def _spread_assignments(problem: Problem, fleet: FleetChange, near: int, seed: int) -> list[Assignment]:
    """Return the instances of an even spread; none where an adapter or the slots find no place."""
    ground = build_search_data(problem)
    board = balanced(ground, fleet.pools)
    if board is None:
        return []
    twin = TwinEstimator(problem, seed)
    assignments = []
    for members, pool in zip(board.members, fleet.pools, strict=True):
        if not members:
            continue
        shares = ground.shares(frozenset(members))
        ranked = rank_slots(problem, shares, twin, pool, near=near)
        if not ranked:
            return []
        assignments.append(Assignment(shares, next(iter(ranked)), pool=pool))
    return assignments


def _describe_spread(evaluation: list[Evaluation]) -> str:
    failing = [each for each in evaluation if each.violations]
    if not failing:
        return "spread evenly, the planned load holds on one seed, but not over (1 - headroom)"
    worst = min(failing, key=lambda each: each.result.served_fraction)
    return (
        f"spread evenly, {len(failing)} of {len(evaluation)} break at the planned load, at worst "
        f"{' and '.join(worst.violations)}"
    )
