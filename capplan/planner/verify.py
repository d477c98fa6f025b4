"""Verification of assignments by the twin on fresh seeds, and repair of instances that fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from capplan.errors import InfeasibleError, InputError
from capplan.models.uncertainty import DRAWS, drawn_profiles
from capplan.planner.deadline import NEVER, Deadline, OutOfTimeError
from capplan.planner.evaluate import (
    Evaluation,
    equal_instances,
    evaluate,
    evaluate_cluster,
    simulate_instances,
)
from capplan.planner.knobs import KNOBS, knob_grid, tune_knobs
from capplan.planner.operating_points import rebalancing_of
from capplan.planner.parallel import no_progress, parallel_map, parallel_until
from capplan.planner.problem import (
    SIMULATED_S,
    AdapterShare,
    Assignment,
    Estimate,
    Estimator,
    Problem,
)
from capplan.planner.queues import with_queues
from capplan.planner.search.data import AdapterGroup, adapter_groups
from capplan.planner.slots import choose_slots, slot_candidates
from capplan.planner.validity import broken_rules
from capplan.spec import Profile
from capplan.spec.limits import require_seed_count
from capplan.spec.plan import OUT_OF_TIME
from capplan.twin import SimulationResult
from capplan.twin.cluster import Rebalancing

FRESH_SEEDS = 5
_FIRST_FRESH_SEED = 1_000_003
_SEEDS = 2**64
"""Verification seeds start here, away from the seed that the search used."""


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

        jobs = [(assignment, seed) for assignment in assignments for seed in self.seeds]
        evaluations = parallel_map(simulate, jobs, lambda done: progress(done, len(jobs)))
        count = len(self.seeds)
        by_instance = [evaluations[i : i + count] for i in range(0, len(jobs), count)]
        return self._collect(assignments, self.seeds, by_instance)

    def whole(
        self, assignments: Sequence[Assignment], progress: Callable[[int, int], None] = no_progress
    ) -> list[InstanceVerification]:
        """Verify a complete plan: all instances under one clock, with its router and re-balancing.

        A single instance is simulated alone. Seeds that the deadline ends are left out, which the violations
        say.

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

        by_seed = parallel_until(
            simulate, self.seeds, self.deadline, lambda done: progress(done, len(self.seeds))
        )
        known = [(seed, each) for seed, each in zip(self.seeds, by_seed, strict=True) if each is not None]
        if not known:
            raise OutOfTimeError
        seeds, evaluations = zip(*known, strict=True)
        return self._collect(assignments, seeds, list(zip(*evaluations, strict=True)))

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

    def _collect(
        self,
        assignments: Sequence[Assignment],
        seeds: tuple[int, ...],
        evaluations: Sequence[Sequence[Evaluation]],
    ) -> list[InstanceVerification]:
        at_headroom = parallel_until(self.with_headroom, assignments, self.deadline)
        return [
            self._verify(seeds, each, estimate)
            for each, estimate in zip(evaluations, at_headroom, strict=True)
        ]

    def _verify(
        self, seeds: tuple[int, ...], evaluations: Sequence[Evaluation], at_headroom: Estimate | None
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
        if len(seeds) < len(self.seeds):
            violations.append(f"{OUT_OF_TIME} after {len(seeds)} of {len(self.seeds)} seeds")
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


_ROUNDS = 12
_ROUNDS_PER_GPU = 2


@dataclass(frozen=True)
class RepairResult:
    """Repaired assignments, their verification, and the changes."""

    assignments: tuple[Assignment, ...]
    verifications: tuple[InstanceVerification, ...]
    changes: tuple[str, ...]


def fit_slots_in_memory(
    problem: Problem, assignments: Sequence[Assignment], twin: Estimator
) -> tuple[tuple[Assignment, ...], tuple[str, ...]]:
    """Replace numbers of slots that do not fit in memory; return assignments and changes."""
    fitted, changes = list(assignments), []
    for gpu, assignment in enumerate(assignments):
        if problem.fits_in_memory(assignment):
            continue
        fitting = slot_candidates(problem, assignment.shares, twin, assignment.pool, assignment)
        if fitting:
            fitted[gpu] = replace(assignment, a_max=fitting[0])
            changes.append(f"gpu {gpu}: {assignment.a_max} -> {fitting[0]} slots, for want of memory")
    return tuple(fitted), tuple(changes)


def repair(
    verifier: Verifier,
    assignments: Sequence[Assignment],
    verifications: Sequence[InstanceVerification],
    twin: Estimator,
    before: Sequence[str] = (),
) -> RepairResult:
    """Change failing instances until all hold or no change is left.

    A failing instance first gets every other number of slots that holds by the twin on the search's seed,
    then the open knobs of the least utilization. If none is verified, a quarter of its load moves to an
    unused instance, or to the one with the least load.
    `before` lists the changes made so far.
    """
    problem = verifier.problem
    current, current_verifications = dict(enumerate(assignments)), dict(enumerate(verifications))
    changes = list(before)
    for _ in range(_ROUNDS + _ROUNDS_PER_GPU * problem.gpus):
        failing = next((i for i, verification in current_verifications.items() if not verification.ok), None)
        if failing is None:
            break
        other = _other_slots(current[failing], verifier, twin) or _other_knobs(
            current[failing], verifier, twin
        )
        if other is not None:
            changes.append(f"gpu {failing}: {_changed_settings(problem, current[failing], other[0])}")
            current[failing], current_verifications[failing] = other
            continue
        moved = _move_load(problem, current, failing, twin)
        if not moved or any(broken_rules(problem, list((current | moved).values()))):
            break
        target = next(i for i in moved if i != failing)
        moving = len(current[failing].shares) - len(moved[failing].shares)
        changes.append(f"gpu {failing}: {moving} adapters moved to gpu {target}")
        current |= moved
        current_verifications |= dict(zip(moved, verifier(list(moved.values())), strict=True))
    return RepairResult(tuple(current.values()), tuple(current_verifications.values()), tuple(changes))


def _other_slots(
    assignment: Assignment, verifier: Verifier, twin: Estimator
) -> tuple[Assignment, InstanceVerification] | None:
    for a_max in slot_candidates(verifier.problem, assignment.shares, twin, assignment.pool, assignment):
        candidate = replace(assignment, a_max=a_max)
        if a_max != assignment.a_max and not twin(candidate).starved:
            (verification,) = verifier([candidate])
            if verification.ok:
                return candidate, verification
    return None


def _other_knobs(
    assignment: Assignment, verifier: Verifier, twin: Estimator
) -> tuple[Assignment, InstanceVerification] | None:
    """Return the instance with the open knobs of the least utilization, if it is verified with them."""
    if not knob_grid(verifier.problem, assignment.pool).is_open:
        return None
    candidate, estimate = tune_knobs(verifier.problem, assignment, twin)
    if candidate == assignment or estimate.starved:
        return None
    (verification,) = verifier([candidate])
    return (candidate, verification) if verification.ok else None


def _changed_settings(problem: Problem, before: Assignment, after: Assignment) -> str:
    """Return the change of an instance's settings as text."""
    if after.a_max != before.a_max:
        return f"{before.a_max} -> {after.a_max} slots"
    old, new = problem.engine_args(before), problem.engine_args(after)
    changed = [knob for knob in KNOBS if getattr(old, knob) != getattr(new, knob)]
    return ", ".join(f"{knob} {getattr(old, knob)} -> {getattr(new, knob)}" for knob in changed)


def _move_load(
    problem: Problem, current: Mapping[int, Assignment], failing: int, twin: Estimator
) -> dict[int, Assignment]:
    """Return both instances after a move of load; empty if there is no target."""
    moving = _lightest_quarter(problem, current[failing].shares)
    place = _target(problem, current, failing, moving)
    if not moving or place is None:
        return {}
    target, pool = place
    staying = tuple(share for share in current[failing].shares if share not in moving)
    # An unused instance starts with the engine settings of the failing one.
    there = current[target] if target in current else replace(current[failing], shares=(), pool=pool)
    moved: dict[int, Assignment] = {}
    for gpu, before, shares in (
        (failing, current[failing], staying),
        (target, there, (*there.shares, *moving)),
    ):
        a_max = choose_slots(problem, shares, twin, twin, before.pool, before)
        fitting = (
            [a_max] if a_max is not None else slot_candidates(problem, shares, twin, before.pool, before)
        )
        if not fitting:
            return {}
        moved[gpu] = replace(before, shares=shares, a_max=fitting[0])
        if not _has_quotas(problem, moved[gpu]):
            return {}
    return moved


def _has_quotas(problem: Problem, assignment: Assignment) -> bool:
    """Tell whether the minimum quotas of the instance's queues fit."""
    try:
        with_queues(problem, assignment)
    except InfeasibleError:
        return False
    return True


def _load_tok_s(problem: Problem, shares: Iterable[AdapterShare]) -> float:
    return sum(map(problem.offered_tok_s, shares))


def _lightest_quarter(problem: Problem, shares: Sequence[AdapterShare]) -> tuple[AdapterShare, ...]:
    """Return the lightest groups that make a quarter of the load, but never all shares."""
    quarter = _load_tok_s(problem, shares) / 4
    groups = adapter_groups(replace(problem, shares=tuple(shares)))
    moving: list[AdapterShare] = []

    def weight(group: AdapterGroup) -> tuple[float, str, int]:
        first = group.shares[0]
        return _load_tok_s(problem, group.shares), first.name, first.number

    for group in sorted(groups, key=weight):
        if len(moving) + len(group.shares) < len(shares) and _load_tok_s(problem, moving) < quarter:
            moving += group.shares
    return tuple(moving)


def _target(
    problem: Problem, current: Mapping[int, Assignment], failing: int, moving: Sequence[AdapterShare]
) -> tuple[int, int] | None:
    """Return the target and its pool: an unused instance, else the allowed one with the least load."""
    groups = adapter_groups(replace(problem, shares=tuple(moving)))
    pools = frozenset(range(len(problem.pools))).intersection(*(group.pools for group in groups))
    used = Counter(assignment.pool for assignment in current.values())
    free = [pool for pool in sorted(pools) if used[pool] < problem.pools[pool].instances]
    if free:
        own = current[failing].pool
        return len(current), own if own in free else free[0]
    conflicts = frozenset[str]().union(*(group.conflicts | group.names for group in groups))
    others = [
        (_load_tok_s(problem, assignment.shares), gpu)
        for gpu, assignment in current.items()
        if gpu != failing
        and assignment.pool in pools
        and conflicts.isdisjoint(p.name for p in assignment.shares)
    ]
    gpu = min(others, default=(0.0, None))[1]
    return None if gpu is None else (gpu, current[gpu].pool)
