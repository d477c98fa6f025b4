"""ProposedLat, the latency-oriented prototype of the adapter-caching paper (section 8.4.4).

Adapters in input order, each to the GPU with the lowest sum of rates; as many slots as adapters; the
estimator judges the whole once, at the end. Every GPU is used, since an empty one has the lowest sum.
"""

from __future__ import annotations

from functools import partial

from capplan.errors import InfeasibleError
from capplan.planner.parallel import parallel_map
from capplan.planner.problem import AdapterShare, Assignment, Problem, distinct_adapters
from capplan.planner.solvers.base import RequiredEstimator, Solver, SolverContext
from capplan.planner.splitting import in_input_order


def _place(problem: Problem, tools: SolverContext) -> tuple[Assignment, ...]:
    gpus: list[list[AdapterShare]] = [[] for _ in range(problem.gpus)]
    for part in in_input_order(problem):
        free = [gpu for gpu in gpus if all(other.name != part.name for other in gpu)]
        min(free or gpus, key=_rate_rps).append(part)  # the first of equals
    assignments = tuple(
        Assignment(tuple(parts), problem.fixed_a_max or distinct_adapters(parts)) for parts in gpus if parts
    )
    failing = [
        number
        for number, holds in enumerate(parallel_map(partial(_holds, problem, tools), assignments))
        if not holds
    ]
    if failing:
        raise _fails(problem, assignments, failing[0], len(failing))
    return assignments


def _rate_rps(parts: list[AdapterShare]) -> float:
    return sum(part.rate_rps for part in parts)


def _holds(problem: Problem, tools: SolverContext, assignment: Assignment) -> bool:
    return problem.fits_in_memory(assignment) and not tools.quick(assignment).starved


def _fails(problem: Problem, assignments: tuple[Assignment, ...], first: int, count: int) -> InfeasibleError:
    failing = assignments[first]
    fits = problem.fits_in_memory(failing)
    what = "starve or break a latency bound" if fits else "leave no room for a request beside their slots"
    return InfeasibleError(
        f"{'gpus' if fits else 'memory'}: spread over {len(assignments)} GPU(s) by rate, the "
        f"{len(failing.parts)} adapters of GPU {first} with {failing.a_max} slots {what} (and {count - 1} "
        "more GPUs fail); the latency heuristic tries nothing else",
        reason="gpus" if fits else "memory",
    )


LATENCY = Solver(
    name="latency",
    summary="spreads adapters over all GPUs by their rates, a slot for each; judged once at the end",
    source="adapter-caching paper, section 8.4.4 (ProposedLat)",
    place=_place,
    asks=RequiredEstimator.ESTIMATOR,
    splits_hot=True,
    confirms=True,
)
