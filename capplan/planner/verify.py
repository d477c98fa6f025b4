"""Verification of assignments by the twin on fresh seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from capplan.errors import InputError
from capplan.models.uncertainty import DRAWS, drawn_profiles
from capplan.planner.deadline import NEVER, Deadline, OutOfTimeError
from capplan.planner.evaluate import (
    SAFE_SERVED_FRACTION,
    Evaluation,
    equal_instances,
    evaluate,
    evaluate_cluster,
    simulate_instances,
)
from capplan.planner.operating_points import rebalancing_of
from capplan.planner.parallel import no_progress, parallel_map, parallel_until
from capplan.planner.problem import (
    SIMULATED_S,
    Assignment,
    Estimate,
    Estimator,
    Problem,
)
from capplan.planner.queues import with_queues
from capplan.spec import Profile
from capplan.spec.limits import require_seed_count
from capplan.spec.plan import OUT_OF_TIME
from capplan.twin import SimulationResult
from capplan.twin.cluster import Rebalancing

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

    @property
    def ok(self) -> bool:
        """Whether every bound holds on every seed and at the load over (1 - headroom)."""
        return not self.violations


@dataclass(frozen=True)
class Verifier:
    """Verification at the planned load on fresh seeds, and once at the load over (1 - headroom)."""

    problem: Problem
    seeds: tuple[int, ...]
    with_headroom: Estimator
    duration_s: float = SIMULATED_S
    deadline: Deadline = NEVER
    """Time at which simulations end."""
    further_seeds: tuple[int, ...] = ()
    """Seeds on which a plan must hold, too, that holds on `seeds` with a queue at the end of one; those that
    the deadline ends do not count."""

    def as_served(self, assignments: Sequence[Assignment]) -> list[Assignment]:
        """Return the instances as they are served: with equal settings to re-balance, and initial queues.

        Raises
        ------
        InfeasibleError
            If the minimum quotas of one do not fit.
        """
        return parallel_map(partial(with_queues, self.problem), equal_instances(self.problem, assignments))

    def __call__(
        self, assignments: Sequence[Assignment], progress: Callable[[int, int], None] = no_progress
    ) -> list[InstanceVerification]:
        """Verify assignments, each simulated by itself.

        Raises
        ------
        InfeasibleError
            If an assignment does not fit in memory, or the minimum quotas of its queues do not.
        OutOfTimeError
            If the deadline passes.
        """
        assignments = self.as_served(assignments)

        def simulate(job: tuple[Assignment, int]) -> Evaluation:
            self.deadline.check()
            return evaluate(self.problem, *job, self.duration_s, deadline=self.deadline)

        def on(seeds: Sequence[int], each: Sequence[Assignment]) -> list[list[Evaluation]]:
            jobs = [(assignment, seed) for assignment in each for seed in seeds]
            evaluations = parallel_map(simulate, jobs, lambda done: progress(done, len(jobs)))
            count = len(seeds)
            return [evaluations[i * count : (i + 1) * count] for i in range(len(each))]

        by_instance = on(self.seeds, assignments)
        doubtful = [i for i, found in enumerate(by_instance) if self.further_seeds and is_doubtful(found)]
        further = on(self.further_seeds, [assignments[i] for i in doubtful])
        for i, found in zip(doubtful, further, strict=True):
            by_instance[i] += found
        return self._collect(self.seeds + self.further_seeds, by_instance, self._at_headroom(assignments))

    def whole(
        self, assignments: Sequence[Assignment], progress: Callable[[int, int], None] = no_progress
    ) -> list[InstanceVerification]:
        """Verify a complete plan: all instances under one clock, with its router and re-balancing.

        A single instance is simulated alone. Seeds that the deadline ends are left out, which the violations
        say of `seeds`.

        Raises
        ------
        OutOfTimeError
            If it ends all of them.
        """
        assignments = self.as_served(assignments)
        rebalance = self._rebalancing(assignments)

        def simulate(seed: int) -> list[Evaluation]:
            duration_s, deadline = self.duration_s, self.deadline
            if len(assignments) == 1:
                return [evaluate(self.problem, assignments[0], seed, duration_s, deadline=deadline)]
            return evaluate_cluster(self.problem, assignments, seed, duration_s, deadline, rebalance)

        def on(seeds: Sequence[int]) -> list[list[Evaluation] | None]:
            return parallel_until(simulate, seeds, self.deadline, lambda done: progress(done, len(seeds)))

        by_seed = dict(zip(self.seeds, on(self.seeds), strict=True))
        known = {seed: each for seed, each in by_seed.items() if each is not None}
        missing = len(by_seed) - len(known)
        if not known:
            raise OutOfTimeError
        together = self.problem.workload.stores_everywhere and len(assignments) > 1
        at_headroom = (self._together_at_headroom if together else self._at_headroom)(assignments)
        if self.further_seeds and not missing and is_doubtful(chain.from_iterable(known.values())):
            further = zip(self.further_seeds, on(self.further_seeds), strict=True)
            known |= {seed: each for seed, each in further if each is not None}
        by_instance = list(zip(*known.values(), strict=True))
        return self._collect(tuple(known), by_instance, at_headroom, missing)

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
            problem = self.problem.with_profiles(profiles)
            duration_s, deadline = self.duration_s, self.deadline
            return simulate_instances(problem, assignments, seed, duration_s, deadline, rebalance)

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

    def _at_headroom(self, assignments: Sequence[Assignment]) -> list[Estimate | None]:
        """Return the estimates at the load over (1 - headroom); None for those that the deadline prevents."""
        return parallel_until(self.with_headroom, assignments, self.deadline)

    def _together_at_headroom(self, assignments: Sequence[Assignment]) -> list[Estimate | None]:
        """Return the same for instances among which a router chooses, on the first seed."""
        slow = self.problem.pessimistic
        scaled = slow.workload.at_load(1.0 / (1.0 - slow.workload.headroom))
        problem, deadline = replace(slow, workload=scaled), self.deadline
        duration_s = scaled.horizon_s(self.duration_s)
        try:
            deadline.check()
            found = evaluate_cluster(problem, assignments, self.seeds[0], duration_s, deadline)
        except OutOfTimeError:
            return [None] * len(assignments)
        return [Estimate(each.result.throughput_tok_s, bool(each.violations)) for each in found]

    def _collect(
        self,
        seeds: tuple[int, ...],
        evaluations: Sequence[Sequence[Evaluation]],
        at_headroom: Sequence[Estimate | None],
        missing: int = 0,
    ) -> list[InstanceVerification]:
        """Return the verdicts on instances; the deadline prevented `missing` seeds after these."""
        return [
            self._verify(seeds[: len(each)], each, estimate, missing)
            for each, estimate in zip(evaluations, at_headroom, strict=True)
        ]

    def _verify(
        self,
        seeds: tuple[int, ...],
        evaluations: Sequence[Evaluation],
        at_headroom: Estimate | None,
        missing: int,
    ) -> InstanceVerification:
        violations = [
            f"seed {seed}: {words}"
            for seed, each in zip(seeds, evaluations, strict=True)
            for words in each.violations
        ]
        load = f"the load over (1 - headroom {self.problem.workload.headroom:g})"
        lacks_headroom = not violations and at_headroom is not None and at_headroom.starved
        if lacks_headroom:
            robust = self.problem.robust
            slow = "" if robust is None else f" and step times at their quantile {robust:g}"
            violations = [f"a bound breaks at {load}{slow}"]
        if missing:
            violations.append(f"{OUT_OF_TIME} after {len(seeds)} of {len(seeds) + missing} seeds")
        elif at_headroom is None:
            violations.append(f"{OUT_OF_TIME} before {load}")
        return InstanceVerification(
            tuple(each.result for each in evaluations),
            tuple(violations),
            starves=any(each.starves for each in evaluations),
            lacks_headroom=lacks_headroom,
            seeds=seeds,
        )


def make_verifier(
    problem: Problem, twin: Estimator, seed: int, verify: bool = True, count: int = FRESH_SEEDS
) -> Verifier:
    """Return the verifier of a plan: `count` fresh seeds; one for a trace, or without verification."""
    once = not verify or problem.workload.trace is not None
    duration_s = problem.workload.horizon_s(Verifier.duration_s)
    return Verifier(problem, fresh_seeds(seed, 1 if once else count), twin, duration_s)


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
