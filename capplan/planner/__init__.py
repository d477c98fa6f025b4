"""Placement: solvers, number of slots, verification by the twin, repair, and the plan that comes of it."""

from capplan.planner.api import SOLVERS, plan

__all__ = ["SOLVERS", "plan"]
