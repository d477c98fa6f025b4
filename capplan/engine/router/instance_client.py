"""HTTP client of one instance, with the plan's queues by request size.

Sizes are those of `capplan.spec.Wrs` (Chameleon, section 4.3.1). A request takes the tokens of prompt and
output, and those equivalent to its adapter's weights, from the quota of its queue until it is answered.
Waiting requests are served in order of arrival. Queues do not lend quota to each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

import aiohttp

from capplan.spec import Queues

T = TypeVar("T")

_CONNECT_TIMEOUT_S: Final = 10.0
_TIMEOUT_PARTS: Final = 12


class RequestSize(NamedTuple):
    """Size of a request for the queues."""

    adapter: str | None
    prompt_tokens: int
    output_tokens: int | None
    """Maximum output of the request, the router's only prediction; None: not given."""


class QueueFullError(Exception):
    """The queues hold the maximum number of requests."""


class InstanceGoneError(Exception):
    """The instance cannot be reached, or accepts no request; the request has not been started.

    Parameters
    ----------
    refusal
        Code of the instance's error, if it has refused the request.
    """

    def __init__(self, refusal: str | None = None) -> None:
        super().__init__(refusal)
        self.refusal = refusal


class FileLimitError(Exception):
    """The router has too many open files to connect to an instance."""


@contextlib.contextmanager
def _file_limit() -> Iterator[None]:
    """Raise `FileLimitError` for errors of a connection that are no fault of the instance."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        if error.os_error.errno in (errno.EMFILE, errno.ENFILE):
            raise FileLimitError from None
        raise


@dataclass
class _Queue:
    quota_tokens: int
    used_tokens: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    def fits(self, tokens: int) -> bool:
        """Return whether a request can be sent; one larger than the quota is sent alone."""
        return self.used_tokens == 0 or self.used_tokens + tokens <= self.quota_tokens

    def admit(self) -> None:
        while self.waiting and self.fits(self.waiting[0][0]):
            tokens, admitted = self.waiting.popleft()
            if not admitted.done():
                self.used_tokens += tokens
                admitted.set_result(None)


class SizeQueues:
    """Queues of one instance.

    Parameters
    ----------
    queues
        Queues of the plan.
    ranks
        Of the instance's adapters. The largest has the weight `max_adapter_bytes`, as in the planner.
    adapter_tokens_per_rank
        KV tokens with the memory of one rank of an adapter.
    max_waiting
        Maximum number of waiting requests.
    """

    def __init__(
        self, queues: Queues, ranks: Mapping[str, int], adapter_tokens_per_rank: float, max_waiting: int
    ) -> None:
        self._spec = queues
        self._ranks = ranks
        self._tokens_per_rank = adapter_tokens_per_rank
        self._max_waiting = max_waiting
        self._queues = [_Queue(each.quota_tokens) for each in queues.classes]

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return sum(len(queue.waiting) for queue in self._queues)

    @contextlib.asynccontextmanager
    async def admitted(self, request: RequestSize) -> AsyncIterator[None]:
        """Wait for the quota of a request, and hold it in the context.

        Raises
        ------
        QueueFullError
            If too many requests wait.
        InstanceGoneError
            If the queues were closed meanwhile.
        """
        queue = self._queues[self.queue_of(request)]
        tokens = self.charge(request)
        if not queue.waiting and queue.fits(tokens):
            queue.used_tokens += tokens
        else:
            await self._wait(queue, tokens)
        try:
            yield
        finally:
            queue.used_tokens -= tokens
            queue.admit()

    async def _wait(self, queue: _Queue, tokens: int) -> None:
        if self.waiting >= self._max_waiting:
            raise QueueFullError
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.waiting.append((tokens, admitted))
        try:
            await admitted
        except asyncio.CancelledError:  # the client has disconnected
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
                queue.used_tokens -= tokens
            admitted.cancel()
            with contextlib.suppress(ValueError):
                queue.waiting.remove((tokens, admitted))
            queue.admit()
            raise

    def close(self) -> None:
        """Fail all waiting requests with `InstanceGoneError`."""
        for queue in self._queues:
            for _, admitted in queue.waiting:
                if not admitted.done():
                    admitted.set_exception(InstanceGoneError())
            queue.waiting.clear()

    def charge(self, request: RequestSize) -> int:
        """Return the tokens that a request takes from a quota."""
        tokens = request.prompt_tokens + self._output_tokens(request)
        if self._spec.adapter_charge == "none" or request.adapter is None:
            return tokens
        return tokens + int(-(-self._ranks[request.adapter] * self._tokens_per_rank // 1))

    def queue_of(self, request: RequestSize) -> int:
        """Return the index of a request's queue; a size equal to an upper bound is above it."""
        size = self.size(request)
        uppers = [each.upper_wrs for each in self._spec.classes]
        return next(i for i, upper in enumerate(uppers) if upper is None or size < upper)

    def size(self, request: RequestSize) -> float:
        """Return the weighted size of a request, from 0 to 1."""
        wrs = self._spec.wrs
        prompt = min(request.prompt_tokens / wrs.max_prompt_tokens, 1.0)
        output = min(self._output_tokens(request) / wrs.max_output_tokens, 1.0)
        lengths = wrs.a * prompt + wrs.b * output
        ranks = self._ranks or {"": 1}  # an instance of the base model alone
        rank = min(ranks.values()) if request.adapter is None else ranks[request.adapter]
        adapter = rank / max(ranks.values())
        if wrs.form == "degree2":
            return lengths * adapter
        return (lengths + adapter) / 2.0 if wrs.form == "degree1" else lengths

    def _output_tokens(self, request: RequestSize) -> int:
        most = self._spec.wrs.max_output_tokens
        return most if request.output_tokens is None else request.output_tokens


