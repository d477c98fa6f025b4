"""What a loading policy is worth: one instance of a plan under each policy, with the same requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from capplan.errors import CapplanError
from capplan.planner.problem._evaluate import evaluate
from capplan.planner.problem._execution import parallel_map
from capplan.planner.problem._problem import Assignment, Problem
from capplan.spec import Cache


@dataclass(frozen=True)
class LoadingPoint:
    """One policy at the planned load."""

    loading: str
    ttft_mean_s: float
    tpt_mean_ms: float
    interruption_mean_share: float
    broken: tuple[str, ...]
    """Broken bounds."""


def loading_points(
    problem: Problem, assignment: Assignment, seed: int, answered: Callable[[int], None] | None = None
) -> tuple[LoadingPoint, ...]:
    """Return the policies that go with an instance's scheduler, its own first; none if it has no choice.

    Assistance is among them where the profile knows the CPU's cores. A policy with which the instance does
    not start, such as adapters that do not fit together, is left out.
    """
    pair = problem.workload.scheduling
    if pair is None or pair[0].policy == "slora":
        return ()
    scheduler, cache = pair
    names = [cache.loading, "asynchronous"]
    if not scheduler.chunked:
        names += ["on-demand"]
        if problem.pools[assignment.pool].profile.cpu_lora is not None:
            names += ["assisted"]
    caches = {name: _with_loading(cache, name) for name in (*names, "resident")}

    def simulated(own: Cache) -> LoadingPoint | None:
        changed = problem.workload.model_copy(update={"cache": own})
        try:
            found = evaluate(replace(problem, workload=changed), assignment, seed)
        except CapplanError:
            return None
        result = found.result
        means = (result.ttft_s_mean, result.tpt_ms_mean, result.interruption_share_mean)
        return None if any(map(math.isnan, means)) else LoadingPoint(own.loading, *means, found.violations)

    points = parallel_map(simulated, list(caches.values()), answered)
    return tuple(point for point in points if point is not None)


def _with_loading(cache: Cache, loading: str) -> Cache:
    """Return the cache under another policy, without the keys that do not go with it."""
    kept = {name: getattr(cache, name) for name in cache.model_fields_set - {"loading", "cpu_workers"}}
    if loading in ("resident", "cached"):
        kept.pop("prefetch", None)
    if loading == cache.loading and cache.cpu_workers is not None:
        kept["cpu_workers"] = cache.cpu_workers
    return Cache(**kept, loading=loading)
