from ._base import RequiredEstimator, Solver, SolverContext
from ._registry import SOLVERS, find_solver, registry

__all__ = ["SOLVERS", "RequiredEstimator", "Solver", "SolverContext", "find_solver", "registry"]
