"""Verification of assignments by the twin on fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from capplan.errors import InputError
from capplan.models import DRAWS, drawn_profiles
from capplan.planner.problem._estimate import TwinEstimator
from capplan.planner.problem._evaluate import (
    SAFE_SERVED_FRACTION,
    Evaluation,
    equal_instances,
    evaluate,
    evaluate_cluster,
    known_values,
    simulate_instances,
)
from capplan.planner.problem._execution import (
    NEVER,
    Deadline,
    OutOfTimeError,
    no_progress,
    parallel_map,
    parallel_until,
)
from capplan.planner.problem._operating_points import rebalancing_of
from capplan.planner.problem._problem import (
    Assignment,
    Estimate,
    Problem,
)
from capplan.planner.problem._settings import with_queues
from capplan.spec import OUT_OF_TIME, Profile, Verdict, require_seed_count
from capplan.twin import SimulationResult
from capplan.twin.cluster import Rebalancing
from capplan.twin.instance import bound_value

FRESH_SEEDS = 5
_TIMES_IF_DOUBTFUL = 4
"""Seeds of a doubtful plan over those of others."""
_FIRST_FRESH_SEED = 1_000_003
"""Verification seeds start here, away from the seed that the search used."""
_SEEDS = 2**64


@dataclass(frozen=True)
class InstanceVerification:
    """Verification of one instance, one result per seed."""

    results: tuple[SimulationResult, ...]
    violations: tuple[str, ...]
    """Broken bounds by seed, as text; empty if the instance holds."""
    starves: bool = False
    """Whether too little is served on some seed, of all requests or of those of an adapter."""
    lacks_headroom: bool = False
    """Whether every bound holds at the planned load, and one breaks at the load over (1 - headroom)."""
    drawn: tuple[SimulationResult, ...] = ()
    """Simulations of the first seed with drawn profiles."""
    seeds: tuple[int, ...] = ()
    """Seed of each result."""
    window: int = 0
    """Window of a trace that the results are of: the worst one of the fleet."""
    undecided: str = ""
    """Reason for which simulations that break no bound do not decide, as text; empty if they do."""

    @property
    def ok(self) -> bool:
        """Whether every bound holds on every seed and at the load over (1 - headroom)."""
        return not self.violations and not self.undecided


class PlanVerdict(NamedTuple):
    """Verdict on a plan."""

    verdict: Verdict
    reason: str = ""
    """Why it is not verified, as text."""
    deciding_s: float | None = None
    """Simulated time that would decide, if too short a time is the reason."""


@dataclass(frozen=True)
class Verifier:
    """Verification at the planned load on fresh seeds, and once at the load over (1 - headroom).

    The bounds must hold in every window of a trace, which the first seed replays as recorded. Other seeds
    replay bootstrap samples of the worst window.
    """

    problem: Problem
    seeds: tuple[int, ...]
    with_headroom: TwinEstimator
    deadline: Deadline = NEVER
    """Time at which simulations end."""
    further_seeds: tuple[int, ...] = ()
    """Seeds on which a plan must hold, too, that holds on `seeds` with a queue at the end of one; those that
    the deadline ends do not count."""

    def problem_of(self, verification: InstanceVerification) -> Problem:
        """Return the problem in the window of a verification."""
        return self.problem.windows[verification.window][1]

    def as_served(self, assignments: Sequence[Assignment]) -> list[Assignment]:
        """Return the instances as they are served: with equal settings to re-balance, and initial queues."""
        return parallel_map(partial(with_queues, self.problem), equal_instances(self.problem, assignments))

    def __call__(
        self, assignments: Sequence[Assignment], progress: Callable[[int, int], None] = no_progress
    ) -> list[InstanceVerification]:
        """Verify assignments, each simulated by itself.

        Raises
        ------
        InfeasibleError
            If an assignment does not fit in memory.
        OutOfTimeError
            If the deadline passes.
        """

        def verify(assignment: Assignment) -> InstanceVerification:
            def simulate(job: tuple[Problem, int]) -> list[Evaluation]:
                self.deadline.check()
                problem, seed = job
                return [evaluate(problem, assignment, seed, deadline=self.deadline)]

            (found,) = self._verify_fleet([assignment], partial(parallel_map, simulate))
            return found

        served = self.as_served(assignments)
        return parallel_map(verify, served, lambda done: progress(done, len(served)))

    def whole(
        self, assignments: Sequence[Assignment], progress: Callable[[int, int], None] = no_progress
    ) -> list[InstanceVerification]:
        """Verify a complete plan: all instances under one clock, with its router and re-balancing.

        A single instance is simulated alone. Seeds that the deadline ends are left out, which makes the
        verdict undecided.

        Raises
        ------
        OutOfTimeError
            If it ends all of them.
        """
        assignments = self.as_served(assignments)
        rebalance = self._rebalancing(assignments)

        def simulate(job: tuple[Problem, int]) -> list[Evaluation]:
            problem, seed = job
            if len(assignments) == 1:
                return [evaluate(problem, assignments[0], seed, deadline=self.deadline)]
            return evaluate_cluster(problem, assignments, seed, deadline=self.deadline, rebalance=rebalance)

        def run(jobs: Sequence[tuple[Problem, int]]) -> list[list[Evaluation] | None]:
            return parallel_until(simulate, jobs, self.deadline, lambda done: progress(done, len(jobs)))

        return self._verify_fleet(assignments, run)

    def _verify_fleet(
        self,
        assignments: Sequence[Assignment],
        run: Callable[[Sequence[tuple[Problem, int]]], Sequence[list[Evaluation] | None]],
    ) -> list[InstanceVerification]:
        """Verify instances; `run` simulates them for pairs of a problem and a seed, None if out of time."""
        first, others = self.seeds[0], self.seeds[1:]
        windows = self.problem.windows
        replayed = run([(problem, first) for _, problem in windows])
        known = [each for each in replayed if each is not None]
        if not known:
            raise OutOfTimeError
        worst = max(range(len(windows)), key=lambda number: _severity(self.problem, replayed[number]))
        problem = windows[worst][1]

        def on(seeds: Sequence[int]) -> list[tuple[int, list[Evaluation] | None]]:
            return list(zip(seeds, run([(problem.resampled(seed), seed) for seed in seeds]), strict=True))

        found = [(first, replayed[worst]), *on(others)]
        missing = len(windows) - len(known) + sum(each is None for _, each in found[1:])
        at_headroom = self._at_headroom(assignments, problem)
        if self.further_seeds and not missing and is_doubtful(chain.from_iterable(e for _, e in found if e)):
            found += [pair for pair in on(self.further_seeds) if pair[1] is not None]
        by_seed = [(seed, each) for seed, each in found if each is not None]
        elsewhere = [
            (start_s, each)
            for number, ((start_s, _), each) in enumerate(zip(windows, replayed, strict=True))
            if number != worst and each is not None
        ]
        return [
            self._verdict(
                [(seed, each[i]) for seed, each in by_seed],
                [(start_s, each[i]) for start_s, each in elsewhere],
                at_headroom[i],
                missing,
                worst,
            )
            for i in range(len(assignments))
        ]

    def verdict(self, verifications: Sequence[InstanceVerification]) -> PlanVerdict:
        """Return the verdict on a plan whose instances were verified."""
        failing = next((each for each in verifications if each.violations), None)
        if failing is not None:
            return PlanVerdict("failed", failing.violations[0])
        cut = next((each.undecided for each in verifications if each.undecided), "")
        if cut:
            return PlanVerdict("undecided", f"{cut}; a longer --time-limit decides")
        simulated_s, deciding = self.problem.duration_s, self.problem.deciding_time
        if simulated_s < deciding.duration_s:
            count = sum(result.submitted for each in verifications for result in each.results)
            seen = f"{count:,} in" if count else "no request was simulated in"
            seen = f"{seen} {len(self.seeds)} simulations of {simulated_s:g} s"
            words = f"{deciding.reason}; {seen}; --duration {math.ceil(deciding.duration_s)} decides"
            return PlanVerdict("undecided", words, float(math.ceil(deciding.duration_s)))
        return PlanVerdict("verified")

    def with_drawn_profiles(
        self,
        assignments: Sequence[Assignment],
        verifications: Sequence[InstanceVerification],
        progress: Callable[[int, int], None] = no_progress,
    ) -> tuple[InstanceVerification, ...]:
        """Add simulations with profiles drawn from the uncertainty of the fit; none after one seed.

        The seed is the first of the verification, so differences are those of the profiles. None are added if
        the deadline ends one of them.
        """
        if len(self.seeds) < 2:
            return tuple(verifications)
        seed = verifications[0].seeds[0]
        assignments = self.as_served(assignments)
        by_pool = [drawn_profiles(pool.profile) for pool in self.problem.pools]
        rebalance = self._rebalancing(assignments)

        def simulate(profiles: Sequence[Profile]) -> list[SimulationResult]:
            problem = self.problem_of(verifications[0]).with_profiles(profiles)
            return simulate_instances(problem, assignments, seed, self.deadline, rebalance)

        draws = list(zip(*by_pool, strict=True))
        answers = parallel_until(simulate, draws, self.deadline, lambda done: progress(done, DRAWS))
        drawn = [each for each in answers if each is not None]
        if len(drawn) < len(draws):
            return tuple(verifications)
        by_instance = zip(verifications, zip(*drawn, strict=True), strict=True)
        return tuple(replace(each, drawn=results) for each, results in by_instance)

    def _rebalancing(self, assignments: Sequence[Assignment]) -> Rebalancing | None:
        """Return the re-balancing of the plan; None for a single instance."""
        settings = self.problem.workload.rebalance
        return None if settings is None or len(assignments) == 1 else rebalancing_of(self.problem, settings)

    def _at_headroom(self, assignments: Sequence[Assignment], problem: Problem) -> list[Estimate | None]:
        """Return the estimates at the load over (1 - headroom); None for those that the deadline prevents.

        Instances among which a router chooses are simulated together, on the first seed.
        """
        if not (self.problem.workload.stores_everywhere and len(assignments) > 1):
            estimator = self.with_headroom
            if problem.workload.trace is not None and problem.workload != estimator.problem.busiest_workload:
                estimator = estimator.on(problem)
            return parallel_until(estimator, assignments, self.deadline)
        scale = 1.0 / (1.0 - problem.workload.headroom)
        try:
            self.deadline.check()
            found = evaluate_cluster(problem.pessimistic, assignments, self.seeds[0], scale, self.deadline)
        except OutOfTimeError:
            return [None] * len(assignments)
        return [Estimate(each.result.throughput_tok_s, bool(each.violations)) for each in found]

    def _verdict(
        self,
        by_seed: Sequence[tuple[int, Evaluation]],
        elsewhere: Sequence[tuple[float, Evaluation]],
        at_headroom: Estimate | None,
        missing: int,
        window: int,
    ) -> InstanceVerification:
        """Return the verdict on an instance.

        Parameters
        ----------
        by_seed, elsewhere
            Evaluations in the worst window by seed, and on the first seed by the start of other windows.
        at_headroom
            Estimate at the load over (1 - headroom); None if the deadline prevented it.
        missing
            Simulations that the deadline prevented.
        window
            Number of the worst window.
        """
        violations = [f"seed {seed}: {words}" for seed, each in by_seed for words in each.violations]
        violations += [
            f"from {start_s:g} s of the trace: {words}"
            for start_s, each in elsewhere
            for words in each.violations
        ]
        load = f"the load over (1 - headroom {self.problem.workload.headroom:g})"
        lacks_headroom = not violations and at_headroom is not None and at_headroom.starved
        if lacks_headroom:
            robust = self.problem.robust
            slow = "" if robust is None else f" and step times at their quantile {robust:g}"
            violations = [f"a bound breaks at {load}{slow}"]
        undecided = ""
        if missing:
            total = len(by_seed) + missing
            undecided = f"{OUT_OF_TIME} after {len(by_seed)} of {total} simulations"
        elif at_headroom is None:
            undecided = f"{OUT_OF_TIME} before {load}"
        return InstanceVerification(
            tuple(each.result for _, each in by_seed),
            tuple(violations),
            starves=any(each.starves for _, each in (*by_seed, *elsewhere)),
            lacks_headroom=lacks_headroom,
            seeds=tuple(seed for seed, _ in by_seed),
            window=window,
            undecided=undecided,
        )


def _severity(problem: Problem, evaluations: Sequence[Evaluation] | None) -> tuple[int, float]:
    """Return a key by which windows are compared: broken bounds, then the largest use of a bound."""
    slo, known = problem.workload.slo, evaluations or ()
    used = [
        bound_value(each.result, name) / bound
        for each in known
        for name, bound in slo.latency_limits().items()
    ]
    unserved = [1.0 - each.result.served_fraction for each in known]
    broken = sum(len(each.violations) for each in known)
    return broken, max(known_values(used), default=max(unserved, default=-1.0))


def make_verifier(
    problem: Problem, twin: TwinEstimator, seed: int, verify: bool = True, count: int = FRESH_SEEDS
) -> Verifier:
    """Return the verifier of a plan: `count` fresh seeds; one without verification."""
    return Verifier(problem, fresh_seeds(seed, count if verify else 1), twin)


def is_doubtful(evaluations: Iterable[Evaluation]) -> bool:
    """Tell whether simulations that break no bound leave so many requests that other seeds may break one."""
    known = list(evaluations)
    holds = not any(each.violations for each in known)
    return holds and any(each.result.served_fraction < SAFE_SERVED_FRACTION for each in known)


def further_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Return the seeds for a doubtful plan beside verification seeds; none beside fewer than the default."""
    count = len(seeds) if len(seeds) >= FRESH_SEEDS else 0
    return tuple(seeds[-1] + 1 + i for i in range((_TIMES_IF_DOUBTFUL - 1) * count))


def require_seeds(seed: int, count: int) -> None:
    """Check that the planning seed is not negative, and the number of fresh seeds."""
    if seed < 0:
        raise InputError("must be a whole number >= 0", seed, "seed")
    if seed >= _SEEDS:
        raise InputError(f"must be below {_SEEDS}", seed, "seed")
    require_seed_count(count, "seeds")


def fresh_seeds(seed: int, count: int = FRESH_SEEDS) -> tuple[int, ...]:
    """Return the verification seeds that belong to a planning seed."""
    return tuple(_FIRST_FRESH_SEED * (seed + 1) + i for i in range(count))
