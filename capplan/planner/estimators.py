"""Estimators: what one instance would do, by a surrogate or by the twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final

from capplan.errors import InfeasibleError, InputError
from capplan.models import load_surrogate
from capplan.models.surrogates.documents import KINDS
from capplan.models.surrogates.features import untrained
from capplan.planner.judging import Judged, judge
from capplan.planner.parallel import ask_all
from capplan.planner.problem import Assignment, Estimate, Estimator, Problem
from capplan.planner.surrogate_estimator import SurrogateEstimator, with_usual_lengths
from capplan.spec import STARVED_BELOW, Workload
from capplan.twin import SimulationResult
from capplan.twin.result import bound_value
from capplan.twin.simulate import DEFAULT_MAX_MODEL_LEN

SEARCH_DURATION_S = 3600.0
"""As long as verification: of deep queues, a shorter run counts more as unserved that is only under way."""
NAMES: Final = ("auto", *KINDS, "twin")
_AUTO: Final = "best"
_A_FEW: Final = 16
_AT_EASE: Final = 0.99
"""Served fraction from which an instance is far from its edge."""
_RUNS_AT_THE_EDGE: Final = 3
_PER_BOUND: Final = 0.1
_FAR_BEYOND: Final = 10.0
"""Strain of an instance that just keeps a latency bound, and multiples of the bound that count."""
_SEEDS_APART: Final = 500_009


@dataclass(frozen=True)
class TwinEstimator:
    """Asks the twin, at the workload's load over (1 - headroom)."""

    problem: Problem
    seed: int
    duration_s: float = SEARCH_DURATION_S
    margin: float = 0.0
    """What a run at the edge must serve beyond the fraction asked for."""
    _runs: dict[tuple[object, ...], Judged | None] = field(default_factory=dict, compare=False)
    """What was simulated, by instance and seed; None: would not start. Solvers ask the same question more
    than once, and a copy with another margin shares what is known."""

    def __call__(self, assignment: Assignment) -> Estimate:
        """Simulate one seed, and others at the edge; latency bounds count as starvation does."""
        judged = self._judged(assignment)
        if judged is None:
            return Estimate(0.0, starved=True)
        result, broken = judged.result, bool(judged.broken)
        short = max(0.0, self._wanted - result.served_fraction)
        return Estimate(
            result.throughput_tok_s,
            starved=broken,
            e2e_s_mean=_charged_s(result),
            strain=broken + short + _PER_BOUND * self._of_bounds(result),
            short=short,
        )

    def _of_bounds(self, result: SimulationResult) -> float:
        """Return the share of the latency bound nearest to breaking that is used; above 1 it is broken."""
        bounds = self.problem.workload.slo.latency_bounds()
        used = (bound_value(result, name) / bound for name, bound in bounds.items())
        return min(_FAR_BEYOND, max((each for each in used if each == each), default=0.0))

    def _judged(self, assignment: Assignment) -> Judged | None:
        """Return the first of a few runs that breaks a bound, or the first run.

        An instance that leaves requests waiting is near its edge, where runs differ: there one is not enough.
        """
        first = self._with_margin(self._run(assignment, self.seed))
        if first is None or first.broken or first.result.served_fraction >= _AT_EASE:
            return first
        more = 0 if self.problem.workload.trace is not None else _RUNS_AT_THE_EDGE
        for number in range(1, more):
            another = self._with_margin(self._run(assignment, self.seed + number * _SEEDS_APART))
            if another is not None and another.broken:
                return another
        return first

    def _run(self, assignment: Assignment, seed: int) -> Judged | None:
        seqs = self.problem.max_num_seqs(assignment)
        question = (frozenset(assignment.parts), assignment.a_max, seqs, assignment.pool, seed)
        if question not in self._runs:
            scale = 1.0 / (1.0 - self.problem.workload.headroom)
            try:
                self._runs[question] = judge(self.problem, assignment, seed, self.duration_s, scale)
            except InfeasibleError:
                self._runs[question] = None
        return self._runs[question]

    def _with_margin(self, judged: Judged | None) -> Judged | None:
        if judged is None or judged.broken:
            return judged
        served = judged.result.served_fraction
        if served >= self._wanted:
            return judged
        return replace(judged, broken=(f"served_fraction {served:.3f} < {self._wanted:g}",))

    @property
    def _wanted(self) -> float:
        bound = self.problem.workload.slo.served_fraction
        return max(bound, min(_AT_EASE, bound + self.margin))


