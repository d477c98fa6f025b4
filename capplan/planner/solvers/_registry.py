"""Solvers by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from capplan.errors import InputError

if TYPE_CHECKING:
    from capplan.planner.solvers._base import Solver

SOLVERS: Final = (  # the command line shows the names without loading twin and surrogates
    "capplan",
    "greedy",
    "greedy-strict",
    "greedy-fast",
    "latency",
    "maxbase",
    "maxbase-half",
    "random",
    "slora-random",
    "slora-contiguous",
    "dlora-proactive",
    "loraserve",
    "milp",
)


@cache
def registry() -> Mapping[str, Solver]:
    """Return the solvers by name, in the order of `SOLVERS`."""
    from capplan.planner.solvers._capplan import CAPPLAN
    from capplan.planner.solvers._dlora import DLORA_PROACTIVE
    from capplan.planner.solvers._greedy import GREEDY, GREEDY_FAST, GREEDY_STRICT
    from capplan.planner.solvers._latency import LATENCY
    from capplan.planner.solvers._loraserve import LORASERVE
    from capplan.planner.solvers._maxbase import MAXBASE, MAXBASE_HALF
    from capplan.planner.solvers._milp import MILP
    from capplan.planner.solvers._random_placement import RANDOM, SLORA_CONTIGUOUS, SLORA_RANDOM

    every = (
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
    return MappingProxyType({solver.name: solver for solver in every})


def find_solver(solver: Solver | str) -> Solver:
    """Return the solver of a name, or the solver itself.

    Raises
    ------
    InputError
        If the name is unknown.
    """
    if not isinstance(solver, str):
        return solver
    if solver not in SOLVERS:
        raise InputError(f"must be one of {', '.join(SOLVERS)}", solver, "solver")
    return registry()[solver]
