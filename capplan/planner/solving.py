"""From a problem to a solver's answer: wishes checked, hot adapters split, the solver run and timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from capplan.errors import InputError
from capplan.planner.estimators import NAMES, TwinEstimator, estimator_name, make_estimator, make_hint
from capplan.planner.parts import require_memory, split_hot
from capplan.planner.problem import Assignment, Estimator, Problem
from capplan.planner.solvers.description import Asks, Solver, Tools, Wish
from capplan.spec import Objective, Plan, Workload

_MARGIN = 0.01
_LEAST_MARGIN = 0.003
"""Served fraction beyond the bound that a careful search wants, as other seeds differ by about as much, and
that any search wants, as the worst of many seeds is worse than that of a few."""


@dataclass(frozen=True)
class Answer:
    """What a solver says."""

    problem: Problem
    """With the parts that the solver was given."""
    assignments: tuple[Assignment, ...]
    estimator: str
    """Who was asked about single GPUs."""
    solve_s: float
    """Seconds that splitting and placing took."""


def solve(
    problem: Problem,
    solver: Solver,
    exact: TwinEstimator,
    *,
    estimator: str = "auto",
    seed: int = 0,
    time_limit_s: float,
    previous: Plan | None = None,
) -> Answer:
    """Run a solver on whole adapters, or on shares of the hot ones where it takes them.

    Parameters
    ----------
    problem
        With whole adapters.
    solver
        Who answers.
    exact
        The twin.
    estimator
        Name of the estimator that the user asks for.
    seed, time_limit_s, previous
        For the solver.

    Raises
    ------
    InputError
        For an estimator that does not exist or does not go with the solver, and where the solver is not for
        this problem.
    InfeasibleError
        When there is no answer, with the reason.
    """
    _require_match(problem, solver, estimator)
    _require_honoured(problem.workload, solver)
    nothing = solver.asks is Asks.NOTHING
    quick = exact if nothing else make_estimator(problem, _chosen(solver, estimator), exact)
    started = time.perf_counter()
    require_memory(problem)
    if solver.splits_hot:
        judge: Estimator = exact if solver.asks is Asks.TWIN else quick
        problem = replace(problem, parts=split_hot(problem, judge))

    def tools(asked: Problem, twin: TwinEstimator, quick: Estimator) -> Tools:
        if solver.asks is not Asks.TWIN:
            return Tools(quick, twin, seed, time_limit_s)
        careful, exact = replace(twin, margin=_MARGIN), replace(twin, margin=_LEAST_MARGIN)
        return Tools(quick, exact, seed, time_limit_s, make_hint(asked, twin), careful, previous, renew)

    def renew(asked: Problem) -> Tools:
        twin = TwinEstimator(asked, seed)
        return tools(asked, twin, make_estimator(asked, _chosen(solver, estimator), twin))

    assignments: Sequence[Assignment] = solver.place(problem, tools(problem, exact, quick))
    return Answer(
        problem,
        tuple(assignments),
        "none" if nothing else estimator_name(quick),
        time.perf_counter() - started,
    )


def _chosen(solver: Solver, estimator: str) -> str:
    return solver.estimator if estimator == "auto" else estimator


def _require_match(problem: Problem, solver: Solver, estimator: str) -> None:
    if estimator not in NAMES:
        raise InputError(f"must be one of {', '.join(NAMES)}", estimator, "estimator")
    if solver.estimator not in ("auto", _chosen(solver, estimator)):
        rule = f"must be {solver.estimator} for solver {solver.name}, or auto"
        raise InputError(rule, estimator, "estimator")
    if problem.fixed_a_max is not None and not solver.fixed_a_max:
        rule = f"must be left open for solver {solver.name}, which chooses it"
        raise InputError(rule, problem.fixed_a_max, "engine.max_loras")


def _require_honoured(workload: Workload, solver: Solver) -> None:
    """Refuse wishes that the solver does not grant, rather than ignore them."""
    for wish, value in _wishes(workload).items():
        if wish not in solver.honours:
            rule = f"solver {solver.name} does not heed this: capplan does"
            raise InputError(rule, value, wish.value)


def _wishes(workload: Workload) -> dict[Wish, str]:
    """Return what a workload asks for beyond the fewest of equal GPUs, with the value to name in an error."""
    wishes: dict[Wish, str] = {}
    if len(workload.pools) > 1:
        wishes[Wish.POOLS] = ", ".join(pool.name for pool in workload.pools)
    if workload.objective is not Objective.MIN_GPUS and len(workload.pools) != 1:
        wishes[Wish.OBJECTIVE] = workload.objective.value
    if workload.previous_plan is not None:
        wishes[Wish.PREVIOUS_PLAN] = workload.previous_plan
    for adapter in workload.adapters:
        if adapter.apart_from:
            wishes.setdefault(Wish.APART, adapter.name)
        if adapter.together_with:
            wishes.setdefault(Wish.TOGETHER, adapter.name)
        if adapter.max_replicas is not None:
            wishes.setdefault(Wish.MAX_REPLICAS, adapter.name)
    return wishes
