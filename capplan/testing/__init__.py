"""For users who plug in parts of their own, and for our tests: contracts and integrity checks."""

from capplan.testing.integrity import check_integrity
from capplan.testing.router import RouterContract, example_cluster
from capplan.testing.solver import Capacity, SolverContract, example_problem

__all__ = [
    "Capacity",
    "RouterContract",
    "SolverContract",
    "check_integrity",
    "example_cluster",
    "example_problem",
]
