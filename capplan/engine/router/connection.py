"""HTTP/1.1 connections to one server, kept open between requests.

For requests that are forwarded, and for states that are read several times per second: aiohttp's client takes
more time for a request than the rest of a router. Responses are parsed by httptools, as requests are by
uvicorn.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

CONNECT_TIMEOUT_S: Final = 10.0
_MAX_IDLE_S: Final = 15.0
"""Shorter than the time after which a server closes an idle connection."""
_MAX_HELD_BYTES: Final = 256 * 1024
"""Of a response whose reader is slower than its server."""
_MAX_HEAD_BYTES: Final = 64 * 1024


class ConnectionLostError(Exception):
    """A connection has ended, or its server has sent no HTTP, before the response was complete."""


class HttpConnection(asyncio.Protocol):
    """One connection; it carries one request at a time.

    Attributes
    ----------
    status
        Status of the response.
    headers
        Headers of the response, by names in lower case; of repeated ones the last.
    is_complete
        Whether the response has arrived as a whole.
    is_open
        Whether a further request can be sent, once the response is complete.
    idle_since_s
        Time of the last response, on the event loop's clock.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._head_bytes = 0
        self._has_head = False
        self._is_paused = False
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.is_complete = True
        self.is_open = True
        self.idle_since_s = 0.0

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request; the response to the one before must be complete."""
        self.headers = {}
        self._head_bytes = 0
        self._has_head = self.is_complete = False
        self._transport.write(head + body)

    async def wait_for_head(self) -> None:
        """Wait for status and headers.

        Raises
        ------
        ConnectionLostError
            If they do not come.
        """
        while not self._has_head:
            await self._wait()

    async def next_part(self) -> bytes:
        """Return what has arrived of the body since the last call; at its end nothing.

        Raises
        ------
        ConnectionLostError
            If the rest does not come.
        """
        while not self._parts:
            if self.is_complete:
                return b""
            await self._wait()
        parts, self._parts, self._held_bytes = self._parts, [], 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def whole_body(self) -> bytes:
        """Return the body.

        Raises
        ------
        ConnectionLostError
            If it does not come as a whole.
        """
        parts = []
        while part := await self.next_part():
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def abort(self) -> None:
        """Close the connection at once; a response that is not complete is lost."""
        self.is_open = False
        self._transport.abort()

    async def _wait(self) -> None:
        if not self.is_open:
            raise ConnectionLostError
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- calls of the transport --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        if self.is_complete:  # nothing was asked for
            self.abort()
            return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.abort()
        if not self._has_head and self._head_bytes > _MAX_HEAD_BYTES:
            self.abort()
        if self._held_bytes > _MAX_HELD_BYTES and self.is_open and not self.is_complete:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request in progress."""
        self.is_open = False
        self._pool.forget(self)
        self._wake()

    # -- calls of the parser --

    def on_message_begin(self) -> None:
        """Begin a response; none may follow the one that was asked for."""
        if self.is_complete:
            self.is_open = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header."""
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Note the status; another response follows an interim one."""
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= HTTPStatus.OK

    def on_body(self, part: bytes) -> None:
        """Add a part of the body."""
        self._parts.append(part)
        self._held_bytes += len(part)

    def on_message_complete(self) -> None:
        """End the response."""
        self.is_complete = self._has_head
        if not self._parser.should_keep_alive():
            self.is_open = False


class ConnectionPool:
    """Connections to one server; as many as there are requests at a time.

    Parameters
    ----------
    url
        ``http://HOST:PORT``.
    key
        API key.
    """

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "", parts.port or 80
        self._common = f" HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {key}\r\n".encode()
        self._idle: dict[HttpConnection, None] = {}  # the one used last is at the end
        self._all: set[HttpConnection] = set()
        self.is_closed = False

    async def connection(self) -> HttpConnection:
        """Return an idle connection, or a new one.

        Raises
        ------
        OSError, TimeoutError
            If there is none.
        """
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            idle, _ = self._idle.popitem()
            if idle.is_open and now_s - idle.idle_since_s < _MAX_IDLE_S:
                return idle
            idle.abort()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, made = await loop.create_connection(lambda: HttpConnection(self), *self._address)
        if self.is_closed:
            made.abort()
            raise ConnectionAbortedError
        self._all.add(made)
        return made

    def post(self, connection: HttpConnection, path: str, body: bytes, content_type: bytes) -> None:
        """Send a POST request."""
        length = str(len(body)).encode()
        fields = b"Content-Type: " + content_type + b"\r\nContent-Length: " + length + b"\r\n\r\n"
        connection.send(b"POST " + path.encode() + self._common + fields, body)

    def get(self, connection: HttpConnection, path: str) -> None:
        """Send a GET request."""
        connection.send(b"GET " + path.encode() + self._common + b"\r\n", b"")

    def release(self, connection: HttpConnection) -> None:
        """Keep a connection for the next request; close it if its response is not complete."""
        if connection.is_complete and connection.is_open and not self.is_closed:
            connection.idle_since_s = asyncio.get_running_loop().time()
            self._idle[connection] = None
        else:
            connection.abort()

    def forget(self, connection: HttpConnection) -> None:
        """Forget a connection that has ended."""
        self._idle.pop(connection, None)
        self._all.discard(connection)

    def close(self) -> None:
        """Close all connections; their requests fail."""
        self.is_closed = True
        self._idle.clear()
        for connection in list(self._all):
            connection.abort()
