"""Load tests of hostile servers: answers without end are refused in bounded time and memory."""

import asyncio
import gzip
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("httptools", reason="the load generator needs httptools (extra `bench`)")

from capplan import InputError
from capplan.profiling.load import Target
from capplan.profiling.load._client import CompletionClient, open_session
from capplan.profiling.load._preflight import fetch_metrics, preflight
from capplan.profiling.load._record import BAD_RESPONSE, RequestOutcome
from tests.profiling.load.servers import STREAM_HEAD, chunk, event, listening

MIB = 2**20
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def repeated(first: bytes, part: bytes) -> Answer:
    """Return an answer without an end."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        while True:
            writer.write(part)
            await writer.drain()

    return answer


@contextmanager
def hostile(answer: Answer) -> Iterator[Target]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    with listening(lambda: asyncio.start_server(handle, "127.0.0.1", 0)) as url:
        yield Target(url, None, "base", {}, {})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (repeated(CHUNKED, chunk(b" " * MIB)), "more than 16777216 bytes"),
        (repeated(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100), "more than 16 informational responses"),
        (repeated(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 1000), "does not answer"),
        (repeated(b"HTTP/1.1 200 OK\r\nX: ", b"y" * 65536), "does not answer"),
    ],
    ids=["endless", "informational", "headers", "header"],
)
def test_an_endless_list_of_models_is_refused(answer: Answer, message: str) -> None:
    begin_s = time.monotonic()
    with hostile(answer) as target, pytest.raises(InputError, match=message):
        asyncio.run(preflight(target, ["a"]))
    assert time.monotonic() - begin_s < 10


def fetched(answer: Answer) -> str | None:
    """Return the metrics of a hostile server."""

    async def fetch(target: Target) -> str | None:
        async with open_session(target) as session:
            return await fetch_metrics(session, target)

    with hostile(answer) as target:
        return asyncio.run(fetch(target))


def test_endless_metrics_are_none() -> None:
    assert fetched(repeated(CHUNKED, chunk(b"x 1\n" * 20_000))) is None


def test_a_compressed_answer_is_not_expanded() -> None:
    """The client does not ask for compression."""
    bomb = gzip.compress(b" " * (64 * MIB))
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(head + bomb)
        await writer.drain()

    text = fetched(answer)
    assert text is not None
    assert len(text) <= len(bomb)


def test_an_answer_of_more_events_than_tokens_is_an_error() -> None:
    async def complete(target: Target) -> RequestOutcome:
        async with open_session(target) as session:
            client = CompletionClient(session, target, 20.0, time.monotonic)
            return await client.complete(0, b"{}", 10)

    with hostile(repeated(STREAM_HEAD, chunk(event() * 100))) as target:
        outcome = asyncio.run(complete(target))
    assert outcome.kind == BAD_RESPONSE
    assert "more than 104 events" in outcome.message
    assert len(outcome.times_s) == 104
