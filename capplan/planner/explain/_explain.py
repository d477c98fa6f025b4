"""`explain`: reasons for a plan, measured by the twin.

Beside the curves over engine settings these are: utilization and headroom of an instance, what each loading
policy and the queues are worth to it, and plans with one instance fewer and one more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Final

from capplan.errors import CapplanError, InfeasibleError
from capplan.planner._api import PlanOptions, plan_problem
from capplan.planner.explain._curve import (
    CurveRuns,
    SettingCurve,
    SlotCurve,
    explain_slots,
    knob_curves,
    slot_curve,
)
from capplan.planner.problem._bound import busy_gpus
from capplan.planner.problem._estimate import TwinEstimator
from capplan.planner.problem._evaluate import evaluate, known_value, kv_share
from capplan.planner.problem._execution import Progress, no_progress, parallel_map
from capplan.planner.problem._problem import Assignment, KnobSearch, Problem, distinct_adapters, infeasible
from capplan.planner.problem._settings import rank_slots
from capplan.planner.problem._setup import RebuiltGroup, RebuiltPlan, make_problem, rebuild, search_seed
from capplan.planner.search._placement import balanced, build_search_data
from capplan.planner.solvers import find_solver
from capplan.planner.verification._verify import fresh_seeds
from capplan.spec import Binds, Cache, Displayed, Group, Objective, Plan, Profile, Scheduler, Workload
from capplan.twin import SimulationResult
from capplan.twin.instance import bound_value

_OVERLOAD_STEP: Final = 1.0 / 32.0
"""Relative excess over the largest load that holds, at which a failing instance is simulated; twice the
resolution of that load."""


@dataclass(frozen=True)
class Headroom:
    """Headroom of an instance."""

    holds_until: float | None
    """Largest multiple of the planned load that holds; None without load."""
    fails_at: float | None
    """Multiple at which `beyond` of the uses was simulated; None without a bottleneck."""
    broken: tuple[str, ...]
    """Bounds that break there, as text."""
    uses: tuple[ResourceUse, ...]
    """Utilization of every resource and every bound."""
    words: str
    """Summary with the bottleneck and the resource in fullest use beside it."""


@dataclass(frozen=True)
class ResourceUse:
    """Utilization of a resource or a bound."""

    resource: str
    """``kv``, ``slots``, ``requests``, ``compute``, ``busy``, ``served_fraction``, or a latency bound."""
    name: str
    """Name for users."""
    now: float | None
    beyond: float | None
    """Share in use at the planned load, and where the instance fails; 1 is all, or the bound itself. None if
    unknown."""
    detail: str
    """Use at the planned load, in units."""
    limits: bool = True
    """Whether the instance is saturated when everything is in use."""


def find_headroom(
    problem: Problem,
    assignment: Assignment,
    binds: Binds | None,
    load_over_capacity: float | None,
    seed: int,
    bottleneck_seed: int,
) -> Headroom:
    """Return the headroom of an instance, from its bottleneck in the plan, which another seed gave."""
    now = evaluate(problem, assignment, seed).result
    holds_until = 1.0 / load_over_capacity if load_over_capacity else None
    if holds_until is None or binds is None:
        words = "no load at all, so nothing binds"
        if holds_until is not None:
            words = f"holds {holds_until:.0f} x the planned load, and more was not tried"
        return Headroom(holds_until, None, (), _uses(problem, assignment, now, None, None), words)
    fails_at = holds_until + _OVERLOAD_STEP * max(1.0, holds_until)
    beyond = evaluate(problem, assignment, bottleneck_seed, fails_at)
    uses = _uses(problem, assignment, now, beyond.result, fails_at)
    fault = f"it breaks {beyond.violations[0]}" if beyond.violations else f"what is full: {binds.note}"
    words = f"holds {holds_until:.2f} x the planned load; at {fails_at:.2f} x {fault}"
    others = [
        (use.beyond, use.name)
        for use in uses
        if use.limits and use.beyond is not None and use.beyond <= 1.0 and use.resource != binds.resource
    ]
    if others:
        share, name = max(others, key=lambda other: other[0])
        words += f"; fullest beside that: {name}, {100.0 * share:.0f} %"
    return Headroom(holds_until, fails_at, beyond.violations, uses, words)


def _uses(
    problem: Problem,
    assignment: Assignment,
    now: SimulationResult,
    beyond: SimulationResult | None,
    fails_at: float | None,
) -> tuple[ResourceUse, ...]:
    """Return the use of every resource and every bound, at the planned load and at `fails_at` times it."""
    slo, a_max, seqs = problem.workload.slo, assignment.a_max, problem.engine_limits(assignment).max_num_seqs
    runs = [now] if beyond is None else [now, beyond]
    uses: list[ResourceUse] = []

    def add(resource: str, name: str, shares: Iterable[float], detail: str, limits: bool = True) -> None:
        share, there = (*map(known_value, shares), None)[:2]
        uses.append(ResourceUse(resource, name, share, there, detail, limits))

    detail = f"{kv_share(problem, assignment, now) * now.kv_tokens:,.0f} of {now.kv_tokens:,} tokens"
    add("kv", "KV-cache memory", [kv_share(problem, assignment, r) for r in runs], detail)
    if a_max and problem.has_slots:
        scarce = a_max < distinct_adapters(assignment.shares)
        detail = f"{now.adapters_mean:.1f} of {a_max}{'' if scarce else ', one for each adapter'}"
        add("slots", "adapter slots", [r.adapters_mean / a_max for r in runs], detail, scarce)
    detail = f"{now.running_mean:.0f} of {seqs} (max_num_seqs), at most {now.running_max}"
    add("requests", "running requests", [r.running_mean / seqs for r in runs], detail)
    compute = _min_busy(problem, assignment)
    if compute > 0.0:
        factors = (1.0,) if fails_at is None else (1.0, fails_at)
        detail = "of the time, if all batches were full"
        add("compute", "compute, at least", [compute * factor for factor in factors], detail)
    detail = "no limit by itself: fuller batches do more in it"
    add("busy", "time in steps", [r.busy_fraction for r in runs], detail, limits=False)
    if slo.served_fraction < 1.0:
        allowed = 1.0 - slo.served_fraction
        detail = f"{100.0 * now.served_fraction:.1f} % served, {100.0 * slo.served_fraction:g} % asked for"
        shares = [(1.0 - r.served_fraction) / allowed for r in runs]
        add("served_fraction", "unserved tokens", shares, detail)
    for name, bound in slo.latency_limits().items():
        values = [bound_value(r, name) for r in runs]
        detail = "no request" if math.isnan(values[0]) else f"{values[0]:.3g} of {bound:g}"
        add(name, name, [value / bound for value in values], detail)
    return tuple(uses)


def _min_busy(problem: Problem, assignment: Assignment) -> float:
    """Return the least share of the time that the load takes in full batches; 0 if unknown."""
    workload = problem.subworkload(assignment.shares)
    slo = workload.slo.model_copy(update={"served_fraction": 1.0})
    alone = workload.model_copy(update={"headroom": 0.0, "slo": slo})
    pools = (problem.pools[assignment.pool],)
    return busy_gpus(replace(problem, workload=alone, pools=pools, knobs=KnobSearch.DEFAULT))


@dataclass(frozen=True)
class LoadingPoint:
    """One policy at the planned load."""

    loading: str
    ttft_mean_s: float
    tpt_mean_ms: float
    interruption_mean_share: float
    broken: tuple[str, ...]
    """Broken bounds."""


def loading_points(problem: Problem, assignment: Assignment, seed: int) -> tuple[LoadingPoint, ...]:
    """Return the policies that go with an instance's scheduler, its own first; none if it has no choice.

    Assistance is among them where the profile knows the CPU's cores. A policy with which the instance does
    not start, such as adapters that do not fit together, is left out.
    """
    pair = problem.workload.scheduling
    if pair is None or pair[0].policy == "slora":
        return ()
    scheduler, cache = pair
    names = [cache.loading, "asynchronous"]
    if not scheduler.chunked:
        names += ["on-demand"]
        if problem.pools[assignment.pool].profile.cpu_lora is not None:
            names += ["assisted"]
    caches = {name: _with_loading(cache, name) for name in (*names, "resident")}

    def simulated(own: Cache) -> LoadingPoint | None:
        changed = problem.workload.model_copy(update={"cache": own})
        try:
            found = evaluate(replace(problem, workload=changed), assignment, seed)
        except CapplanError:
            return None
        result = found.result
        means = (result.ttft_s_mean, result.tpt_ms_mean, result.interruption_share_mean)
        return None if any(map(math.isnan, means)) else LoadingPoint(own.loading, *means, found.violations)

    points = parallel_map(simulated, list(caches.values()))
    return tuple(point for point in points if point is not None)


def _with_loading(cache: Cache, loading: str) -> Cache:
    """Return the cache under another policy, without the keys that do not go with it."""
    kept = {name: getattr(cache, name) for name in cache.model_fields_set - {"loading", "cpu_workers"}}
    if loading in ("resident", "cached"):
        kept.pop("prefetch", None)
    if loading == cache.loading and cache.cpu_workers is not None:
        kept["cpu_workers"] = cache.cpu_workers
    return Cache(**kept, loading=loading)


_OVERLOAD: Final = 1.1
"""Load over capacity at which queues must decide who waits."""


@dataclass(frozen=True)
class SizeGain:
    """TTFT of the requests of one size class, with queues and in order of arrival, in seconds."""

    size: str
    planned_s: tuple[float, float]
    """99th percentiles at the planned load."""
    overloaded_s: tuple[float, float]
    """99th percentiles at `overload` times the planned load."""
    overload: float


def size_gains(
    problem: Problem, assignment: Assignment, load_over_capacity: float | None, seed: int
) -> tuple[SizeGain, ...]:
    """Return the gain of each size class; none without queues, or if an instance serves too few requests.

    The same requests are simulated with the same cache under the scheduler ``fifo``. Overload is a tenth more
    than the capacity, or than the planned load where the capacity is not known.
    """
    pair = problem.workload.scheduling
    if pair is None or not pair[0].has_queues or assignment.queues is None:
        return ()
    changes = {"scheduler": Scheduler(policy="fifo"), "queues": None, "cache": pair[1]}
    in_order = replace(problem, workload=problem.workload.model_copy(update=changes))
    kinds = ((problem, assignment), (in_order, replace(assignment, queues=None)))
    overload = _OVERLOAD / (load_over_capacity or 1.0)
    runs = [(*kind, scale) for scale in (1.0, overload) for kind in kinds]
    results = parallel_map(lambda run: evaluate(run[0], run[1], seed, run[2]).result, runs)
    pools = [result.pool for result in results if result.pool is not None]
    if len(pools) < len(runs) or len({len(pool.sizes) for pool in pools}) != 1:
        return ()
    return tuple(
        SizeGain(
            size=sizes[0].name,
            planned_s=(sizes[0].ttft_s.p99, sizes[1].ttft_s.p99),
            overloaded_s=(sizes[2].ttft_s.p99, sizes[3].ttft_s.p99),
            overload=overload,
        )
        for sizes in zip(*(pool.sizes for pool in pools), strict=True)
    )


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
        """The workload with these instances only; infeasible if an adapter is pinned to none of them."""
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
            instance = Assignment(data.shares(frozenset(members)), near, pool)
            ranked = rank_slots(problem, instance, twin, near)
            if not ranked:
                return ""
            assignments.append(replace(instance, a_max=next(iter(ranked))))
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


SHARED: Final = "no slots: adapters and KV share the memory"
"""Reason under a scheduler or a cache of the workload."""


@dataclass(frozen=True)
class GroupExplanation:
    """Explanation of groups with equal load and settings."""

    ids: tuple[str, ...]
    """Names of the groups."""
    curve: SlotCurve
    """Simulations with other numbers of slots."""
    why_a_max: str
    """Reason for the number of slots, in one sentence."""
    room: Headroom
    """Utilization and headroom."""
    knobs: tuple[SettingCurve, ...] = ()
    """Simulations with other values of each engine knob that the planner may choose."""
    has_slots: bool = True
    """Whether there are adapter slots; else the curve over them has the plan's point alone."""
    loading: tuple[LoadingPoint, ...] = ()
    """Loading policies, the plan's first; empty with slots, or where there is one."""
    queues: tuple[SizeGain, ...] = ()
    """What the queues give to each size class; empty without queues."""


