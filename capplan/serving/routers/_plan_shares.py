"""The plan's routing: every request draws an instance with the shares of its adapter."""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.routers._fleet import Fleet, Placement, Router, RoutingRule


@inner
def by_share(
    rule: RoutingRule, fleet: Fleet, placement: Placement, first: int, last: int, draw: float
) -> int:
    """Return the holder drawn by `draw`, uniform in [0, 1)."""
    upto = 0.0
    for place in range(first, last - 1):
        upto += placement.share[place]
        if draw < upto:
            return place
    # The rest, rounding included, is the last holder's with a share.
    place = last - 1
    while place > first and placement.share[place] == 0.0:
        place -= 1
    return place


ROUTERS = {
    "plan-shares": Router(by_share, "random by the adapter's shares", "LoRAServe IV", reads_state=False)
}
