"""How long the phases of a step take."""

from __future__ import annotations

import time


class Stopwatch:
    """Laps in nanoseconds, by name."""

    def __init__(self) -> None:
        self.laps_ns: dict[str, int] = {}
        self._since_ns = time.perf_counter_ns()

    def lap(self, name: str) -> None:
        """Add the time since the last call to a lap."""
        now_ns = time.perf_counter_ns()
        self.laps_ns[name] = self.laps_ns.get(name, 0) + now_ns - self._since_ns
        self._since_ns = now_ns

    def skip(self) -> None:
        """Leave the time since the last call out."""
        self._since_ns = time.perf_counter_ns()

    def until(self, name: str, total_ns: int) -> None:
        """Make the laps so far at least so long together: time that has passed by another clock only."""
        self.laps_ns[name] = self.laps_ns.get(name, 0) + max(0, total_ns - self.total_ns)

    def ms(self, name: str) -> float:
        """Return a lap in milliseconds."""
        return self.laps_ns.get(name, 0) * 1e-6

    @property
    def total_ns(self) -> int:
        """All laps together."""
        return sum(self.laps_ns.values())
