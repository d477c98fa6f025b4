from ._api import plan
from ._comparison import SolverComparison, SolverResult, compare
from ._tuning import Settings, TuneOptions, TuningResult, fragment, tune
from .document._as_served import verify_as_served
from .problem._problem import Assignment, Problem
from .solvers._base import RequiredEstimator, Solver, SolverContext
from .solvers._registry import SOLVERS

__all__ = [
    "SOLVERS",
    "Assignment",
    "Problem",
    "RequiredEstimator",
    "Settings",
    "Solver",
    "SolverComparison",
    "SolverContext",
    "SolverResult",
    "TuneOptions",
    "TuningResult",
    "compare",
    "fragment",
    "plan",
    "tune",
    "verify_as_served",
]
