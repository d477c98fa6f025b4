"""Reference of the link from host memory to GPUs, and of one instance's copies over it. Times in ns."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass
class Prefetch:
    """A copy that loads on demand overtake until it begins."""

    asked_ns: int
    place: int
    """Instance among those of the link."""
    copy_ns: int
    ready_ns: int | None = None
    """Its end; None until it has begun, or is on demand."""


@dataclass
class ReferenceLink:
    """One copy at a time; calls come in the order of time."""

    free_ns: int = 0
    """End of the copies that no other one overtakes."""
    busy_ns: int = 0
    waiting: list[Prefetch] = field(default_factory=list)

    def load(self, now_ns: int, copy_ns: int) -> int:
        """Queue a load on demand and return its end."""
        self._begin_prefetches(now_ns)
        self.free_ns = max(self.free_ns, now_ns) + copy_ns
        self.busy_ns += copy_ns
        return self.free_ns

    def prefetch(self, place: int, now_ns: int, copy_ns: int) -> Prefetch:
        """Queue a prefetch."""
        self._begin_prefetches(now_ns)
        prefetch = Prefetch(now_ns, place, copy_ns)
        self.waiting.append(prefetch)
        self.waiting.sort(key=lambda each: (each.asked_ns, each.place))
        return prefetch

    def promote(self, prefetch: Prefetch, now_ns: int) -> None:
        """Make a prefetch a load on demand unless it has begun."""
        self._begin_prefetches(now_ns)
        if prefetch.ready_ns is None:
            self.waiting.remove(prefetch)
            prefetch.ready_ns = self.load(now_ns, prefetch.copy_ns)

    def expected_ns(self, prefetch: Prefetch) -> int:
        """Return the end of a prefetch if no further load on demand comes."""
        if prefetch.ready_ns is not None:
            return prefetch.ready_ns
        free_ns = self.free_ns
        for each in self.waiting[: self.waiting.index(prefetch) + 1]:
            free_ns = max(free_ns, each.asked_ns) + each.copy_ns
        return free_ns

    def _begin_prefetches(self, now_ns: int) -> None:
        while self.waiting and max(self.free_ns, self.waiting[0].asked_ns) < now_ns:
            first = self.waiting.pop(0)
            self.free_ns = first.ready_ns = max(self.free_ns, first.asked_ns) + first.copy_ns
            self.busy_ns += first.copy_ns


class ReferenceCopier:
    """Copies of one instance, over a link of its own unless one is given."""

    def __init__(self, link: ReferenceLink | None = None, place: int = 0) -> None:
        self.link = ReferenceLink() if link is None else link
        self.place = place
        self.begun_ns: dict[int, int] = {}
        """Start of the last copy of an adapter, or of its wait for the link."""
        self.ready_ns: dict[int, int] = {}
        """End of that copy; not of a prefetch in progress."""
        self.coming: deque[int] = deque()
        """Adapters loaded on demand whose arrival is pending for the scheduler, in order of arrival."""
        self.ahead: tuple[int, Prefetch] | None = None
        """Adapter of the prefetch in progress."""

    def begin(
        self, adapter: int, now_ns: int, duration_ns: int, announce: bool, prefetch: bool = False
    ) -> None:
        """Queue a copy; `announce`: a load on demand whose arrival the scheduler awaits."""
        self.begun_ns[adapter] = now_ns
        if prefetch:
            self.ahead = adapter, self.link.prefetch(self.place, now_ns, duration_ns)
            return
        self.ready_ns[adapter] = self.link.load(now_ns, duration_ns)
        if announce:
            self.coming.append(adapter)

    def next_ns(self) -> int | None:
        """Return the next pending arrival, or None."""
        pending = [self.ready_ns[self.coming[0]]] if self.coming else []
        if self.ahead is not None:
            pending.append(self.link.expected_ns(self.ahead[1]))
        return min(pending, default=None)

    def arrived(self, now_ns: int) -> list[int]:
        """Return and remove the pending adapters that have arrived by `now_ns`, in order of arrival."""
        adapters = []
        while (next_ns := self.next_ns()) is not None and next_ns <= now_ns:
            if self.coming and self.ready_ns[self.coming[0]] == next_ns:
                adapters.append(self.coming.popleft())
            elif self.ahead is not None:
                adapters.append(self.ahead[0])
                self.ready_ns[self.ahead[0]] = next_ns
                self.ahead = None
        return adapters

    def promote(self, adapter: int, now_ns: int) -> None:
        """Make a prefetch of an adapter that a request needs a load on demand, unless it has begun."""
        if self.ahead is not None and self.ahead[0] == adapter:
            self.link.promote(self.ahead[1], now_ns)

    def wait_ns(self, adapter: int, from_ns: int) -> int:
        """Return the remaining time of the last copy of an adapter at `from_ns`."""
        ready_ns = self.ready_ns.get(adapter, from_ns)
        if self.ahead is not None and self.ahead[0] == adapter:
            ready_ns = self.link.expected_ns(self.ahead[1])
        return max(0, ready_ns - from_ns)

    def waited_ns(self, adapter: int, arrival_ns: int) -> int:
        """Return the time that a request of this arrival waited for that copy."""
        since_ns = max(arrival_ns, self.begun_ns.get(adapter, arrival_ns))
        return self.wait_ns(adapter, since_ns)
