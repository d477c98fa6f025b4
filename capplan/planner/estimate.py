"""Estimators of one instance: a surrogate or the twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Final, Self, cast

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InfeasibleError, InputError
from capplan.models import Surrogate, load_surrogate
from capplan.models.surrogates.compiled import CompiledSurrogate, EngineLimits, compile_surrogate
from capplan.models.surrogates.features import unsupported_workload
from capplan.models.surrogates.files import KINDS
from capplan.planner.evaluate import Evaluation, evaluate
from capplan.planner.parallel import estimate_all
from capplan.planner.problem import AdapterShare, Assignment, Estimate, Estimator, Problem
from capplan.spec import STARVED_BELOW, Workload
from capplan.spec.engine_args import DEFAULT_MAX_MODEL_LEN
from capplan.twin import SimulationResult
from capplan.twin.metrics import bound_value

SEARCH_DURATION_S = 3600.0

"""As long as verification: of deep queues, a shorter run counts more as unserved that is only under way."""

ESTIMATORS: Final = ("auto", *KINDS, "twin")

_DEFAULT_SURROGATE: Final = "best"

_ALLOWED_BACKLOG: Final = 16

_SAFE_SERVED_FRACTION: Final = 0.99

"""Served fraction from which an instance is far from its edge."""

_RUNS_NEAR_THE_BOUND: Final = 3

_BOUND_WEIGHT: Final = 0.1

_MAX_BOUND_USE: Final = 10.0

"""Strain of an instance that just keeps a latency bound, and multiples of the bound that count."""

_SEED_STEP: Final = 500_009


@dataclass(frozen=True)
class TwinEstimator:
    """Asks the twin, at the workload's load over (1 - headroom)."""

    problem: Problem
    seed: int
    duration_s: float = SEARCH_DURATION_S
    margin: float = 0.0
    """What a run at the edge must serve beyond the fraction asked for."""
    _runs: dict[tuple[object, ...], Evaluation | None] = field(default_factory=dict, compare=False)
    """What was simulated, by instance and seed; None: would not start. Solvers ask the same question more
    than once, and a copy with another margin shares what is known."""

    def __call__(self, assignment: Assignment) -> Estimate:
        """Simulate one seed, and others at the edge; latency bounds count as starvation does."""
        evaluation = self._evaluate(assignment)
        if evaluation is None:
            return Estimate(0.0, starved=True)
        result, broken = evaluation.result, bool(evaluation.broken)
        short = max(0.0, self._wanted - result.served_fraction)
        return Estimate(
            result.throughput_tok_s,
            starved=broken,
            e2e_s_mean=_charged_e2e_s(result),
            utilization=broken + short + _BOUND_WEIGHT * self._of_bounds(result),
            overload=short,
        )

    def _of_bounds(self, result: SimulationResult) -> float:
        """Return the share of the latency bound nearest to breaking that is used; above 1 it is broken."""
        bounds = self.problem.workload.slo.latency_bounds()
        used = (bound_value(result, name) / bound for name, bound in bounds.items())
        return min(_MAX_BOUND_USE, max((each for each in used if each == each), default=0.0))

    def _evaluate(self, assignment: Assignment) -> Evaluation | None:
        """Return the first of a few runs that breaks a bound, or the first run.

        An instance that leaves requests waiting is near its edge, where runs differ: there one is not enough.
        """
        first = self._with_margin(self._run(assignment, self.seed))
        if first is None or first.broken or first.result.served_fraction >= _SAFE_SERVED_FRACTION:
            return first
        more = 0 if self.problem.workload.trace is not None else _RUNS_NEAR_THE_BOUND
        for number in range(1, more):
            another = self._with_margin(self._run(assignment, self.seed + number * _SEED_STEP))
            if another is not None and another.broken:
                return another
        return first

    def _run(self, assignment: Assignment, seed: int) -> Evaluation | None:
        seqs = self.problem.max_num_seqs(assignment)
        question = (frozenset(assignment.shares), assignment.a_max, seqs, assignment.pool, seed)
        if question not in self._runs:
            scale = 1.0 / (1.0 - self.problem.workload.headroom)
            try:
                self._runs[question] = evaluate(self.problem, assignment, seed, self.duration_s, scale)
            except InfeasibleError:
                self._runs[question] = None
        return self._runs[question]

    def _with_margin(self, evaluation: Evaluation | None) -> Evaluation | None:
        if evaluation is None or evaluation.broken:
            return evaluation
        served = evaluation.result.served_fraction
        if served >= self._wanted:
            return evaluation
        return replace(evaluation, broken=(f"served_fraction {served:.3f} < {self._wanted:g}",))

    @property
    def _wanted(self) -> float:
        bound = self.problem.workload.slo.served_fraction
        return max(bound, min(_SAFE_SERVED_FRACTION, bound + self.margin))


