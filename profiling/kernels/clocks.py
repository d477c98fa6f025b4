"""How long a call takes: by the processor's clock on a CPU, by events between kernels on a GPU."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

_FLUSHES: Final = 2
"""L2 caches that are written between two calls: one leaves parts of the old contents in some replacement
policies, and the longer the flush, the surer the host is ahead of the GPU when the call begins."""
_LEAST_FLUSH_BYTES: Final = 256 * 2**20


class Visit(NamedTuple):
    """What the calls of one visit took."""

    median_us: float
    disturbed: bool
    """Whether every call was interrupted by something else that ran on its core."""


class Clock(Protocol):
    """Times calls that are alike."""

    def time(self, calls: Sequence[Callable[[], object]]) -> Visit:
        """Run all calls and return the median time of all but the first, which warms up."""
        ...


class CpuClock:
    """Each call by itself. Calls that were interrupted to run something else on their core do not count.

    A call was interrupted if the process was made to leave a core meanwhile (``ru_nivcsw``). Where all calls
    of a visit were, as on a machine that others use, too, their time on the core stands in: on one thread
    that is what they would have taken alone, but for caches that the others have filled.
    """

    def time(self, calls: Sequence[Callable[[], object]]) -> Visit:
        """See `Clock`."""
        calls[0]()
        whole, on_core = [], []
        for call in calls[1:]:
            switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            start_on_core, start = time.thread_time_ns(), time.perf_counter_ns()
            call()
            taken_ns, core_ns = time.perf_counter_ns() - start, time.thread_time_ns() - start_on_core
            if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == switches:
                whole.append(taken_ns)
            elif torch.get_num_threads() == 1:
                on_core.append(core_ns)
            else:
                on_core.append(taken_ns)
        return Visit(float(np.median(whole or on_core)) / 1000.0, not whole)


class CudaClock:
    """Events around each call on the GPU's own clock, its L2 cache written over in between.

    While the GPU overwrites its cache, the host issues the call, so no launch is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._dirt = torch.empty(
            max(_FLUSHES * l2_bytes, _LEAST_FLUSH_BYTES), dtype=torch.int8, device=device
        )

    def time(self, calls: Sequence[Callable[[], object]]) -> Visit:
        """See `Clock`."""
        calls[0]()
        marks = []
        for call in calls[1:]:
            self._dirt.zero_()
            begin, end = _event(), _event()
            begin.record()
            call()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize(self._dirt.device)
        return Visit(float(np.median([begin.elapsed_time(end) for begin, end in marks])) * 1000.0, False)


def _event() -> Any:
    make: Any = torch.cuda.Event
    return make(enable_timing=True)
