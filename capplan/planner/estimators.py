"""Estimators: what one GPU would do, by the surrogate forests or by the twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from capplan.errors import InfeasibleError, InputError
from capplan.models import Surrogate, load_surrogate
from capplan.planner.problem import Estimate, Estimator, Part, Problem
from capplan.planner.slo import broken_bounds
from capplan.twin import SimulationResult, simulate

SEARCH_DURATION_S = 900.0


@dataclass(frozen=True)
class TwinEstimator:
    """Asks the twin, at the workload's load over (1 - headroom)."""

    problem: Problem
    seed: int
    duration_s: float = SEARCH_DURATION_S

    def __call__(self, parts: Sequence[Part], a_max: int) -> Estimate:
        """Simulate one seed; latency bounds count as starvation does."""
        scale = 1.0 / (1.0 - self.problem.workload.headroom)
        try:
            result = run_twin(self.problem, parts, a_max, self.seed, self.duration_s, scale)
        except InfeasibleError:
            return Estimate(0.0, starved=True)
        return Estimate(
            result.throughput_tok_s, starved=bool(broken_bounds(self.problem.workload.slo, result))
        )


@dataclass(frozen=True)
class ForestEstimator:
    """Asks the forests, and the twin for what lies outside their training range."""

    problem: Problem
    surrogate: Surrogate
    twin: TwinEstimator

    def __call__(self, parts: Sequence[Part], a_max: int) -> Estimate:
        """Answer at the workload's load over (1 - headroom)."""
        problem, engine = self.problem, self.problem.engine
        answer = self.surrogate.predict(
            problem.subworkload(parts, 1.0 / (1.0 - problem.workload.headroom)),
            a_max=a_max,
            s_max=problem.s_max(parts),
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            gpu_memory_utilization=engine.gpu_memory_utilization,
        )
        if not answer.in_range:
            return self.twin(parts, a_max)
        return Estimate(answer.throughput_tok_s, answer.starved)


def make_estimator(problem: Problem, name: str, seed: int) -> Estimator:
    """Return the estimator called `name`: ``forest``, ``twin``, or ``auto``.

    ``auto`` takes the forests, unless the workload bounds latencies, a trace sets its arrivals, or no forest was
    trained for the profile: of these only the twin knows something.
    """
    twin = TwinEstimator(problem, seed)
    if name not in ("auto", "forest", "twin"):
        raise InputError("must be one of auto, forest, twin", name, "estimator")
    workload = problem.workload
    if name == "twin" or (name == "auto" and (workload.slo.latency_bounds() or workload.trace is not None)):
        return twin
    try:
        return ForestEstimator(problem, load_surrogate(problem.profile), twin)
    except InputError:
        if name == "forest":
            raise
        return twin


def run_twin(
    problem: Problem, parts: Sequence[Part], a_max: int, seed: int, duration_s: float, scale: float = 1.0
) -> SimulationResult:
    """Simulate one GPU of a problem."""
    engine = problem.engine
    return simulate(
        problem.subworkload(parts, scale),
        problem.profile,
        a_max=a_max,
        s_max=problem.s_max(parts),
        duration_s=duration_s,
        seed=seed,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=engine.max_model_len,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        max_cpu_loras=problem.workload.engine.max_cpu_loras,
    )
