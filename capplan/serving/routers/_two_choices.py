"""Power of two choices: the less loaded of two holders drawn at random (Mitzenmacher, 2001)."""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.routers._fleet import Fleet, Placement


@inner
def less_loaded_of_two(fleet: Fleet, placement: Placement, first: int, last: int, draw: float) -> int:
    """Return the holder with fewer requests, running and waiting, of an ordered pair; ties: its first."""
    holders = last - first
    if holders == 1:
        return first
    pairs = holders * (holders - 1)
    one, other = divmod(min(int(draw * pairs), pairs - 1), holders - 1)
    if other >= one:
        other += 1
    instances = fleet.instances
    here, there = placement.instance[first + one], placement.instance[first + other]
    if instances.running[there] + instances.queued[there] < instances.running[here] + instances.queued[here]:
        return first + other
    return first + one
