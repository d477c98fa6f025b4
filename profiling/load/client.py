"""HTTP client for streamed completions."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from capplan.profiling.load.record import (
    BAD_RESPONSE,
    CLIENT_LIMIT,
    DISCONNECTED,
    FINISHED,
    HTTP_PREFIX,
    REFUSED,
    TIMEOUT,
    UNFINISHED,
    RequestOutcome,
)
from capplan.profiling.load.settings import Target

_EVENT: Final = b"\ndata:"
_DONE: Final = b"[DONE]"
_TAIL_BYTES: Final = 2048
_READ: Final = 3  # the last token, the usage, [DONE]
_MOST_TOKENS: Final = 1 << 30
"""No answer is as long; what counts more is no count."""
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
_PATH: Final = "/v1/completions"
_KEEPALIVE_S: Final = 2.0
"""Idle connections are dropped before servers drop them: uvicorn does after 5 s, and a request that is sent
at that moment is lost.
"""
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True)
class StreamEnding:
    """What the last events of an answer say.

    Attributes
    ----------
    complete : bool
        Whether the answer ended as answers do: with a usage, a reason, or ``[DONE]``.
    without_token : int
        Events that carry no token.
    prompt_tokens, output_tokens : int, optional
        As the server counted them.
    error : str
        What went wrong inside the stream; empty when nothing did.
    """

    complete: bool
    without_token: int
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""


class EventCounter:
    """Counts the events of one answer as its bytes come in, however they are cut.

    Attributes
    ----------
    times : list of float
        When each event arrived.
    """

    __slots__ = ("_tail", "times")

    def __init__(self) -> None:
        self._tail = b"\n"
        self.times: list[float] = []

    def feed(self, data: bytes, now: float) -> None:
        """Note the arrival of bytes: one time for each event that begins in them."""
        tail = self._tail
        # A line break inside JSON is escaped, so the pattern is found only where an event begins; what is
        # kept of earlier bytes is too short to hold it a second time.
        count = (tail[1 - len(_EVENT) :] + data).count(_EVENT)
        if count == 1:
            self.times.append(now)
        elif count:
            self.times.extend([now] * count)
        self._tail = (tail + data)[-_TAIL_BYTES:]

    def ending(self) -> StreamEnding:
        """Read the last events."""
        complete, without_token = False, 0
        usage: Any = None
        for text in self._tail.split(_EVENT)[1:][-_READ:]:
            # What follows the line is no data: names of events, comments that keep a connection alive.
            line = text.partition(b"\n")[0].strip()
            if line == _DONE:
                complete, without_token = True, without_token + 1
                continue
            event = _event(line)
            if event is None:
                return StreamEnding(False, without_token, error=f"no answer to a completion: {_shown(line)}")
            if event.get("error") is not None:
                return StreamEnding(False, without_token, error=_shown(line))
            choices = event.get("choices")
            complete |= bool(choices and choices[0].get("finish_reason"))
            without_token += not choices
            usage = event.get("usage") or usage
        if not isinstance(usage, dict):
            return StreamEnding(complete, without_token)
        prompt, output = (_count(usage, key) for key in ("prompt_tokens", "completion_tokens"))
        if max(prompt or 0, output or 0) > _MOST_TOKENS:
            return StreamEnding(False, without_token, error="an answer with an absurd number of tokens")
        return StreamEnding(True, without_token, prompt, output)


def _event(line: bytes) -> dict[str, Any] | None:
    """Return an event of a completion; None for anything else."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict):
        return None
    choices = event.get("choices")
    sound = choices is None or (isinstance(choices, list) and all(isinstance(each, dict) for each in choices))
    return event if sound else None


def _count(usage: dict[str, Any], key: str) -> int | None:
    value = usage.get(key)
    return value if isinstance(value, int) and value >= 0 else None


def _shown(line: bytes) -> str:
    return line[:200].decode("utf-8", "replace")


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


def open_session(target: Target) -> aiohttp.ClientSession:
    """Return a session with the headers of the target; inside a running event loop only."""
    return aiohttp.ClientSession(headers=target.headers(), timeout=aiohttp.ClientTimeout(total=None))


