"""Estimators of one instance: a surrogate or the twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Final, Self, cast

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InfeasibleError, InputError
from capplan.models import Surrogate, load_surrogate
from capplan.models.surrogates import (
    KINDS,
    STARVED_PROBABILITY,
    CompiledSurrogate,
    compile_surrogate,
    unsupported_workload,
)
from capplan.planner.problem._evaluate import SAFE_SERVED_FRACTION, Evaluation, evaluate
from capplan.planner.problem._execution import NEVER, Deadline
from capplan.planner.problem._problem import (
    AdapterShare,
    Assignment,
    Estimate,
    Estimator,
    Problem,
    estimate_all,
)
from capplan.planner.problem._settings import with_queues
from capplan.spec import STARVED_BELOW, Workload
from capplan.twin import SimulationResult
from capplan.twin.instance import bound_value

ESTIMATORS: Final = ("auto", *KINDS, "twin")
_DEFAULT_SURROGATE: Final = "best"
_ALLOWED_BACKLOG: Final = 16
_RUNS_NEAR_THE_BOUND: Final = 3
_BOUND_WEIGHT: Final = 0.1
"""Utilization of an instance that just keeps a latency bound."""
_MAX_BOUND_USE: Final = 10.0
_STABLE_THROUGHPUT: Final = 0.97
"""Throughput over offered load from which a surrogate's queues count as stable; the rest is the surrogate's
error, and requests in execution at the end."""
_SEED_STEP: Final = 500_009
_NAME: Final = attrgetter("name")
_RATE: Final = attrgetter("rate_rps")
_RANK: Final = attrgetter("rank")


@dataclass(frozen=True)
class TwinEstimator:
    """Estimator that simulates the workload's load over (1 - headroom), with pessimistic step times if asked.

    See `Problem.robust`.
    """

    problem: Problem
    seed: int
    margin: float = 0.0
    """Served fraction required beyond the bound."""
    deadline: Deadline = field(default=NEVER, compare=False)
    """Time at which simulations raise `OutOfTimeError`."""
    _cache: dict[tuple[object, ...], Evaluation | None] = field(default_factory=dict, compare=False)
    """Runs by instance and seed, None for one that does not start; shared with copies of another margin."""

    def __call__(self, assignment: Assignment) -> Estimate:
        """Simulate one seed, and more near the bound; a broken latency bound counts as starvation."""
        evaluation = self._evaluate(assignment)
        if evaluation is None:
            return Estimate(0.0, starved=True)
        result, broken = evaluation.result, bool(evaluation.violations)
        overload = max(0.0, self._stable_fraction - result.served_fraction) if broken else 0.0
        return Estimate(
            result.throughput_tok_s,
            starved=broken,
            e2e_s_mean=_charged_e2e_s(result),
            utilization=broken + overload + _BOUND_WEIGHT * self._bound_use(result),
            overload=overload,
        )

    def on(self, problem: Problem) -> TwinEstimator:
        """Return the estimator on another problem."""
        return replace(self, problem=problem, _cache={})

    def _bound_use(self, result: SimulationResult) -> float:
        """Return the largest ratio of a latency to its bound."""
        bounds = self.problem.workload.slo.latency_limits()
        used = (bound_value(result, name) / bound for name, bound in bounds.items())
        return min(_MAX_BOUND_USE, max((each for each in used if each == each), default=0.0))

    def _evaluate(self, assignment: Assignment) -> Evaluation | None:
        """Return the first run that breaks a bound, or the first run.

        Runs of an instance that leaves requests waiting differ by seed, so several are made.
        """
        first = self._run(assignment, self.seed)
        if first is None or first.violations or first.result.served_fraction >= SAFE_SERVED_FRACTION:
            return first
        runs = 0 if self.problem.workload.trace is not None else _RUNS_NEAR_THE_BOUND
        for number in range(1, runs):
            other = self._run(assignment, self.seed + number * _SEED_STEP)
            if other is not None and other.violations:
                return other
        return first

    def _run(self, assignment: Assignment, seed: int) -> Evaluation | None:
        limits = self.problem.engine_limits(assignment)
        key = (frozenset(assignment.shares), limits, assignment.pool, seed)
        if key not in self._cache:
            self.deadline.check()
            scale = self.problem.load_with_headroom
            try:
                planned = with_queues(self.problem, assignment)
                problem = self.problem.pessimistic
                self._cache[key] = evaluate(problem, planned, seed, scale, self.deadline)
            except InfeasibleError:
                self._cache[key] = None
        run = self._cache[key]
        if run is None or run.violations or run.result.served_fraction >= self._required_fraction:
            return run
        violation = f"served_fraction {run.result.served_fraction:.3f} < {self._required_fraction:g}"
        return replace(run, violations=(violation,))

    @property
    def _required_fraction(self) -> float:
        bound = self.problem.workload.slo.served_fraction
        return max(bound, min(SAFE_SERVED_FRACTION, bound + self.margin))

    @property
    def _stable_fraction(self) -> float:
        """Served fraction below which the load exceeds what the instance sustains."""
        stable = self.problem.workload.slo.stable
        return max(self._required_fraction, SAFE_SERVED_FRACTION) if stable else self._required_fraction


def _charged_e2e_s(result: SimulationResult) -> float:
    """Return the mean time from arrival to last token, with waiting requests charged the whole duration.

    By Little's law, rate x time requests are in progress at the end. Twice as many and a few more do not
    count as waiting.
    """
    if result.completed == 0:
        return result.duration_s if result.submitted else 0.0
    in_progress = result.submitted / result.duration_s * result.e2e_s_mean
    waiting = max(0.0, result.submitted - result.completed - 2.0 * in_progress - _ALLOWED_BACKLOG)
    return result.e2e_s_mean + waiting / result.submitted * result.duration_s


@dataclass(frozen=True)
class SurrogateEstimator:
    """Estimator by the surrogate of one pool's profile, and by the twin outside its training range.

    For a lighter load than any in training the surrogate suffices if it predicts no starvation.
    """

    problem: Problem
    surrogate: Surrogate
    twin: Estimator
    extrapolates: bool = False
    """Whether the surrogate is also used outside its training range. Adapters with their own lengths then
    count as adapters of the default lengths with as many tokens."""

    @property
    def least_throughput(self) -> float:
        """Throughput over offered load from which queues count as stable.

        0 if they need not be, or if the twin confirms every answer: doubts would only unbalance the search.
        """
        decides = self.problem.workload.slo.stable and not self.extrapolates
        return _STABLE_THROUGHPUT if decides else 0.0

    def prepared(self) -> Self:
        """Compile the surrogate now rather than at the first call."""
        _ = self._compiled
        return self

    def __call__(self, assignment: Assignment) -> Estimate:
        """Estimate at the workload's load over (1 - headroom)."""
        return self.estimate_all((assignment,))[0]

    def estimate_all(self, assignments: Sequence[Assignment]) -> list[Estimate]:
        """Return the estimates of several instances.

        Neighbours with the same shares are one batch, and so are instances with one share each.
        """
        known: list[Estimate | None] = []
        if len(assignments) > 1 and all(len(each.shares) == 1 for each in assignments):
            known = self._predict([each.shares[0] for each in assignments], assignments, alone=True)
        else:
            for _, group in groupby(assignments, key=lambda assignment: id(assignment.shares)):
                same = list(group)
                known += self._predict(same[0].shares, same)
        if None not in known:
            return cast(list[Estimate], known)
        unknown = [each for each, estimate in zip(assignments, known, strict=True) if estimate is None]
        simulated = iter(estimate_all(self.twin, unknown) if unknown else ())
        return [next(simulated) if estimate is None else estimate for estimate in known]

    def _predict(
        self, shares: Sequence[AdapterShare], assignments: Sequence[Assignment], *, alone: bool = False
    ) -> list[Estimate | None]:
        """Return the surrogate's estimates, None outside its range, of instances with all these shares.

        If `alone`, each instance has one of the shares.
        """
        inputs = self.inputs(shares, merge=not alone)
        if inputs is None:
            return [None] * len(assignments)
        compiled, rates_rps, ranks = inputs
        engines = [self.problem.engine_limits(assignment) for assignment in assignments]
        predict = compiled.predict_alone if alone else compiled.predict
        predictions = predict(rates_rps, ranks, engines)
        starved = predictions.starvation_probability >= STARVED_PROBABILITY
        if self.least_throughput:
            offered = np.fromiter(map(self.problem.offered_tok_s, shares), np.float64, len(shares))
            offered *= self.least_throughput / (1.0 - self.problem.workload.headroom)
            starved = starved | (predictions.throughput_tok_s < (offered if alone else offered.sum()))
        usable = predictions.in_range | (predictions.is_lighter & ~starved) | self.extrapolates
        columns = (
            predictions.throughput_tok_s,
            starved,
            predictions.request_s,
            predictions.starvation_probability,
        )
        rows = zip(usable.tolist(), *(column.tolist() for column in columns), strict=True)
        return [Estimate(*estimate) if known else None for known, *estimate in rows]

    def inputs(
        self, shares: Sequence[AdapterShare], *, merge: bool = True
    ) -> tuple[CompiledSurrogate, NDArray[np.float64], NDArray[np.float64]] | None:
        """Return the compiled surrogate, and rate at the load over (1 - headroom) and rank of each adapter.

        None if the surrogate does not cover adapters with these lengths. Unless `merge`, each share counts as
        an adapter.
        """
        compiled, own = self._compiled, self._own_lengths
        if compiled is None or (own and not self.extrapolates and any(each.name in own for each in shares)):
            return None
        rates_rps, ranks = _rates_and_ranks(shares, own, merge)
        return compiled, rates_rps / (1.0 - self.problem.workload.headroom), ranks

    @cached_property
    def _compiled(self) -> CompiledSurrogate | None:
        """Surrogate for adapters of the default lengths; None if there are none."""
        workload = self.problem.workload
        if self.extrapolates:
            workload = with_default_lengths(workload)
        else:
            usual = tuple(a for a in workload.adapters if a.name not in self._own_lengths)
            workload = workload.model_copy(update={"adapters": usual})
        if not workload.adapters:
            return None
        return compile_surrogate(self.surrogate, workload, self.problem.engine)

    @cached_property
    def _own_lengths(self) -> Mapping[str, float]:
        """Tokens per request relative to the default lengths, of adapters with lengths of their own."""
        workload = self.problem.workload
        usual = workload.prompt_tokens.mean_tokens + workload.output_tokens.mean_tokens
        return {
            adapter.name: sum(lengths.mean_tokens for lengths in workload.lengths_of(adapter)) / usual
            for adapter in workload.adapters
            if adapter.prompt_tokens or adapter.output_tokens
        }


