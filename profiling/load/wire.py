"""HTTP/1.1 as a load generator needs it: a request is one write, an answer is timed where it arrives.

A general client (aiohttp 3.14) took 340 microseconds of processor time for one streamed answer of the null
server, this one 220, most of them the kernel's. It matters where engine and client share a machine, and for
the times of tokens: they are taken when the bytes come in, not when some task gets its turn.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final

from capplan.profiling.load.stream import EventCounter

_HEAD_END: Final = b"\r\n\r\n"
_LONGEST_HEAD: Final = 1 << 16
_LONGEST_LINE: Final = 1 << 10
_SHOWN_BYTES: Final = 300
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,18})[ \t]*\r")
_SIZE: Final = re.compile(rb"[ \t]*([0-9A-Fa-f]{1,16})[ \t]*(?:;|$)")
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding:[^\r]*chunked")
_CLOSE: Final = re.compile(rb"\r\nconnection:[^\r]*close")
_OK: Final = 200


class WireError(Exception):
    """What came back is no HTTP."""


class Dechunker:
    """Takes the chunks of a body apart, however the bytes are cut."""

    __slots__ = ("_last", "_left", "_rest", "done")

    def __init__(self) -> None:
        self.done = False
        self._rest = b""
        self._left = 0
        self._last = False

    def feed(self, data: bytes) -> bytes:
        """Return the content in these bytes.

        Raises
        ------
        WireError
            When they are no chunks.
        """
        buffer, at = self._rest + data, 0
        content = []
        while at < len(buffer) and not self.done:
            if self._left:
                part = buffer[at : at + self._left]
                content.append(part)
                at += len(part)
                self._left -= len(part)
                continue
            end = buffer.find(b"\r\n", at)
            if end < 0:
                break
            self._line(buffer[at:end])
            at = end + 2
        self._rest = buffer[at:]
        if len(self._rest) > _LONGEST_LINE:
            raise WireError("a chunk without a size")
        return b"".join(content)

    def _line(self, line: bytes) -> None:
        """Read the size of a chunk, the empty line after one, or a trailer after the last."""
        if self._last:
            self.done = not line
        elif line:
            size = _SIZE.match(line)
            if size is None:
                raise WireError(f"no size of a chunk: {line[:40]!r}")
            self._left = int(size[1], 16)
            self._last = self._left == 0


class Exchange:
    """One request and its answer.

    Attributes
    ----------
    events : EventCounter
        The events of the answer, if its status is 200.
    status : int
        0 until it is known.
    message : bytes
        How an answer with another status begins.
    ended : future
        Done when the answer is complete; its exception is a `WireError` for what is no HTTP, and a
        `ConnectionError` when the connection was lost before.
    """

    __slots__ = ("clock", "ended", "events", "message", "status")

    def __init__(self, clock: Callable[[], float], ended: asyncio.Future[None]) -> None:
        self.clock = clock
        self.ended = ended
        self.events = EventCounter()
        self.status = 0
        self.message = b""

    def feed(self, content: bytes) -> None:
        """Take in a part of the body."""
        if self.status == _OK:
            self.events.feed(content, self.clock())
        elif len(self.message) < _SHOWN_BYTES:
            self.message = (self.message + content)[:_SHOWN_BYTES]


class Connection(asyncio.Protocol):
    """One connection to a server, for one exchange at a time.

    Attributes
    ----------
    reusable : bool
        Whether another request may follow.
    """

    __slots__ = ("_chunks", "_exchange", "_head", "_left", "_transport", "idle_since", "reusable")

    def __init__(self) -> None:
        self.reusable = False
        self.idle_since = 0.0
        self._exchange: Exchange | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what asyncio gives for TCP and TLS
        self._transport = transport
        self.reusable = True

    def ask(self, request: bytes, exchange: Exchange) -> None:
        """Send a whole request; the answer goes to the exchange."""
        self._exchange = exchange
        self._head: bytes | None = b""
        self._chunks: Dechunker | None = None
        self._left: int | None = None
        self._transport.write(request)

    def close(self) -> None:
        """Drop the connection at once."""
        self.reusable = False
        self._exchange = None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take in bytes of the answer."""
        exchange = self._exchange
        if exchange is None:  # nobody asked
            self.close()
            return
        try:
            if self._head is not None:
                data = self._read_head(exchange, self._head + data)
            if self._head is None:
                self._read_body(exchange, data)
        except WireError as error:
            self._fail(exchange, error)

    def eof_received(self) -> None:
        """Let the transport close; what that means is decided in `connection_lost`."""

    def connection_lost(self, error: Exception | None) -> None:
        """End the answer, if the end of the connection is its end, or fail."""
        self.reusable = False
        exchange = self._exchange
        if exchange is None:
            return
        until_closed = self._head is None and self._chunks is None and self._left is None
        if error is None and until_closed:
            self._finish(exchange)
        else:
            self._fail(exchange, ConnectionError(str(error or "the server closed the connection")))

    def _read_head(self, exchange: Exchange, data: bytes) -> bytes:
        """Read status and headers if they are whole; return what follows."""
        end = data.find(_HEAD_END)
        if end < 0:
            if len(data) > _LONGEST_HEAD or not b"HTTP/1.".startswith(data[:7]):
                raise WireError(f"no HTTP: {data[:40]!r}")
            self._head = data
            return b""
        head, rest = data[: end + 2].lower(), data[end + len(_HEAD_END) :]
        status = _STATUS.match(data)
        if status is None:
            raise WireError(f"no HTTP: {data[:40]!r}")
        exchange.status = int(status[1])
        if exchange.status < _OK:  # 100 Continue and the like come before the answer
            return self._read_head(exchange, rest)
        length = _LENGTH.search(head)
        if _CHUNKED.search(head):
            self._chunks = Dechunker()
        elif length is not None:
            self._left = int(length[1])
        self.reusable = self.reusable and _CLOSE.search(head) is None and head.startswith(b"http/1.1")
        self._head = None
        return rest

    def _read_body(self, exchange: Exchange, data: bytes) -> None:
        if self._chunks is not None:
            exchange.feed(self._chunks.feed(data))
            if self._chunks.done:
                self._finish(exchange)
            return
        exchange.feed(data)
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        self._exchange = None
        if not exchange.ended.done():
            exchange.ended.set_result(None)

    def _fail(self, exchange: Exchange, error: Exception) -> None:
        self.close()
        if not exchange.ended.done():
            exchange.ended.set_exception(error)
