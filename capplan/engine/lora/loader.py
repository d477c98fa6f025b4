"""Adapter loaders: copies of adapters beside the batch, one after the other."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from capplan.engine.timing import EngineClock

LoadJob = Callable[[], str | None]
"""Copies an adapter and returns an error message, or None."""


class LoadResult(NamedTuple):
    """Finished load of an adapter."""

    adapter: int
    error: str | None


class ThreadLoader:
    """Loads in a thread of its own, on the wall clock."""

    def __init__(self, clock: EngineClock) -> None:
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter-loader")
        self._futures: dict[int, Future[str | None]] = {}
        self._done_ns: dict[int, int] = {}
        self._reported: deque[int] = deque()

    def start(self, adapter: int, job: LoadJob, report: bool) -> None:
        """Queue a load; `report`: return it by `finished` once it is done."""
        self._futures[adapter] = self._thread.submit(self._run, adapter, job)
        if report:
            self._reported.append(adapter)

    def _run(self, adapter: int, job: LoadJob) -> str | None:
        error = job()
        self._done_ns[adapter] = self._clock.now_ns()
        return error

    def finished(self) -> list[LoadResult]:
        """Return the reported loads that have finished since the last call, in order."""
        results = []
        while self._reported and self._futures[self._reported[0]].done():
            adapter = self._reported.popleft()
            results.append(LoadResult(adapter, self._futures[adapter].result()))
        return results

    def wait(self, adapter: int) -> str | None:
        """Wait for the adapter's last load and return its error."""
        return self._futures[adapter].result() if adapter in self._futures else None

    def discard(self, adapter: int) -> None:
        """Wait for the adapter's last load and do not report it."""
        self.wait(adapter)
        if adapter in self._reported:
            self._reported.remove(adapter)

    def ready_ns(self, adapter: int) -> int:
        """Wait for the adapter's last load and return when it finished."""
        self.wait(adapter)
        return self._done_ns.get(adapter, 0)

    def next_ns(self, timeout_s: float) -> int | None:
        """Wait at most `timeout_s` for the next reported load; return when to look again, or None."""
        if not self._reported:
            return None
        wait([self._futures[self._reported[0]]], timeout=timeout_s)
        return self._clock.now_ns()

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(cancel_futures=True)


class VirtualLoader:
    """Loads at once, and reports each when its measured duration has passed on a virtual clock.

    Attributes
    ----------
    durations_ns
        (adapter, duration) of every load so far.
    """

    def __init__(self, clock: EngineClock) -> None:
        self._clock = clock
        self._free_ns = 0
        self._ready_ns: dict[int, int] = {}
        self._errors: dict[int, str | None] = {}
        self._reported: deque[int] = deque()
        self.durations_ns: list[tuple[int, int]] = []

    def start(self, adapter: int, job: LoadJob, report: bool) -> None:
        """Load; `report`: return it by `finished` once its duration has passed."""
        start = time.perf_counter_ns()
        self._errors[adapter] = job()
        duration_ns = time.perf_counter_ns() - start
        self.durations_ns.append((adapter, duration_ns))
        self._free_ns = max(self._free_ns, self._clock.now_ns()) + duration_ns
        self._ready_ns[adapter] = self._free_ns
        if report:
            self._reported.append(adapter)

    def finished(self) -> list[LoadResult]:
        """Return the reported loads that have finished since the last call, in order."""
        results = []
        while self._reported and self._ready_ns[self._reported[0]] <= self._clock.now_ns():
            adapter = self._reported.popleft()
            results.append(LoadResult(adapter, self._errors[adapter]))
        return results

    def wait(self, adapter: int) -> str | None:
        """Return the error of the adapter's last load."""
        return self._errors.get(adapter)

    def discard(self, adapter: int) -> None:
        """Do not report the adapter's last load."""
        if adapter in self._reported:
            self._reported.remove(adapter)

    def ready_ns(self, adapter: int) -> int:
        """Return when the adapter's last load finishes."""
        return self._ready_ns.get(adapter, 0)

    def next_ns(self, timeout_s: float) -> int | None:
        """Return when the next reported load finishes, or None."""
        return self._ready_ns[self._reported[0]] if self._reported else None

    def close(self) -> None:
        """Do nothing: there is no thread."""


AdapterLoader = ThreadLoader | VirtualLoader
