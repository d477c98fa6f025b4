"""Who takes part in the benchmarks of placement: the solvers by name, and two more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from capplan import plan
from capplan.errors import InfeasibleError, InputError
from capplan.planner import RequiredEstimator, Solver, SolverContext
from capplan.planner.problem import AdapterShare, Assignment, Problem
from capplan.planner.solvers import REGISTRY, find_solver
from capplan.planner.solvers.milp import MOST_GPUS, MOST_PARTS
from capplan.spec import Plan


def assignments_of(made: Plan) -> tuple[Assignment, ...]:
    """Return what a plan says, instance by instance."""
    placed: dict[str, int] = {}
    answers = []
    for group in made.groups:
        for _ in range(group.replicas):
            parts = []
            for adapter in group.adapters:
                number, share = placed.get(adapter.name, 0), adapter.share / group.replicas
                parts.append(
                    AdapterShare(adapter.name, adapter.rank, adapter.rate_rps * share, share, number)
                )
                placed[adapter.name] = number + 1
            args = group.engine_args
            answers.append(Assignment(tuple(parts), args.max_loras, args.max_num_seqs))
    return tuple(answers)


def _planned(problem: Problem, tools: SolverContext) -> tuple[Assignment, ...]:
    made = plan(
        problem.workload,
        gpus=problem.gpus * problem.profile.tp,
        profile=problem.profile,
        seed=tools.seed + 1,
        time_limit_s=tools.time_limit_s,
    )
    if not made.verification.ok:
        notes = "; ".join(f"{g.id}: {g.note}" for g in made.verification.groups if not g.ok)
        raise InfeasibleError(f"gpus: the plan says of itself that it does not hold ({notes})", reason="gpus")
    return assignments_of(made)


PROPOSED: Final = replace(
    find_solver("greedy-strict"),
    name="proposed",
    summary="greedy to the letter with random forests, which is how the adapter-caching paper ran it",
    estimator="forest",
)
PLAN: Final = Solver(
    name="plan",
    summary=(
        "what `plan` makes of capplan's answer: verified on five seeds and mended; planned with the next "
        "seed, so that the seeds it is judged on are as new to it as to the others"
    ),
    source="ours",
    place=_planned,
    asks=RequiredEstimator.TWIN,
    divides=True,
)
ALL: Final = MappingProxyType({**REGISTRY, PROPOSED.name: PROPOSED, PLAN.name: PLAN})


def find_all(names: Iterable[str]) -> list[Solver]:
    """Return solvers by name.

    Raises
    ------
    InputError
        For a name that no solver has.
    """
    wanted = list(names)
    for name in wanted:
        if name not in ALL:
            raise InputError(f"must be some of {','.join(ALL)}", name, "--solvers")
    return [ALL[name] for name in wanted]


def suits(solver: Solver, adapters: int, gpus: int) -> bool:
    """Tell whether a solver is for problems of this size."""
    return solver.name != "milp" or (adapters <= MOST_PARTS and gpus <= MOST_GPUS)
