"""The plan's routing: every request draws an instance with the shares of its adapter."""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.routers._fleet import Placement


@inner
def by_share(placement: Placement, first: int, last: int, draw: float) -> int:
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
