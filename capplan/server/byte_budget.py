"""Byte budget: the memory of requests of all connections before they are submitted or forwarded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol


class IncompleteRequest(Protocol):
    """Request that has not arrived as a whole."""

    def refuse_overload(self) -> None:
        """End the request: its bytes are needed for others."""
        ...


class ByteBudget:
    """Budget of the bytes of all requests that are incomplete, or not submitted or forwarded yet.

    A request that arrives slowly holds its bytes for long. When the budget is exhausted, the requests that
    have been arriving for the longest time are refused, so that slow clients cannot lock others out.

    Parameters
    ----------
    max_bytes
        Size of the budget.

    Attributes
    ----------
    used_bytes
        Bytes held and reserved.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: dict[IncompleteRequest, int] = {}  # in order of arrival
        self.used_bytes = 0

    def hold(self, request: IncompleteRequest, total_bytes: int) -> None:
        """Set the bytes of an incomplete request; it is refused itself if it is the oldest."""
        self.used_bytes += total_bytes - self._held.get(request, 0)
        self._held[request] = total_bytes
        self._make_room(0)

    def release(self, request: IncompleteRequest) -> None:
        """Return the bytes of a request, which is complete or has ended."""
        self.used_bytes -= self._held.pop(request, 0)

    @contextlib.contextmanager
    def reserved(self, size_bytes: int) -> Iterator[bool]:
        """Reserve bytes of a complete request, which is not refused later; yield whether there is room."""
        self._make_room(size_bytes)
        has_room = self.used_bytes + size_bytes <= self._max_bytes
        size_bytes = size_bytes if has_room else 0
        self.used_bytes += size_bytes
        try:
            yield has_room
        finally:
            self.used_bytes -= size_bytes

    def _make_room(self, size_bytes: int) -> None:
        while self._held and self.used_bytes + size_bytes > self._max_bytes:
            oldest = next(iter(self._held))
            self.release(oldest)
            oldest.refuse_overload()
