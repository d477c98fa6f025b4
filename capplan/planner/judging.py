"""One instance in the twin, and which service-level objectives it breaks."""

from __future__ import annotations

from dataclasses import dataclass

from capplan.planner.problem import Assignment, Problem
from capplan.spec import Slo
from capplan.twin import SimulationResult, simulate, simulate_detailed
from capplan.twin.result import bound_value
from capplan.twin.simulate import Settings


@dataclass(frozen=True)
class Judged:
    """What the twin says of one instance."""

    result: SimulationResult
    broken: tuple[str, ...]
    """The bounds that it breaks, each in words."""


def judge(
    problem: Problem, assignment: Assignment, seed: int, duration_s: float, scale: float = 1.0
) -> Judged:
    """Simulate one instance; a trace is replayed as a whole, whatever the duration.

    Parameters
    ----------
    problem, assignment
        What the instance serves, and how it is set.
    seed, duration_s
        Of the simulation.
    scale
        Multiplies every rate.

    Raises
    ------
    InfeasibleError
        When the instance would not start.
    """
    slo = problem.workload.slo
    workload = problem.subworkload(assignment.parts, scale)
    profile = problem.pools[assignment.pool].profile
    settings = twin_settings(problem, assignment, seed, duration_s)
    if slo.tpt_over_base is None:
        result = simulate(workload, profile, **settings)
        return Judged(result, broken_bounds(slo, result))
    detailed = simulate_detailed(workload, profile, **settings)
    result = detailed.result
    broken = broken_bounds(slo, result)
    good = next(kept for kept in detailed.slo if kept.bound == "tpt_over_base")
    if slo.attainment is not None and good.share < slo.attainment:
        words = f"attainment {good.share:.3f} < {slo.attainment:g} (TPT within {good.limit:.3g} ms)"
        broken = (*broken, words)
    return Judged(result, broken)


def twin_settings(problem: Problem, assignment: Assignment, seed: int, duration_s: float) -> Settings:
    """Return how the twin is to run one instance; a trace as long as it is."""
    engine, trace = problem.engine, problem.workload.trace
    return {
        "a_max": assignment.a_max,
        "s_max": problem.s_max(assignment.parts),
        "duration_s": duration_s if trace is None else trace.duration_s,
        "seed": seed,
        "max_num_seqs": problem.max_num_seqs(assignment),
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": engine.max_model_len,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "max_cpu_loras": problem.workload.engine.max_cpu_loras,
    }


def broken_bounds(slo: Slo, result: SimulationResult) -> tuple[str, ...]:
    """Return the bounds that a simulated GPU breaks, each in words; none when it keeps all of them.

    A latency that no request had (NaN) breaks no bound: where they waited in vain, `served_fraction` tells.
    """
    broken = []
    if result.served_fraction < slo.served_fraction:
        broken.append(f"served_fraction {result.served_fraction:.3f} < {slo.served_fraction:g}")
    for name, bound in slo.latency_bounds().items():
        value = bound_value(result, name)
        if value > bound:
            broken.append(f"{name} {value:.3g} > {bound:g}")
    return tuple(broken)