def _charged_s(result: SimulationResult) -> float:
    """Return the mean time from arrival to last token, where who is left behind waited all along.

    By Little's law, rate x time are under way at the end; twice as many, and a few, are not left behind.
    """
    if result.completed == 0:
        return result.duration_s if result.submitted else 0.0
    under_way = result.submitted / result.duration_s * result.e2e_s_mean
    behind = max(0.0, result.submitted - result.completed - 2.0 * under_way - _A_FEW)
    return result.e2e_s_mean + behind / result.submitted * result.duration_s


@dataclass(frozen=True)
class PoolEstimator:
    """Asks the estimator of the pool that an instance belongs to."""

    pools: tuple[Estimator, ...]

    def __call__(self, assignment: Assignment) -> Estimate:
        """Return what the pool's own estimator says."""
        return self.pools[assignment.pool](assignment)

    def ask_all(self, assignments: Sequence[Assignment]) -> list[Estimate]:
        """Return the same of several instances; those that follow each other go to their pool together."""
        estimates: list[Estimate] = []
        for pool, alike in groupby(assignments, key=lambda assignment: assignment.pool):
            estimates += ask_all(self.pools[pool], list(alike))
        return estimates


def make_estimator(problem: Problem, name: str, twin: TwinEstimator) -> Estimator:
    """Return the estimator called `name`: ``auto``, ``best``, ``forest``, ``tree`` or ``twin``.

    ``auto`` takes the best surrogate, unless the workload asks for what none was trained on, or none was
    trained for the profile.

    Raises
    ------
    InputError
        For another name, and for a kind of surrogate that a profile has none of.
    """
    if name not in NAMES:
        raise InputError(f"must be one of {', '.join(NAMES)}", name, "estimator")
    if name == "twin" or (name == "auto" and _only_the_twin_judges(problem)):
        return twin
    return _surrogates(problem, _AUTO if name == "auto" else name, twin, or_the_twin=name == "auto")


def make_hint(problem: Problem, twin: TwinEstimator) -> Estimator:
    """Return who says at little cost what an instance serves, whatever latency bounds say; else the twin."""
    if _untrained(problem, with_usual_lengths(problem.workload)):
        return twin
    return _surrogates(problem, _AUTO, twin, or_the_twin=True, guesses=True)


def estimator_name(estimator: Estimator) -> str:
    """Return what a plan says of where its estimates come from."""
    if isinstance(estimator, PoolEstimator):
        return " and ".join(dict.fromkeys(estimator_name(pool) for pool in estimator.pools))
    return estimator.surrogate.kind if isinstance(estimator, SurrogateEstimator) else "twin"


def _surrogates(
    problem: Problem, kind: str, twin: TwinEstimator, *, or_the_twin: bool, guesses: bool = False
) -> Estimator:
    """Return the surrogates of all pools; the twin stands in for missing ones if it may."""
    estimators: list[Estimator] = []
    for pool in problem.pools:
        try:
            surrogate = load_surrogate(pool.profile, kind)
        except InputError:
            if not or_the_twin:
                raise
            estimators.append(twin)
            continue
        estimators.append(SurrogateEstimator(problem, surrogate, twin, guesses).ready())
    return estimators[0] if len(estimators) == 1 else PoolEstimator(tuple(estimators))


def _only_the_twin_judges(problem: Problem) -> bool:
    """Tell whether a workload has bounds that no surrogate knows of, or goes beyond all that they learned."""
    slo = problem.workload.slo
    return bool(
        _untrained(problem, problem.workload)
        or slo.latency_bounds()
        or slo.tpt_over_base is not None
        or slo.served_fraction != STARVED_BELOW
    )


def _untrained(problem: Problem, workload: Workload) -> bool:
    host = workload.engine.max_cpu_loras
    return bool(
        any(untrained(workload, pool.profile) for pool in problem.pools)
        or (host is not None and host < len(workload.adapters))
        or problem.engine.max_model_len < DEFAULT_MAX_MODEL_LEN
    )
