"""Plan documents: predictions, bottlenecks and provenance of verified assignments.

Intervals of predictions: spread over seeds, and over profiles drawn from the uncertainty of the fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Final

import numpy as np
from pydantic import JsonValue
from scipy.special import ndtri, stdtrit

from capplan.planner.problem._bound import lower_bound, lower_bound_gpus
from capplan.planner.problem._evaluate import Bottleneck, find_bottlenecks, known_values
from capplan.planner.problem._execution import NEVER, Deadline
from capplan.planner.problem._previous import (
    PreviousInstance,
    moved_adapters,
    moved_bytes,
    name_groups,
    previous_instances,
)
from capplan.planner.problem._problem import Assignment, GpuPool, Problem
from capplan.planner.verification._verify import InstanceVerification, PlanVerdict, RepairResult, Verifier
from capplan.spec import (
    MEAN_LENGTHS,
    Group,
    GroupVerification,
    Move,
    Percentiles,
    Plan,
    PlanAdapter,
    PlanBase,
    PlanEngine,
    Predicted,
    Profile,
    SchedulingPrediction,
    SizePrediction,
    Slo,
    Totals,
    Trace,
    Verification,
    Workload,
)
from capplan.twin import SimulationResult
from capplan.twin.instance import Extrapolation, bound_value, extrapolations, merged, values_of
from capplan.version import installed_version

LEVEL: Final = 0.9
"""Probability that one further hour lies within the interval."""


def least_share_of_seeds(count: int) -> float:
    """Return the least share of seeds that hold, with probability `LEVEL`, after `count` that all held."""
    return float((1.0 - LEVEL) ** (1.0 / count))


def prediction_interval(values: Sequence[float], drawn: Sequence[float] = ()) -> tuple[float, float] | None:
    """Return the interval of a metric of one further run; None for one seed, which shows no spread.

    With mean m and standard deviation s of n seeds, and deviations d of drawn profiles from the first seed
    with the fitted profile::

        low  = m - sqrt((t s sqrt(1 + 1/n))^2 + (z r_below)^2)
        high = m + sqrt((t s sqrt(1 + 1/n))^2 + (z r_above)^2)

    t and z are the two-sided `LEVEL` quantiles of Student's distribution with n - 1 degrees and of the normal
    distribution. ``r_below = sqrt(2 mean(min(d, 0)^2))`` and ``r_above`` alike: half of the draws are slower
    profiles, so a metric that only falls has an interval to one side.

    `values` are by seed, `drawn` by profile on the first seed; empty: without uncertainty of the profile.
    """
    count = len(values)
    if count < 2:
        return None
    mean, upper = fmean(values), (1.0 + LEVEL) / 2.0
    seeds = float(stdtrit(count - 1, upper)) * stdev(values) * math.sqrt(1.0 + 1.0 / count)
    deviations = [each - values[0] for each in drawn]
    below, above = (
        float(ndtri(upper)) * math.sqrt(2.0 * fmean(max(0.0, sign * d) ** 2 for d in deviations or (0.0,)))
        for sign in (-1.0, 1.0)
    )
    return max(0.0, mean - math.hypot(seeds, below)), mean + math.hypot(seeds, above)


_SHARE_DIGITS: Final = 12
"""Digits of a share that was added up from light ones."""


def build_plan(
    verifier: Verifier,
    answer: RepairResult,
    *,
    verified: bool,
    previous: Plan | None,
    notes: Mapping[str, JsonValue],
    deadline: Deadline = NEVER,
) -> Plan:
    """Return the plan document; groups of the previous plan keep their names.

    Unless `verified`, the plan is marked unverified, with predictions of one seed. `notes` are added to the
    provenance. Bottlenecks that are not known at the deadline are left out.
    """
    problem, assignments, verifications = verifier.problem, answer.assignments, answer.verifications
    workload = problem.workload
    old = () if previous is None else previous_instances(previous)
    names, moves = name_groups(problem, assignments, old)
    planned = verifier.as_served(assignments)
    bottlenecks = _bottlenecks(verifier, planned, verifications, verified, deadline)
    columns = zip(names, planned, verifications, bottlenecks, strict=True)
    bound = lower_bound(problem)
    price = f" and cost {bound.usd_per_hour:.3f} USD per hour" if bound.usd_per_hour else ""
    used = _used_pools(problem, assignments)
    engine = _engine(used[0].profile)
    groups = tuple(_group(problem, engine, *row) for row in columns)
    plan = Plan(
        created_by=f"capplan {installed_version()}",
        base_model=workload.base_model,
        engine=engine,
        objective=workload.objective,
        slo=workload.slo,
        workload_digest=workload.digest(),
        groups=groups,
        totals=fleet_totals(problem, assignments),
        moves=moves,
        router=workload.router,
        router_options=workload.router_options,
        rebalance=workload.rebalance,
        provenance={
            **_profiles(used),
            "lower_bound": f"tokens, KV reads and full batches alone keep {bound.gpus:.3f} GPUs busy{price}",
            "headroom": workload.headroom,
            "extrapolations": _extrapolations(problem, names, planned, verifications),
            **_trace_notes(workload.trace),
            **_mean_lengths(workload),
            **move_sizes(problem, moves, old),
            **({} if problem.gpus_per_link == 1 else {"gpus_per_link": problem.gpus_per_link}),
            **notes,
        },
        verification=_verification(verifier, names, verifications, verified),
    )
    if plan.verification.ok and len(problem.pools) == 1 and plan.totals.gpus < plan.totals.lower_bound_gpus:
        raise AssertionError(
            f"{plan.totals.gpus} GPUs are verified below the lower bound of {plan.totals.lower_bound_gpus}"
        )
    return plan.with_digest() if verified else plan


def _bottlenecks(
    verifier: Verifier,
    planned: Sequence[Assignment],
    verifications: Sequence[InstanceVerification],
    verified: bool,
    deadline: Deadline,
) -> list[Bottleneck]:
    """Return the bottlenecks in the worst window; a verified plan is known to hold with its headroom."""
    problem = replace(verifier.problem_of(verifications[0]), deadline=deadline)
    ok = verified and all(each.ok for each in verifications)
    holds = problem.load_with_headroom if ok else 0.0
    together = problem.workload.stores_everywhere and len(planned) > 1
    seed = verifier.seeds[0] if together else verifier.with_headroom.seed
    return find_bottlenecks(problem, planned, seed, holds)


def _verification(
    verifier: Verifier,
    names: Sequence[str],
    verifications: Sequence[InstanceVerification],
    verified: bool,
) -> Verification:
    problem, first = verifier.problem, verifications[0]
    verdict = PlanVerdict("undecided", "planned without verification")
    if verified:
        verdict = verifier.verdict(verifications)
    ok = verdict.verdict == "verified"
    return Verification(
        ok=ok,
        verdict=verdict.verdict,
        reason=verdict.reason,
        deciding_duration_s=verdict.deciding_s,
        window_start_s=None if problem.workload.trace is None else problem.windows[first.window][0],
        seeds=first.seeds if verified else (),
        least_share_of_seeds=least_share_of_seeds(len(first.seeds)) if ok else None,
        duration_s=verifier.problem_of(first).duration_s if verified else 0.0,
        min_served_fraction=min(r.served_fraction for each in verifications for r in each.results),
        groups=tuple(map(_group_verification, names, verifications)) if verified else (),
        drawn_profiles=len(first.drawn),
    )


def _trace_notes(trace: Trace | None) -> dict[str, JsonValue]:
    """Return the notes of a trace, and its speed if it is replayed at another rate than recorded."""
    if trace is None:
        return {}
    notes: dict[str, JsonValue] = {"trace_notes": list(trace.notes)} if trace.notes else {}
    return notes if trace.speed == 1.0 else {**notes, "trace_speed": trace.speed}


def _mean_lengths(workload: Workload) -> dict[str, JsonValue]:
    """Return the mean lengths of requests, by which routers are fitted."""
    traffic = list(workload.traffic.values())
    rates = [each.rate_rps for each in traffic]
    weights = rates if any(rates) else [1.0] * len(traffic)
    means = np.average(
        [[part.mean_tokens for part in workload.lengths_of(each)] for each in traffic], 0, weights
    )
    return dict(zip(MEAN_LENGTHS, means.round(6).tolist(), strict=True))


def move_sizes(
    problem: Problem, moves: Sequence[Move], old: Sequence[PreviousInstance]
) -> dict[str, JsonValue]:
    """Return the provenance of the moves; empty without a plan in force."""
    if not old:
        return {}
    return {"moved_adapters": moved_adapters(moves), "moved_bytes": moved_bytes(problem, moves, old)}


def fleet_totals(problem: Problem, assignments: Sequence[Assignment]) -> Totals:
    """Return GPUs, their lower bound and price."""
    used = [problem.pools[assignment.pool] for assignment in assignments]
    prices = [pool.usd_per_hour for pool in used]
    known = [price for price in prices if price is not None]
    return Totals(
        gpus=sum(pool.profile.tp for pool in used),
        lower_bound_gpus=lower_bound_gpus(problem),
        usd_per_hour=sum(known) if len(known) == len(prices) else None,
    )


def _extrapolations(
    problem: Problem,
    names: Sequence[str],
    assignments: Sequence[Assignment],
    verifications: Sequence[InstanceVerification],
) -> list[JsonValue]:
    """Return the extrapolations of all groups; equal ones of several groups are one record."""
    found: list[tuple[str, Extrapolation]] = []
    for name, assignment, verification in zip(names, assignments, verifications, strict=True):
        profile = problem.pools[assignment.pool].profile
        traffic, args = problem.subworkload(assignment.shares), problem.engine_args(assignment)
        values = values_of(traffic, args, profile.tp, verification.results)
        found += [(name, each) for each in extrapolations(profile, values)]
    return [each.document() for each in merged(found)]


def _used_pools(problem: Problem, assignments: Sequence[Assignment]) -> tuple[GpuPool, ...]:
    """Return the pools with an instance; all of them if there is none."""
    numbers = {assignment.pool for assignment in assignments} or range(len(problem.pools))
    return tuple(problem.pools[number] for number in sorted(numbers))


def _profiles(pools: Sequence[GpuPool]) -> dict[str, JsonValue]:
    """Return the provenance of the profile, or of the profile of every pool."""
    sources: list[dict[str, JsonValue]] = [
        {
            "profile": pool.profile.name,
            "profile_kind": pool.profile.provenance.kind.value,
            "profile_source": pool.profile.provenance.source,
        }
        for pool in pools
    ]
    if pools[0].name is None:
        return sources[0]
    return {"pools": {str(pool.name): source for pool, source in zip(pools, sources, strict=True)}}


def _engine(profile: Profile) -> PlanEngine:
    engine = profile.engine
    return PlanEngine(
        name=engine.name,
        version=engine.version,
        rules=engine.rules,
        target_modules=engine.target_modules,
        fully_sharded_loras=engine.fully_sharded_loras,
        quantization=engine.quantization,
        kv_cache_dtype="fp8" if profile.model.kv_dtype_bytes == 1 else None,
    )


def _group(
    problem: Problem,
    common: PlanEngine,
    name: str,
    assignment: Assignment,
    verification: InstanceVerification,
    bottleneck: Bottleneck,
) -> Group:
    pool = problem.pools[assignment.pool]
    profile = pool.profile
    engine = _engine(profile)
    binds, load_over_capacity = bottleneck
    stored = problem.stored(assignment)
    scheduler, cache = problem.workload.scheduling or (None, None)
    if scheduler is not None:
        scheduler = scheduler.with_absolute_paths()
    caching = problem.caches_prefixes(assignment.pool)  # as simulated by the twin
    return Group(
        id=name,
        replicas=1,
        pool=pool.name,
        gpu=profile.gpu.name,
        tp=profile.tp,
        profile=profile.name,
        engine=None if engine == common else engine,
        engine_args=problem.engine_args(assignment).replace(enable_prefix_caching=caching),
        adapters=tuple(
            PlanAdapter(
                name=a.name,
                rank=a.rank,
                rate_rps=a.rate_rps,
                path=a.path,
                target_modules=a.target_modules,
                share=stored[a.name],
            )
            for a in problem.workload.adapters
            if a.name in stored
        ),
        base=_base(problem, stored),
        scheduler=scheduler,
        queues=assignment.queues,
        cache=cache,
        predicted=_predicted(verification, load_over_capacity, problem.workload.slo),
        binds=binds,
    )


def _base(problem: Problem, fractions: Mapping[str, float]) -> PlanBase | None:
    """Return the traffic of the base model on an instance; None if it gets none."""
    base, share = problem.workload.base, fractions.get(problem.workload.base_model)
    if base is None or share is None:
        return None
    return PlanBase(rate_rps=base.rate_rps, share=round(share, _SHARE_DIGITS))


def _predicted(verification: InstanceVerification, load_over_capacity: float | None, slo: Slo) -> Predicted:
    """Return means over seeds, with intervals over seeds and drawn profiles."""
    results, drawn = verification.results, verification.drawn
    throughput = [r.throughput_tok_s for r in results]
    low_tok_s, high_tok_s = (
        prediction_interval(throughput, [r.throughput_tok_s for r in drawn]) or (None,) * 2
    )
    bounded = {name: known_values(bound_value(r, name) for r in results) for name in slo.latency_bounds()}
    return Predicted(
        throughput_tok_s=fmean(throughput),
        low_tok_s=low_tok_s,
        high_tok_s=high_tok_s,
        intervals=_latency_intervals(results, drawn),
        ttft_s=_percentiles(results, "ttft_{}_s"),
        tpot_ms=_percentiles(results, "tpot_{}_ms"),
        bounded={name: fmean(values) for name, values in bounded.items() if values},
        served_fraction=fmean(r.served_fraction for r in results),
        kv_tokens=results[0].kv_tokens,
        waiting_max=max(r.waiting_max for r in results),
        load_over_capacity=load_over_capacity,
        source=f"twin, {len(results)} seed(s) of {results[0].duration_s:g} s",
        scheduling=_scheduling(results),
    )


def _scheduling(results: Sequence[SimulationResult]) -> SchedulingPrediction | None:
    """Return means over seeds of the metrics of scheduler and cache; size classes of the first seed."""
    pools = [result.pool for result in results if result.pool is not None]
    if not pools:
        return None
    names = [size.name for size in pools[0].sizes]
    by_name = {name: [s for pool in pools for s in pool.sizes if s.name == name] for name in names}
    return SchedulingPrediction(
        hit_rate=_mean(pool.hit_rate for pool in pools),
        load_wait_ms=_mean(pool.load_wait_ms.mean for pool in pools),
        sizes=tuple(
            SizePrediction(
                name=name,
                ttft_p99_s=_mean(size.ttft_s.p99 for size in sizes),
                queue_share=_mean(size.queue_share for size in sizes),
                queue_mean_s=_mean(size.queue_s.mean for size in sizes),
                interruption_mean_count=_mean(size.interruption_count.mean for size in sizes),
                interruption_mean_share=_mean(size.interruption_share.mean for size in sizes),
            )
            for name, sizes in by_name.items()
        ),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None if there are none."""
    known = known_values(value for value in values if value is not None)
    return fmean(known) if known else None


