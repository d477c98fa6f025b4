"""Streamed completions over `capplan.http_connection`, and the outcome of each."""

from __future__ import annotations

import asyncio
import errno
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

from capplan.http_connection import (
    ConnectionLostError,
    ConnectionPool,
    HttpConnection,
    MalformedResponseError,
    PoolLimits,
)
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
from capplan.profiling.load.requests import Target, escaped_path

_EVENT: Final = b"\ndata:"
_DONE: Final = b"[DONE]"
_TAIL_BYTES: Final = 2048
_READ: Final = 3  # the last token, the usage, [DONE]
_EVENTS_PER_TOKEN: Final = 4
_MORE_EVENTS: Final = 64
"""Events of an answer beyond those of its tokens."""
_MOST_TOKENS: Final = 1 << 30
"""Limit on the token counts of an answer; a larger count is an error of the server."""
_SHOWN_BYTES: Final = 300
_OK: Final = 200
_LIMITS: Final = PoolLimits(max_idle_s=2.0, connect_timeout_s=None)
"""An idle connection lives shorter than a server's (uvicorn: 5 s). Connecting counts as part of a request."""
_REDIRECTIONS: Final = (301, 302, 303, 307, 308)
_MOST_REDIRECTIONS: Final = 5
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)
_JSON: Final = b"application/json"


@asynccontextmanager
async def open_session(target: Target) -> AsyncIterator[ConnectionPool]:
    """Open connections with the API key of the target, in any number."""
    pool = ConnectionPool(target.url, target.headers(), _LIMITS)
    try:
        yield pool
    finally:
        pool.close()
        await asyncio.sleep(0)  # sockets are closed by the event loop


async def fetch(
    pool: ConnectionPool, path: str, max_bytes: int, data: bytes | None = None
) -> tuple[int, str]:
    """Return status and text of a GET request, or of a POST request with `data`.

    A GET request follows redirections to other paths of the server, as frameworks send them for ``/metrics``.

    Raises
    ------
    ConnectionLostError
        If the response is not whole, or longer than `max_bytes`.
    OSError
        If there is no connection.
    """
    for _ in range(_MOST_REDIRECTIONS):
        status, text, location = await _fetch_once(pool, path, max_bytes, data)
        if data is not None or status not in _REDIRECTIONS:
            break
        try:
            parts = urlsplit(urljoin(path, location))
        except ValueError:
            break
        if parts.netloc not in ("", pool.authority):
            break
        path = escaped_path(parts.path or "/")
    return status, text


async def _fetch_once(
    pool: ConnectionPool, path: str, max_bytes: int, data: bytes | None
) -> tuple[int, str, str]:
    """Return status, text and location."""
    connection = await pool.connection()
    try:
        if data is None:
            pool.get(connection, path)
        else:
            pool.post(connection, path, data, _JSON)
        await connection.wait_for_head()
        text = bytearray()
        while part := await _next_part(connection):
            text += part
            if len(text) > max_bytes:
                raise ConnectionLostError(f"a response of more than {max_bytes} bytes")
        location = connection.headers.get(b"location", b"").decode("latin-1")
        return connection.status, text.decode("utf-8", "replace"), location
    finally:
        pool.release(connection)


async def _next_part(connection: HttpConnection) -> bytes:
    try:
        return await connection.next_part()
    except ConnectionLostError:
        if connection.ends_unframed:
            return b""
        raise


