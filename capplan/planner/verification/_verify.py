"""Verification of assignments by the twin on fresh seeds, and their repair."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Final, NamedTuple, TypeAlias

from capplan.errors import InputError
from capplan.models import DRAWS, drawn_profiles
from capplan.planner.problem._bound import lower_bound_instances
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
    AdapterShare,
    Assignment,
    Estimate,
    Estimator,
    Problem,
    broken_rules,
    distinct_adapters,
    whole_adapters,
)
from capplan.planner.problem._settings import (
    KNOBS,
    choose_slots,
    has_open_knobs,
    max_fitting_slots,
    rank_slots,
    tune_knobs,
    with_queues,
)
from capplan.planner.search._placement import (
    AdapterGroup,
    adapter_groups,
    balanced,
    balanced_by_rank,
    build_search_data,
)
from capplan.spec import OUT_OF_TIME, Objective, Profile, Verdict, require_seed_count
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
        """Verify assignments that fit in memory, each simulated by itself.

        Raises `OutOfTimeError` at the deadline.
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
        verdict undecided; `OutOfTimeError` if it ends all of them.
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
        scale = problem.load_with_headroom
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
        """Return the verdict on an instance whose worst window is number `window`.

        Evaluations in it are by seed, those on the first seed `elsewhere` by the start of the window. The
        deadline prevented `missing` simulations, and that `at_headroom` if it is None.
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


Placement: TypeAlias = frozenset[tuple[frozenset[AdapterShare], int, int]]

_ROUNDS: Final = 12
_ROUNDS_PER_GPU: Final = 2
_MOST_MOVES: Final = 12
"""Moves of load that are verified in a round."""


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
        fitting = list(rank_slots(problem, assignment, twin))
        if fitting:
            fitted[gpu] = replace(assignment, a_max=fitting[0])
            changes.append(f"gpu {gpu}: {assignment.a_max} -> {fitting[0]} slots, for want of memory")
    return tuple(fitted), tuple(changes)


@dataclass(frozen=True)
class _Fleet:
    """Instances and their verdicts by number."""

    assignments: Mapping[int, Assignment]
    verdicts: Mapping[int, InstanceVerification]

    @property
    def failing(self) -> int | None:
        """Return the first instance that fails."""
        return next((number for number, verdict in self.verdicts.items() if not verdict.ok), None)

    @property
    def cost(self) -> tuple[int, float]:
        """Return the number of instances that fail, and of their broken bounds per seed."""
        failing = [verdict for verdict in self.verdicts.values() if not verdict.ok]
        return len(failing), sum(len(each.violations) / max(1, len(each.results)) for each in failing)

    @property
    def placement(self) -> Placement:
        """Return what is placed together, with how many slots, in which pool."""
        instances = self.assignments.values()
        return frozenset((frozenset(each.shares), each.a_max, each.pool) for each in instances)

    def changed(
        self, assignments: Mapping[int, Assignment], verdicts: Mapping[int, InstanceVerification]
    ) -> _Fleet:
        """Return the fleet with some instances changed."""
        return _Fleet({**self.assignments, **assignments}, {**self.verdicts, **verdicts})


def repair(
    verifier: Verifier,
    assignments: Sequence[Assignment],
    verifications: Sequence[InstanceVerification],
    twin: Estimator,
    before: Sequence[str] = (),
) -> RepairResult:
    """Change failing instances until all hold or no change is left; return the best placement seen.

    A failing instance first gets every other number of slots that holds by the twin on the search's seed,
    then the open knobs of the least utilization. If none is verified, load moves: a quarter of it to an
    unused instance or the one with the least load, else its lightest group to any that holds with it. If none
    holds, the quarter moves nevertheless, but no placement is tried twice.
    `before` lists the changes made so far.
    """
    problem = verifier.problem
    fleet = best = _Fleet(dict(enumerate(assignments)), dict(enumerate(verifications)))
    seen, changes = {fleet.placement}, list(before)
    kept = len(changes)
    for _ in range(_ROUNDS + _ROUNDS_PER_GPU * problem.gpus):
        failing = fleet.failing
        if failing is None:
            break
        old = fleet.assignments[failing]
        other = _other_slots(old, verifier, twin) or _other_knobs(old, verifier, twin)
        if other is not None:
            changes.append(f"gpu {failing}: {_changed_settings(problem, old, other[0])}")
            fleet = fleet.changed({failing: other[0]}, {failing: other[1]})
        else:
            moved = _with_load_moved(verifier, fleet, failing, twin, seen)
            if moved is None:
                break
            changes.append(_moved_adapters(fleet, moved, failing))
            fleet = moved
        seen.add(fleet.placement)
        if fleet.cost < best.cost:
            best, kept = fleet, len(changes)
    return RepairResult(
        tuple(best.assignments.values()), tuple(best.verdicts.values()), tuple(changes[:kept])
    )


def _moved_adapters(before: _Fleet, after: _Fleet, source: int) -> str:
    """Return a move of load as text."""
    count = len(before.assignments[source].shares) - len(after.assignments[source].shares)
    target = next(n for n, a in after.assignments.items() if n != source and a != before.assignments.get(n))
    return f"gpu {source}: {count} adapter{'' if count == 1 else 's'} moved to gpu {target}"


def _other_slots(
    assignment: Assignment, verifier: Verifier, twin: Estimator
) -> tuple[Assignment, InstanceVerification] | None:
    for a_max in rank_slots(verifier.problem, assignment, twin):
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
    if not has_open_knobs(verifier.problem, assignment.pool):
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


def _with_load_moved(
    verifier: Verifier,
    fleet: _Fleet,
    failing: int,
    twin: Estimator,
    seen: Container[Placement],
) -> _Fleet | None:
    """Return the fleet after the first move of load with which the target holds, else after the first move.

    None if every move leads to a placement that was seen, breaks a rule or does not fit.
    """
    problem, first = verifier.problem, None
    moves = _moves(problem, fleet.assignments, failing)
    for moving, target, pool in islice(moves, _MOST_MOVES):
        moved = _move(problem, fleet.assignments, failing, moving, (target, pool), twin)
        after = fleet.changed(moved, {})
        if not moved or after.placement in seen or any(broken_rules(problem, [*after.assignments.values()])):
            continue
        verdicts = dict(zip(moved, verifier([*moved.values()]), strict=True))
        after = after.changed({}, verdicts)
        if verdicts[target].ok:
            return after
        first = first or after
    return first


def _moves(
    problem: Problem, current: Mapping[int, Assignment], failing: int
) -> Iterator[tuple[tuple[AdapterShare, ...], int, int]]:
    """Yield the shares to move from a failing instance, the target and its pool, in the order of trial."""
    shares = current[failing].shares
    quarter = _lightest_quarter(problem, shares)
    if quarter:
        yield from ((quarter, *place) for place in islice(_targets(problem, current, failing, quarter), 1))
    for group in _by_weight(problem, shares):
        if group.shares != quarter and len(group.shares) < len(shares) and _load_tok_s(problem, group.shares):
            for place in _targets(problem, current, failing, group.shares):
                yield group.shares, *place


def _move(
    problem: Problem,
    current: Mapping[int, Assignment],
    failing: int,
    moving: Sequence[AdapterShare],
    place: tuple[int, int],
    twin: Estimator,
) -> dict[int, Assignment]:
    """Return both instances after a move of shares to an instance and its pool; empty if one does not fit."""
    target, pool = place
    staying = tuple(share for share in current[failing].shares if share not in moving)
    # An unused instance starts with the engine settings of the failing one.
    there = current[target] if target in current else replace(current[failing], shares=(), pool=pool)
    moved: dict[int, Assignment] = {}
    for gpu, before, shares in (
        (failing, current[failing], staying),
        (target, there, (*there.shares, *moving)),
    ):
        after = replace(before, shares=shares)
        a_max = choose_slots(problem, shares, twin, twin, before)
        fitting = [a_max] if a_max is not None else list(rank_slots(problem, after, twin))
        if not fitting:
            return {}
        moved[gpu] = replace(after, a_max=fitting[0])
    return moved


def _load_tok_s(problem: Problem, shares: Iterable[AdapterShare]) -> float:
    return sum(map(problem.offered_tok_s, shares))


def _by_weight(problem: Problem, shares: Sequence[AdapterShare]) -> list[AdapterGroup]:
    """Return the groups of shares, the lightest first."""

    def weight(group: AdapterGroup) -> tuple[float, str, int]:
        first = group.shares[0]
        return _load_tok_s(problem, group.shares), first.name, first.number

    return sorted(adapter_groups(replace(problem, shares=tuple(shares))), key=weight)


def _lightest_quarter(problem: Problem, shares: Sequence[AdapterShare]) -> tuple[AdapterShare, ...]:
    """Return the lightest groups that make a quarter of the load, but never all shares."""
    quarter = _load_tok_s(problem, shares) / 4
    moving: list[AdapterShare] = []
    for group in _by_weight(problem, shares):
        if len(moving) + len(group.shares) < len(shares) and _load_tok_s(problem, moving) < quarter:
            moving += group.shares
    return tuple(moving)


def _targets(
    problem: Problem, current: Mapping[int, Assignment], failing: int, moving: Sequence[AdapterShare]
) -> Iterator[tuple[int, int]]:
    """Yield targets and their pools: an unused instance, else the allowed ones, the least loaded first."""
    groups = adapter_groups(replace(problem, shares=tuple(moving)))
    pools = frozenset(range(len(problem.pools))).intersection(*(group.pools for group in groups))
    used = Counter(assignment.pool for assignment in current.values())
    free = [pool for pool in sorted(pools) if used[pool] < problem.pools[pool].instances]
    if free:
        own = current[failing].pool
        yield len(current), own if own in free else free[0]
        return
    conflicts = frozenset[str]().union(*(group.conflicts | group.names for group in groups))
    others = [
        (_load_tok_s(problem, assignment.shares), gpu)
        for gpu, assignment in current.items()
        if gpu != failing
        and assignment.pool in pools
        and conflicts.isdisjoint(p.name for p in assignment.shares)
    ]
    for _, gpu in sorted(others):
        yield gpu, current[gpu].pool


def evened_out(
    verifier: Verifier,
    outcome: RepairResult,
    twin: Estimator,
    progress: Callable[[int, int], None] = no_progress,
) -> RepairResult:
    """Return a placement with more slots if that of the outcome fails, and on the fewest instances.

    A search by shares keeps every instance within the bounds by its own part of the traffic, with its bursts.
    Where all instances store all adapters, a router that reads their state sends the requests of a burst
    elsewhere, so that fewer instances may keep the bounds together; each is then beyond them at its shares.

    Requests come of adapters that are not placed, too. For the fewest GPUs of one pool, without a plan in
    force, one instance less at a time is tried, with a balanced placement, of equal ranks if it holds.
    """
    problem = verifier.problem
    workload, bound = problem.workload, lower_bound_instances(problem)
    if workload.objective is not Objective.MIN_GPUS or len(problem.pools) > 1 or workload.previous_plan:
        bound = len(outcome.assignments)
    try:
        if not all(each.ok for each in outcome.verifications):
            found = _verified(verifier, outcome, _with_slots(problem, outcome.assignments), progress)
            if found is None:
                return outcome
            outcome = found
        while len(outcome.assignments) > bound:
            fewer = _verified(verifier, outcome, _on_one_less(problem, outcome, twin), progress)
            if fewer is None:
                break
            outcome = fewer
    except OutOfTimeError:
        pass
    return outcome


def _verified(
    verifier: Verifier,
    before: RepairResult,
    placements: Iterable[tuple[Assignment, ...]],
    progress: Callable[[int, int], None],
) -> RepairResult | None:
    """Return the first placement that is verified; None if there is none."""
    for assignments in placements:
        verdicts = tuple(verifier.whole(assignments, progress))
        if all(each.ok for each in verdicts):
            slots = ", ".join(str(each.a_max) for each in assignments)
            change = f"{len(assignments)} GPUs with {slots} slots, among which the router evens out the load"
            return RepairResult(assignments, verdicts, (*before.changes, change))
    return None


def _on_one_less(
    problem: Problem, outcome: RepairResult, twin: Estimator
) -> Iterator[tuple[Assignment, ...]]:
    """Yield placements of whole adapters on one instance less, with the other settings of the first one."""
    data = build_search_data(replace(problem, shares=whole_adapters(problem)))
    like, pools = outcome.assignments[0], [0] * (len(outcome.assignments) - 1)
    tried: list[list[set[int]]] = []
    for initial in (balanced_by_rank, balanced):
        state = initial(data, pools)
        if state is None or not all(state.members) or state.members in tried:
            continue
        tried.append(state.members)
        placed = [replace(like, shares=data.shares(frozenset(members))) for members in state.members]
        slots = [list(rank_slots(problem, each, twin))[:1] for each in placed]
        if all(slots):
            best = tuple(replace(each, a_max=own[0]) for each, own in zip(placed, slots, strict=True))
            yield best
            yield from _with_slots(problem, best)


def _with_slots(problem: Problem, assignments: Sequence[Assignment]) -> Iterator[tuple[Assignment, ...]]:
    """Yield the placement with slots for all adapters placed, and for all stored, as far as memory allows."""
    if problem.fixed_a_max is not None or not problem.has_slots:
        return
    tried = {tuple(each.a_max for each in assignments)}
    for limits in (
        [distinct_adapters(each.shares) for each in assignments],
        [len(problem.stored(each).keys() - {problem.workload.base_model}) for each in assignments],
    ):
        pairs = zip(assignments, limits, strict=True)
        slots = tuple(max_fitting_slots(problem, each, limit) for each, limit in pairs)
        if all(slots) and slots not in tried:
            tried.add(slots)
            yield tuple(replace(each, a_max=own) for each, own in zip(assignments, slots, strict=True))
