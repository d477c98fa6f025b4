"""Random: all holders of the adapter with equal probability (Toppings section 7.4, S-LoRA's baseline)."""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.routers._fleet import Fleet, Placement, Router, RoutingRule


@inner
def any_holder(
    rule: RoutingRule, fleet: Fleet, placement: Placement, first: int, last: int, draw: float
) -> int:
    """Return the holder drawn by `draw`, uniform in [0, 1)."""
    return min(last - 1, first + int(draw * (last - first)))


ROUTERS = {"random": Router(any_holder, "any holder", "Toppings 7.4", reads_state=False)}
