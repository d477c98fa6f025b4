"""For users who plug in parts of their own, and for our tests: contracts and integrity checks."""

from capplan.testing.integrity import check_integrity
from capplan.testing.solver import Capacity, SolverContract, example_problem

__all__ = ["Capacity", "SolverContract", "check_integrity", "example_problem"]
