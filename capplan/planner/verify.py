"""Verification of assignments by the twin on fresh seeds, and repair of instances that fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from capplan.errors import InputError
from capplan.planner.evaluate import Evaluation, evaluate, evaluate_cluster
from capplan.planner.parallel import parallel_map
from capplan.planner.problem import AdapterShare, Assignment, Estimator, Problem, horizon_s
from capplan.planner.search.data import AdapterGroup, adapter_groups
from capplan.planner.slots import choose_slots, slot_candidates
from capplan.twin import SimulationResult

FRESH_SEEDS = 5

_FIRST_FRESH_SEED = 1_000_003

"""Verification seeds start here, away from the seed that the search used."""


@dataclass(frozen=True)
class InstanceVerification:
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
    ) -> list[InstanceVerification]:
        """Return a verdict per assignment, each simulated by itself.

        Raises
        ------
        InfeasibleError
            For an assignment that does not fit in memory.
        """
        jobs = [(assignment, seed) for assignment in assignments for seed in self.seeds]
        report = progress or _silent
        evaluation = parallel_map(self._simulate, jobs, lambda done: report(done, len(jobs)))
        count = len(self.seeds)
        return self._verdicts(assignments, [evaluation[i : i + count] for i in range(0, len(jobs), count)])

    def whole(
        self, assignments: Sequence[Assignment], progress: Callable[[int, int], None] | None = None
    ) -> list[InstanceVerification]:
        """Return a verdict per assignment of a whole plan: all under one clock, routed by its shares.

        One instance is a cluster by itself; and a bound relative to the base model is evaluation one by one.
        """
        if len(assignments) == 1 or self.problem.workload.slo.tpt_over_base is not None:
            return self(assignments, progress)
        report = progress or _silent
        by_seed = parallel_map(
            lambda seed: evaluate_cluster(self.problem, assignments, seed, self.duration_s),
            self.seeds,
            lambda done: report(done, len(self.seeds)),
        )
        return self._verdicts(assignments, list(zip(*by_seed, strict=True)))

    def _simulate(self, job: tuple[Assignment, int]) -> Evaluation:
        assignment, seed = job
        return evaluate(self.problem, assignment, seed, self.duration_s)

    def _verdicts(
        self, assignments: Sequence[Assignment], evaluation: Sequence[Sequence[Evaluation]]
    ) -> list[InstanceVerification]:
        kept = parallel_map(self._keeps_headroom, assignments)
        return [self._verdict(*each) for each in zip(evaluation, kept, strict=True)]

    def _keeps_headroom(self, assignment: Assignment) -> bool:
        return not self.with_headroom(assignment).starved

    def _verdict(self, evaluation: Sequence[Evaluation], keeps_headroom: bool) -> InstanceVerification:
        broken = [
            f"seed {seed}: {words}"
            for seed, each in zip(self.seeds, evaluation, strict=True)
            for words in each.broken
        ]
        if not broken and not keeps_headroom:
            broken = [f"a bound breaks at the load over (1 - headroom {self.problem.workload.headroom:g})"]
        return InstanceVerification(tuple(each.result for each in evaluation), tuple(broken))


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
    duration_s = horizon_s(problem.workload, Verifier.duration_s)
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


_ROUNDS = 12

_ROUNDS_PER_GPU = 2


@dataclass(frozen=True)
class RepairResult:
    """An assignment with its verdicts, and what was done to it."""

    assignments: tuple[Assignment, ...]
    verdicts: tuple[InstanceVerification, ...]
    changes: tuple[str, ...]


def fit_slots_in_memory(
    problem: Problem, assignments: Sequence[Assignment], exact: Estimator
) -> tuple[tuple[Assignment, ...], tuple[str, ...]]:
    """Return the assignments, with other slots where theirs do not fit in memory, and the changes made.

    Where no number fits, an assignment stays as it is.
    """
    fitted, changes = list(assignments), []
    for gpu, assignment in enumerate(assignments):
        if problem.fits_in_memory(assignment):
            continue
        fitting = slot_candidates(problem, assignment.shares, exact, assignment.pool)
        if fitting:
            fitted[gpu] = replace(assignment, a_max=fitting[0])
            changes.append(f"gpu {gpu}: {assignment.a_max} -> {fitting[0]} slots, for want of memory")
    return tuple(fitted), tuple(changes)


def repair(
    problem: Problem,
    assignments: Sequence[Assignment],
    verdicts: Sequence[InstanceVerification],
    verifier: Verifier,
    exact: Estimator,
    before: Sequence[str] = (),
) -> RepairResult:
    """Change GPUs that fail until all hold, or nothing more can be tried.

    A failing GPU first gets every other number of slots with which `exact` believes in it. If none holds, a
    quarter of its load goes to an unused GPU, or to the lightest of the others.

    Parameters
    ----------
    problem, assignments, verdicts
        What was asked and answered, and what the twin said of it.
    verifier, exact
        Whom changes are tried on.
    before
        Changes that were made already.
    """
    current, evaluation = dict(enumerate(assignments)), dict(enumerate(verdicts))
    changes = list(before)
    for _ in range(_ROUNDS + _ROUNDS_PER_GPU * problem.gpus):
        failing = next((i for i, verdict in evaluation.items() if not verdict.ok), None)
        if failing is None:
            break
        other = _other_slots(problem, current[failing], verifier, exact)
        if other is not None:
            changes.append(f"gpu {failing}: {current[failing].a_max} -> {other[0].a_max} slots")
            current[failing], evaluation[failing] = other
            continue
        moved = _move_load(problem, current, failing, exact)
        if not moved:
            break
        target = next(i for i in moved if i != failing)
        gone = len(current[failing].shares) - len(moved[failing].shares)
        changes.append(f"gpu {failing}: {gone} adapters moved to gpu {target}")
        current |= moved
        evaluation |= dict(zip(moved, verifier(list(moved.values())), strict=True))
    return RepairResult(tuple(current.values()), tuple(evaluation.values()), tuple(changes))


def _other_slots(
    problem: Problem, assignment: Assignment, verifier: Verifier, exact: Estimator
) -> tuple[Assignment, InstanceVerification] | None:
    for a_max in slot_candidates(problem, assignment.shares, exact, assignment.pool):
        candidate = replace(assignment, a_max=a_max)
        if a_max != assignment.a_max and not exact(candidate).starved:
            (verdict,) = verifier([candidate])
            if verdict.ok:
                return candidate, verdict
    return None


def _move_load(
    problem: Problem, current: Mapping[int, Assignment], failing: int, exact: Estimator
) -> dict[int, Assignment]:
    """Return the two GPUs after a move of load from one to the other; nothing when there is no place."""
    moving = _lightest_quarter(problem, current[failing].shares)
    place = _target(problem, current, failing, moving)
    if not moving or place is None:
        return {}
    target, pool = place
    staying = tuple(share for share in current[failing].shares if share not in moving)
    there = current[target].shares if target in current else ()
    moved: dict[int, Assignment] = {}
    for gpu, shares, of in ((failing, staying, current[failing].pool), (target, (*there, *moving), pool)):
        a_max = choose_slots(problem, shares, exact, exact, of)
        fitting = [a_max] if a_max is not None else slot_candidates(problem, shares, exact, of)
        if not fitting:
            return {}
        moved[gpu] = Assignment(shares, fitting[0], pool=of)
    return moved


def _lightest_quarter(problem: Problem, shares: Sequence[AdapterShare]) -> tuple[AdapterShare, ...]:
    """Return the lightest units that together make a quarter of the load, but never all shares."""
    total = sum(map(problem.offered_tok_s, shares))
    units = adapter_groups(replace(problem, shares=tuple(shares)))
    moving: list[AdapterShare] = []

    def load(unit: AdapterGroup) -> float:
        return sum(map(problem.offered_tok_s, unit.shares))

    for unit in sorted(units, key=lambda u: (load(u), u.shares[0].name, u.shares[0].number)):
        if (
            len(moving) + len(unit.shares) < len(shares)
            and sum(map(problem.offered_tok_s, moving)) < total / 4
        ):
            moving += unit.shares
    return tuple(moving)


def _target(
    problem: Problem, current: Mapping[int, Assignment], failing: int, moving: Sequence[AdapterShare]
) -> tuple[int, int] | None:
    """Return where to, and in which pool: an unused instance, else the lightest that may have what moves."""
    units = adapter_groups(replace(problem, shares=tuple(moving)))
    pools = frozenset(range(len(problem.pools))).intersection(*(unit.pools for unit in units))
    used = Counter(assignment.pool for assignment in current.values())
    free = [pool for pool in sorted(pools) if used[pool] < problem.pools[pool].instances]
    if free:
        own = current[failing].pool
        return len(current), own if own in free else free[0]
    foes = frozenset[str]().union(*(unit.conflicts | unit.names for unit in units))
    others = [
        (sum(map(problem.offered_tok_s, assignment.shares)), gpu)
        for gpu, assignment in current.items()
        if gpu != failing and assignment.pool in pools and foes.isdisjoint(p.name for p in assignment.shares)
    ]
    gpu = min(others, default=(0.0, None))[1]
    return None if gpu is None else (gpu, current[gpu].pool)
