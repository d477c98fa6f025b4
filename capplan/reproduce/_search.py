"""Search of the highest load that holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

SMALLEST_RPS: Final = 1e-3


def highest(
    holds: Callable[[float], bool], start: float, step: float = 1.25, precision: float = 0.01
) -> float:
    """Return a rate that holds and is within the precision of one that does not; 0 if none holds.

    The bracket starts at `start` and widens by `step`, then its square, at most by 2.
    """
    low = high = start
    if holds(low):
        while holds(high := high * step):
            low, step = high, min(2.0, step**2)
    else:
        while not holds(low := low / step):
            high, step = low, min(2.0, step**2)
            if low < SMALLEST_RPS:
                return 0.0
    while high / low > 1.0 + precision:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
