"""Verification: the twin runs every GPU of an assignment on fresh seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from capplan.errors import InputError
from capplan.planner.judging import Judged, judge
from capplan.planner.parallel import in_parallel
from capplan.planner.problem import Assignment, Estimator, Problem, replayed_s
from capplan.planner.together import judge_together
from capplan.twin import SimulationResult

FRESH_SEEDS = 5
_FIRST_FRESH_SEED = 1_000_003
"""Verification seeds start here, away from the seed that the search used."""


@dataclass(frozen=True)
class Verdict:
    """What the twin said of one GPU, one result per seed."""

    results: tuple[SimulationResult, ...]
    broken: tuple[str, ...]
    """What was broken, in words; empty when the GPU holds."""

    @property
    def ok(self) -> bool:
        """Whether every bound held on every seed, and with the headroom."""
        return not self.broken


@dataclass(frozen=True)
class Verifier:
    """How plans are verified: at the planned load on fresh seeds, and once with the headroom used up."""

    problem: Problem
    seeds: tuple[int, ...]
    with_headroom: Estimator
    duration_s: float = 3600.0

    def __call__(
        self, assignments: Sequence[Assignment], progress: Callable[[int, int], None] | None = None
    ) -> list[Verdict]:
        """Return a verdict per assignment, each simulated by itself.

        Raises
        ------
        InfeasibleError
            For an assignment that does not fit in memory.
        """
        jobs = [(assignment, seed) for assignment in assignments for seed in self.seeds]
        report = progress or _silent
        judged = in_parallel(self._simulate, jobs, lambda done: report(done, len(jobs)))
        count = len(self.seeds)
        return self._verdicts(assignments, [judged[i : i + count] for i in range(0, len(jobs), count)])

    def whole(
        self, assignments: Sequence[Assignment], progress: Callable[[int, int], None] | None = None
    ) -> list[Verdict]:
        """Return a verdict per assignment of a whole plan: all under one clock, routed by its shares.

        One instance is a cluster by itself; and a bound relative to the base model is judged one by one.
        """
        if len(assignments) == 1 or self.problem.workload.slo.tpt_over_base is not None:
            return self(assignments, progress)
        report = progress or _silent
        by_seed = in_parallel(
            lambda seed: judge_together(self.problem, assignments, seed, self.duration_s),
            self.seeds,
            lambda done: report(done, len(self.seeds)),
        )
        return self._verdicts(assignments, list(zip(*by_seed, strict=True)))

    def _simulate(self, job: tuple[Assignment, int]) -> Judged:
        assignment, seed = job
        return judge(self.problem, assignment, seed, self.duration_s)

    def _verdicts(
        self, assignments: Sequence[Assignment], judged: Sequence[Sequence[Judged]]
    ) -> list[Verdict]:
        kept = in_parallel(self._keeps_headroom, assignments)
        return [self._verdict(*each) for each in zip(judged, kept, strict=True)]

    def _keeps_headroom(self, assignment: Assignment) -> bool:
        return not self.with_headroom(assignment).starved

    def _verdict(self, judged: Sequence[Judged], keeps_headroom: bool) -> Verdict:
        broken = [
            f"seed {seed}: {words}"
            for seed, each in zip(self.seeds, judged, strict=True)
            for words in each.broken
        ]
        if not broken and not keeps_headroom:
            broken = [f"a bound breaks at the load over (1 - headroom {self.problem.workload.headroom:g})"]
        return Verdict(tuple(each.result for each in judged), tuple(broken))


def make_verifier(
    problem: Problem, exact: Estimator, seed: int, verify: bool = True, count: int = FRESH_SEEDS
) -> Verifier:
    """Return how to verify; a trace is replayed as it is, so that one seed says it all.

    Parameters
    ----------
    problem, exact
        What is asked, and who answers for the headroom.
    seed
        The planning seed.
    verify
        Without, one seed does for the predictions.
    count
        How many fresh seeds.
    """
    once = not verify or problem.workload.trace is not None
    duration_s = replayed_s(problem.workload, Verifier.duration_s)
    return Verifier(problem, fresh_seeds(seed, 1 if once else count), exact, duration_s)


def require_seeds(seed: int, count: int) -> None:
    """Refuse seeds that are none.

    Raises
    ------
    InputError
        For a planning seed below 0, or fewer than one fresh seed.
    """
    if seed < 0:
        raise InputError("must be a whole number >= 0", seed, "seed")
    if count < 1:
        raise InputError("must be >= 1", count, "seeds")


def fresh_seeds(seed: int, count: int = FRESH_SEEDS) -> tuple[int, ...]:
    """Return the verification seeds that belong to a planning seed."""
    return tuple(_FIRST_FRESH_SEED * (seed + 1) + i for i in range(count))


def _silent(done: int, total: int) -> None:
    """Report nothing."""
