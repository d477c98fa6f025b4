"""`solve`: run a solver with its estimators, before verification."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from capplan.errors import InfeasibleError, InputError
from capplan.planner.problem._estimate import (
    ESTIMATORS,
    TwinEstimator,
    estimator_name,
    make_estimator,
    make_surrogate,
)
from capplan.planner.problem._execution import OutOfTimeError
from capplan.planner.problem._problem import Assignment, Estimator, Problem, infeasible, require_valid
from capplan.planner.problem._splitting import require_memory, split_hot_adapters
from capplan.planner.search._local_search import fleet_cost, fleet_size_of
from capplan.planner.search._shortage import broken_when_spread
from capplan.planner.solvers._base import RequiredEstimator, Requirement, Solver, SolverContext
from capplan.spec import Objective, Plan, Workload

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
    ends the search, the best answer that it has reported is returned.

    Raises
    ------
    InputError
        If the estimator is unknown or not the solver's, the solver does not support the problem, or its
        placement breaks a rule.
    InfeasibleError
        If there is no answer.
    """
    _require_match(problem, solver, estimator)
    _require_supported(problem.workload, solver)
    _require_number_of_gpus(problem, solver)
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
        fleet = fleet_size_of(self.problem, answer)
        return fleet_cost(self.problem, fleet, self.problem.workload.objective)[:2]


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


def _require_supported(workload: Workload, solver: Solver) -> None:
    """Refuse requirements that the solver does not support."""
    pools = workload.pools
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


def _require_number_of_gpus(problem: Problem, solver: Solver) -> None:
    """Refuse an open number of GPUs for a solver that uses all."""
    if solver.uses_all_gpus and any(pool.is_open for pool in problem.pools):
        raise InputError(f"is required for solver {solver.name}, which uses all GPUs", location="gpus")