def _latency_intervals(
    results: Sequence[SimulationResult], drawn: Sequence[SimulationResult]
) -> dict[str, tuple[float, float]]:
    """Return the intervals of TTFT and TPOT that are known in every simulation."""
    found = {}
    for metric, unit in (("ttft", "s"), ("tpot", "ms")):
        for statistic in Percentiles.model_fields:
            name = f"{metric}_{statistic}_{unit}"
            values, others = ([bound_value(r, name) for r in each] for each in (results, drawn))
            complete = len(known_values([*values, *others])) == len(values) + len(others)
            interval = prediction_interval(values, others) if complete else None
            if interval is not None:
                found[name] = interval
    return found


def _percentiles(results: Sequence[SimulationResult], pattern: str) -> Percentiles:
    names = {statistic: pattern.format(statistic) for statistic in Percentiles.model_fields}
    return Percentiles(
        **{statistic: _mean(bound_value(r, name) for r in results) for statistic, name in names.items()}
    )


def _group_verification(name: str, verification: InstanceVerification) -> GroupVerification:
    results = verification.results
    return GroupVerification(
        id=name,
        ok=verification.ok,
        served_fraction=min(r.served_fraction for r in results),
        throughput_tok_s=fmean(r.throughput_tok_s for r in results),
        ttft_p99_s=max(known_values(r.ttft_s_p99 for r in results), default=None),
        note="; ".join((*verification.violations, *filter(None, [verification.undecided]))),
    )
