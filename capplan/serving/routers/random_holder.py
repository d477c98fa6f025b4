"""Random: every holder of the adapter is as likely as the other (Toppings section 7.4, S-LoRA's baseline)."""

from __future__ import annotations

from capplan.compile import inner


@inner
def any_holder(first: int, last: int, draw: float) -> int:
    """Return the holder in whose equal part of [0, 1) the number `draw` lies."""
    return min(last - 1, first + int(draw * (last - first)))