def raise_file_limit() -> None:
    """Let this process open as many files and connections as it may; where that cannot be set, nothing."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class CompletionClient:
    """Sends completions to one server.

    Parameters
    ----------
    target
        The server.
    timeout_s
        How long one completion may take.
    clock
        Seconds on the clock of the run.
    """

    def __init__(self, target: Target, timeout_s: float, clock: Callable[[], float]) -> None:
        parts = urlsplit(target.at(_PATH))
        self._host = parts.hostname or ""
        self._port = parts.port or _PORTS[parts.scheme]
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        fields = {"Host": parts.netloc, **target.headers()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._head = f"POST {parts.path} HTTP/1.1\r\n{lines}Content-Length: ".encode("latin-1")
        self._timeout_s = timeout_s
        self._clock = clock
        self._idle: list[Connection] = []
        self._addresses: list[str] = []

    async def complete(self, number: int, body: bytes) -> RequestOutcome:
        """Send a request and read its answer to the end; cancelled, it is told as unfinished.

        Never raises for what a server does.
        """
        clock = self._clock
        exchange = Exchange(clock, asyncio.get_running_loop().create_future())
        sent_s = clock()
        connection = None
        kind, message = FINISHED, ""
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._idle_connection() or await self._connect()
                connection.ask(b"%s%d\r\n\r\n%s" % (self._head, len(body), body), exchange)
                await exchange.ended
        except TimeoutError:
            kind, message = TIMEOUT, f"took longer than {self._timeout_s:g} s"
        except asyncio.CancelledError:
            kind = UNFINISHED
        except WireError as error:
            kind, message = BAD_RESPONSE, str(error)
        except OSError as error:
            kind, message = _broken(error, connected=connection is not None), str(error)
        self._release(connection, whole=kind == FINISHED)
        return _outcome(number, kind, message, sent_s, clock(), exchange)

    def close(self) -> None:
        """Drop the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _idle_connection(self) -> Connection | None:
        """Return the connection that was used last, unless it is stale; then all of them are."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and self._clock() - connection.idle_since < _KEEPALIVE_S:
                return connection
            connection.close()
        return None

    def _release(self, connection: Connection | None, *, whole: bool) -> None:
        if connection is None:
            return
        if whole and connection.reusable:
            connection.idle_since = self._clock()
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> Connection:
        """Open a connection to the first address that takes one."""
        loop = asyncio.get_running_loop()
        if not self._addresses:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._addresses = [str(address[0]) for *_, address in found]
        name = self._host if self._tls else None
        failure: OSError | None = None
        for address in self._addresses:
            try:
                _, connection = await loop.create_connection(
                    Connection, address, self._port, ssl=self._tls, server_hostname=name
                )
            except OSError as error:
                failure = failure or error
            else:
                self._addresses = [address]
                return connection
        raise failure or OSError(f"{self._host} has no address")


def _outcome(
    number: int, kind: str, message: str, sent_s: float, ended_s: float, exchange: Exchange
) -> RequestOutcome:
    """Return what became of a request; what looks like an answer must end like one, too."""
    times = exchange.events.times
    if kind != FINISHED:
        return RequestOutcome(number, kind, sent_s, ended_s, times, message=message)
    if exchange.status != _OK:
        text = exchange.message.decode("utf-8", "replace")
        return RequestOutcome(number, f"{HTTP_PREFIX}{exchange.status}", sent_s, ended_s, times, message=text)
    ending = exchange.events.ending()
    if ending.error or not times:
        told = ending.error or "an answer without a single event"
        return RequestOutcome(number, BAD_RESPONSE, sent_s, ended_s, times, message=told)
    if not ending.complete:
        return RequestOutcome(
            number, DISCONNECTED, sent_s, ended_s, times, message="the answer ended half-way"
        )
    tokens = times[: len(times) - ending.without_token]
    if not tokens:
        return RequestOutcome(
            number, BAD_RESPONSE, sent_s, ended_s, tokens, message="an answer without a token"
        )
    return RequestOutcome(
        number, FINISHED, sent_s, ended_s, tokens, ending.prompt_tokens, ending.output_tokens
    )


def _broken(error: OSError, *, connected: bool) -> str:
    if connected:
        return DISCONNECTED
    return CLIENT_LIMIT if error.errno in _EXHAUSTED else REFUSED
