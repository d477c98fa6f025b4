"""Solver interface, and `solve`: run a solver with its estimators, before verification."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from capplan.errors import InfeasibleError, InputError
from capplan.planner.problem._estimate import (
    ESTIMATORS,
    TwinEstimator,
    estimator_name,
    make_estimator,
    make_surrogate,
)
from capplan.planner.problem._evaluate import NOTHING_BREAKS, failure_of
from capplan.planner.problem._execution import NEVER, Deadline, OutOfTimeError, no_progress
from capplan.planner.problem._problem import (
    AdapterShare,
    Assignment,
    Estimator,
    Problem,
    distinct_adapters,
    infeasible,
    require_valid,
)
from capplan.planner.problem._settings import max_fitting_slots
from capplan.planner.problem._splitting import require_memory, split_hot_adapters
from capplan.planner.search._local_search import fleet_cost, fleet_size_of
from capplan.planner.search._placement import balanced, build_search_data
from capplan.spec import Objective, Plan

DEFAULT_TIME_LIMIT_S = 60.0


class Requirement(StrEnum):
    """Workload feature beyond the fewest of equal GPUs; the value is its key in the workload file."""

    POOLS = "pools"
    OBJECTIVE = "objective"
    APART = "adapters: apart_from"
    TOGETHER = "adapters: together_with"
    MAX_REPLICAS = "adapters: max_replicas"
    PREVIOUS_PLAN = "previous_plan"


class RequiredEstimator(StrEnum):
    """Estimator that a solver requires."""

    NONE = "none"
    ESTIMATOR = "estimator"
    TWIN = "estimator and twin"


@dataclass(frozen=True)
class SolverContext:
    """Estimators and limits of a solver run."""

    estimator: Estimator
    """Estimator selected by the user, such as a surrogate."""
    twin: Estimator
    """Digital twin."""
    seed: int = 0
    """Seed of every random choice."""
    time_limit_s: float = DEFAULT_TIME_LIMIT_S
    """Time after which a slow solver raises, or returns its best placement."""
    surrogate: Estimator | None = None
    """Surrogate that ignores latency bounds; None: use `estimator`."""
    conservative_twin: Estimator | None = None
    """Twin with a larger margin to the served fraction; None: use `twin`."""
    previous: Plan | None = None
    """Plan in force, from which adapters are moved as little as possible."""
    insufficient_gpus: int = 0
    """Number of GPUs that is known not to suffice."""
    deadline: Deadline = NEVER
    """Time at which estimates raise `OutOfTimeError`."""
    on_answer: Callable[[Sequence[Assignment]], None] = no_progress
    """Called with each answer that is found during the search, which is used if the deadline ends it."""
    on_alternative: Callable[[Sequence[Assignment]], None] = no_progress
    """Called with each confirmed placement that moves fewer adapters than the answer, at a higher cost."""
    on_cut: Callable[[], None] = no_progress
    """Called if the time limit ends the search, so that the answer is the best by then."""
    renew: Callable[[Problem], SolverContext] | None = None
    """Returns the context for another load on the same instances; None: this one."""

    def for_problem(self, problem: Problem) -> SolverContext:
        """Return the context for another load on the same instances."""
        return self if self.renew is None else self.renew(problem)


@dataclass(frozen=True)
class Solver:
    """A named placement algorithm."""

    name: str
    """Name for users."""
    summary: str
    """One line about the algorithm."""
    source: str
    """Paper and section, or other origin."""
    place: Callable[[Problem, SolverContext], Sequence[Assignment]]
    """Called with problem and context. Returns one assignment per GPU used, or raises `InfeasibleError`. The
    same problem, seed and estimates give the same assignments."""
    required_estimator: RequiredEstimator = RequiredEstimator.NONE
    """Estimator that it calls. With the twin, the twin also decides which adapters are split."""
    splits_hot: bool = False
    """Whether adapters too hot for one GPU are split before `place` is called."""
    confirms: bool = False
    """Whether every GPU of an answer fits in memory and holds by its estimator. Other answers are raw."""
    divides: bool = False
    """Whether it divides adapters into shares of its own."""
    fixed_a_max: bool = True
    """Whether it supports a number of slots fixed by the workload."""
    uses_all_gpus: bool = False
    """Whether it places on all GPUs, also for a small load. Their number must then be given."""
    estimator: str = "auto"
    """Name of its own estimator; "auto": the user's choice."""
    supports: frozenset[Requirement] = frozenset({Requirement.MAX_REPLICAS})
    """Supported requirements. A workload with any other is refused."""


