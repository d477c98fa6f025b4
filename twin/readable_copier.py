"""The copies of adapters that go on beside the steps, one after the other, as one would tell them."""

from __future__ import annotations

from collections import deque


class ReadableCopier:
    """One link from host to GPU. Times in ns."""

    def __init__(self) -> None:
        self.free_ns = 0
        self.begun_ns: dict[int, int] = {}
        """When the last copy of an adapter was asked for."""
        self.ready_ns: dict[int, int] = {}
        """When that copy is, or was, done."""
        self.coming: deque[int] = deque()
        """Adapters whose arrival the scheduler has not been told of, in the order of their arrival."""

    def begin(self, adapter: int, now_ns: int, duration_ns: int, announce: bool) -> None:
        """Queue a copy behind those under way; `announce`: the scheduler waits to be told of it."""
        self.free_ns = max(self.free_ns, now_ns) + duration_ns
        self.begun_ns[adapter] = now_ns
        self.ready_ns[adapter] = self.free_ns
        if announce:
            self.coming.append(adapter)

    def next_ns(self) -> int | None:
        """Return when the next adapter arrives that the scheduler has not been told of, or None."""
        return self.ready_ns[self.coming[0]] if self.coming else None

    def arrived(self, now_ns: int) -> list[int]:
        """Return the adapters that have arrived by `now_ns` and have not been returned before."""
        adapters = []
        while self.coming and self.ready_ns[self.coming[0]] <= now_ns:
            adapters.append(self.coming.popleft())
        return adapters

    def wait_ns(self, adapter: int, from_ns: int) -> int:
        """Return for how long after `from_ns` the last copy of an adapter goes on."""
        return max(0, self.ready_ns.get(adapter, from_ns) - from_ns)

    def waited_ns(self, adapter: int, arrival_ns: int) -> int:
        """Return for how long a request that arrived then had to wait for that copy."""
        since_ns = max(arrival_ns, self.begun_ns.get(adapter, arrival_ns))
        return self.wait_ns(adapter, since_ns)
