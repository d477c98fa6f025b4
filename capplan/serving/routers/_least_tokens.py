"""Least tokens: the holder with the fewest tokens queued and running (Chameleon, section 4.4); ties rotate.

The paper names no policy of the global scheduler before its engines. A dispatcher sees the prompts of waiting
requests, and of running ones the KV tokens and what is left of their prompts.
"""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.routers._fleet import (
    ArrivingRequest,
    Fleet,
    Placement,
    Router,
    RoutingRule,
    after,
    queued_tokens,
)


@inner
def fewest_tokens(
    rule: RoutingRule, fleet: Fleet, placement: Placement, first: int, last: int, request: ArrivingRequest
) -> int:
    """Return the holder with the fewest tokens, of several the first behind the last chosen instance."""
    chosen = first
    least = least_distance = 2**62
    for place in range(first, last):
        instance = placement.instance[place]
        tokens = fleet.instances.running_tokens[instance] + queued_tokens(fleet, instance)
        distance = after(instance, rule.turn[0], fleet.instances.size)
        if tokens < least or (tokens == least and distance < least_distance):
            chosen, least, least_distance = place, tokens, distance
    return chosen


ROUTERS = {
    "least-tokens": Router(
        fewest_tokens,
        "fewest tokens of waiting prompts and running requests; ties go round",
        "Chameleon 4.4",
        reads_ranks=True,
    )
}
