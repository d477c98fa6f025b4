"""Adapter loaders: copies of adapters concurrent with the batch, one at a time.

Times of adapter loads, the cost of a load in the cache policy ``gdsf``.

Stream of adapter copies beside the computation.

A copy waits on the device for the steps that may read what its memory held before. Steps do not wait for
copies: an adapter is in no step before its copy has ended, which the loader's thread waits for.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np
import torch

from capplan.engine._timing import EngineClock
from capplan.spec import FittedModel, NonNegative, SpecModel

if TYPE_CHECKING:
    from capplan.engine.lora._manager import LoRAManager


class CopyStream:
    """Copies to a CPU's memory, which end before they return."""

    def fence(self) -> Any:
        """Return the end of all computation so far; called by the thread that computes."""
        return None

    @contextmanager
    def copying(self, after: Any) -> Iterator[None]:
        """Run copies after a fence, and return at their end; called by the thread that copies."""
        yield


class CudaCopyStream(CopyStream):
    """Copies from pinned host memory on a stream of their own, which the GPU's copy engine runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fence(self) -> torch.cuda.Event:
        """Return the end of all computation so far; called by the thread that computes."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def copying(self, after: torch.cuda.Event) -> Iterator[None]:
        """Run copies after a fence, and return at their end; called by the thread that copies."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            yield
            # The thread sleeps, and leaves its CPU to the core.
            end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            end.record(self._stream)
        end.synchronize()


def copy_stream(device: torch.device) -> CopyStream:
    """Return the stream of copies to a device."""
    return CudaCopyStream(device) if device.type == "cuda" else CopyStream()


_REPEATS: Final = 5


class LoadTimes(SpecModel):
    """Time of a load from host memory: fixed, and by rank.

    Both are of an adapter on all layers; others take their share of the matrices and of the elements.
    """

    base_ms: NonNegative
    ms_per_rank: NonNegative
    padding_ms: NonNegative = 0.0
    """Beside `base_ms`, for a rank below the largest of the engine."""

    @classmethod
    def of_profile(cls, loading: FittedModel) -> Self:
        """Return the times of a profile's loading model, as the twin computes them."""
        factor = loading.value("serving_factor")
        names = {"base_ms": "gpu_base_ms", "ms_per_rank": "gpu_ms_per_rank", "padding_ms": "gpu_padding_ms"}
        return cls(**{field: factor * loading.value(name) for field, name in names.items()})

    def load_ms(self, rank: int, is_padded: bool, matrices: float, elements: float) -> float:
        """Return the time of a load.

        Parameters
        ----------
        rank
            Largest rank of the adapter.
        is_padded
            Whether it is below the largest of the engine.
        matrices, elements
            Its shares of the matrices, and of the elements of its rank on all layers.
        """
        fixed_ms = self.base_ms + (self.padding_ms if is_padded else 0.0)
        return matrices * fixed_ms + elements * self.ms_per_rank * rank


def measured_load_times(lora: LoRAManager, numbers: Sequence[int]) -> LoadTimes | None:
    """Return the times by loads of the smallest and the largest of some adapters; None without any.

    A single size gives the time by rank alone.
    """
    if not numbers:
        return None
    ends = (min(numbers, key=lora.bytes), max(numbers, key=lora.bytes))
    times_ms = [median(_load_ms(lora, number) for _ in range(_REPEATS)) for number in ends]
    parts = [_parts(lora, number) for number in ends]
    (low_fixed, low), (high_fixed, high) = parts
    if low_fixed * high > high_fixed * low:
        base_ms, ms_per_rank = np.linalg.solve(np.array(parts), np.array(times_ms)).tolist()
        if base_ms >= 0.0 and ms_per_rank >= 0.0:
            return LoadTimes(base_ms=base_ms, ms_per_rank=ms_per_rank)
    return LoadTimes(base_ms=0.0, ms_per_rank=sum(times_ms) / max(1.0, low + high))


def _parts(lora: LoRAManager, number: int) -> tuple[float, float]:
    """Return the multiples of the fixed time and of the time per rank in the load of an adapter."""
    matrices, elements = lora.shares(number)
    return matrices, elements * int(lora.rank_of[number])


def _load_ms(lora: LoRAManager, number: int) -> float:
    """Return the time of a load into memory that no adapter uses yet; the adapter is removed again."""
    load = lora.new_load(number)
    began_s = time.perf_counter()
    load()
    passed_ms = 1e3 * (time.perf_counter() - began_s)
    lora.memory.release(lora.evict(number))
    return passed_ms


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

    Attributes
    ----------
    durations_ns
        (adapter, duration) of every load so far.
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
