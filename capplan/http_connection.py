"""HTTP/1.1 connections to one server, kept open between requests.

For clients of many requests: the router, which forwards them, and the load generator. General clients in
Python take more time for a request, and for each part of a stream, than the rest of either program.
Responses are parsed by httptools, as requests are by uvicorn.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

_MAX_HELD_BYTES: Final = 256 * 1024
"""Of a response whose reader is slower than its server."""
_MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_INTERIM: Final = 16
"""Informational responses, such as 100 Continue, before the final one."""
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_NEXT_ADDRESS_S: Final = 2.0
"""Time for one of several addresses of a host, after which the next one is tried."""


class ConnectionLostError(Exception):
    """A connection has ended, or its server has sent no HTTP, before the response was complete."""


class MalformedResponseError(ConnectionLostError):
    """The server has sent something other than HTTP."""


@dataclass(frozen=True)
class PoolLimits:
    """Limits on the connections of a pool."""

    max_idle_s: float = 15.0
    """Lifetime of an idle connection: shorter than the server's, which otherwise could lose a request."""
    connect_timeout_s: float | None = 10.0


class HttpConnection(asyncio.Protocol):
    """One connection; it carries one request at a time.

    A response is read by `wait_for_head` and `next_part`, or, without a switch of tasks, by a listener that
    calls `take`.

    Attributes
    ----------
    status
        Status of the response.
    headers
        Headers of the response, by names in lower case; of repeated ones the last.
    has_head
        Whether status and headers have arrived.
    is_complete
        Whether the response has arrived as a whole.
    is_open
        Whether a further request can be sent, once the response is complete.
    error
        Why the connection has ended; None: it is open, or its server has closed it.
    idle_since_s
        Time of the last response, on the event loop's clock.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._head_bytes = 0
        self._interim = 0
        self._is_paused = False
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.has_head = False
        self.is_complete = True
        self.is_open = True
        self.error: ConnectionLostError | None = None
        self.idle_since_s = 0.0

    def send(self, head: bytes, body: bytes, listener: Callable[[], None] | None = None) -> None:
        """Send a request; the response to the one before must be complete.

        `listener` is called when bytes have arrived, once for all that arrived together, and when the
        connection has ended.
        """
        self.status = 0
        self.headers = {}
        self._head_bytes = self._interim = 0
        self.has_head = self.is_complete = False
        self._listener = listener
        self._transport.write(head + body)

    def take(self) -> bytes:
        """Return what has arrived of the body since the last call."""
        if not self._parts:
            return b""
        parts, self._parts, self._held_bytes = self._parts, [], 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def wait_for_head(self) -> None:
        """Wait for status and headers.

        Raises
        ------
        ConnectionLostError
            If they do not come.
        """
        while not self.has_head:
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
        return self.take()

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

    @property
    def is_read(self) -> bool:
        """Whether all that has arrived of the body has been taken."""
        return not self._parts

    @property
    def ends_unframed(self) -> bool:
        """Whether the server has closed the connection, and thus ended a body of unstated length."""
        is_framed = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        return self.has_head and not self.is_open and self.error is None and not is_framed

    def lost_error(self) -> ConnectionLostError:
        """Return why a response did not come as a whole."""
        if self.error is not None:
            return self.error
        return ConnectionLostError("the response ended early" if self.has_head else "Server disconnected")

    def abort(self, error: ConnectionLostError | None = None) -> None:
        """Close the connection at once; a response that is not complete is lost."""
        if self.is_open:
            self.error = error or ConnectionLostError("the connection has been closed")
        self.is_open = False
        self._transport.abort()

    async def _wait(self) -> None:
        if not self.is_open:
            raise self.lost_error()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _notify(self) -> None:
        if self._listener is not None:
            self._listener()
        elif self._waiter is not None and not self._waiter.done():
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
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort(MalformedResponseError(str(error)))
        except httptools.HttpParserUpgrade:
            self.abort(MalformedResponseError("a switch to another protocol"))
        if not self.has_head:
            self._limit_head(len(data))
        if self._held_bytes > _MAX_HELD_BYTES and self.is_open and not self.is_complete:
            self._is_paused = True
            self._transport.pause_reading()
        self._notify()

    def _limit_head(self, more_bytes: int) -> None:
        self._head_bytes += more_bytes
        if self._interim > _MAX_INTERIM:
            self.abort(ConnectionLostError(f"more than {_MAX_INTERIM} informational responses"))
        elif self._head_bytes > _MAX_HEAD_BYTES:
            self.abort(MalformedResponseError(f"more than {_MAX_HEAD_BYTES} bytes of headers"))

    def eof_received(self) -> None:
        """Let no request be sent to a server that has closed an idle connection."""
        if self.is_complete:
            self.is_open = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request in progress, unless its body ends with the connection."""
        if exc is not None and self.is_open:
            self.error = ConnectionLostError(str(exc))
        self.is_open = False
        del self._parser  # it refers to the connection
        self._pool.forget(self)
        self._notify()
        self._listener = None

    # -- calls of the parser --

    def on_message_begin(self) -> None:
        """Begin a response; none may follow the one that was asked for."""
        if self.is_complete:
            raise MalformedResponseError("a response without a request")
        self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header."""
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Note the status; another response follows an interim one."""
        self.status = self._parser.get_status_code()
        self.has_head = self.status >= HTTPStatus.OK
        self._interim += not self.has_head

    def on_body(self, part: bytes) -> None:
        """Add a part of the body."""
        self._parts.append(part)
        self._held_bytes += len(part)

    def on_message_complete(self) -> None:
        """End the response."""
        self.is_complete = self.has_head
        if not self._parser.should_keep_alive():
            self.is_open = False


