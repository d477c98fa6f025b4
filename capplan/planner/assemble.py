"""From a verified assignment to a plan: predictions, what binds, and where every number comes from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from statistics import fmean

from capplan.planner.binding import find_binding
from capplan.planner.bound import busy_gpus, lower_bound_gpus
from capplan.planner.parallel import in_parallel
from capplan.planner.problem import Assignment, Problem
from capplan.planner.verify import Verdict
from capplan.spec import (
    Binds,
    EngineArgs,
    Group,
    GroupVerification,
    Percentiles,
    Plan,
    PlanAdapter,
    PlanEngine,
    Predicted,
    Totals,
    Verification,
)
from capplan.twin import SimulationResult
from capplan.twin.result import bound_value
from capplan.twin.scenario import chosen_rules


def build_plan(
    problem: Problem,
    assignments: Sequence[Assignment],
    verdicts: Sequence[Verdict],
    *,
    seeds: Sequence[int],
    duration_s: float,
    verified: bool,
    notes: dict[str, object],
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
    verified
        False when the user wanted no verification: the predictions then rest on one seed.
    notes
        What the provenance should say of the solver.
    """
    workload, profile = problem.workload, problem.profile
    bindings = in_parallel(partial(find_binding, problem), assignments)
    answers = zip(assignments, verdicts, bindings, strict=True)
    groups = tuple(_group(problem, f"gpu-{i}", *answer) for i, answer in enumerate(answers))
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
        totals=Totals(gpus=len(groups) * profile.tp, lower_bound_gpus=lower_bound_gpus(problem) * profile.tp),
        provenance={
            "profile": profile.name,
            "profile_kind": profile.provenance.kind.value,
            "profile_source": profile.provenance.source,
            "lower_bound": f"tokens, KV reads and full batches alone keep {busy_gpus(problem):.3f} GPUs busy",
            "headroom": workload.headroom,
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


def _group(
    problem: Problem,
    name: str,
    assignment: Assignment,
    verdict: Verdict,
    binding: tuple[Binds | None, float | None],
) -> Group:
    profile, engine = problem.profile, problem.engine
    binds, load_over_capacity = binding
    shares: dict[str, float] = {}
    for part in assignment.parts:
        shares[part.name] = shares.get(part.name, 0.0) + part.share
    return Group(
        id=name,
        replicas=1,
        gpu=profile.gpu.name,
        tp=profile.tp,
        profile=profile.name,
        engine_args=EngineArgs(
            max_loras=assignment.a_max,
            max_lora_rank=problem.s_max(assignment.parts),
            max_cpu_loras=problem.workload.engine.max_cpu_loras,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            max_model_len=engine.max_model_len,
            enable_prefix_caching=chosen_rules(profile, None, None).prefix_caching,  # as run_twin has it
        ),
        adapters=tuple(
            PlanAdapter(
                name=a.name, rank=a.rank, rate_rps=a.rate_rps, path=a.path, share=min(1.0, shares[a.name])
            )
            for a in problem.workload.adapters
            if a.name in shares
        ),
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
    for statistic in ("mean", "p50", "p95", "p99"):
        over_seeds = [v for r in results if (v := bound_value(r, pattern.format(statistic))) == v]
        values[statistic] = fmean(over_seeds) if over_seeds else None
    return Percentiles(**values)


def _verification(name: str, verdict: Verdict) -> GroupVerification:
    late = [r.ttft_s_p99 for r in verdict.results if r.ttft_s_p99 == r.ttft_s_p99]
    return GroupVerification(
        id=name,
        ok=verdict.ok,
        served_fraction=min(r.served_fraction for r in verdict.results),
        throughput_tok_s=fmean(r.throughput_tok_s for r in verdict.results),
        ttft_p99_s=max(late, default=None),
        note="; ".join(verdict.broken),
    )


def _version() -> str:
    try:
        return version("capplan")
    except PackageNotFoundError:
        return "0.0.0+checkout"
