"""Streamed completions over `capplan.http_connection`, and the outcome of each."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

from pydantic_core import from_json

from capplan.http_connection import (
    ConnectionLostError,
    ConnectionPool,
    HttpConnection,
    MalformedResponseError,
    PoolLimits,
)
from capplan.profiling.load._record import (
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
from capplan.profiling.load._requests import Target, escaped_path

_DONE: Final = b"[DONE]"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_MOST_EVENT_BYTES: Final = 1 << 20
_GENERATED: Final = frozenset(
    ("text", "content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")
)
"""Fields of generated tokens in a choice or its delta."""
_TEXT: Final = re.compile(rb'"(?:text|content)": ?"((?:[^"\\]|\\.)+)"')
_STRING: Final = re.compile(rb'(?:[^"\\\n]++|\\.)++')
_FAILED_REASONS: Final = ("error", "abort")
"""Finish reasons of answers that the engine gave up."""
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
    Raise `ConnectionLostError` if the response is not whole, or longer than `max_bytes`.
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
            return _answered(number, sent_s, answer)
        kind, message = answer.failure
        return RequestOutcome(number, kind, sent_s, answer.ended_s, answer.token_times(), message=message)

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
        if not math.isnan(self.ended_s):
            return
        connection, now_s = self.connection, self._clock()
        part = connection.take()
        if connection.status == _OK:
            if part:
                self.events.feed(part, now_s)
                if self.events.choices > self._most_events:
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

    def token_times(self) -> list[float]:
        """Return the arrival of each event with tokens."""
        return self.events.token_times()[: self._most_events]

    def fail(self, kind: str, message: str) -> None:
        if math.isnan(self.ended_s):
            self.failure = kind, message
            self._end(self._clock())

    def _end(self, now_s: float) -> None:
        self.ended_s = now_s
        if self.done is not None and not self.done.done():
            self.done.set_result(None)


def _answered(number: int, sent_s: float, answer: _Answer) -> RequestOutcome:
    """Return the outcome of a whole answer, which must also end as a completion does."""
    events = answer.events
    events.end(answer.ended_s)
    times = answer.token_times()
    if events.error:
        failure = BAD_RESPONSE, events.error
    elif not events.complete:
        failure = DISCONNECTED, "the answer ended early"
    elif not times:
        failure = BAD_RESPONSE, "an answer without a token"
    else:
        return RequestOutcome(
            number, FINISHED, sent_s, answer.ended_s, times, events.prompt_tokens, events.output_tokens
        )
    return RequestOutcome(number, failure[0], sent_s, answer.ended_s, times, message=failure[1])


class EventCounter:
    """Parser of the server-sent events of one answer, however its bytes are split.

    An event counts from the arrival of its last byte. It holds tokens if it has generated text, if the server
    counts tokens in it (``continuous_usage_stats``, ``token_ids``, ``logprobs``), or as `token_times` infers.
    Events of another kind (comments, ``{}``, no choices, a role alone) hold none.
    """

    __slots__ = (
        "_after_return",
        "_around_text",
        "_buffer",
        "_count",
        "_counted",
        "_is_sure",
        "_times",
        "_usage_tokens",
        "complete",
        "error",
        "prompt_tokens",
    )

    def __init__(self) -> None:
        self._buffer = b""
        self._after_return = False
        self._around_text = b"", b""
        """Bytes of an event before and after its text."""
        self._times: list[float] = []
        """Of events with a choice that may hold a token."""
        self._is_sure = bytearray()
        """Whether each of them surely does."""
        self._count = 0
        """Events of any kind; comments are none."""
        self._counted = 0
        """Tokens that events list."""
        self._usage_tokens: int | None = None
        self.complete = False
        """Whether the answer ended as answers do: with a usage, a reason, or ``[DONE]``."""
        self.prompt_tokens: int | None = None
        """As the server counted them."""
        self.error = ""
        """First error inside the stream, or empty."""

    @property
    def choices(self) -> int:
        """Events so far that may hold a token."""
        return len(self._times)

    @property
    def output_tokens(self) -> int | None:
        """Generated tokens as the server counted them; None if it did not."""
        return self._usage_tokens or self._counted or None

    def feed(self, data: bytes, now_s: float) -> None:
        if self._after_return and data[:1] == b"\n":
            data = data[1:]
        self._after_return = data[-1:] == b"\r"
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._buffer:
            data = self._buffer + data
        *events, self._buffer = data.split(b"\n\n")
        for each in events:
            self._event(each, now_s)
        if len(self._buffer) > _MOST_EVENT_BYTES:
            self._fail(f"an event of more than {_MOST_EVENT_BYTES} bytes")
            self._buffer = b""

    def end(self, now_s: float) -> None:
        """Parse an event that no empty line has ended."""
        rest, self._buffer = self._buffer, b""
        self._event(rest, now_s)
        if not self._count:
            self._fail(f"an answer without a single event: {_shown(rest) or 'it is empty'}")

    def token_times(self) -> list[float]:
        """Return the arrival of each event with tokens.

        Some servers send empty text for a token (special tokens, part of a character), others as a greeting
        or beside the finish reason. Empty events count as far as the server counts more tokens than events
        with text: the latest ones first, and if events hold several tokens, none before the first text. So a
        doubt lengthens latencies.
        """
        times, sure = self._times, self._is_sure
        tokens, known = self.output_tokens or 0, sure.count(1)
        if known == len(times) or tokens == len(times):
            return times
        if tokens > len(times):
            return times[sure.index(1) if known else -1 :]
        empty = [at for at, is_sure in enumerate(sure) if not is_sure]
        left_out = set(empty[: len(times) - max(tokens, known)])
        return [time_s for at, time_s in enumerate(times) if at not in left_out]

    def _event(self, text: bytes, now_s: float) -> None:
        before, after = self._around_text
        if (
            before
            and text.startswith(before)
            and text.endswith(after)
            and _STRING.fullmatch(text, len(before), len(text) - len(after))
        ):  # an event as one before but for its text: parsing JSON takes several times as long
            self._times.append(now_s)
            self._is_sure.append(True)
            return
        if text.startswith(b"data:") and b"\n" not in text:
            name, line = b"", text[5:].strip()
        else:
            name, line = _fields(text)
        if not line:
            return
        self._count += 1
        if line == _DONE:
            self.complete = True
            return
        event = _json_object(line)
        if event is None:
            self._fail(f"no answer to a completion: {_shown(line)}")
        elif name == b"error" or event.get("error") or event.get("object") == "error":
            self._fail(_shown(line))
        else:
            choices, usage = event.get("choices") or (), event.get("usage")
            tokens = self._usage_of(usage, bool(choices)) if isinstance(usage, dict) else None
            if choices and self._add(choices, tokens, now_s) and not isinstance(usage, dict):
                fields = list(_TEXT.finditer(text))
                if len(fields) == 1:
                    self._around_text = text[: fields[0].start(1)], text[fields[0].end(1) :]

    def _add(self, choices: Sequence[dict[str, Any]], tokens: int | None, now_s: float) -> bool:
        """Record an event with choices, and with a number of tokens if the server counts them.

        Return whether it has text, and nothing beside it to record.
        """
        is_plain = tokens is None
        has_text = may_hold_tokens = False
        for choice in choices:
            if reason := choice.get("finish_reason"):
                is_plain = False
                self._end_by(reason)
            if tokens is None and (choice.get("logprobs") or choice.get("token_ids")):
                is_plain, tokens = False, _listed_tokens(choice)
                self._counted += tokens or 0
            output = choice.get("delta") or choice.get("message") or choice
            if not isinstance(output, dict):
                continue
            if output.get("text") or output.get("content") or any(map(output.get, _GENERATED)):
                has_text = True
            elif "role" not in output and not _GENERATED.isdisjoint(output):
                may_hold_tokens = True
        if has_text or (may_hold_tokens if tokens is None else tokens > 0):
            self._times.append(now_s)
            self._is_sure.append(has_text or tokens is not None)
        return has_text and is_plain

    def _end_by(self, reason: Any) -> None:
        """Record a finish reason; some servers give its type in an object."""
        self.complete = True
        if (reason.get("type") if isinstance(reason, dict) else reason) in _FAILED_REASONS:
            self._fail(f"an answer that ended with {_shown(json.dumps(reason).encode())}")

    def _usage_of(self, usage: dict[str, Any], is_running: bool) -> int | None:
        """Record a usage; return the tokens of an event with a running total."""
        prompt, output = (_count(usage, key) for key in ("prompt_tokens", "completion_tokens"))
        if max(prompt or 0, output or 0) > _MOST_TOKENS:
            self._fail("an answer with an impossible number of tokens")
            return None
        if prompt is not None:
            self.prompt_tokens = prompt
        self.complete |= not is_running and bool(output)
        if output is None:
            return None
        before, self._usage_tokens = self._usage_tokens, output
        if not is_running or (before is None and output > 1):
            return None  # a total in the last event only is not that of its tokens
        return max(0, output - (before or 0))

    def _fail(self, error: str) -> None:
        self.error = self.error or error


def _fields(text: bytes) -> tuple[bytes, bytes]:
    """Return the name and the data of an event."""
    name, data = b"", []
    for line in text.split(b"\n"):
        field, _, value = line.removeprefix(_BYTE_ORDER_MARK).partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.strip()
    return name, b"\n".join(data).strip()


def _json_object(line: bytes) -> dict[str, Any] | None:
    """Return an event that may be of a completion; None for anything else."""
    try:
        event = from_json(line)  # a third of the time of json
    except ValueError:
        try:
            event = json.loads(line)  # takes half a surrogate pair
        except (ValueError, RecursionError):
            return None
    if not isinstance(event, dict):
        return None
    choices = event.get("choices")
    sound = choices is None or (isinstance(choices, list) and all(isinstance(each, dict) for each in choices))
    return event if sound else None


def _listed_tokens(choice: dict[str, Any]) -> int | None:
    """Return the number of tokens that an event lists; None if it lists none."""
    logprobs = choice.get("logprobs")
    listed = [choice.get("token_ids")]
    if isinstance(logprobs, dict):
        listed += [logprobs.get("tokens"), logprobs.get("content")]
    return next((len(each) for each in listed if isinstance(each, list)), None)


def _count(usage: dict[str, Any], key: str) -> int | None:
    value = usage.get(key)
    return value if isinstance(value, int) and value >= 0 else None


def _shown(line: bytes) -> str:
    return line[:200].decode("utf-8", "replace")
