"""The time by which requests arrive and steps end, in integer nanoseconds.

`WallClock` is what a server uses. `VirtualClock` is moved by the measured durations of steps alone and skips
idle time: a trace of an hour is replayed as fast as the steps run, and under the twin, told the same
durations, the same trace must see the same decisions.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time."""

    def now_ns(self) -> int:
        """Return the nanoseconds since the clock's start."""
        ...

    def step(self, duration_ns: int) -> None:
        """Note that a step has taken so long."""
        ...

    def sleep_until(self, time_ns: int) -> None:
        """Return at that time, or at once if it has passed."""
        ...


class WallClock:
    """Real time since its creation."""

    def __init__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def now_ns(self) -> int:
        """See `Clock`."""
        return time.monotonic_ns() - self._start_ns

    def step(self, duration_ns: int) -> None:
        """Time has passed by itself."""

    def sleep_until(self, time_ns: int) -> None:
        """See `Clock`."""
        time.sleep(max(0.0, (time_ns - self.now_ns()) * 1e-9))


class VirtualClock:
    """Time that passes in steps only."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        """See `Clock`."""
        return self._now_ns

    def step(self, duration_ns: int) -> None:
        """See `Clock`."""
        self._now_ns += duration_ns

    def sleep_until(self, time_ns: int) -> None:
        """See `Clock`."""
        self._now_ns = max(self._now_ns, time_ns)
