"""`plan`: place the adapters of a workload on GPUs and verify the placement."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from capplan.errors import InfeasibleError, InputError
from capplan.planner.assemble import build_plan
from capplan.planner.estimate import (
    ESTIMATORS,
    TwinEstimator,
    estimator_name,
    make_estimator,
    make_surrogate,
)
from capplan.planner.parallel import Progress, no_progress
from capplan.planner.previous import read_previous
from capplan.planner.problem import Assignment, Estimator, Problem, make_problem
from capplan.planner.solvers import find_solver
from capplan.planner.solvers.base import (
    DEFAULT_TIME_LIMIT_S,
    RequiredEstimator,
    Requirement,
    Solver,
    SolverContext,
)
from capplan.planner.splitting import require_memory, split_hot_adapters
from capplan.planner.verify import (
    FRESH_SEEDS,
    RepairResult,
    Verifier,
    fit_slots_in_memory,
    make_verifier,
    repair,
    require_seeds,
)
from capplan.spec import Objective, Plan, Profile, Workload


def plan(
    workload: Workload,
    *,
    gpus: int | None = None,
    profile: Profile | str | None = None,
    solver: Solver | str = "capplan",
    estimator: str = "auto",
    seed: int = 0,
    verify: bool = True,
    repair: bool = True,
    seeds: int = FRESH_SEEDS,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    progress: Progress | None = None,
) -> Plan:
    """Place the adapters of a workload on GPUs; the twin verifies every GPU.

    Parameters
    ----------
    workload
        Adapters, traffic, objectives and constraints.
    gpus
        Maximum number of GPUs; None: the workload's.
    profile
        Profile, name of a shipped one or path of a JSON; None: the workload's.
    solver
        A name of `capplan.planner.SOLVERS`, or a solver of your own.
    estimator
        A surrogate (``best``, ``forest`` or ``tree``), the ``twin``, or ``auto``: the best surrogate if it
        covers the workload.
    seed
        Same seed, same plan.
    verify
        Simulate on fresh seeds. Otherwise the plan is marked unverified, and nothing is repaired.
    repair
        Repair GPUs that fail verification; otherwise the plan records the failure.
    seeds
        Number of fresh seeds; a trace is replayed once.
    time_limit_s
        Time after which slow solvers stop: without an answer (``dlora-proactive``, ``milp``) or with the best
        so far (``capplan``).
    progress
        Called with (stage, done, total).

    Raises
    ------
    InputError
        If a parameter or the workload is invalid.
    InfeasibleError
        If the GPUs do not suffice; `reason` tells why.
    """
    problem = make_problem(workload, gpus, profile)
    previous = read_previous(workload)
    chosen = find_solver(solver)
    require_seeds(seed, seeds)
    report = progress or no_progress
    report("placing", 0, 1)
    twin = TwinEstimator(problem, seed)
    answer = solve(
        problem,
        chosen,
        twin,
        estimator=estimator,
        seed=seed,
        time_limit_s=time_limit_s,
        previous=previous,
    )
    problem = answer.problem
    report("placing", 1, 1)
    verifier = make_verifier(problem, twin, seed, verify, seeds)
    outcome = _verified(problem, answer.assignments, verifier, twin, verify and repair, report)
    return build_plan(
        problem,
        outcome.assignments,
        outcome.verifications,
        seeds=verifier.seeds,
        duration_s=verifier.duration_s,
        verified=verify,
        previous=previous,
        notes={
            "solver": chosen.name,
            "estimator": answer.estimator,
            "seed": seed,
            "repairs": list(outcome.changes),
        },
    )


def _verified(
    problem: Problem,
    assignments: Sequence[Assignment],
    verifier: Verifier,
    twin: TwinEstimator,
    repair_failing: bool,
    report: Progress,
) -> RepairResult:
    fitted, changes = (
        fit_slots_in_memory(problem, assignments, twin) if repair_failing else (tuple(assignments), ())
    )
    _require_memory(problem, fitted)
    verdicts = verifier.whole(fitted, lambda done, total: report("verifying", done, total))
    if not repair_failing or all(verdict.ok for verdict in verdicts):
        return RepairResult(fitted, tuple(verdicts), changes)
    repaired = repair(problem, fitted, verdicts, verifier, twin, changes)
    if repaired.assignments == fitted:
        return repaired
    again = verifier.whole(repaired.assignments, lambda done, total: report("verifying", done, total))
    return RepairResult(repaired.assignments, tuple(again), repaired.changes)


def _require_memory(problem: Problem, assignments: Sequence[Assignment]) -> None:
    """Refuse an answer with an instance that does not start."""
    for number, assignment in enumerate(assignments):
        if not problem.fits_in_memory(assignment):
            raise InfeasibleError(
                f"memory: GPU {number} of the answer would not start: {assignment.a_max} slots of rank "
                f"{problem.s_max(assignment.shares)} leave no room for one request of max_model_len "
                f"{problem.engine.max_model_len}, or its adapters do not fit on the host",
                reason="memory",
            )


_CONSERVATIVE_MARGIN = 0.01
"""Served fraction beyond the bound required first, since other seeds differ by about as much."""
_MARGIN = 0.003
"""The same required always, since the worst of many seeds is worse than that of a few."""


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


def solve(
    problem: Problem,
    solver: Solver,
    twin: TwinEstimator,
    *,
    estimator: str = "auto",
    seed: int = 0,
    time_limit_s: float,
    previous: Plan | None = None,
) -> SolverRun:
    """Run a solver on whole adapters, or on shares of hot ones if it supports them.

    Parameters
    ----------
    problem
        Problem with whole adapters.
    solver
        Solver to run.
    twin
        Digital twin.
    estimator
        Name of the estimator selected by the user.
    seed, time_limit_s, previous
        Passed to the solver.

    Raises
    ------
    InputError
        If the estimator is unknown or not the solver's, or the solver does not support the problem.
    InfeasibleError
        If there is no answer.
    """
    _require_match(problem, solver, estimator)
    _require_supported(problem.workload, solver)
    required, name = solver.required_estimator, _estimator_of(solver, estimator)
    none = required is RequiredEstimator.NONE
    selected = twin if none else make_estimator(problem, name, twin)
    started = time.perf_counter()
    require_memory(problem)
    if solver.splits_hot:
        deciding: Estimator = twin if required is RequiredEstimator.TWIN else selected
        problem = replace(problem, shares=split_hot_adapters(problem, deciding))

    def context(problem: Problem, twin: TwinEstimator, estimator: Estimator) -> SolverContext:
        if required is not RequiredEstimator.TWIN:
            return SolverContext(estimator, twin, seed, time_limit_s)
        return SolverContext(
            estimator,
            replace(twin, margin=_MARGIN),
            seed,
            time_limit_s,
            surrogate=make_surrogate(problem, twin),
            conservative_twin=replace(twin, margin=_CONSERVATIVE_MARGIN),
            previous=previous,
            renew=renew,
        )

    def renew(problem: Problem) -> SolverContext:
        twin = TwinEstimator(problem, seed)
        return context(problem, twin, make_estimator(problem, name, twin))

    assignments = tuple(solver.place(problem, context(problem, twin, selected)))
    solve_s = time.perf_counter() - started
    return SolverRun(problem, assignments, "none" if none else estimator_name(selected), solve_s)


def _estimator_of(solver: Solver, estimator: str) -> str:
    return solver.estimator if estimator == "auto" else estimator


def _require_match(problem: Problem, solver: Solver, estimator: str) -> None:
    if estimator not in ESTIMATORS:
        raise InputError(f"must be one of {', '.join(ESTIMATORS)}", estimator, "estimator")
    if solver.estimator not in ("auto", _estimator_of(solver, estimator)):
        rule = f"must be {solver.estimator} for solver {solver.name}, or auto"
        raise InputError(rule, estimator, "estimator")
    if problem.fixed_a_max is not None and not solver.fixed_a_max:
        rule = f"must be left open for solver {solver.name}, which chooses it"
        raise InputError(rule, problem.fixed_a_max, "engine.max_loras")


def _require_supported(workload: Workload, solver: Solver) -> None:
    """Refuse requirements that the solver does not support."""
    for requirement, value in _requirements(workload).items():
        if requirement not in solver.supports:
            rule = f"not supported by solver {solver.name}; use --solver capplan"
            raise InputError(rule, value, requirement.value)


def _requirements(workload: Workload) -> dict[Requirement, str]:
    """Return the requirements of a workload, each with its value for errors."""
    requirements: dict[Requirement, str] = {}
    if len(workload.pools) > 1:
        requirements[Requirement.POOLS] = ", ".join(pool.name for pool in workload.pools)
    if workload.objective is not Objective.MIN_GPUS and len(workload.pools) != 1:
        requirements[Requirement.OBJECTIVE] = workload.objective.value
    if workload.previous_plan is not None:
        requirements[Requirement.PREVIOUS_PLAN] = workload.previous_plan
    for adapter in workload.adapters:
        if adapter.apart_from:
            requirements.setdefault(Requirement.APART, adapter.name)
        if adapter.together_with:
            requirements.setdefault(Requirement.TOGETHER, adapter.name)
        if adapter.max_replicas is not None:
            requirements.setdefault(Requirement.MAX_REPLICAS, adapter.name)
    return requirements