class ConnectionPool:
    """Connections to one server; as many as there are requests at a time.

    Parameters
    ----------
    url
        ``http://HOST:PORT`` or ``https://HOST:PORT``; the rest is not used. Certificates are checked against
        those of the system.
    headers
        Of every request.
    limits
        Of the connections.

    Attributes
    ----------
    authority
        Host, and port unless it is the scheme's own.

    Raises
    ------
    ValueError
        If a header has several lines.
    """

    def __init__(self, url: str, headers: Mapping[str, str], limits: PoolLimits | None = None) -> None:
        parts = urlsplit(url)
        host, default_port = parts.hostname or "", _DEFAULT_PORTS[parts.scheme]
        self._host, self._port = host, parts.port or default_port
        named = f"[{host}]" if ":" in host else host.encode("idna").decode()
        self.authority = named if self._port == default_port else f"{named}:{self._port}"
        fields = {"Host": self.authority, **headers}
        lines = [f"{name}: {value}" for name, value in fields.items()]
        if any(character in line for line in lines for character in "\r\n\0"):
            raise ValueError("a header must be one line")
        self._common = "\r\n".join([" HTTP/1.1", *lines, ""]).encode()
        self._limits = limits or PoolLimits()
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        self._addresses: list[tuple[str, int]] = []  # the one that was reached last is the first
        self._idle: dict[HttpConnection, None] = {}  # the one used last is at the end
        self._all: set[HttpConnection] = set()
        self._expiry: asyncio.TimerHandle | None = None
        self.is_closed = False

    def idle_connection(self) -> HttpConnection | None:
        """Return an open connection without a request, if there is one."""
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            idle, _ = self._idle.popitem()
            if idle.is_open and now_s - idle.idle_since_s < self._limits.max_idle_s:
                return idle
            idle.abort()
        return None

    async def connection(self) -> HttpConnection:
        """Return an idle connection, or a new one.

        Raises
        ------
        OSError, TimeoutError
            If there is none.
        """
        idle = self.idle_connection()
        if idle is not None:
            return idle
        async with asyncio.timeout(self._limits.connect_timeout_s):
            made = await self._connect()
        if self.is_closed:
            made.abort()
            raise ConnectionAbortedError
        self._all.add(made)
        return made

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        if not self._addresses:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._addresses = [(str(each[4][0]), int(each[4][1])) for each in found]
        name = self._host if self._tls is not None else None
        failure: OSError | None = None
        addresses = list(self._addresses)
        for address in addresses:
            try:
                async with asyncio.timeout(_NEXT_ADDRESS_S if address != addresses[-1] else None):
                    _, made = await loop.create_connection(
                        lambda: HttpConnection(self), *address, ssl=self._tls, server_hostname=name
                    )
            except OSError as error:
                failure = failure or error
                continue
            self._addresses = [address, *(each for each in addresses if each != address)]
            return made
        self._addresses = []  # they may have changed
        raise failure or OSError("the host has no address")

    def post(
        self,
        connection: HttpConnection,
        path: str,
        body: bytes,
        content_type: bytes,
        listener: Callable[[], None] | None = None,
    ) -> None:
        """Send a POST request; `listener` as in `HttpConnection.send`."""
        length = str(len(body)).encode()
        fields = b"Content-Type: " + content_type + b"\r\nContent-Length: " + length + b"\r\n\r\n"
        connection.send(b"POST " + path.encode() + self._common + fields, body, listener)

    def get(self, connection: HttpConnection, path: str) -> None:
        """Send a GET request."""
        connection.send(b"GET " + path.encode() + self._common + b"\r\n", b"")

    def release(self, connection: HttpConnection) -> None:
        """Keep a connection for the next request; close it unless its response is complete and read.

        What is left of one response must not be taken for the next one, which may be another client's.
        """
        if connection.is_complete and connection.is_read and connection.is_open and not self.is_closed:
            loop = asyncio.get_running_loop()
            connection.idle_since_s = loop.time()
            self._idle[connection] = None
            if self._expiry is None:
                self._expiry = loop.call_later(self._limits.max_idle_s, self._close_expired)
        else:
            connection.abort()

    def _close_expired(self) -> None:
        loop = asyncio.get_running_loop()
        self._expiry = None
        for connection in list(self._idle):
            end_s = connection.idle_since_s + self._limits.max_idle_s
            if end_s > loop.time():
                self._expiry = loop.call_at(end_s, self._close_expired)
                return
            del self._idle[connection]
            connection.abort()

    def forget(self, connection: HttpConnection) -> None:
        """Forget a connection that has ended."""
        self._idle.pop(connection, None)
        self._all.discard(connection)

    def close(self) -> None:
        """Close all connections; their requests fail."""
        self.is_closed = True
        self._idle.clear()
        if self._expiry is not None:
            self._expiry.cancel()
        for connection in list(self._all):
            connection.abort()
