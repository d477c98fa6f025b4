"""HTTP client of one instance."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Final, TypeVar

import aiohttp

T = TypeVar("T")

_CONNECT_TIMEOUT_S: Final = 10.0
_TIMEOUT_PARTS: Final = 12


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


class InstanceClient:
    """Connections to an engine process; closing it fails all its requests.

    Attributes
    ----------
    running
        Number of requests sent and not answered as a whole.
    progress_s
        Time of the last part of a response to one of them, on the monotonic clock.
    """

    def __init__(self, url: str, key: str) -> None:
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

    async def post_as(self, key: str, path: str, body: bytes, timeout_s: float) -> None:
        """Post a JSON document with another key than the client's.

        Raises
        ------
        aiohttp.ClientError, TimeoutError
            If there is no response, or its status is an error.
        FileLimitError
            If the router has too many open files.
        """
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        if self._session.closed:
            raise aiohttp.ClientConnectionError("the connection has been closed")
        with _file_limit():
            posted = await self._session.post(path, data=body, headers=headers, timeout=timeout)
        async with posted as response:
            response.raise_for_status()

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

    async def close(self) -> None:
        """Fail all requests in progress."""
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
