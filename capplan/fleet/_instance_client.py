"""HTTP client of one instance."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import time
from collections.abc import Coroutine, Iterator
from http import HTTPStatus
from types import TracebackType
from typing import Final, TypeVar

import aiohttp

from capplan.http_connection import ConnectionLostError, ConnectionPool, HttpConnection, PoolLimits

T = TypeVar("T")

_TIMEOUT_PARTS: Final = 12
_FILE_LIMITS: Final = (errno.EMFILE, errno.ENFILE)


class InstanceGoneError(Exception):
    """The instance cannot be reached, or accepts no request; the request has not been started.

    `refusal` is the code of its error, if it has refused the request.
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
        if error.os_error.errno in _FILE_LIMITS:
            raise FileLimitError from None
        raise


class ForwardedResponse:
    """A request that is sent to an instance, and its response; a context manager.

    On entry, raise `InstanceGoneError` if the process cannot be reached, and `FileLimitError` if the router
    has too many open files; the request has not been sent then. If the connection fails after that, raise
    `ConnectionLostError`.
    """

    def __init__(self, client: InstanceClient, path: str, body: bytes, content_type: bytes) -> None:
        self._client = client
        self._pool = client.pool
        self._request = path, body, content_type
        self._connection: HttpConnection | None = None

    async def __aenter__(self) -> HttpConnection:
        self._client.running += 1
        try:
            self._connection = connection = await self._pool.connection()
            self._pool.post(connection, *self._request)
            await connection.wait_for_head()
        except BaseException as error:
            self._release()
            if isinstance(error, OSError):  # also TimeoutError
                raise (FileLimitError if error.errno in _FILE_LIMITS else InstanceGoneError) from None
            raise
        return connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        self._client.running -= 1
        if self._connection is not None:
            self._pool.release(self._connection)


class InstanceClient:
    """Connections to an engine process; closing it fails all its requests.

    `pool` is for forwarded requests, states and pings. `running` requests are not answered as a whole.
    `progress_s` is the time of the last part of a response to one of them, on the monotonic clock. Its
    methods raise `FileLimitError` if the router has too many open files.
    """

    def __init__(self, url: str, key: str) -> None:
        self.running = 0
        self.progress_s = -math.inf
        headers = {"Authorization": f"Bearer {key}"}
        limits = PoolLimits()
        self.pool = ConnectionPool(url, headers, limits)
        self._session = aiohttp.ClientSession(
            base_url=url,
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            # Responses may take any time; the supervisor detects dead processes.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_timeout_s),
            auto_decompress=False,
        )

    def post(self, path: str, body: bytes, content_type: bytes) -> ForwardedResponse:
        """Return a request, which is sent on entry of its context; the response may take any time."""
        return ForwardedResponse(self, path, body, content_type)

    def note_progress(self) -> None:
        """Note that a part of a response has come: evidence that the instance works, however slowly."""
        self.progress_s = time.monotonic()

    async def get(self, path: str, timeout_s: float) -> bytes:
        """Return the body of a response that is no error.

        Without one, raise `aiohttp.ClientError` or `TimeoutError`.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        with _file_limit():
            got = await self._session.get(path, timeout=timeout)
        async with got as response:
            response.raise_for_status()
            return await response.read()

    async def post_as(self, key: str, path: str, body: bytes, timeout_s: float) -> None:
        """Post a JSON document with another key than the client's; raise as `get`."""
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        if self._session.closed:
            raise aiohttp.ClientConnectionError("the connection has been closed")
        with _file_limit():
            posted = await self._session.post(path, data=body, headers=headers, timeout=timeout)
        async with posted as response:
            response.raise_for_status()

    async def state(self, timeout_s: float) -> bytes:
        """Return the state that the instance reports.

        Without one, raise `ConnectionLostError`, `OSError` or `TimeoutError`.
        """
        async with asyncio.timeout(timeout_s):
            status, body = await self._fetch("/state")
        if status != HTTPStatus.OK:
            raise ConnectionLostError
        return body

    async def _fetch(self, path: str) -> tuple[int, bytes]:
        """Return status and body of a small response, over the connections of forwarded requests."""
        connection = await self.pool.connection()
        try:
            self.pool.get(connection, path)
            await connection.wait_for_head()
            return connection.status, await connection.whole_body()
        finally:
            self.pool.release(connection)

    async def ping(self, timeout_s: float) -> str | None:
        """Return why the instance accepts no requests, or None; raise `TimeoutError` without a response."""
        try:
            status, body = await _within(timeout_s, self._fetch("/ping"))
        except TimeoutError:
            raise
        except OSError as error:
            if error.errno in _FILE_LIMITS:
                raise FileLimitError from None
            return "unreachable"
        except ConnectionLostError:
            return "unreachable"
        if status < HTTPStatus.BAD_REQUEST:
            return None
        try:
            return str(json.loads(body)["reason"])
        except (ValueError, TypeError, KeyError):
            return f"status {status}"

    async def close(self) -> None:
        """Fail all requests in progress."""
        self.pool.close()
        await self._session.close()


async def _within(timeout_s: float, work: Coroutine[None, None, T]) -> T:
    """Return the result of work, or raise `TimeoutError`.

    Of the time in which this event loop is late, only a part counts: its timers run before it reads what has
    arrived meanwhile.
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
