"""Least loaded: the holder with the fewest requests, running and waiting; ties rotate."""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.routers._fleet import ArrivingRequest, Fleet, Placement, Router, RoutingRule, after


@inner
def least_loaded(
    rule: RoutingRule, fleet: Fleet, placement: Placement, first: int, last: int, request: ArrivingRequest
) -> int:
    """Return the holder with the fewest requests, of several the first behind the last chosen instance."""
    chosen = first
    least = least_distance = 2**62
    for place in range(first, last):
        instance = placement.instance[place]
        load = fleet.instances.running[instance] + fleet.instances.queued[instance]
        distance = after(instance, rule.turn[0], fleet.instances.size)
        if load < least or (load == least and distance < least_distance):
            chosen, least, least_distance = place, load, distance
    return chosen


ROUTERS = {
    "least-loaded": Router(least_loaded, "fewest requests, running and waiting; ties go round"),
}