class CompletionClient:
    """Client for streamed completions; `timeout_s` limits one completion, `clock` is that of the run."""

    def __init__(
        self, session: ConnectionPool, target: Target, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._pool = session
        self._path = target.path("/v1/completions")
        self._timeout_s = timeout_s
        self._clock = clock
        self._loop = asyncio.get_running_loop()

    async def complete(self, number: int, body: bytes, output_tokens: int) -> RequestOutcome:
        """Send a request for a number of tokens and read its answer to the end.

        Failures and cancellation are outcomes, not exceptions.
        """
        sent_s, until_s = self._clock(), self._loop.time() + self._timeout_s
        answer = _Answer(self._clock, _EVENTS_PER_TOKEN * output_tokens + _MORE_EVENTS)
        try:
            connection = self._pool.idle_connection()
            if connection is None:
                async with asyncio.timeout_at(until_s):
                    connection = await self._connected(answer)
            if connection is not None:
                await self._exchange(connection, body, answer, until_s)
        except TimeoutError:
            answer.fail(TIMEOUT, f"took longer than {self._timeout_s:g} s")
        except asyncio.CancelledError:
            answer.fail(UNFINISHED, "")
        if answer.failure is None:
            return _answered(number, sent_s, answer.ended_s, answer.events)
        kind, message = answer.failure
        return RequestOutcome(number, kind, sent_s, answer.ended_s, answer.events.times, message=message)

    async def _connected(self, answer: _Answer) -> HttpConnection | None:
        try:
            return await self._pool.connection()
        except OSError as error:
            kind = CLIENT_LIMIT if error.errno in _EXHAUSTED else REFUSED
            answer.fail(kind, f"no connection: {' '.join(str(error).split()) or type(error).__name__}")
            return None

    async def _exchange(
        self, connection: HttpConnection, body: bytes, answer: _Answer, until_s: float
    ) -> None:
        """Read one answer, in calls of its connection: no task is woken by an event."""
        answer.connection = connection
        answer.done = self._loop.create_future()
        message = f"took longer than {self._timeout_s:g} s"
        timer = self._loop.call_at(until_s, answer.fail, TIMEOUT, message)
        try:
            self._pool.post(connection, self._path, body, _JSON, answer.on_progress)
            await answer.done
        finally:
            timer.cancel()
            self._pool.release(connection)


class _Answer:
    """Answer to one request; it ends once, whole or with a failure."""

    __slots__ = ("_clock", "_most_events", "connection", "done", "ended_s", "events", "failure")

    connection: HttpConnection
    done: asyncio.Future[None] | None

    def __init__(self, clock: Callable[[], float], most_events: int) -> None:
        self._clock = clock
        self._most_events = most_events
        self.events = EventCounter()
        self.failure: tuple[str, str] | None = None
        self.ended_s = math.nan
        self.done = None

    def on_progress(self) -> None:
        """Record what has arrived."""
        if not math.isnan(self.ended_s):
            return
        connection, now_s = self.connection, self._clock()
        part = connection.take()
        if connection.status == _OK:
            if part:
                times = self.events.times
                self.events.feed(part, now_s)
                if len(times) > self._most_events:
                    del times[self._most_events :]
                    self.fail(BAD_RESPONSE, f"an answer of more than {self._most_events} events")
                    return
        elif connection.has_head and (part or connection.is_complete or connection.ends_unframed):
            text = part[:_SHOWN_BYTES].decode("utf-8", "replace")
            self.fail(f"{HTTP_PREFIX}{connection.status}", text)
            return
        if connection.is_complete or connection.ends_unframed:
            self._end(now_s)
        elif not connection.is_open:
            error = connection.lost_error()
            kind = BAD_RESPONSE if isinstance(error, MalformedResponseError) else DISCONNECTED
            self.fail(kind, " ".join(str(error).split()))

    def fail(self, kind: str, message: str) -> None:
        """End with a failure."""
        if math.isnan(self.ended_s):
            self.failure = kind, message
            self._end(self._clock())

    def _end(self, now_s: float) -> None:
        self.ended_s = now_s
        if self.done is not None and not self.done.done():
            self.done.set_result(None)


def _answered(number: int, sent_s: float, ended_s: float, events: EventCounter) -> RequestOutcome:
    """Return the outcome of a whole answer, which must also end as a completion does."""
    times, ending = events.times, events.ending()
    tokens = times[: len(times) - ending.without_token]
    if ending.error or not times:
        failure = BAD_RESPONSE, ending.error or "an answer without a single event"
    elif not ending.complete:
        failure = DISCONNECTED, "the answer ended early"
    elif not tokens:
        failure, times = (BAD_RESPONSE, "an answer without a token"), tokens
    else:
        return RequestOutcome(
            number, FINISHED, sent_s, ended_s, tokens, ending.prompt_tokens, ending.output_tokens
        )
    return RequestOutcome(number, failure[0], sent_s, ended_s, times, message=failure[1])


@dataclass(frozen=True)
class StreamEnding:
    """Ending of an answer, from its last events."""

    complete: bool
    """Whether the answer ended as answers do: with a usage, a reason, or ``[DONE]``."""
    without_token: int
    """Events that carry no token."""
    prompt_tokens: int | None = None
    """As the server counted them."""
    output_tokens: int | None = None
    error: str = ""
    """Error inside the stream, or empty."""


class EventCounter:
    """Counter of the server-sent events of one answer, however its bytes are split.

    JSON is parsed for the last events only. `times` holds the arrival of each event.
    """

    __slots__ = ("_tail", "times")

    def __init__(self) -> None:
        self._tail = b"\n"
        self.times: list[float] = []

    def feed(self, data: bytes, now: float) -> None:
        """Record the arrival of bytes: one time per event that starts in them."""
        tail = self._tail
        # A line break inside JSON is escaped, so the pattern matches only where an event begins. The kept
        # bytes are too short to match twice.
        count = (tail[1 - len(_EVENT) :] + data).count(_EVENT)
        if count == 1:
            self.times.append(now)
        elif count:
            self.times.extend([now] * count)
        self._tail = (tail + data)[-_TAIL_BYTES:]

    def ending(self) -> StreamEnding:
        """Parse the last events."""
        complete, without_token = False, 0
        usage: Any = None
        for text in self._tail.split(_EVENT)[1:][-_READ:]:
            # Names of events and keep-alive comments may follow the line.
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
            return StreamEnding(False, without_token, error="an answer with an impossible number of tokens")
        return StreamEnding(True, without_token, prompt, output)


def _event(line: bytes) -> dict[str, Any] | None:
    """Return a completion event; None for anything else."""
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
