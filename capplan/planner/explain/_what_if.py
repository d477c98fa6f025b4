"""Plans with one instance fewer and one more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Final

from capplan.errors import InfeasibleError
from capplan.planner._api import PlanOptions, plan_problem
from capplan.planner.problem._estimate import TwinEstimator
from capplan.planner.problem._evaluate import evaluate
from capplan.planner.problem._execution import Progress, parallel_map
from capplan.planner.problem._problem import Assignment, Problem, infeasible
from capplan.planner.problem._settings import rank_slots
from capplan.planner.problem._setup import RebuiltPlan, make_problem
from capplan.planner.search._placement import balanced, build_search_data
from capplan.planner.solvers import find_solver
from capplan.spec import Objective, Plan, Workload

_MAX_SPREAD_INSTANCES: Final = 16
"""Instances up to which an even spread of the load is simulated."""


@dataclass(frozen=True)
class PlanOutcome:
    """Predicted outcome of a plan over all its GPUs."""

    gpus: int
    usd_per_hour: float | None
    """Size and price."""
    ttft_p99_s: float | None
    tpot_mean_ms: float | None
    """Longest of all instances; None if no request was served."""
    throughput_tok_s: float
    """Input and output tokens per second of all instances."""
    holds_until: float | None
    """Multiple of the planned load up to which every instance holds; None without load."""
    fails: bool
    """Whether an instance fails beyond it; otherwise nothing larger was tried."""


@dataclass(frozen=True)
class WhatIf:
    """Plan with one instance fewer, or one more."""

    change: str
    """Change of the fleet, as text."""
    gpus: int
    """GPUs of the changed fleet."""
    outcome: PlanOutcome | None
    """Outcome of the plan by the solver `capplan`; None if there is none."""
    holds: bool
    """Whether the twin confirms that plan."""
    words: str
    """Summary; without a plan, the reason and the bounds that break with the load spread evenly."""


def plan_outcome(plan: Plan) -> PlanOutcome:
    """Return the predicted outcome of a plan."""
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
    """Return the plans with one instance fewer, if there are several, and one more.

    The larger fleet is planned for the shortest latency: for the fewest GPUs the new one would stay idle.
    Verification is on one fresh seed.
    """
    problem, pools = rebuilt.problem, rebuilt.pools
    fewer, more = one_fewer(problem, pools), one_more(problem, pools)
    answers = []
    if fewer is not None:
        try:
            plan = _replan(fewer, problem.workload.objective, seed, progress)
            answers.append(_summarize(plan, fewer))
        except InfeasibleError as error:
            words = "; ".join(filter(None, (str(error), _even_spread(rebuilt, fewer, seed))))
            answers.append(WhatIf(fewer.change, fewer.gpus, None, holds=False, words=words))
    try:
        plan = _replan(more, Objective.MIN_LATENCY, seed, progress)
        answers.append(_summarize(plan, more, "placed for the shortest mean time to the last token"))
    except InfeasibleError as error:
        answers.append(WhatIf(more.change, more.gpus, None, holds=False, words=str(error)))
    return tuple(answers)


def _replan(fleet: FleetChange, objective: Objective, seed: int, progress: Progress) -> Plan:
    def report(stage: str, done: int, total: int) -> None:
        progress(f"{fleet.change}: {stage}", done, total)

    workload = fleet.workload.replace(objective=objective, previous_plan=None, move_cost=None)
    profile = None if workload.pools else fleet.problem.profile
    gpus = None if workload.pools else fleet.gpus
    made, old = make_problem(workload, gpus, profile), fleet.problem
    problem = replace(made, knobs=old.knobs, robust=old.robust, gpus_per_link=old.gpus_per_link)
    options = PlanOptions(find_solver("capplan"), seed=seed, seeds=1, finds_shortage=False)
    return plan_problem(problem, options, progress=report)


def _summarize(plan: Plan, fleet: FleetChange, aim: str = "") -> WhatIf:
    outcome = plan_outcome(plan)
    failed = [f"{check.id}: {check.note}" for check in plan.verification.groups if not check.ok]
    unused = f"{outcome.gpus} of them suffice, more are of no use" if outcome.gpus < fleet.gpus else ""
    words = "; ".join(filter(None, (f"fails, {failed[0]}" if failed else "holds", aim, unused)))
    return WhatIf(fleet.change, fleet.gpus, outcome, holds=plan.verification.ok, words=words)


@dataclass(frozen=True)
class FleetChange:
    """Changed fleet."""

    problem: Problem
    """Problem with the pools."""
    pools: tuple[int, ...]
    """Index of the pool of every instance."""
    change: str
    """Difference to the plan, as text."""

    @property
    def gpus(self) -> int:
        """Number of GPUs of all instances."""
        return sum(self.problem.pools[pool].profile.tp for pool in self.pools)

    @property
    def workload(self) -> Workload:
        """The workload with these instances only.

        Raises
        ------
        InfeasibleError
            If an adapter is pinned to a pool without an instance.
        """
        workload = self.problem.workload
        if self.problem.pools[0].name is None:
            return workload
        left = Counter(self.problem.pools[pool].name for pool in self.pools)
        for adapter in workload.adapters:
            if adapter.pool is not None and not left[adapter.pool]:
                words = f"adapter {adapter.name} is pinned to pool {adapter.pool}, which has none left"
                raise infeasible("gpus", words)
        tp = {pool.name: pool.profile.tp for pool in self.problem.pools}
        pools = tuple(p.replace(count=left[p.name] * tp[p.name]) for p in workload.pools if left[p.name])
        return workload.replace(pools=pools)


def one_fewer(problem: Problem, pools: Sequence[int]) -> FleetChange | None:
    """Return the fleet without an instance of the most expensive pool in use; None if there is only one."""
    if len(pools) == 1:
        return None
    removed = _pool_by_price(problem, pools, set(pools), -1.0)
    left = list(pools)
    left.remove(removed)
    return FleetChange(problem, tuple(left), f"one {_instance_kind(problem, removed)} fewer")


def one_more(problem: Problem, pools: Sequence[int]) -> FleetChange:
    """Return the fleet with another instance of the cheapest pool."""
    added = _pool_by_price(problem, pools, range(len(problem.pools)), 1.0)
    change = f"one {_instance_kind(problem, added)} more"
    return FleetChange(problem, tuple(sorted([*pools, added])), change)


def _pool_by_price(problem: Problem, used: Sequence[int], candidates: Collection[int], sign: float) -> int:
    """Return the candidate with the least signed price; the most used pool if a price is missing."""
    prices = [pool.usd_per_hour for pool in problem.pools if pool.usd_per_hour is not None]
    if len(prices) < len(problem.pools):
        return min(Counter(used).items(), key=lambda each: (-each[1], each[0]))[0]
    return min(candidates, key=lambda pool: (sign * prices[pool], pool))


def _instance_kind(problem: Problem, pool: int) -> str:
    tp, name = problem.pools[pool].profile.tp, problem.pools[pool].name
    kind = "GPU" if tp == 1 else f"instance of {tp} GPUs"
    return kind if name is None else f"{kind} of pool {name}"


def _even_spread(rebuilt: RebuiltPlan, fleet: FleetChange, seed: int) -> str:
    """Return the bounds that break if a fleet shares the load evenly, as text; empty if it cannot.

    Every instance gets the best number of slots by the twin, of those near the plan's.
    """
    if len(fleet.pools) > _MAX_SPREAD_INSTANCES:
        return ""
    problem = replace(rebuilt.problem, shares=rebuilt.shares)
    data = build_search_data(problem)
    state = balanced(data, fleet.pools)
    near = median_low(each.assignment.a_max for each in rebuilt.groups)
    twin = TwinEstimator(problem, seed)
    assignments = []
    for members, pool in zip(state.members, fleet.pools, strict=True) if state else ():
        if members:
            shares = data.shares(frozenset(members))
            ranked = rank_slots(problem, shares, twin, pool, near=near)
            if not ranked:
                return ""
            assignments.append(Assignment(shares, next(iter(ranked)), pool=pool))
    if not assignments:
        return ""
    evaluations = parallel_map(lambda each: evaluate(problem, each, seed), assignments)
    failing = [each for each in evaluations if each.violations]
    if not failing:
        return "spread evenly, the planned load holds on one seed, but not over (1 - headroom)"
    worst = min(failing, key=lambda each: each.result.served_fraction)
    return (
        f"spread evenly, {len(failing)} of {len(evaluations)} break at the planned load, at worst "
        f"{' and '.join(worst.violations)}"
    )
