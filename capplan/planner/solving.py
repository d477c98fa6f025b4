"""From a workload to a solver's answer: the problem checked, hot adapters split, the solver run and timed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from capplan.errors import InputError
from capplan.planner.estimators import NAMES, TwinEstimator, estimator_name, make_estimator
from capplan.planner.parts import require_memory, split_hot, whole_parts
from capplan.planner.problem import Assignment, Estimator, Problem, complete_engine
from capplan.planner.solvers.description import Asks, Solver, Tools
from capplan.spec import Objective, Profile, Workload


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


def make_problem(workload: Workload, gpus: int | None, profile: Profile | str | None) -> Problem:
    """Return the problem of a workload; `gpus` and `profile` win over what it says itself.

    Raises
    ------
    InputError
        When one of them is missing or does not fit, or the workload wishes for what no solver honours.
    """
    from capplan.datasets import load_profile

    _require_supported(workload)
    count = gpus if gpus is not None else (workload.gpus.count if workload.gpus else None)
    if count is None:
        rule = "is required: say how many GPUs a plan may use (gpus: {count: N} in the workload, or --gpus N)"
        raise InputError(rule, location="gpus")
    if count < 1:
        raise InputError("must be >= 1", count, "gpus")
    wanted = profile if profile is not None else workload.profile
    if wanted is None:
        raise InputError("is required: name a shipped profile or a profile JSON", location="profile")
    loaded = load_profile(wanted) if isinstance(wanted, str | os.PathLike) else wanted
    loaded.require_model(workload.base_model)
    if count < loaded.tp:
        raise InputError(
            f"must be at least the {loaded.tp} GPUs of one instance of profile {loaded.name}", count, "gpus"
        )
    engine = complete_engine(workload.engine)
    _require_prompts_that_fit(workload, engine.max_model_len)
    problem = Problem(workload, loaded, count // loaded.tp, engine, ())
    return replace(problem, parts=whole_parts(problem))


def solve(
    problem: Problem,
    solver: Solver,
    exact: TwinEstimator,
    *,
    estimator: str = "auto",
    seed: int = 0,
    time_limit_s: float,
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
    seed, time_limit_s
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
    nothing = solver.asks is Asks.NOTHING
    quick = exact if nothing else make_estimator(problem, _chosen(solver, estimator), exact)
    started = time.perf_counter()
    require_memory(problem)
    if solver.splits_hot:
        judge: Estimator = exact if solver.asks is Asks.TWIN else quick
        problem = replace(problem, parts=split_hot(problem, judge))
    assignments: Sequence[Assignment] = solver.place(problem, Tools(quick, exact, seed, time_limit_s))
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


def _require_supported(workload: Workload) -> None:
    """Refuse wishes that no solver honours yet, rather than ignore them."""
    if workload.pools:
        raise InputError("no solver handles pools yet: give profile and gpus", location="pools")
    if workload.objective is not Objective.MIN_GPUS:
        raise InputError("only min_gpus is solved yet", workload.objective.value, "objective")
    if workload.previous_plan is not None:
        raise InputError("no solver plans from a previous plan yet", workload.previous_plan, "previous_plan")
    if workload.slo.tpt_over_base is not None:
        raise InputError("no solver handles this bound yet", workload.slo.tpt_over_base, "slo.tpt_over_base")
    for adapter in workload.adapters:
        if adapter.apart_from or adapter.together_with:
            key = "apart_from" if adapter.apart_from else "together_with"
            raise InputError("no solver handles this constraint yet", adapter.name, f"adapters: {key}")


def _require_prompts_that_fit(workload: Workload, max_model_len: int) -> None:
    """Refuse a trace of which so much is too long for the engine that no number of GPUs would do."""
    trace = workload.trace
    if trace is None:
        return
    tokens = trace.prompt_tokens.astype(float) + trace.output_tokens
    too_long = trace.prompt_tokens >= max_model_len
    if tokens[too_long].sum() > (1.0 - workload.slo.served_fraction) * tokens.sum():
        rule = (
            f"must exceed the prompts of the trace: {int(too_long.sum())} of {too_long.size} do not fit, "
            f"the longest has {int(trace.prompt_tokens.max())} tokens"
        )
        raise InputError(rule, max_model_len, "engine.max_model_len")
