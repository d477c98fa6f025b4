"""Registry of the solvers by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from capplan.errors import InputError
from capplan.planner.solvers._base import RequiredEstimator, Solver, SolverContext
from capplan.planner.solvers._capplan import CAPPLAN
from capplan.planner.solvers._dlora import DLORA_PROACTIVE
from capplan.planner.solvers._greedy import GREEDY, GREEDY_FAST, GREEDY_STRICT
from capplan.planner.solvers._latency import LATENCY
from capplan.planner.solvers._loraserve import LORASERVE
from capplan.planner.solvers._maxbase import MAXBASE, MAXBASE_HALF
from capplan.planner.solvers._milp import MILP
from capplan.planner.solvers._random_placement import RANDOM, SLORA_CONTIGUOUS, SLORA_RANDOM

__all__ = ["REGISTRY", "RequiredEstimator", "Solver", "SolverContext", "find_solver"]

REGISTRY: Final[Mapping[str, Solver]] = MappingProxyType(
    {
        solver.name: solver
        for solver in (
            CAPPLAN,
            GREEDY,
            GREEDY_STRICT,
            GREEDY_FAST,
            LATENCY,
            MAXBASE,
            MAXBASE_HALF,
            RANDOM,
            SLORA_RANDOM,
            SLORA_CONTIGUOUS,
            DLORA_PROACTIVE,
            LORASERVE,
            MILP,
        )
    }
)


def find_solver(solver: Solver | str) -> Solver:
    """Return the solver of a name, or the solver itself.

    Raises
    ------
    InputError
        If the name is unknown.
    """
    if isinstance(solver, Solver):
        return solver
    if solver not in REGISTRY:
        raise InputError(f"must be one of {', '.join(REGISTRY)}", solver, "solver")
    return REGISTRY[solver]