@dataclass(frozen=True, repr=False)
class Explanation(Displayed):
    """Explanation of a plan."""

    outcome: PlanOutcome
    """Predicted outcome of the whole plan."""
    groups: tuple[GroupExplanation, ...]
    """Explanations of its groups, equal ones together."""
    what_if: tuple[WhatIf, ...]
    """Plans with one instance fewer (unless there is only one) and one more; empty if groups were
    selected."""

    def display_facts(self) -> Mapping[str, object]:
        """Return the size of the plan, and the reasons for the slots of its first groups."""
        return {
            "gpus": self.outcome.gpus,
            "groups": len(self.groups),
            "what_if": len(self.what_if),
            "a_max": "; ".join(group.why_a_max for group in self.groups[:3]),
        }


def explain(
    plan: Plan,
    workload: Workload,
    *,
    profile: Profile | None = None,
    groups: Sequence[Group] = (),
    source: str = "workload",
    progress: Progress | None = None,
) -> Explanation:
    """Return the reasons for a plan, measured by the twin.

    Parameters
    ----------
    plan, workload
        Plan, and its workload.
    profile
        Profile of the plan, if it is neither a shipped one nor the workload's.
    groups
        Groups to explain, without other numbers of GPUs; empty: the whole plan.
    source
        Name of the workload in errors.
    progress
        Called with (stage, done, total).

    Raises
    ------
    InputError
        If the workload or the profile is not the plan's.
    InfeasibleError
        If an instance of the plan does not start, since the plan was edited.
    """
    rebuilt = rebuild(plan, workload, profile, source)
    report = progress or no_progress
    selected = {group.id for group in groups or plan.groups}
    chosen = [each for each in rebuilt.groups if each.group.id in selected]
    explained = _explain_groups(plan, chosen, report)
    others = () if groups else what_if(rebuilt, search_seed(plan), report)
    return Explanation(plan_outcome(plan), explained, others)