_CONSERVATIVE_MARGIN = 0.01
"""Served fraction required beyond the bound at first: the difference between seeds."""
_MARGIN = 0.003
"""Served fraction always required beyond the bound: the worst of many seeds is worse than that of a few."""


@dataclass(frozen=True)
class SolverRun:
    """Answer of a solver before verification."""

    problem: Problem
    """Problem with the shares that the solver placed."""
    assignments: tuple[Assignment, ...]
    estimator: str
    """Name of the estimator."""
    solve_s: float
    """Wall time of splitting and placing."""
    is_cut: bool = False
    """Whether a time limit ended the search, so that a longer one may find a better answer."""
    alternatives: tuple[tuple[Assignment, ...], ...] = ()
    """Confirmed placements that move fewer adapters of the plan in force, at a higher cost."""


def solve(
    problem: Problem,
    solver: Solver,
    twin: TwinEstimator,
    *,
    estimator: str = "auto",
    seed: int = 0,
    time_limit_s: float,
    previous: Plan | None = None,
    insufficient_gpus: int = 0,
) -> SolverRun:
    """Run a solver on whole adapters, or on shares of hot ones if it supports them.

    `estimator` is the name selected by the user; the other options are passed to the solver. If a deadline
    ends the search, the best answer that it has reported is returned. A problem that the solver does not
    support is an `InputError`, and so is a placement that breaks a rule.
    """
    _require_match(problem, solver, estimator)
    _require_supported(problem, solver)
    required = solver.required_estimator
    name = solver.estimator if estimator == "auto" else estimator
    none = required is RequiredEstimator.NONE
    answers = _Answers(problem)
    alternatives: list[tuple[Assignment, ...]] = []
    twin = replace(twin, deadline=replace(twin.deadline, is_missing=lambda: not answers.best))
    selected = twin if none else make_estimator(problem, name, twin)
    started = time.perf_counter()
    require_memory(problem)
    try:
        if solver.splits_hot:
            deciding: Estimator = twin if required is RequiredEstimator.TWIN else selected
            shares = split_hot_adapters(problem, deciding)
            problem = problem if shares is problem.shares else replace(problem, shares=shares)
        context = SolverContext(
            selected,
            twin,
            seed,
            time_limit_s,
            previous=previous,
            insufficient_gpus=insufficient_gpus,
            deadline=twin.deadline,
            on_answer=answers.add,
            on_alternative=lambda other: alternatives.append(tuple(other)),
            on_cut=answers.cut,
        )
        if required is RequiredEstimator.TWIN:
            context = _add_twins(context, problem, twin, name)
        assignments = tuple(solver.place(problem, context))
        if answers.is_cut:
            assignments = answers.better(assignments)
    except (OutOfTimeError, InfeasibleError) as error:
        if not answers.best:
            if isinstance(error, InfeasibleError):
                raise
            words = f"no placement found by solver {solver.name} in {time_limit_s:g} s"
            hint = "a longer --time-limit may find one"
            words = "; ".join(filter(None, (words, broken_when_spread(problem), hint)))
            raise infeasible("time", words) from None
        assignments = answers.best
        if isinstance(error, OutOfTimeError) or error.reason == "time":
            answers.cut()
    solve_s = time.perf_counter() - started
    require_valid(problem, assignments, solver.name)
    used = "none" if none else estimator_name(selected)
    return SolverRun(problem, assignments, used, solve_s, answers.is_cut, tuple(alternatives))


@dataclass
class _Answers:
    """Best of the answers that a solver has reported."""

    problem: Problem
    best: tuple[Assignment, ...] = ()
    is_cut: bool = False

    def cut(self) -> None:
        self.is_cut = True

    def better(self, answer: tuple[Assignment, ...]) -> tuple[Assignment, ...]:
        """Return the answer, or the best one reported if that is cheaper."""
        return self.best if self.best and self._cost(self.best) < self._cost(answer) else answer

    def add(self, answer: Sequence[Assignment]) -> None:
        if not self.best or self._cost(answer) <= self._cost(self.best):
            self.best = tuple(answer)

    def _cost(self, answer: Sequence[Assignment]) -> tuple[float, ...]:
        return fleet_cost(self.problem, fleet_size_of(self.problem, answer))[:2]


