"""Concurrency limit of a server whose event loop is late: requests are refused before they delay others."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

_TICK_S: Final = 0.1
_LATE_S: Final = 1.0
_DECREASE: Final = 2 / 3
_STEPS_TO_MAX: Final = 100
_MIN_LIMIT: Final = 32
"""An event loop that is late with fewer requests is late for another reason."""


class ConcurrencyLimit:
    """Limit of requests in flight that follows the lag of the event loop.

    A process beyond its capacity runs ever more behind, and with it health probes, streams and new
    connections. Additive increase and multiplicative decrease (Chiu and Jain, 1989) find the number of
    requests that it handles with a lag of about a second.

    Parameters
    ----------
    max_requests
        Maximum number of requests in flight while the event loop is in time.
    in_flight
        Returns the number of requests in flight.

    Attributes
    ----------
    value
        Maximum number of requests in flight; infinite unless the event loop has been late.
    """

    def __init__(self, max_requests: int, in_flight: Callable[[], int]) -> None:
        self._step = max(1, max_requests // _STEPS_TO_MAX)
        self._max_requests = max_requests
        self._in_flight = in_flight
        self._is_reached = True
        """Whether the requests in flight have been within the limit since its last decrease."""
        self._was_late = False
        self.value = math.inf

    def admits(self) -> bool:
        """Return whether a further request is accepted."""
        has_room = self._in_flight() < self.value
        self._is_reached |= has_room
        return has_room

    async def follow(self) -> None:
        """Update the limit until cancelled."""
        while True:
            begin_s = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self.update(time.monotonic() - begin_s - _TICK_S)

    def update(self, lag_s: float) -> None:
        """Update the limit by the present lag of the event loop.

        A decrease takes effect when requests that were accepted before it have ended. Until then the limit is
        not decreased again. A single lag is a pause, such as a garbage collection: not an overload.
        """
        in_flight = self._in_flight()
        self._is_reached |= in_flight <= self.value
        if lag_s <= _LATE_S:
            self.value += self._step
        elif self._was_late and self._is_reached and in_flight > _MIN_LIMIT:
            self.value = max(_MIN_LIMIT, _DECREASE * min(self.value, in_flight))
            self._is_reached = False
        self._was_late = lag_s > _LATE_S
        if self.value >= self._max_requests:
            self.value = math.inf
