"""Power of two choices: the less loaded of two holders drawn at random (Mitzenmacher, 2001)."""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.routers._fleet import ArrivingRequest, Fleet, Placement, Router, RoutingRule


@inner
def less_loaded_of_two(
    rule: RoutingRule, fleet: Fleet, placement: Placement, first: int, last: int, request: ArrivingRequest
) -> int:
    """Return the holder with fewer requests, running and waiting, of an ordered pair; ties: its first."""
    holders = last - first
    if holders == 1:
        return first
    pairs = holders * (holders - 1)
    one, other = divmod(min(int(request.draw * pairs), pairs - 1), holders - 1)
    if other >= one:
        other += 1
    instances = fleet.instances
    here, there = placement.instance[first + one], placement.instance[first + other]
    if instances.running[there] + instances.queued[there] < instances.running[here] + instances.queued[here]:
        return first + other
    return first + one


ROUTERS = {
    "two-choices": Router(
        less_loaded_of_two,
        "the one with fewer requests of two holders drawn at random",
        "Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001",
    )
}
