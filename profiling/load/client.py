"""Streamed completions over aiohttp, and the outcome of each."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp import hdrs, http_exceptions
from yarl import URL

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
from capplan.profiling.load.requests import Target

if TYPE_CHECKING:
    from aiohttp.connector import Connection

_EVENT: Final = b"\ndata:"
_DONE: Final = b"[DONE]"
_TAIL_BYTES: Final = 2048
_READ: Final = 3  # the last token, the usage, [DONE]
_MOST_INFORMATIONAL: Final = 16
"""Responses such as 100 Continue before the final one."""
_EVENTS_PER_TOKEN: Final = 4
_MORE_EVENTS: Final = 64
"""Events of an answer beyond those of its tokens."""
_MOST_TOKENS: Final = 1 << 30
"""Limit on the token counts of an answer; a larger count is an error of the server."""
_SHOWN_BYTES: Final = 300
_OK: Final = 200
_KEEPALIVE_S: Final = 2.0
"""Lifetime of an idle connection: shorter than a server's (uvicorn: 5 s), which would lose a request."""
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)
_NO_HEADERS: Final = (hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.USER_AGENT)
"""Headers that aiohttp adds by default; compression would hold tokens back."""


def open_session(target: Target) -> aiohttp.ClientSession:
    """Return a session with the headers of the target and any number of connections.

    It must be opened inside a running event loop.
    """
    return aiohttp.ClientSession(
        headers=target.headers(),
        skip_auto_headers=_NO_HEADERS,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None, keepalive_timeout=_KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,  # not requested, and without a limit
        response_class=_Response,
    )


class _Response(aiohttp.ClientResponse):
    """Response after a limited number of informational ones, which aiohttp skips without a limit."""

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        protocol: Any = connection.protocol
        read, count = protocol.read, 0

        async def limited() -> Any:
            nonlocal count
            count += 1
            if count > _MOST_INFORMATIONAL:
                raise aiohttp.ClientPayloadError(f"more than {_MOST_INFORMATIONAL} informational responses")
            return await read()

        protocol.read = limited
        try:
            return await super().start(connection)
        finally:
            del protocol.read


async def read_at_most(response: aiohttp.ClientResponse, max_bytes: int) -> str:
    """Return the text of a response.

    Raises
    ------
    aiohttp.ClientPayloadError
        If it is longer than `max_bytes`.
    """
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) > max_bytes:
            raise aiohttp.ClientPayloadError(f"a response of more than {max_bytes} bytes")
    return data.decode("utf-8", "replace")


class CompletionClient:
    """Client for streamed completions; `timeout_s` limits one completion, `clock` is that of the run."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._session = session
        self._url = URL(target.at("/v1/completions"))
        self._timeout_s = timeout_s
        self._clock = clock

    async def complete(self, number: int, body: bytes, output_tokens: int) -> RequestOutcome:
        """Send a request for a number of tokens and read its answer to the end.

        Failures and cancellation are outcomes, not exceptions.
        """
        most_events = _EVENTS_PER_TOKEN * output_tokens + _MORE_EVENTS
        sent_s, events = self._clock(), EventCounter()
        try:
            async with asyncio.timeout(self._timeout_s):
                refusal = await self._exchange(body, events, most_events)
        except TimeoutError:
            failure = TIMEOUT, f"took longer than {self._timeout_s:g} s"
        except asyncio.CancelledError:
            failure = UNFINISHED, ""
        except (aiohttp.ClientError, http_exceptions.HttpProcessingError, OSError) as error:
            failure = _failure_kind(error), " ".join(str(error).split()) or type(error).__name__
        else:
            if refusal is None:
                return _answered(number, sent_s, self._clock(), events)
            failure = refusal
        return RequestOutcome(number, failure[0], sent_s, self._clock(), events.times, message=failure[1])

    async def _exchange(self, body: bytes, events: EventCounter, most_events: int) -> tuple[str, str] | None:
        """Read one answer into `events`; return kind and message if it is none, or has too many events."""
        async with self._session.post(self._url, data=body, allow_redirects=False) as response:
            if response.status != _OK:
                text = await response.content.read(_SHOWN_BYTES)
                return f"{HTTP_PREFIX}{response.status}", text.decode("utf-8", "replace")
            async for content in response.content.iter_any():
                events.feed(content, self._clock())
                if len(events.times) > most_events:
                    del events.times[most_events:]
                    return BAD_RESPONSE, f"an answer of more than {most_events} events"
        return None


def _failure_kind(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return CLIENT_LIMIT if error.errno in _EXHAUSTED else REFUSED
    if isinstance(error, OSError | aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        return DISCONNECTED
    return BAD_RESPONSE


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
