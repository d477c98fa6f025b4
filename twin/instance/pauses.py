"""Pauses of a simulation, in which it calls an interrupt."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from capplan.twin.instance.host_link import NEVER_NS

MAX_PAUSE_NS: Final = 60 * 10**9
"""Largest simulated time between two calls."""
_FIRST_PAUSE_NS: Final = 10**9
_TARGET_S: Final = 0.1
"""Time of computing between two calls, above which the next one comes sooner."""


class Pauses:
    """Times at which a simulation calls its interrupt; an exception that it raises ends the simulation.

    A simulated minute takes milliseconds or, with a long queue, seconds: the distance of the calls adapts to
    the time of computing. What is simulated does not depend on it.
    """

    def __init__(self, interrupt: Callable[[], None] | None) -> None:
        self.next_ns = NEVER_NS if interrupt is None else _FIRST_PAUSE_NS
        """Simulated time of the next call; NEVER_NS without an interrupt."""
        self._interrupt = interrupt
        self._length_ns = _FIRST_PAUSE_NS
        self._called_s = time.monotonic()

    def call(self) -> None:
        """Call the interrupt at `next_ns`, and choose the time of the next call."""
        if self._interrupt is None:
            return
        self._interrupt()
        now_s = time.monotonic()
        growth = min(2.0, _TARGET_S / max(now_s - self._called_s, 1e-9))
        self._called_s = now_s
        self._length_ns = max(1, min(MAX_PAUSE_NS, int(growth * self._length_ns)))
        self.next_ns += self._length_ns
