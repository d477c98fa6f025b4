"""Stream of adapter copies beside the computation.

A copy waits on the device for the steps that may read what its memory held before. Steps do not wait for
copies: an adapter is in no step before its copy has ended, which the loader's thread waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
