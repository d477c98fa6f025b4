"""Heavy adapters in shares, so that instances can be filled evenly and by rank.

An adapter that fits on one instance need not be split; but five that take half of one each leave three
instances no way to be full. Lighter shares do, at the price of a slot wherever there is one of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from capplan.planner.parts import equal_shares, whole_parts
from capplan.planner.problem import Problem
from capplan.planner.search.ground import Ground

_HEAVY: Final = 0.1
"""Share of an instance from which an adapter is divided."""
_LIGHT: Final = 0.05
"""Share of an instance that each of its shares then takes, about."""


def divided(ground: Ground) -> Problem:
    """Return the problem with heavy adapters in light shares; the same where none is heavy.

    Adapters that stay together are divided together, into no more shares than `max_replicas` allows, and no
    fewer than there are.
    """
    problem = ground.problem
    constraints, scale = problem.constraints, 1.0 / (1.0 - problem.workload.headroom)
    weight: dict[str, float] = {}
    count: dict[str, int] = {}
    for unit, own in zip(ground.units, ground.weight.tolist(), strict=True):
        first = constraints.bundle[unit.parts[0].name]
        weight[first] = weight.get(first, 0.0) + own * scale
        count[first] = count.get(first, 0) + 1
    for first, taken in weight.items():
        if taken > _HEAVY:
            most = constraints.max_replicas.get(first, math.inf)
            count[first] = max(count[first], int(min(most, math.ceil(taken / _LIGHT))))
    parts = tuple(
        share
        for part in whole_parts(problem)
        for share in equal_shares(part, count[constraints.bundle[part.name]])
    )
    return problem if len(parts) == len(problem.parts) else replace(problem, parts=parts)