def with_default_lengths(workload: Workload) -> Workload:
    """Return the workload without the adapters' own lengths."""
    plain = {"prompt_tokens": None, "output_tokens": None}
    adapters = tuple(adapter.model_copy(update=plain) for adapter in workload.adapters)
    return workload.model_copy(update={"adapters": adapters})


def _rates_and_ranks(
    shares: Sequence[AdapterShare], relative_tokens: Mapping[str, float], merge: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the rate and rank of each share; with `merge`, of each adapter, its shares added up."""
    rates_rps = np.fromiter(map(_RATE, shares), np.float64, len(shares))
    ranks = np.fromiter(map(_RANK, shares), np.float64, len(shares))
    if relative_tokens:
        rates_rps *= [relative_tokens.get(share.name, 1.0) for share in shares]
    names = list(map(_NAME, shares)) if merge else []
    if len(set(names)) == len(names):
        return rates_rps, ranks
    _, first, which = np.unique(names, return_index=True, return_inverse=True)
    return np.bincount(which, rates_rps).astype(np.float64), ranks[first]


@dataclass(frozen=True)
class PoolEstimator:
    """Estimator that delegates to the estimator of the instance's pool."""

    pools: tuple[Estimator, ...]

    def __call__(self, assignment: Assignment) -> Estimate:
        """Return the estimate of the pool's estimator."""
        return self.pools[assignment.pool](assignment)

    def estimate_all(self, assignments: Sequence[Assignment]) -> list[Estimate]:
        """Return the estimates of several instances, in one batch for neighbours of the same pool."""
        estimates: list[Estimate] = []
        for pool, same in groupby(assignments, key=lambda assignment: assignment.pool):
            estimates += estimate_all(self.pools[pool], list(same))
        return estimates


def make_estimator(problem: Problem, name: str, twin: TwinEstimator) -> Estimator:
    """Return the estimator of a name of `ESTIMATORS`.

    ``auto`` is the best surrogate, or the twin if no surrogate covers the workload or the profile. An unknown
    name, or another kind that a profile has no surrogate of, is an `InputError`.
    """
    if name not in ESTIMATORS:
        raise InputError(f"must be one of {', '.join(ESTIMATORS)}", name, "estimator")
    if name == "twin" or (name == "auto" and _requires_twin(problem)):
        return twin
    auto = name == "auto"
    return _surrogates(problem, _DEFAULT_SURROGATE if auto else name, twin, allow_twin=auto)


def make_surrogate(problem: Problem, twin: TwinEstimator) -> Estimator:
    """Return the best surrogate, without regard to bounds; the twin if it does not cover the workload."""
    if _is_unsupported(problem, with_default_lengths(problem.workload)):
        return twin
    return _surrogates(problem, _DEFAULT_SURROGATE, twin, allow_twin=True, extrapolates=True)


def estimator_name(estimator: Estimator) -> str:
    """Return the name of an estimator for the provenance of a plan."""
    if isinstance(estimator, PoolEstimator):
        return " and ".join(dict.fromkeys(estimator_name(pool) for pool in estimator.pools))
    return estimator.surrogate.kind if isinstance(estimator, SurrogateEstimator) else "twin"


def _surrogates(
    problem: Problem, kind: str, twin: TwinEstimator, *, allow_twin: bool, extrapolates: bool = False
) -> Estimator:
    """Return the surrogates of all pools, with the twin in place of missing ones if allowed."""
    estimators: list[Estimator] = []
    for pool in problem.pools:
        try:
            surrogate = load_surrogate(pool.profile, kind)
        except InputError as error:
            if not allow_twin:
                rule = f"{error.rule}; or use a solver or estimator without surrogates, such as capplan"
                raise InputError(rule, error.value, error.location) from None
            estimators.append(twin)
            continue
        estimators.append(SurrogateEstimator(problem, surrogate, twin, extrapolates).prepared())
    return estimators[0] if len(estimators) == 1 else PoolEstimator(tuple(estimators))


def _requires_twin(problem: Problem) -> bool:
    """Tell whether the workload has bounds that no surrogate predicts, or is outside all training data."""
    slo = problem.workload.slo
    return bool(
        _is_unsupported(problem, problem.workload)
        or slo.latency_bounds()
        or slo.tpt_over_base is not None
        or slo.served_fraction != STARVED_BELOW
    )


def _is_unsupported(problem: Problem, workload: Workload) -> bool:
    host = workload.engine.max_cpu_loras
    return bool(
        any(unsupported_workload(workload, pool.profile) for pool in problem.pools)
        or (host is not None and host < len(workload.adapters))
        or problem.engine.max_model_len
        < min(pool.profile.model.default_max_model_len for pool in problem.pools)
    )
