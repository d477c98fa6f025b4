"""Random: all holders of the adapter with equal probability (Toppings section 7.4, S-LoRA's baseline)."""

from __future__ import annotations

from capplan._jit import inner


@inner
def any_holder(first: int, last: int, draw: float) -> int:
    """Return the holder drawn by `draw`, uniform in [0, 1)."""
    return min(last - 1, first + int(draw * (last - first)))
