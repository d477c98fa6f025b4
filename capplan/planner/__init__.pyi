from ._api import plan, verify_as_served
from ._comparison import SolverComparison, SolverResult, compare
from ._diff import GroupChange, PlanDiff, diff_plans
from ._tuning import Settings, TuneOptions, TuningResult, fragment, tune
from .problem._problem import Assignment, Problem
from .solvers._base import RequiredEstimator, Solver, SolverContext
from .solvers._registry import SOLVERS

__all__ = [
    "SOLVERS",
    "Assignment",
    "GroupChange",
    "PlanDiff",
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
    "diff_plans",
    "fragment",
    "plan",
    "tune",
    "verify_as_served",
]
