"""`plan`: a workload in, a plan out that the twin has confirmed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from capplan.errors import InfeasibleError
from capplan.planner.assemble import build_plan
from capplan.planner.estimators import TwinEstimator
from capplan.planner.posing import make_problem
from capplan.planner.previous import read_previous
from capplan.planner.problem import Assignment, Problem
from capplan.planner.repair import Repaired, fit_slots, repair
from capplan.planner.solvers import find_solver
from capplan.planner.solvers.description import DEFAULT_TIME_LIMIT_S, Solver
from capplan.planner.solving import solve
from capplan.planner.verify import FRESH_SEEDS, Verifier, make_verifier, require_seeds
from capplan.spec import Plan, Profile, Workload

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
        outcome.verdicts,
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
) -> Repaired:
    fitted, changes = fit_slots(problem, assignments, exact) if mend else (tuple(assignments), ())
    _require_memory(problem, fitted)
    verdicts = verifier.whole(fitted, lambda done, total: report("verifying", done, total))
    if not mend or all(verdict.ok for verdict in verdicts):
        return Repaired(fitted, tuple(verdicts), changes)
    mended = repair(problem, fitted, verdicts, verifier, exact, changes)
    if mended.assignments == fitted:
        return mended
    again = verifier.whole(mended.assignments, lambda done, total: report("verifying", done, total))
    return Repaired(mended.assignments, tuple(again), mended.changes)


def _require_memory(problem: Problem, assignments: Sequence[Assignment]) -> None:
    """Refuse a raw answer with a GPU that would not start: there is nothing to predict."""
    for number, assignment in enumerate(assignments):
        if not problem.fits_in_memory(assignment):
            raise InfeasibleError(
                f"memory: GPU {number} of the answer would not start: {assignment.a_max} slots of rank "
                f"{problem.s_max(assignment.parts)} leave no room for one request of max_model_len "
                f"{problem.engine.max_model_len}, or its adapters do not fit on the host",
                reason="memory",
            )


def _silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""
