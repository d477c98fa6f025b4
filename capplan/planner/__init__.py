"""Placement: solvers, number of slots, verification by the twin, repair, and the plan that comes of it.

Public names are loaded on first use (PEP 562), so that the names of the solvers can be had without the twin.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from capplan.planner.names import SOLVERS

if TYPE_CHECKING:
    from capplan.planner.api import plan
    from capplan.planner.comparison import Comparison, Row, compare
    from capplan.planner.solvers.description import Asks, Solver, Tools

__all__ = ["SOLVERS", "Asks", "Comparison", "Row", "Solver", "Tools", "compare", "plan"]

_HOME = MappingProxyType(
    {
        "plan": "capplan.planner.api",
        "Comparison": "capplan.planner.comparison",
        "Row": "capplan.planner.comparison",
        "compare": "capplan.planner.comparison",
        "Asks": "capplan.planner.solvers.description",
        "Solver": "capplan.planner.solvers.description",
        "Tools": "capplan.planner.solvers.description",
    }
)


def _resolve(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # type checkers see the imports above instead, and so notice a misspelt name
    __getattr__ = _resolve
