"""Round robin: the next holder after the instance of the last request of any adapter."""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.routers._fleet import Fleet, Placement, Router, RoutingRule, after


@inner
def next_holder(
    rule: RoutingRule, fleet: Fleet, placement: Placement, first: int, last: int, draw: float
) -> int:
    """Return the first holder behind the last chosen instance, going round."""
    chosen, turn = first, rule.turn[0]
    for place in range(first + 1, last):
        n = fleet.instances.size
        if after(placement.instance[place], turn, n) < after(placement.instance[chosen], turn, n):
            chosen = place
    return chosen


ROUTERS = {"round-robin": Router(next_holder, "the next holder", reads_state=False)}
