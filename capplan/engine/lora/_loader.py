"""Adapter loaders: copies of adapters concurrent with the batch, one at a time.

A copy runs on a stream beside the computation. It waits on the device for the steps that may read what its
memory held before. Steps do not wait for copies: an adapter is in no step before its copy has ended, which
the loader's thread waits for.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

from capplan.engine._timing import EngineClock


class CopyStream:
    """Copies to a CPU's memory, which end before they return.

    `bytes_per_s` is the bandwidth of a GPU's link that they stand in for; None: that of the memory.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._ns_per_byte = 0.0 if bytes_per_s is None else 1e9 / bytes_per_s

    def fence(self) -> Any:
        """Return the end of all computation so far; called by the thread that computes."""
        return None

    @contextmanager
    def copying(self, after: Any, size_bytes: int = 0) -> Iterator[None]:
        """Run copies after a fence, and return at their end; called by the thread that copies."""
        until_ns = time.monotonic_ns() + round(size_bytes * self._ns_per_byte)
        yield
        while (left_ns := until_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns * 1e-9)


class CudaCopyStream(CopyStream):
    """Copies from pinned host memory on a stream of their own, which the GPU's copy engine runs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fence(self) -> torch.cuda.Event:
        """Return the end of all computation so far; called by the thread that computes."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def copying(self, after: torch.cuda.Event, size_bytes: int = 0) -> Iterator[None]:
        """Run copies after a fence, and return at their end; called by the thread that copies."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            yield
            # The thread sleeps, and leaves its CPU to the core.
            end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            end.record(self._stream)
        end.synchronize()


def copy_stream(device: torch.device, gb_per_s: float | None = None) -> CopyStream:
    """Return the stream of copies to a device; for a CPU, at most so many GB per second."""
    if device.type == "cuda":
        return CudaCopyStream(device)
    return CopyStream(None if gb_per_s is None else 1e9 * gb_per_s)


class LayerProgress:
    """Layers of an adapter that a load has copied; written by the loader's thread alone."""

    def __init__(self, layers: int) -> None:
        self._copied = bytearray(layers)
        self.has_ended = False
        """Whether the load has ended, with all layers or an error."""

    def note(self, layers: range) -> None:
        """Note that layers have been copied."""
        self._copied[layers.start : layers.stop] = b"\1" * len(layers)

    def has(self, layer: int) -> bool:
        """Return whether a layer has been copied."""
        return bool(self._copied[layer])

    def wait_for(self, layer: int) -> None:
        """Wait until a layer has been copied, or the load has failed."""
        while not self._copied[layer] and not self.has_ended:
            time.sleep(_LOOK_S)


_LOOK_S: Final = 1e-4

LoadJob = Callable[[], str | None]
"""Copies an adapter and returns an error message, or None."""


class LoadResult(NamedTuple):
    """Finished load of an adapter."""

    adapter: int
    error: str | None


class AdapterLoader(ABC):
    """Last load of each adapter, and the queue of loads to report."""

    def __init__(self, clock: EngineClock) -> None:
        self._clock = clock
        self._loads: dict[int, Future[str | None]] = {}
        self._done_ns: dict[int, int] = {}
        self._reported: deque[int] = deque()

    def start(self, adapter: int, job: LoadJob, report: bool) -> None:
        """Queue a load; `report`: return it by `finished` once it is done."""
        self._loads[adapter] = self._run(adapter, job)
        if report:
            self._reported.append(adapter)

    @abstractmethod
    def _run(self, adapter: int, job: LoadJob) -> Future[str | None]: ...

    @abstractmethod
    def _is_done(self, adapter: int) -> bool: ...

    @abstractmethod
    def next_ns(self, timeout_s: float) -> int | None:
        """Return when to look for the next reported load, or None; on the wall clock wait for it."""

    def finished(self) -> list[LoadResult]:
        """Return the reported loads that have finished since the last call, in order."""
        results = []
        while self._reported and self._is_done(self._reported[0]):
            adapter = self._reported.popleft()
            results.append(LoadResult(adapter, self._loads[adapter].result()))
        return results

    def wait(self, adapter: int) -> str | None:
        """Wait for the adapter's last load and return its error."""
        return self._loads[adapter].result() if adapter in self._loads else None

    def has_ended(self, adapter: int) -> bool:
        """Return whether the adapter's last load has ended; True without any."""
        return adapter not in self._loads or self._loads[adapter].done()

    def discard(self, adapter: int) -> None:
        """Wait for the adapter's last load and do not report it."""
        self.wait(adapter)
        if adapter in self._reported:
            self._reported.remove(adapter)

    def ready_ns(self, adapter: int) -> int:
        """Wait for the adapter's last load and return the time of its end."""
        self.wait(adapter)
        return self._done_ns.get(adapter, 0)

    def bind(self, cpus: Sequence[int]) -> None:  # noqa: B027 - not every loader has a thread
        """Run the thread on these CPUs."""

    def close(self) -> None:  # noqa: B027
        """Stop the thread."""


class ThreadLoader(AdapterLoader):
    """Loads in a thread, on the wall clock."""

    def __init__(self, clock: EngineClock) -> None:
        super().__init__(clock)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter-loader")

    def _run(self, adapter: int, job: LoadJob) -> Future[str | None]:
        def timed() -> str | None:
            error = job()
            self._done_ns[adapter] = self._clock.now_ns()
            return error

        return self._thread.submit(timed)

    def _is_done(self, adapter: int) -> bool:
        return self._loads[adapter].done()

    def next_ns(self, timeout_s: float) -> int | None:
        """Wait at most `timeout_s` for the next reported load; return the time, or None."""
        if not self._reported:
            return None
        wait([self._loads[self._reported[0]]], timeout=timeout_s)
        return self._clock.now_ns()

    def bind(self, cpus: Sequence[int]) -> None:
        """Run the thread on these CPUs.

        Beside the CPUs of the core, a copy delays no step, as a GPU's copy engine does not.
        """
        self._thread.submit(os.sched_setaffinity, 0, cpus).result()  # 0: the calling thread

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(cancel_futures=True)


class VirtualLoader(AdapterLoader):
    """Loads at once, and reports each when its measured duration has passed on a virtual clock.

    `durations_ns` are the (adapter, duration) of all loads so far.
    """

    def __init__(self, clock: EngineClock) -> None:
        super().__init__(clock)
        self._free_ns = 0
        self.durations_ns: list[tuple[int, int]] = []

    def _run(self, adapter: int, job: LoadJob) -> Future[str | None]:
        load: Future[str | None] = Future()
        start_ns = time.perf_counter_ns()
        load.set_result(job())
        duration_ns = time.perf_counter_ns() - start_ns
        self.durations_ns.append((adapter, duration_ns))
        self._free_ns = self._done_ns[adapter] = max(self._free_ns, self._clock.now_ns()) + duration_ns
        return load

    def _is_done(self, adapter: int) -> bool:
        return self._done_ns[adapter] <= self._clock.now_ns()

    def next_ns(self, timeout_s: float) -> int | None:
        """Return when the next reported load finishes, or None."""
        return self._done_ns[self._reported[0]] if self._reported else None
