"""For users who plug in parts of their own, and for our tests: contracts and integrity checks."""

from capplan.testing._contracts import (
    Capacity,
    RouterContract,
    SolverContract,
    example_cluster,
    example_problem,
)
from capplan.testing._integrity import check_integrity

__all__ = [
    "Capacity",
    "RouterContract",
    "SolverContract",
    "check_integrity",
    "example_cluster",
    "example_problem",
]
