"""State of a server, of one engine or of a router: adapters, requests in flight, refusals, byte budget."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Container, Iterator

from capplan.server.byte_budget import ByteBudget
from capplan.server.concurrency import ConcurrencyLimit
from capplan.server.protocol import ApiError, overloaded, unknown_model
from capplan.server.settings import ServerSettings


class ServerState(ABC):
    """State of a server that finishes running requests before it stops.

    Attributes
    ----------
    adapters
        Names of the adapters that are served.
    draining
        Whether new requests are refused.
    max_model_len
        Maximum number of tokens of prompt and output.
    refusals
        Number of refused requests by status.
    max_body_bytes
        Maximum size of a request body.
    budget
        Bytes of requests that are incomplete, or not submitted or forwarded yet.
    concurrency
        Limit of requests in flight while the event loop is late.
    """

    def __init__(self, settings: ServerSettings, adapters: Container[object], max_model_len: int) -> None:
        self.settings = settings
        self.adapters = adapters
        self.max_model_len = max_model_len
        self.max_body_bytes = settings.limits.body_bytes(max_model_len)
        self.budget = ByteBudget(settings.limits.buffered_bytes(max_model_len))
        self.concurrency = ConcurrencyLimit(settings.max_requests, lambda: self.in_flight)
        self.created = int(time.time())
        self.draining = False
        self.refusals: Counter[int] = Counter()

    @property
    @abstractmethod
    def failed(self) -> asyncio.Event:
        """Event after which the server stops."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Number of requests, or prompts, that are not answered yet."""

    @abstractmethod
    async def drain(self) -> None:
        """Wait for running requests; end them after the drain timeout."""

    def adapter_of(self, model: str) -> str | None:
        """Return the adapter of a model name; None is the base model.

        Raises
        ------
        ApiError
            404 if the model does not exist.
        """
        if model == self.settings.model_name:
            return None
        if model not in self.adapters:
            raise unknown_model(model)
        return model

    def refuse_if_late(self) -> None:
        """Check that the event loop keeps up with the requests in flight.

        Raises
        ------
        ApiError
            503 if it is late.
        """
        if not self.concurrency.admits():
            self.refusals[503] += 1
            raise overloaded()

    @contextlib.contextmanager
    def holding(self, size_bytes: int) -> Iterator[None]:
        """Count the bytes of a complete request until it is submitted or forwarded.

        Raises
        ------
        ApiError
            503 if the budget has no room.
        """
        with self.budget.reserved(size_bytes) as has_room:
            if not has_room:
                self.refusals[503] += 1
                raise overloaded()
            yield

    def refusal(self, status: int, message: str, code: str, retry_after_s: int) -> ApiError:
        """Count a refusal and return its error."""
        self.refusals[status] += 1
        return ApiError(status, message, code=code, headers={"Retry-After": str(retry_after_s)})
