"""Step 2 of Algorithm 1: how many servers each rank gets for itself."""

from __future__ import annotations

import math
from collections.abc import Mapping


def server_budgets(
    utilization: Mapping[int, float], servers: int, *, largest_remainder: bool = False
) -> dict[int, int]:
    """Return the servers of each rank; together at most `servers`, and what is missing stays empty.

    The exact ratios ``u[r] / target`` sum to the servers, the rounded ones may not: five ranks of equal
    traffic on four servers round to five. Then one server is taken back at a time, from the rank whose
    rounding gained most, the lowest one of several (the paper is silent: PAPER_NOTES section 2, item 3).

    Parameters
    ----------
    utilization
        Servers' worth of demand per rank: demand over operating point.
    servers
        How many there are.
    largest_remainder
        Round down instead, and give the servers that remain to the largest fractions, to the highest rank
        of several: every server then has a rank.
    """
    total = math.fsum(utilization.values())
    if total <= 0.0:
        return dict.fromkeys(utilization, 0)
    ratio = {rank: value / total * servers for rank, value in utilization.items()}
    if largest_remainder:
        return _by_largest_remainder(ratio, servers)
    budgets = {rank: math.floor(value + 0.5) for rank, value in ratio.items()}
    for _ in range(sum(budgets.values()) - servers):
        budgets[min(budgets, key=lambda rank: (ratio[rank] - budgets[rank], rank))] -= 1
    return budgets


def _by_largest_remainder(ratio: Mapping[int, float], servers: int) -> dict[int, int]:
    budgets = {rank: math.floor(value) for rank, value in ratio.items()}
    asking = [rank for rank, value in ratio.items() if value > 0.0]
    by_remainder = sorted(asking, key=lambda rank: (budgets[rank] - ratio[rank], -rank))
    for rank in by_remainder[: servers - sum(budgets.values())]:
        budgets[rank] += 1
    return budgets
