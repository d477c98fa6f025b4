"""Estimators: what one GPU would do, by a surrogate or by the twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from capplan.errors import InfeasibleError, InputError
from capplan.models import Surrogate, load_surrogate
from capplan.models.surrogates.documents import KINDS
from capplan.models.surrogates.features import untrained
from capplan.planner.problem import Estimate, Estimator, Part, Problem
from capplan.planner.slo import broken_bounds
from capplan.spec import STARVED_BELOW
from capplan.twin import SimulationResult, simulate
from capplan.twin.simulate import DEFAULT_MAX_MODEL_LEN

SEARCH_DURATION_S = 900.0
NAMES: Final = ("auto", *KINDS, "twin")
_AUTO: Final = "best"


@dataclass(frozen=True)
class TwinEstimator:
    """Asks the twin, at the workload's load over (1 - headroom)."""

    problem: Problem
    seed: int
    duration_s: float = SEARCH_DURATION_S
    _answers: dict[tuple[frozenset[Part], int], Estimate] = field(default_factory=dict, compare=False)
    """Solvers ask the same question more than once."""

    def __call__(self, parts: Sequence[Part], a_max: int) -> Estimate:
        """Simulate one seed; latency bounds count as starvation does."""
        question = (frozenset(parts), a_max)
        if question not in self._answers:
            self._answers[question] = self._ask(parts, a_max)
        return self._answers[question]

    def _ask(self, parts: Sequence[Part], a_max: int) -> Estimate:
        scale = 1.0 / (1.0 - self.problem.workload.headroom)
        try:
            result = run_twin(self.problem, parts, a_max, self.seed, self.duration_s, scale)
        except InfeasibleError:
            return Estimate(0.0, starved=True)
        return Estimate(
            result.throughput_tok_s,
            starved=bool(broken_bounds(self.problem.workload.slo, result)),
            ttft_s_p99=result.ttft_s_p99 if result.completed else 0.0,
        )


@dataclass(frozen=True)
class SurrogateEstimator:
    """Asks a surrogate, and the twin for what lies outside its training range."""

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


def make_estimator(problem: Problem, name: str, twin: TwinEstimator) -> Estimator:
    """Return the estimator called `name`: ``auto``, ``best``, ``forest``, ``tree`` or ``twin``.

    ``auto`` takes the best surrogate, unless the workload asks for what none was trained on, or none was
    trained for the profile.

    Raises
    ------
    InputError
        For another name, and for a kind of surrogate that the profile has none of.
    """
    if name not in NAMES:
        raise InputError(f"must be one of {', '.join(NAMES)}", name, "estimator")
    if name == "twin" or (name == "auto" and _only_the_twin_knows(problem)):
        return twin
    try:
        kind = _AUTO if name == "auto" else name
        return SurrogateEstimator(problem, load_surrogate(problem.profile, kind), twin)
    except InputError:
        if name == "auto":
            return twin
        raise


def estimator_name(estimator: Estimator) -> str:
    """Return what a plan says of where its estimates come from."""
    return estimator.surrogate.kind if isinstance(estimator, SurrogateEstimator) else "twin"


def _only_the_twin_knows(problem: Problem) -> bool:
    """Tell whether a workload asks for what no surrogate answers, or goes beyond all that they learned."""
    workload = problem.workload
    host = workload.engine.max_cpu_loras
    return bool(
        untrained(workload, problem.profile)
        or workload.slo.latency_bounds()
        or workload.slo.served_fraction != STARVED_BELOW
        or (host is not None and host < len(workload.adapters))
        or problem.engine.max_model_len < DEFAULT_MAX_MODEL_LEN
    )


def run_twin(
    problem: Problem, parts: Sequence[Part], a_max: int, seed: int, duration_s: float, scale: float = 1.0
) -> SimulationResult:
    """Simulate one GPU of a problem; a trace is replayed as a whole, whatever the duration."""
    engine = problem.engine
    workload = problem.subworkload(parts, scale)
    return simulate(
        workload,
        problem.profile,
        a_max=a_max,
        s_max=problem.s_max(parts),
        duration_s=duration_s if workload.trace is None else workload.trace.duration_s,
        seed=seed,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=engine.max_model_len,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        max_cpu_loras=workload.engine.max_cpu_loras,
    )