def _explain_groups(
    plan: Plan, groups: Sequence[RebuiltGroup], report: Progress
) -> tuple[GroupExplanation, ...]:
    alike: dict[object, list[RebuiltGroup]] = {}
    for each in groups:
        alike.setdefault(each.kind, []).append(each)
    firsts = [same[0] for same in alike.values()]
    seed = search_seed(plan)
    fresh = plan.verification.seeds[0] if plan.verification.seeds else fresh_seeds(seed, 1)[0]

    def headroom(each: RebuiltGroup) -> Headroom:
        load = each.group.predicted.load_over_capacity
        return find_headroom(each.problem, each.assignment, each.group.binds, load, fresh, seed)

    rooms = parallel_map(headroom, firsts, lambda done: report("what is in use", done, len(firsts)))
    runs = [CurveRuns(each.problem, each.assignment, seed) for each in firsts]
    slot_sizes = [len(each.slot_values()[0]) for each in runs]
    knob_sizes = [len(each.knob_values()) for each in runs]

    def simulated(stage: str, sizes: Sequence[int], number: int) -> Callable[[int], None]:
        return lambda done: report(stage, sum(sizes[:number]) + done, sum(sizes))

    explained = []
    for number, (same, room) in enumerate(zip(alike.values(), rooms, strict=True)):
        curve = slot_curve(runs[number], simulated("adapter slots", slot_sizes, number))
        knobs = knob_curves(runs[number], simulated("engine knobs", knob_sizes, number))
        solver = str(plan.provenance.get("solver", "its solver"))
        problem = same[0].problem
        fixed = problem.fixed_a_max is not None
        why = explain_slots(curve, solver, fixed=fixed) if problem.has_slots else SHARED
        names = tuple(each.group.id for each in same)
        loading = loading_points(problem.pessimistic, same[0].assignment, seed)
        load = same[0].group.predicted.load_over_capacity
        gains = size_gains(problem.pessimistic, same[0].assignment, load, seed)
        explained.append(GroupExplanation(names, curve, why, room, knobs, problem.has_slots, loading, gains))
    return tuple(explained)
