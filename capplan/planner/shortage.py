"""Bound that breaks on GPUs that do not suffice."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from capplan.planner.deadline import OutOfTimeError
from capplan.planner.evaluate import describe_failure
from capplan.planner.problem import Assignment, Problem, distinct_adapters
from capplan.planner.search.data import build_search_data
from capplan.planner.search.placement import balanced
from capplan.planner.slots import max_fitting_slots

_MAX_INSTANCES: Final = 64
"""Instances up to which the load is spread."""


def broken_when_spread(problem: Problem) -> str:
    """Return the bound that breaks on the fullest instance with the load spread evenly, as text.

    The instance has a slot for each adapter, as far as memory allows. Empty if the constraints allow no even
    spread, there are many instances, or the deadline of the problem passes.
    """
    pools = [number for number, pool in enumerate(problem.pools) for _ in range(pool.instances)]
    if len(pools) > _MAX_INSTANCES:
        return ""
    data = build_search_data(problem)
    state = balanced(data, pools)
    if state is None:
        return ""
    fullest = int(state.loads().argmax())
    shares, pool = data.shares(frozenset(state.members[fullest])), int(state.pools[fullest])
    one_slot = Assignment(shares, min(1, distinct_adapters(shares)), pool=pool)
    slots = problem.fixed_a_max or max_fitting_slots(problem, one_slot, distinct_adapters(shares))
    instance = replace(one_slot, a_max=slots)
    if slots < one_slot.a_max or not problem.fits_in_memory(instance):
        return "spread evenly, the adapter slots leave no room for one request"
    try:
        return f"spread evenly, {describe_failure(problem, instance)} at the load over (1 - headroom)"
    except OutOfTimeError:
        return ""
