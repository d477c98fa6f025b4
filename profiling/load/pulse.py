"""How late an event loop is: what waits for it, such as the time of a token, is late by as much."""

from __future__ import annotations

import asyncio
import math
from typing import Final

import numpy as np

from capplan.profiling.load.gaps import GapHistogram

_EVERY_S: Final = 0.02
_MS_PER_S: Final = 1e3


class Pulse:
    """Looks at the clock fifty times a second, and notes how late it came to it."""

    def __init__(self) -> None:
        self.late = GapHistogram()

    async def feel(self) -> None:
        """Look until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_EVERY_S)
            self.late.add(np.array([max(0.0, loop.time() - before - _EVERY_S)]))

    def late_ms(self, percentile: float) -> float | None:
        """Return a percentile of how late it was, in milliseconds; None before the first look."""
        (late_s,) = self.late.percentiles_s((percentile,))
        return None if math.isnan(late_s) else _MS_PER_S * late_s
