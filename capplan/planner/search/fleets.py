"""Which instances to use: combinations of pools, in the order of the objective."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from capplan.planner.problem import Assignment, Problem
from capplan.spec import Objective

Fleet = tuple[int, ...]
"""Instances of every pool."""

_MOST_FLEETS: Final = 200_000


def fleets(problem: Problem, units: int, objective: Objective) -> list[Fleet]:
    """Return the fleets to try, the most wanted first; only the whole one where all GPUs are to be used.

    Parameters
    ----------
    problem
        With its pools.
    units
        What is placed: more instances than that are of no use.
    objective
        Fewest GPUs, then least price; or the other way round.
    """
    most = [min(pool.instances, units) for pool in problem.pools]
    if objective in (Objective.MIN_LATENCY, Objective.MAX_THROUGHPUT):
        return [tuple(most)]
    counts = [
        sorted({*range(0, count + 1, step), count}) for count, step in zip(most, _steps(most), strict=True)
    ]
    every = (fleet for fleet in itertools.product(*counts) if any(fleet))
    return sorted(every, key=lambda fleet: wanted(problem, fleet, objective))


def wanted(problem: Problem, fleet: Fleet, objective: Objective) -> tuple[float, float, Fleet]:
    """Return the key by which fleets are ordered, least for the most wanted."""
    gpus, price = float(gpus_of(problem, fleet)), usd_per_hour(problem, fleet)
    ahead = (price, gpus) if objective is Objective.MIN_COST else (gpus, price)
    return (*ahead, tuple(-count for count in fleet))


def instances(fleet: Fleet) -> list[int]:
    """Return the pool of every instance of a fleet."""
    return [pool for pool, count in enumerate(fleet) for _ in range(count)]


def fleet_of(problem: Problem, answer: Iterable[Assignment]) -> Fleet:
    """Return the fleet that a placement uses."""
    used = Counter(assignment.pool for assignment in answer)
    return tuple(used[pool] for pool in range(len(problem.pools)))


def gpus_of(problem: Problem, fleet: Fleet) -> int:
    """Return how many GPUs a fleet has."""
    return sum(count * pool.profile.tp for pool, count in zip(problem.pools, fleet, strict=True))


def usd_per_hour(problem: Problem, fleet: Fleet) -> float:
    """Return what a fleet costs; pools without a price cost nothing."""
    return sum(count * (pool.usd_per_hour or 0.0) for pool, count in zip(problem.pools, fleet, strict=True))


def _steps(most: Sequence[int]) -> list[int]:
    """Return the steps in which pools are counted: 1, unless there are too many combinations."""
    steps = [1] * len(most)
    while len(most) > 1 and _combinations(most, steps) > _MOST_FLEETS:
        widest = max(range(len(most)), key=lambda i: most[i] / steps[i])
        steps[widest] *= 2
    return steps


def _combinations(most: Sequence[int], steps: Sequence[int]) -> int:
    total = 1
    for count, step in zip(most, steps, strict=True):
        total *= count // step + 2
    return total
