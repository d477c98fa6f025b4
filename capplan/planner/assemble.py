"""From a verified assignment to a plan: predictions, what binds, and where every number comes from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from statistics import fmean

from pydantic import JsonValue

from capplan.planner.bound import lower_bound, lower_bound_gpus
from capplan.planner.evaluate import find_bottleneck
from capplan.planner.parallel import parallel_map
from capplan.planner.previous import moved_bytes, name_groups
from capplan.planner.problem import Assignment, GpuPool, Problem
from capplan.planner.queues import group_queues
from capplan.planner.verify import InstanceVerification
from capplan.spec import (
    Binds,
    Group,
    GroupVerification,
    Percentiles,
    Plan,
    PlanAdapter,
    PlanEngine,
    Predicted,
    Queues,
    Totals,
    Verification,
)
from capplan.twin import SimulationResult
from capplan.twin.metrics import bound_value
from capplan.twin.scenario import chosen_rules


def build_plan(
    problem: Problem,
    assignments: Sequence[Assignment],
    verdicts: Sequence[InstanceVerification],
    *,
    seeds: Sequence[int],
    duration_s: float,
    verified: bool,
    previous: Plan | None = None,
    notes: dict[str, JsonValue],
) -> Plan:
    """Return the plan document.

    Parameters
    ----------
    problem
        What was asked.
    assignments, verdicts
        The answer and what the twin said of it, GPU by GPU.
    seeds, duration_s
        How the twin was asked.
    previous
        The plan in force, whose groups keep their names.
    verified
        False when the user wanted no verification: the predictions then rest on one seed.
    notes
        What the provenance should say of the solver.
    """
    workload, profile = problem.workload, problem.profile
    names, moves = name_groups(problem, assignments, previous)
    bindings = parallel_map(partial(find_bottleneck, problem), assignments)
    queues = parallel_map(
        lambda judged: group_queues(problem, judged[0], judged[1].results),
        list(zip(assignments, verdicts, strict=True)),
    )
    answers = zip(names, assignments, verdicts, bindings, queues, strict=True)
    groups = tuple(_group(problem, *answer) for answer in answers)
    return Plan(
        created_by=f"capplan {_version()}",
        base_model=workload.base_model,
        engine=PlanEngine(
            name=profile.engine.name, version=profile.engine.version, rules=profile.engine.rules
        ),
        objective=workload.objective,
        slo=workload.slo,
        workload_digest=workload.digest(),
        groups=groups,
        totals=_totals(problem, assignments),
        moves=moves,
        provenance={
            **_profiles(problem),
            "lower_bound": _bound_in_words(problem),
            "headroom": workload.headroom,
            **({} if previous is None else {"moved_bytes": moved_bytes(problem, moves)}),
            **notes,
        },
        verification=Verification(
            ok=verified and all(verdict.ok for verdict in verdicts),
            seeds=tuple(seeds) if verified else (),
            duration_s=duration_s if verified else 0.0,
            min_served_fraction=min(r.served_fraction for v in verdicts for r in v.results),
            groups=tuple(_verification(g.id, v) for g, v in zip(groups, verdicts, strict=True))
            if verified
            else (),
        ),
    )


def _totals(problem: Problem, assignments: Sequence[Assignment]) -> Totals:
    used = [problem.pools[assignment.pool] for assignment in assignments]
    prices = [pool.usd_per_hour for pool in used]
    known = [price for price in prices if price is not None]
    return Totals(
        gpus=sum(pool.profile.tp for pool in used),
        lower_bound_gpus=lower_bound_gpus(problem),
        usd_per_hour=sum(known) if len(known) == len(prices) else None,
    )


def _profiles(problem: Problem) -> dict[str, JsonValue]:
    """Return where the numbers come from; with several pools, pool by pool."""

    def told(pool: GpuPool) -> dict[str, JsonValue]:
        provenance = pool.profile.provenance
        return {
            "profile": pool.profile.name,
            "profile_kind": provenance.kind.value,
            "profile_source": provenance.source,
        }

    if problem.pools[0].name is None:
        return told(problem.pools[0])
    return {"pools": {str(pool.name): told(pool) for pool in problem.pools}}


def _bound_in_words(problem: Problem) -> str:
    bound = lower_bound(problem)
    price = f" and cost {bound.usd_per_hour:.3f} USD per hour" if bound.usd_per_hour else ""
    return f"tokens, KV reads and full batches alone keep {bound.gpus:.3f} GPUs busy{price}"


def _group(
    problem: Problem,
    name: str,
    assignment: Assignment,
    verdict: InstanceVerification,
    binding: tuple[Binds | None, float | None],
    queues: Queues | None,
) -> Group:
    pool = problem.pools[assignment.pool]
    profile = pool.profile
    binds, load_over_capacity = binding
    fractions = assignment.fractions
    return Group(
        id=name,
        replicas=1,
        pool=pool.name,
        gpu=profile.gpu.name,
        tp=profile.tp,
        profile=profile.name,
        engine_args=problem.engine_args(assignment).replace(
            # as the twin has it
            enable_prefix_caching=chosen_rules(profile, None, None).prefix_caching
        ),
        adapters=tuple(
            PlanAdapter(name=a.name, rank=a.rank, rate_rps=a.rate_rps, path=a.path, share=fractions[a.name])
            for a in problem.workload.adapters
            if a.name in fractions
        ),
        queues=queues,
        predicted=_predicted(verdict.results, load_over_capacity),
        binds=binds,
    )


def _predicted(results: Sequence[SimulationResult], load_over_capacity: float | None) -> Predicted:
    """Return means over seeds; the interval is the range over seeds."""
    throughput = [r.throughput_tok_s for r in results]
    return Predicted(
        throughput_tok_s=fmean(throughput),
        low_tok_s=min(throughput),
        high_tok_s=max(throughput),
        ttft_s=_percentiles(results, "ttft_{}_s"),
        tpot_ms=_percentiles(results, "tpot_{}_ms"),
        served_fraction=fmean(r.served_fraction for r in results),
        kv_tokens=results[0].kv_tokens,
        load_over_capacity=load_over_capacity,
        source=f"twin, {len(results)} seed(s) of {results[0].duration_s:g} s",
    )


def _percentiles(results: Sequence[SimulationResult], pattern: str) -> Percentiles:
    values = {}
    for statistic in Percentiles.model_fields:
        over_seeds = [v for r in results if (v := bound_value(r, pattern.format(statistic))) == v]
        values[statistic] = fmean(over_seeds) if over_seeds else None
    return Percentiles(**values)


def _verification(name: str, verdict: InstanceVerification) -> GroupVerification:
    late = [r.ttft_s_p99 for r in verdict.results if r.ttft_s_p99 == r.ttft_s_p99]
    return GroupVerification(
        id=name,
        ok=verdict.ok,
        served_fraction=min(r.served_fraction for r in verdict.results),
        throughput_tok_s=fmean(r.throughput_tok_s for r in verdict.results),
        ttft_p99_s=max(late, default=None),
        note="; ".join(verdict.violations),
    )


def _version() -> str:
    try:
        return version("capplan")
    except PackageNotFoundError:
        return "0.0.0+checkout"