def _charged_e2e_s(result: SimulationResult) -> float:
    """Return the mean time from arrival to last token, where who is left behind waited all along.

    By Little's law, rate x time are under way at the end; twice as many, and a few, are not left behind.
    """
    if result.completed == 0:
        return result.duration_s if result.submitted else 0.0
    under_way = result.submitted / result.duration_s * result.e2e_s_mean
    behind = max(0.0, result.submitted - result.completed - 2.0 * under_way - _ALLOWED_BACKLOG)
    return result.e2e_s_mean + behind / result.submitted * result.duration_s


@dataclass(frozen=True)
class PoolEstimator:
    """Asks the estimator of the pool that an instance belongs to."""

    pools: tuple[Estimator, ...]

    def __call__(self, assignment: Assignment) -> Estimate:
        """Return what the pool's own estimator says."""
        return self.pools[assignment.pool](assignment)

    def estimate_all(self, assignments: Sequence[Assignment]) -> list[Estimate]:
        """Return the same of several instances; those that follow each other go to their pool together."""
        estimates: list[Estimate] = []
        for pool, alike in groupby(assignments, key=lambda assignment: assignment.pool):
            estimates += estimate_all(self.pools[pool], list(alike))
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
    if name not in ESTIMATORS:
        raise InputError(f"must be one of {', '.join(ESTIMATORS)}", name, "estimator")
    if name == "twin" or (name == "auto" and _requires_twin(problem)):
        return twin
    return _surrogates(
        problem, _DEFAULT_SURROGATE if name == "auto" else name, twin, or_the_twin=name == "auto"
    )


def make_surrogate(problem: Problem, twin: TwinEstimator) -> Estimator:
    """Return who says at little cost what an instance serves, whatever latency bounds say; else the twin."""
    if _untrained(problem, with_default_lengths(problem.workload)):
        return twin
    return _surrogates(problem, _DEFAULT_SURROGATE, twin, or_the_twin=True, guesses=True)


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


def _requires_twin(problem: Problem) -> bool:
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
        any(unsupported_workload(workload, pool.profile) for pool in problem.pools)
        or (host is not None and host < len(workload.adapters))
        or problem.engine.max_model_len < DEFAULT_MAX_MODEL_LEN
    )


_STARVED_PROBABILITY = 0.5


def _shares_id(assignment: Assignment) -> int:
    return id(assignment.shares)


