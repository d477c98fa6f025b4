"""Planning: solvers, number of adapter slots, verification by the twin, repair, and the plan document.

Public names are loaded on first use (PEP 562): the names of the solvers need neither twin nor surrogates.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from capplan.planner._api import plan
    from capplan.planner._comparison import SolverComparison, SolverResult, compare
    from capplan.planner.document._without_scheduling import verify_without_scheduling
    from capplan.planner.problem._problem import Assignment, Problem
    from capplan.planner.solvers._base import RequiredEstimator, Solver, SolverContext

__all__ = [
    "SOLVERS",
    "Assignment",
    "Problem",
    "RequiredEstimator",
    "Solver",
    "SolverComparison",
    "SolverContext",
    "SolverResult",
    "compare",
    "plan",
    "verify_without_scheduling",
]

SOLVERS: Final = (
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

_NAMES: Final = {
    "api": ("plan",),
    "comparison": ("SolverComparison", "SolverResult", "compare"),
    "document.without_scheduling": ("verify_without_scheduling",),
    "problem.problem": ("Assignment", "Problem"),
    "solvers.base": ("RequiredEstimator", "Solver", "SolverContext"),
}
_HOME = MappingProxyType(
    {name: f"capplan.planner.{module}" for module, names in _NAMES.items() for name in names}
)


def _resolve(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # type checkers read the imports above instead, and report a misspelt name
    __getattr__ = _resolve
