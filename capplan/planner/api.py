"""`plan`: place the adapters of a workload on GPUs and verify the placement."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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

Progress = Callable[[str, int, int], None]


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
    """Place the adapters of a workload on GPUs, and have the twin confirm every GPU.

    Parameters
    ----------
    workload
        What is to be served, with its wishes.
    gpus
        Most GPUs to use; None: as the workload says.
    profile
        Profile, name of a shipped one or path of a JSON; None: as the workload says.
    solver
        A name of `capplan.planner.SOLVERS`, or a solver of your own. ``capplan`` (ours: the fewest GPUs,
        evenly loaded) unless given.
    estimator
        What the solver asks: a surrogate (``best``, ``forest`` or ``tree``), the ``twin``, or ``auto`` (the
        best surrogate where it knows enough).
    seed
        Same seed, same plan.
    verify
        Run the twin on fresh seeds. Without, the plan says that it is unverified, and nothing is mended.
    repair
        Mend GPUs on which the twin disagrees with the solver; otherwise their verdict stands in the plan.
    seeds
        How many fresh seeds every GPU is verified on; a trace is replayed once.
    time_limit_s
        When a solver that may take long gives up (``dlora-proactive``, ``milp``) or answers with the best so
        far (``capplan``), in seconds.
    progress
        Called with (stage, done, total).

    Raises
    ------
    InputError
        When a parameter or a wish breaks a rule.
    InfeasibleError
        When the GPUs do not suffice, with the reason.
    """
    problem = make_problem(workload, gpus, profile)
    previous = read_previous(workload)
    chosen = find_solver(solver)
    require_seeds(seed, seeds)
    report = progress or _silent
    report("placing", 0, 1)
    exact = TwinEstimator(problem, seed)
    answer = solve(
        problem,
        chosen,
        exact,
        estimator=estimator,
        seed=seed,
        time_limit_s=time_limit_s,
        previous=previous,
    )
    problem = answer.problem
    report("placing", 1, 1)
    verifier = make_verifier(problem, exact, seed, verify, seeds)
    outcome = _verified(problem, answer.assignments, verifier, exact, verify and repair, report)
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
    exact: TwinEstimator,
    mend: bool,
    report: Progress,
) -> RepairResult:
    fitted, changes = fit_slots_in_memory(problem, assignments, exact) if mend else (tuple(assignments), ())
    _require_memory(problem, fitted)
    verdicts = verifier.whole(fitted, lambda done, total: report("verifying", done, total))
    if not mend or all(verdict.ok for verdict in verdicts):
        return RepairResult(fitted, tuple(verdicts), changes)
    mended = repair(problem, fitted, verdicts, verifier, exact, changes)
    if mended.assignments == fitted:
        return mended
    again = verifier.whole(mended.assignments, lambda done, total: report("verifying", done, total))
    return RepairResult(mended.assignments, tuple(again), mended.changes)


def _require_memory(problem: Problem, assignments: Sequence[Assignment]) -> None:
    """Refuse a raw answer with a GPU that would not start: there is nothing to predict."""
    for number, assignment in enumerate(assignments):
        if not problem.fits_in_memory(assignment):
            raise InfeasibleError(
                f"memory: GPU {number} of the answer would not start: {assignment.a_max} slots of rank "
                f"{problem.s_max(assignment.shares)} leave no room for one request of max_model_len "
                f"{problem.engine.max_model_len}, or its adapters do not fit on the host",
                reason="memory",
            )


def _silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


_CONSERVATIVE_MARGIN = 0.01
_MARGIN = 0.003
"""Served fraction beyond the bound that a careful search wants, as other seeds differ by about as much, and
that any search wants, as the worst of many seeds is worse than that of a few."""


@dataclass(frozen=True)
class SolverRun:
    """What a solver says."""

    problem: Problem
    """With the shares that the solver was given."""
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
) -> SolverRun:
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
    _require_supported(problem.workload, solver)
    nothing = solver.required_estimator is RequiredEstimator.NONE
    quick = exact if nothing else make_estimator(problem, _estimator_of(solver, estimator), exact)
    started = time.perf_counter()
    require_memory(problem)
    if solver.splits_hot:
        judge: Estimator = exact if solver.required_estimator is RequiredEstimator.TWIN else quick
        problem = replace(problem, shares=split_hot_adapters(problem, judge))

    def context(asked: Problem, twin: TwinEstimator, quick: Estimator) -> SolverContext:
        if solver.required_estimator is not RequiredEstimator.TWIN:
            return SolverContext(quick, twin, seed, time_limit_s)
        careful, exact = replace(twin, margin=_CONSERVATIVE_MARGIN), replace(twin, margin=_MARGIN)
        return SolverContext(
            quick, exact, seed, time_limit_s, make_surrogate(asked, twin), careful, previous, renew
        )

    def renew(asked: Problem) -> SolverContext:
        twin = TwinEstimator(asked, seed)
        return context(asked, twin, make_estimator(asked, _estimator_of(solver, estimator), twin))

    assignments: Sequence[Assignment] = solver.place(problem, context(problem, exact, quick))
    return SolverRun(
        problem,
        tuple(assignments),
        "none" if nothing else estimator_name(quick),
        time.perf_counter() - started,
    )


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
    """Refuse wishes that the solver does not grant, rather than ignore them."""
    for wish, value in _requirements(workload).items():
        if wish not in solver.supports:
            rule = f"solver {solver.name} does not heed this: capplan does"
            raise InputError(rule, value, wish.value)


def _requirements(workload: Workload) -> dict[Requirement, str]:
    """Return what a workload asks for beyond the fewest of equal GPUs, with the value to name in an error."""
    wishes: dict[Requirement, str] = {}
    if len(workload.pools) > 1:
        wishes[Requirement.POOLS] = ", ".join(pool.name for pool in workload.pools)
    if workload.objective is not Objective.MIN_GPUS and len(workload.pools) != 1:
        wishes[Requirement.OBJECTIVE] = workload.objective.value
    if workload.previous_plan is not None:
        wishes[Requirement.PREVIOUS_PLAN] = workload.previous_plan
    for adapter in workload.adapters:
        if adapter.apart_from:
            wishes.setdefault(Requirement.APART, adapter.name)
        if adapter.together_with:
            wishes.setdefault(Requirement.TOGETHER, adapter.name)
        if adapter.max_replicas is not None:
            wishes.setdefault(Requirement.MAX_REPLICAS, adapter.name)
    return wishes
