"""First fit: the lowest-numbered holder with room in batch and memory (Toppings section 7.4).

If no holder has room, which the source leaves open, the request goes to the least loaded one.
"""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.routers._fleet import ArrivingRequest, Fleet, Placement, Router, RoutingRule, has_room
from capplan.serving.routers._least_loaded import least_loaded


@inner
def first_fit(
    rule: RoutingRule, fleet: Fleet, placement: Placement, first: int, last: int, request: ArrivingRequest
) -> int:
    """Return the first holder with room for the prompt."""
    for place in range(first, last):
        if has_room(fleet, placement.instance[place], request.prompt_tokens):
            return place
    return least_loaded(rule, fleet, placement, first, last, request)


ROUTERS = {
    "first-fit": Router(
        first_fit,
        "the first holder with room in batch and memory; none: the least loaded",
        "Toppings 7.4",
        reads_ranks=True,
    )
}
