"""What the router counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping

from capplan.engine.server.api_error import ApiError


class Tally:
    """Requests by what became of them. Belongs to the event loop.

    Attributes
    ----------
    in_flight
        Requests that are not answered yet.
    by_instance
        Requests sent to each.
    refusals
        Requests that the router itself refused, by status.
    retries
        Requests that went to another instance because one was gone.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self.by_instance: Counter[str] = Counter()
        self.refusals: Counter[int] = Counter()
        self.retries = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count a request while it runs."""
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def sent(self, instance: str) -> None:
        """Count a request that goes to an instance."""
        self.by_instance[instance] += 1

    def refused(self, status: int, message: str, code: str, headers: Mapping[str, str]) -> ApiError:
        """Count a refusal, and return it."""
        self.refusals[status] += 1
        return ApiError(status, message, code=code, headers=headers)
