"""Bound that breaks on GPUs that do not suffice."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from capplan.planner.problem._evaluate import NOTHING_BREAKS, failure_of
from capplan.planner.problem._execution import OutOfTimeError
from capplan.planner.problem._problem import AdapterShare, Assignment, Problem, distinct_adapters
from capplan.planner.problem._settings import max_fitting_slots
from capplan.planner.search._placement import balanced, build_search_data

_MAX_INSTANCES: Final = 64
"""Instances up to which the load is spread."""


def broken_when_spread(problem: Problem) -> str:
    """Return the bound that breaks with the load spread evenly, as text, on the fullest instance with one.

    An instance has a slot for each adapter, as far as memory allows. Empty if the constraints allow no even
    spread, there are many instances, or the deadline of the problem passes.
    """
    pools = [number for number, pool in enumerate(problem.pools) for _ in range(pool.instances)]
    if len(pools) > _MAX_INSTANCES:
        return ""
    data = build_search_data(problem)
    state = balanced(data, pools)
    if state is None:
        return ""
    different: dict[tuple[bytes, int], tuple[AdapterShare, ...]] = {}
    for instance in np.argsort(-state.loads(), kind="stable").tolist():
        members, pool = frozenset(state.members[instance]), int(state.pools[instance])
        if members:  # fewer adapters than instances leave some empty
            different.setdefault((data.kind_key(members), pool), data.shares(members))
    try:
        failures = (_failure(problem, shares, pool) for (_, pool), shares in different.items())
        return f"spread evenly, {next(filter(None, failures), NOTHING_BREAKS)}"
    except OutOfTimeError:
        return ""


def _failure(problem: Problem, shares: tuple[AdapterShare, ...], pool: int) -> str:
    """Return what an instance with these shares breaks, as text; empty if nothing."""
    adapters = distinct_adapters(shares)
    one_slot = Assignment(shares, min(1, adapters), pool=pool)
    slots = problem.fixed_a_max or max_fitting_slots(problem, one_slot, adapters)
    instance = replace(one_slot, a_max=slots)
    if slots < one_slot.a_max or not problem.fits_in_memory(instance):
        return "the adapter slots leave no room for one request"
    failure = failure_of(problem, instance)
    crowd = f" with {adapters} adapters in {slots} slot(s)" if slots < adapters else ""
    return f"{failure} at the load over (1 - headroom){crowd}" if failure else ""
