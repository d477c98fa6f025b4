"""Copies that go on beside the batch, one after the other.

`ThreadLoader` does them in a thread while the model runs. `VirtualLoader` goes with a clock that only steps
move: it does a copy at once, and announces it when, by that clock, it would be done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

from capplan.engine.timing import EngineClock

Job = Callable[[], str | None]
"""Copies an adapter; returns what was wrong with it, if anything."""


class LoadResult(NamedTuple):
    """The end of a copy."""

    adapter: int
    error: str | None


class Loader(Protocol):
    """One link from host to memory."""

    def begin(self, adapter: int, job: Job, announce: bool) -> None:
        """Queue a copy behind those under way; `announce`: the scheduler waits to be told of it."""
        ...

    def arrived(self) -> list[LoadResult]:
        """Return the announced copies that have ended since the last call, in their order."""
        ...

    def wait(self, adapter: int) -> str | None:
        """Return when no copy of this adapter is under way, and what was wrong with the last one."""
        ...

    def recall(self, adapter: int) -> None:
        """Wait as `wait` does, and never announce that copy."""
        ...

    def ready_ns(self, adapter: int) -> int:
        """Wait as `wait` does, and return the time by the clock at which that copy was done."""
        ...

    def next_ns(self, timeout_s: float) -> int | None:
        """Return when the next announced adapter arrives, or None; may wait so long for it."""
        ...

    def close(self) -> None:
        """Stop."""
        ...


class ThreadLoader:
    """Copies in a thread of their own, under a clock of real time."""

    def __init__(self, clock: EngineClock) -> None:
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter-loader")
        self._futures: dict[int, Future[str | None]] = {}
        self._done_ns: dict[int, int] = {}
        self._coming: deque[int] = deque()

    def begin(self, adapter: int, job: Job, announce: bool) -> None:
        """See `Loader`."""
        self._futures[adapter] = self._thread.submit(self._run, adapter, job)
        if announce:
            self._coming.append(adapter)

    def _run(self, adapter: int, job: Job) -> str | None:
        error = job()
        self._done_ns[adapter] = self._clock.now_ns()
        return error

    def arrived(self) -> list[LoadResult]:
        """See `Loader`."""
        arrivals = []
        while self._coming and self._futures[self._coming[0]].done():
            adapter = self._coming.popleft()
            arrivals.append(LoadResult(adapter, self._futures[adapter].result()))
        return arrivals

    def wait(self, adapter: int) -> str | None:
        """See `Loader`."""
        return self._futures[adapter].result() if adapter in self._futures else None

    def recall(self, adapter: int) -> None:
        """See `Loader`."""
        self.wait(adapter)
        _forget(self._coming, adapter)

    def ready_ns(self, adapter: int) -> int:
        """See `Loader`."""
        self.wait(adapter)
        return self._done_ns.get(adapter, 0)

    def next_ns(self, timeout_s: float) -> int | None:
        """See `Loader`."""
        if not self._coming:
            return None
        wait([self._futures[self._coming[0]]], timeout=timeout_s)
        return self._clock.now_ns()

    def close(self) -> None:
        """See `Loader`."""
        self._thread.shutdown(cancel_futures=True)


class VirtualLoader:
    """Copies that take the time they took, by a clock that stands still meanwhile."""

    def __init__(self, clock: EngineClock) -> None:
        self._clock = clock
        self._free_ns = 0
        self._ready_ns: dict[int, int] = {}
        self._errors: dict[int, str | None] = {}
        self._coming: deque[int] = deque()
        self.durations_ns: list[tuple[int, int]] = []
        """(adapter, time) of every copy so far."""

    def begin(self, adapter: int, job: Job, announce: bool) -> None:
        """See `Loader`."""
        start = time.perf_counter_ns()
        self._errors[adapter] = job()
        duration_ns = time.perf_counter_ns() - start
        self.durations_ns.append((adapter, duration_ns))
        self._free_ns = max(self._free_ns, self._clock.now_ns()) + duration_ns
        self._ready_ns[adapter] = self._free_ns
        if announce:
            self._coming.append(adapter)

    def arrived(self) -> list[LoadResult]:
        """See `Loader`."""
        arrivals = []
        while self._coming and self._ready_ns[self._coming[0]] <= self._clock.now_ns():
            adapter = self._coming.popleft()
            arrivals.append(LoadResult(adapter, self._errors[adapter]))
        return arrivals

    def wait(self, adapter: int) -> str | None:
        """See `Loader`; every copy is done as soon as it has begun."""
        return self._errors.get(adapter)

    def recall(self, adapter: int) -> None:
        """See `Loader`."""
        _forget(self._coming, adapter)

    def ready_ns(self, adapter: int) -> int:
        """See `Loader`."""
        return self._ready_ns.get(adapter, 0)

    def next_ns(self, timeout_s: float) -> int | None:
        """See `Loader`."""
        return self._ready_ns[self._coming[0]] if self._coming else None

    def close(self) -> None:
        """See `Loader`."""


def _forget(coming: deque[int], adapter: int) -> None:
    if adapter in coming:
        coming.remove(adapter)
