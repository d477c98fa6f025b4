"""`plan`: a workload in, a plan out that the twin has confirmed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from capplan.errors import InputError
from capplan.planner.assemble import build_plan
from capplan.planner.balanced import solve_balanced
from capplan.planner.estimators import TwinEstimator, estimator_name, make_estimator
from capplan.planner.greedy import solve_greedy
from capplan.planner.parts import split_hot, whole_parts
from capplan.planner.problem import Assignment, Problem, complete_engine
from capplan.planner.repair import Repaired, repair
from capplan.planner.verify import Verifier, fresh_seeds
from capplan.spec import Objective, Plan, Profile, Workload

SOLVERS = ("capplan", "greedy")

Progress = Callable[[str, int, int], None]


def plan(
    workload: Workload,
    *,
    gpus: int | None = None,
    profile: Profile | str | None = None,
    solver: str = "capplan",
    estimator: str = "auto",
    seed: int = 0,
    verify: bool = True,
    repair: bool = True,
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
        ``capplan`` (ours: the fewest GPUs, evenly loaded) or ``greedy`` (the adapter-caching paper's
        Algorithms 1 and 2).
    estimator
        What the solver asks: a surrogate (``best``, ``forest`` or ``tree``), the ``twin``, or ``auto`` (the
        best surrogate where it knows enough).
    seed
        Same seed, same plan.
    verify
        Run the twin on fresh seeds. Without, the plan says that it is unverified, and nothing is mended.
    repair
        Mend GPUs on which the twin disagrees with the solver; otherwise their verdict stands in the plan.
    progress
        Called with (stage, done, total).

    Raises
    ------
    InputError
        When a parameter or a wish breaks a rule.
    InfeasibleError
        When the GPUs do not suffice, with the reason.
    """
    problem = _problem(workload, gpus, profile)
    if solver not in SOLVERS:
        raise InputError(f"must be one of {', '.join(SOLVERS)}", solver, "solver")
    if seed < 0:
        raise InputError("must be a whole number >= 0", seed, "seed")
    report = progress or _silent
    report("placing", 0, 1)
    exact = TwinEstimator(problem, seed)
    quick = make_estimator(problem, estimator, exact)
    problem = replace(problem, parts=split_hot(problem, quick if solver == "greedy" else exact))
    if solver == "greedy":
        assignments = solve_greedy(problem, quick)
    else:
        assignments = solve_balanced(problem, quick, exact)
    report("placing", 1, 1)
    verifier = _verifier(problem, exact, seed, verify)
    outcome = _verified(problem, assignments, verifier, exact, verify and repair, report)
    return build_plan(
        problem,
        outcome.assignments,
        outcome.verdicts,
        seeds=verifier.seeds,
        duration_s=verifier.duration_s,
        verified=verify,
        notes={
            "solver": solver,
            "estimator": estimator_name(quick),
            "seed": seed,
            "repairs": list(outcome.changes),
        },
    )


def _verifier(problem: Problem, exact: TwinEstimator, seed: int, verify: bool) -> Verifier:
    """Return how to verify; a trace is replayed as it is, so that one seed says it all."""
    trace = problem.workload.trace
    if trace is not None:
        return Verifier(problem, fresh_seeds(seed, 1), exact, trace.duration_s)
    return Verifier(problem, fresh_seeds(seed) if verify else fresh_seeds(seed, 1), exact)


def _verified(
    problem: Problem,
    assignments: Sequence[Assignment],
    verifier: Verifier,
    exact: TwinEstimator,
    mend: bool,
    report: Progress,
) -> Repaired:
    verdicts = verifier(assignments, lambda done, total: report("verifying", done, total))
    if mend and not all(verdict.ok for verdict in verdicts):
        return repair(problem, assignments, verdicts, verifier, exact)
    return Repaired(tuple(assignments), tuple(verdicts), ())


def _problem(workload: Workload, gpus: int | None, profile: Profile | str | None) -> Problem:
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


def _silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""
