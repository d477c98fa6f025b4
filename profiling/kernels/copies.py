"""Bandwidth of copies on a device and from pinned host memory, to which kernels and loads are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

_COPIES: Final = 21
_BYTES: Final = {"cuda": 2**30, "cpu": 2**26}


def copy_rows(device: str, copies: int = _COPIES) -> list[dict[str, Any]]:
    """Measure copies; return the rows of the copy table.

    A copy on the device counts twice its bytes, which are read and written. On a CPU the host's memory is
    the device's.
    """
    place = torch.device(device)
    size_bytes = _BYTES[place.type]
    target = torch.zeros(size_bytes, dtype=torch.uint8, device=place)
    host = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=place.type == "cuda")
    sources = (("device", target.clone(), 2 * size_bytes), ("host", host, size_bytes))
    return [
        {
            "source": name,
            "bytes": size_bytes,
            "bytes_per_s": moved / _median_s(place, partial(target.copy_, source, non_blocking=True), copies),
        }
        for name, source, moved in sources
    ]


def _median_s(device: torch.device, run: Callable[[], object], copies: int) -> float:
    """Return the median time of a copy after a first one."""
    times_s: list[float] = []
    new_event: Any = partial(torch.cuda.Event, enable_timing=True)
    for _ in range(copies + 1):
        if device.type == "cuda":
            begin, end = new_event(), new_event()
            begin.record()
            run()
            end.record()
            end.synchronize()
            times_s.append(begin.elapsed_time(end) * 1e-3)
        else:
            start_s = time.perf_counter()
            run()
            times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[1:])
