from ._contracts import Capacity, RouterContract, SolverContract, example_problem
from ._integrity import check_integrity

__all__ = [
    "Capacity",
    "RouterContract",
    "SolverContract",
    "check_integrity",
    "example_problem",
]