def _add_twins(context: SolverContext, problem: Problem, twin: TwinEstimator, name: str) -> SolverContext:
    """Return the context of a solver that confirms instances with the twin."""

    def renew(other: Problem) -> SolverContext:
        other_twin = TwinEstimator(other, context.seed, deadline=twin.deadline)
        selected = make_estimator(other, name, other_twin)
        return _add_twins(replace(context, estimator=selected), other, other_twin, name)

    return replace(
        context,
        twin=replace(twin, margin=_MARGIN),
        conservative_twin=replace(twin, margin=_CONSERVATIVE_MARGIN),
        surrogate=make_surrogate(problem, twin),
        renew=renew,
    )


def _require_match(problem: Problem, solver: Solver, estimator: str) -> None:
    if estimator not in ESTIMATORS:
        raise InputError(f"must be one of {', '.join(ESTIMATORS)}", estimator, "estimator")
    if solver.estimator != "auto" and estimator not in ("auto", solver.estimator):
        rule = f"must be {solver.estimator} for solver {solver.name}, or auto"
        raise InputError(rule, estimator, "estimator")
    if problem.fixed_a_max is not None and not solver.fixed_a_max:
        rule = f"must be left open for solver {solver.name}, which chooses it"
        raise InputError(rule, problem.fixed_a_max, "engine.max_loras")


def _require_supported(problem: Problem, solver: Solver) -> None:
    """Refuse requirements that the solver does not support, and an open number of GPUs if it uses all."""
    workload, pools = problem.workload, problem.workload.pools
    plain = workload.objective is Objective.MIN_GPUS or len(pools) == 1
    required: list[tuple[Requirement, object]] = [
        (Requirement.POOLS, ", ".join(pool.name for pool in pools) if len(pools) > 1 else None),
        (Requirement.OBJECTIVE, None if plain else workload.objective.value),
        (Requirement.PREVIOUS_PLAN, workload.previous_plan),
    ]
    for adapter in workload.adapters:
        required += [
            (Requirement.APART, adapter.apart_from and adapter.name),
            (Requirement.TOGETHER, adapter.together_with and adapter.name),
            (Requirement.MAX_REPLICAS, adapter.max_replicas and adapter.name),
        ]
    for requirement, value in required:
        if value and requirement not in solver.supports:
            rule = f"not supported by solver {solver.name}; use --solver capplan"
            raise InputError(rule, value, requirement.value)
    if solver.uses_all_gpus and any(pool.is_open for pool in problem.pools):
        raise InputError(f"is required for solver {solver.name}, which uses all GPUs", location="gpus")


_MAX_INSTANCES: Final = 64
"""Instances up to which the load is spread."""


def broken_when_spread(problem: Problem) -> str:
    """Return the bound that breaks with the load spread evenly, as text, on the fullest instance with one.

    An instance has a slot for each adapter, as far as memory allows. Empty if the constraints allow no even
    spread, there are many instances, or the deadline of the problem passes.
    """
    pools = [number for number, pool in enumerate(problem.pools) for _ in range(pool.instances)]
    if len(pools) > _MAX_INSTANCES:
        return ""
    data = build_search_data(problem)
    state = balanced(data, pools)
    if state is None:
        return ""
    different: dict[tuple[bytes, int], tuple[AdapterShare, ...]] = {}
    for instance in np.argsort(-state.loads(), kind="stable").tolist():
        members, pool = frozenset(state.members[instance]), int(state.pools[instance])
        if members:  # fewer adapters than instances leave some empty
            different.setdefault((data.kind_key(members), pool), data.shares(members))
    try:
        failures = (_failure(problem, shares, pool) for (_, pool), shares in different.items())
        return f"spread evenly, {next(filter(None, failures), NOTHING_BREAKS)}"
    except OutOfTimeError:
        return ""


def _failure(problem: Problem, shares: tuple[AdapterShare, ...], pool: int) -> str:
    """Return what an instance with these shares breaks, as text; empty if nothing."""
    adapters = distinct_adapters(shares)
    one_slot = Assignment(shares, min(1, adapters), pool=pool)
    slots = problem.fixed_a_max or max_fitting_slots(problem, one_slot, adapters)
    instance = replace(one_slot, a_max=slots)
    if slots < one_slot.a_max or not problem.fits_in_memory(instance):
        return "the adapter slots leave no room for one request"
    failure = failure_of(problem, instance)
    crowd = f" with {adapters} adapters in {slots} slot(s)" if slots < adapters else ""
    return f"{failure} at the load over (1 - headroom){crowd}" if failure else ""
