"""Round robin: the next holder after the instance of the last request of any adapter."""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.routers._fleet import Fleet, Placement, after


@inner
def next_holder(fleet: Fleet, placement: Placement, first: int, last: int, turn: int) -> int:
    """Return the first holder behind instance `turn`, going round."""
    chosen = first
    for place in range(first + 1, last):
        n = fleet.instances.size
        if after(placement.instance[place], turn, n) < after(placement.instance[chosen], turn, n):
            chosen = place
    return chosen
