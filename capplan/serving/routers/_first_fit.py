"""First fit: the lowest-numbered holder with room in batch and memory (Toppings section 7.4).

If no holder has room, which the source leaves open, the request goes to the least loaded one.
"""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.routers._fleet import Fleet, Placement, has_room
from capplan.serving.routers._least_loaded import least_loaded


@inner
def first_fit(fleet: Fleet, placement: Placement, first: int, last: int, prompt: int, turn: int) -> int:
    """Return the first holder with room for a prompt."""
    for place in range(first, last):
        if has_room(fleet, placement.instance[place], prompt):
            return place
    return least_loaded(fleet, placement, first, last, turn)