class InstanceClient:
    """Connections to an engine process, and the queues before it; closing it fails all its requests.

    Parameters
    ----------
    queues
        Queues by request size; None: requests are sent at once.

    Attributes
    ----------
    running
        Number of requests sent and not answered as a whole.
    progress_s
        Time of the last part of a response to one of them, on the monotonic clock.
    """

    def __init__(self, url: str, key: str, queues: SizeQueues | None) -> None:
        self.queues = queues
        self.running = 0
        self._responses: set[aiohttp.ClientResponse] = set()
        self.progress_s = -math.inf
        self._session = aiohttp.ClientSession(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            connector=aiohttp.TCPConnector(limit=0),
            # Responses may take any time; the supervisor detects dead processes.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            auto_decompress=False,
        )

    def admitted(self, request: RequestSize) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait in the queues, if any; see `SizeQueues.admitted`."""
        return contextlib.nullcontext() if self.queues is None else self.queues.admitted(request)

    @contextlib.asynccontextmanager
    async def post(self, path: str, body: bytes, content_type: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request.

        Raises
        ------
        InstanceGoneError
            If the process cannot be reached and the request has not been sent.
        FileLimitError
            If the router has too many open files.
        aiohttp.ClientError
            If the connection fails after that.
        """
        if self._session.closed:
            raise InstanceGoneError
        sent = False
        headers = {"Content-Type": content_type}
        self.running += 1
        try:
            with _file_limit():
                posted = await self._session.post(path, data=body, headers=headers)
            async with posted as response:
                sent = True
                self._responses.add(response)
                try:
                    yield response
                finally:
                    self._responses.remove(response)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            if sent:
                raise
            raise InstanceGoneError from None
        finally:
            self.running -= 1

    def note_progress(self) -> None:
        """Note that a part of a response has come: evidence that the instance works, however slowly."""
        self.progress_s = time.monotonic()

    async def get(self, path: str, timeout_s: float) -> bytes:
        """Return the body of a response.

        Raises
        ------
        aiohttp.ClientError, TimeoutError
            If there is none, or its status is an error.
        FileLimitError
            If the router has too many open files.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        with _file_limit():
            got = await self._session.get(path, timeout=timeout)
        async with got as response:
            response.raise_for_status()
            return await response.read()

    async def ping(self, timeout_s: float) -> str | None:
        """Return why the instance accepts no requests; None: it does.

        Raises
        ------
        TimeoutError
            If it does not respond.
        FileLimitError
            If the router has too many open files.
        """
        try:
            return await _within(timeout_s, self._ping())
        except aiohttp.ClientError:
            return "unreachable"

    async def _ping(self) -> str | None:
        with _file_limit():
            got = await self._session.get("/ping")
        async with got as response:
            if response.ok:
                return None
            body = await response.read()
        try:
            return str(json.loads(body)["reason"])
        except (ValueError, TypeError, KeyError):
            return f"status {response.status}"

    def release_waiting(self) -> None:
        """Let the requests that wait in the queues go to other instances."""
        if self.queues is not None:
            self.queues.close()

    async def close(self) -> None:
        """Fail all requests in progress."""
        self.release_waiting()
        for response in list(self._responses):
            response.close()  # aiohttp does not end the reader of a stream when its session is closed
        await self._session.close()


async def _within(timeout_s: float, work: Coroutine[None, None, T]) -> T:
    """Return the result of work.

    Of the time in which this event loop is late, only a part counts: its timers run before it reads what has
    arrived meanwhile.

    Raises
    ------
    TimeoutError
        If it has none within a time.
    """
    task = asyncio.ensure_future(work)
    try:
        for _ in range(_TIMEOUT_PARTS):
            done, _ = await asyncio.wait((task,), timeout=timeout_s / _TIMEOUT_PARTS)
            if done:
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()