@dataclass(frozen=True)
class SurrogateEstimator:
    """Asks a surrogate of one pool's profile, and the twin for what lies outside its training range.

    A scenario that is out of range for want of load only, and that the surrogate does not fear for, is no
    reason to ask the twin: with less load than any that was trained on, nothing starves.
    """

    problem: Problem
    surrogate: Surrogate
    twin: Estimator
    guesses: bool = False
    """Whether to answer beyond the training range, too, rather than ask the twin; and to take an adapter with
    lengths of its own for one with the usual lengths that asks for as many tokens."""

    def ready(self) -> Self:
        """Prepare what all questions share, rather than within the first of them."""
        _ = self._asker
        return self

    def __call__(self, assignment: Assignment) -> Estimate:
        """Answer at the workload's load over (1 - headroom)."""
        return self.estimate_all((assignment,))[0]

    def estimate_all(self, assignments: Sequence[Assignment]) -> list[Estimate]:
        """Return the estimates of several instances; those that follow each other may share their shares."""
        known: list[Estimate | None] = []
        for _, alike in groupby(assignments, key=_shares_id):
            known += self._ask(list(alike))
        if None not in known:
            return cast(list[Estimate], known)
        unknown = [asked for asked, estimate in zip(assignments, known, strict=True) if estimate is None]
        twins = iter(estimate_all(self.twin, unknown) if unknown else ())
        return [next(twins) if estimate is None else estimate for estimate in known]

    def _ask(self, alike: Sequence[Assignment]) -> list[Estimate | None]:
        """Return what the surrogate knows of instances that serve the same shares."""
        shares, asker = alike[0].shares, self._asker
        names = [share.name for share in shares]
        own = self._own_lengths
        if asker is None or (own and not self.guesses and not own.keys().isdisjoint(names)):
            return [None] * len(alike)
        rates_rps, ranks = _rates_and_ranks(shares, names, own)
        s_max = self.problem.s_max((shares[int(ranks.argmax())],))
        settings = [EngineLimits(a.a_max, s_max, self.problem.max_num_seqs(a)) for a in alike]
        replies = asker.predict(rates_rps / (1.0 - self.problem.workload.headroom), ranks, settings)
        return [
            Estimate(
                throughput, probability >= _STARVED_PROBABILITY, e2e_s_mean=request_s, utilization=probability
            )
            if self.guesses or in_range or (is_lighter and probability < _STARVED_PROBABILITY)
            else None
            for throughput, probability, request_s, in_range, is_lighter in zip(
                replies.throughput_tok_s.tolist(),
                replies.starvation_probability.tolist(),
                replies.request_s.tolist(),
                replies.in_range.tolist(),
                replies.is_lighter.tolist(),
                strict=True,
            )
        ]

    @cached_property
    def _asker(self) -> CompiledSurrogate | None:
        """Who asks about adapters without lengths of their own; None where nobody can."""
        workload, engine = self.problem.workload, self.problem.engine
        if self.guesses:
            workload = with_default_lengths(workload)
        else:
            usual = tuple(a for a in workload.adapters if a.name not in self._own_lengths)
            workload = workload.model_copy(update={"adapters": usual})
        if not workload.adapters:
            return None
        return compile_surrogate(
            self.surrogate,
            workload,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            gpu_memory_utilization=engine.gpu_memory_utilization,
        )

    @cached_property
    def _own_lengths(self) -> Mapping[str, float]:
        """Return for adapters with lengths of their own how many usual requests one of theirs is worth."""
        workload = self.problem.workload
        usual = workload.prompt_tokens.mean_tokens + workload.output_tokens.mean_tokens
        return {
            adapter.name: sum(lengths.mean_tokens for lengths in workload.lengths_of(adapter)) / usual
            for adapter in workload.adapters
            if adapter.prompt_tokens or adapter.output_tokens
        }


def with_default_lengths(workload: Workload) -> Workload:
    """Return the workload without lengths that adapters have of their own."""
    plain = {"prompt_tokens": None, "output_tokens": None}
    adapters = tuple(adapter.model_copy(update=plain) for adapter in workload.adapters)
    return workload.model_copy(update={"adapters": adapters})


def _rates_and_ranks(
    shares: Sequence[AdapterShare], names: Sequence[str], worth: Mapping[str, float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the rates and ranks of the adapters that these are shares of; shares of one are one adapter."""
    rates = [share.rate_rps for share in shares]
    if worth:
        rates = [rate * worth.get(name, 1.0) for rate, name in zip(rates, names, strict=True)]
    rates_rps, ranks = np.array(rates), np.array([share.rank for share in shares], np.float64)
    if len(set(names)) == len(names):
        return rates_rps, ranks
    _, first, which = np.unique(names, return_index=True, return_inverse=True)
    return np.bincount(which, rates_rps).astype(np.float64), ranks[first]
