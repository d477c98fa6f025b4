"""One instance in the twin, and which service-level objectives it breaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from capplan.planner.problem import Assignment, Problem, replayed_s
from capplan.spec import Slo, Workload
from capplan.twin import SimulationResult, simulate, simulate_detailed
from capplan.twin.result import bound_value


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
    settings = twin_settings(problem, assignment, workload)
    length_s = replayed_s(workload, duration_s)
    if slo.tpt_over_base is None:
        result = simulate(workload, profile, seed=seed, duration_s=length_s, **settings)
        return Judged(result, broken_bounds(slo, result))
    detailed = simulate_detailed(workload, profile, seed=seed, duration_s=length_s, **settings)
    result = detailed.result
    broken = broken_bounds(slo, result)
    good = next(kept for kept in detailed.slo if kept.bound == "tpt_over_base")
    if slo.attainment is not None and good.share < slo.attainment:
        words = f"attainment {good.share:.3f} < {slo.attainment:g} (TPT within {good.limit:.3g} ms)"
        broken = (*broken, words)
    return Judged(result, broken)


class EngineSettings(TypedDict):
    """How an engine is set, by the names that the twin gives the settings."""

    a_max: int
    s_max: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    gpu_memory_utilization: float
    max_cpu_loras: int | None


def twin_settings(problem: Problem, assignment: Assignment, workload: Workload) -> EngineSettings:
    """Return how the twin is to set the engine of one instance that serves a workload."""
    engine = problem.engine
    return {
        "a_max": assignment.a_max,
        "s_max": problem.s_max(assignment.parts),
        "max_num_seqs": problem.max_num_seqs(assignment),
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": engine.max_model_len,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "max_cpu_loras": workload.engine.max_cpu_loras,
    }


def broken_bounds(slo: Slo, result: SimulationResult) -> tuple[str, ...]:
    """Return the bounds that a simulated GPU breaks, each in words; none when it keeps all of them.

    Latencies are those of completed requests. A percentile of the time to the first or last token is broken,
    too, when so many requests are left at the end that too many of them must have waited longer.
    """
    broken = []
    if result.served_fraction < slo.served_fraction:
        broken.append(f"served_fraction {result.served_fraction:.3f} < {slo.served_fraction:g}")
    for name, bound in slo.latency_bounds().items():
        value = bound_value(result, name)
        if value > bound:
            broken.append(f"{name} {value:.3g} > {bound:g}")
        elif _left_waiting(result, name, bound):
            broken.append(f"{name} > {bound:g}, with the requests that still wait at the end")
    return tuple(broken)


def _left_waiting(result: SimulationResult, name: str, bound: float) -> bool:
    """Tell whether more requests than a percentile lets pass have waited beyond its bound in vain.

    Of those not completed, as many as ever ran at once may be under way, and those that came last may still
    be in time.
    """
    metric, statistic, _ = name.split("_")
    if metric not in ("ttft", "e2e") or not statistic.startswith("p"):
        return False
    in_time = result.submitted * min(1.0, bound / result.duration_s) + result.running_max
    late = result.submitted - result.completed - in_time
    return late > (1.0 - float(statistic[1:]) / 100.0) * result.submitted
