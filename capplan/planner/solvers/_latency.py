"""ProposedLat, the latency-oriented prototype of the adapter-caching paper (section 8.4.4).

Each adapter in input order goes to the GPU with the lowest sum of rates and gets a slot there. The estimator
tests all GPUs once, at the end. Every GPU is used, since an empty one has the lowest sum.
"""

from __future__ import annotations

from capplan.errors import InfeasibleError
from capplan.planner.problem._evaluate import describe_failure
from capplan.planner.problem._execution import parallel_map
from capplan.planner.problem._problem import AdapterShare, Assignment, Problem, distinct_adapters, infeasible
from capplan.planner.problem._splitting import in_input_order
from capplan.planner.solvers._base import RequiredEstimator, Solver, SolverContext


def _place(problem: Problem, context: SolverContext) -> tuple[Assignment, ...]:
    gpus: list[list[AdapterShare]] = [[] for _ in range(problem.gpus)]
    for share in in_input_order(problem):
        free = [gpu for gpu in gpus if all(other.name != share.name for other in gpu)]
        # The first of equals.
        min(free or gpus, key=lambda shares: sum(share.rate_rps for share in shares)).append(share)
    assignments = tuple(
        Assignment(tuple(shares), problem.fixed_a_max or distinct_adapters(shares))
        for shares in gpus
        if shares
    )

    def holds(assignment: Assignment) -> bool:
        return problem.fits_in_memory(assignment) and not context.estimator(assignment).starved

    failing = [gpu for gpu, ok in enumerate(parallel_map(holds, assignments)) if not ok]
    if failing:
        raise _fails(problem, assignments, failing[0], len(failing))
    return assignments


def _fails(problem: Problem, assignments: tuple[Assignment, ...], first: int, count: int) -> InfeasibleError:
    failing = assignments[first]
    fits = problem.fits_in_memory(failing)
    what = "leave no room for a request beside their slots"
    if fits:
        what = f"fail: {describe_failure(problem, failing)}"
    return infeasible(
        "gpus" if fits else "memory",
        f"spread over {len(assignments)} GPU(s) by rate, the {len(failing.shares)} adapters of GPU {first} "
        f"with {failing.a_max} slots {what} (and {count - 1} more GPUs fail); the latency heuristic tries "
        "nothing else",
    )


LATENCY = Solver(
    name="latency",
    summary="spreads adapters over all GPUs by their rates, a slot for each; judged once at the end",
    source="adapter-caching paper, section 8.4.4 (ProposedLat)",
    place=_place,
    uses_all_gpus=True,
    required_estimator=RequiredEstimator.ESTIMATOR,
    splits_hot=True,
    confirms=True,
)
