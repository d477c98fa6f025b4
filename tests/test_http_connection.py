"""Connections of the router and the load generator, against servers that send given bytes."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools", reason="needs httptools (extra `engine` or `bench`)")

from capplan.http_connection import ConnectionLostError, ConnectionPool, HttpConnection

BODY = b'{"text": "' + b"x" * 200 + b'"}'
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
    len(BODY),
    BODY,
)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
    b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:8], BODY[8:])
)
ENDED = CHUNKED + b"0\r\n\r\n"
CLOSING = WHOLE.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")


class Server:
    """Server that answers each request with the next parts of bytes."""

    def __init__(self, *answers: list[bytes], hangs_up: bool = False) -> None:
        self.answers = list(answers)
        self.hangs_up = hangs_up
        self.connections = 0
        self.written = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int((head.lower().partition(b"content-length: ")[2] or b"0").split(b"\r")[0])
                await reader.readexactly(length)
                for part in self.answers.pop(0):
                    writer.write(part)
                    await writer.drain()
                    self.written += len(part)
                    await asyncio.sleep(0)
            if not self.hangs_up:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def pool_of(server: Server) -> AsyncIterator[ConnectionPool]:
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    pool = ConnectionPool(f"http://127.0.0.1:{port}", {"Authorization": "Bearer secret"})
    try:
        async with asyncio.timeout(30):
            yield pool
    finally:
        pool.close()
        listening.close()


async def posted(pool: ConnectionPool) -> HttpConnection:
    connection = await pool.connection()
    pool.post(connection, "/v1/completions", b"{}", b"application/json")
    return connection


async def answer(pool: ConnectionPool) -> tuple[int, bytes]:
    connection = await posted(pool)
    try:
        await connection.wait_for_head()
        return connection.status, await connection.whole_body()
    finally:
        pool.release(connection)


@settings(max_examples=30, deadline=None)
@given(whole=st.sampled_from([WHOLE, ENDED]), cuts=st.lists(st.integers(1, len(WHOLE) - 1), max_size=6))
def test_a_response_is_whole_however_its_bytes_arrive(whole: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(whole)]
    parts = [whole[begin:end] for begin, end in pairwise(edges) if begin < end]
    server = Server(parts, parts)

    async def check() -> None:
        async with pool_of(server) as pool:
            assert [await answer(pool), await answer(pool)] == [(200, BODY)] * 2
        assert server.connections == 1

    asyncio.run(check())


async def test_parts_of_a_stream_are_returned_as_they_arrive() -> None:
    gate = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    server = Server([gate, b"2\r\nab\r\n"], [WHOLE])
    async with pool_of(server) as pool:
        connection = await posted(pool)
        await connection.wait_for_head()
        assert await connection.next_part() == b"ab"
        assert not connection.is_complete
        pool.release(connection)  # closes it: the rest may come at any time
        assert not connection.is_open
        assert await answer(pool) == (200, BODY)
        assert server.connections == 2


@pytest.mark.parametrize("whole", [WHOLE, ENDED])
@pytest.mark.parametrize("taken", [0, 1])
async def test_a_body_that_was_not_read_is_no_part_of_the_next_response(whole: bytes, taken: int) -> None:
    """The reader is cancelled after the response has arrived, and before it has taken all of it."""
    server = Server([whole[:-9], whole[-9:]], [WHOLE])
    async with pool_of(server) as pool:
        connection = await posted(pool)
        await connection.wait_for_head()
        for _ in range(taken):
            await connection.next_part()
        while not connection.is_complete:
            await asyncio.sleep(0.01)
        pool.release(connection)
        assert await answer(pool) == (200, BODY)


async def test_a_connection_that_its_server_closes_is_not_used_again() -> None:
    """The transport reports the end of the connection one iteration later."""
    async with pool_of(Server([WHOLE])) as pool:
        connection = await posted(pool)
        await connection.wait_for_head()
        await connection.whole_body()
        pool.release(connection)
        connection.eof_received()
        assert pool.idle_connection() is None


async def test_a_connection_that_has_ended_is_freed_without_a_collection() -> None:
    async with pool_of(Server([WHOLE])) as pool:
        connection = await posted(pool)
        await connection.wait_for_head()
        await connection.whole_body()
        connection.abort()
        found = weakref.ref(connection)
        del connection
        gc.disable()
        try:
            while found() is not None:
                await asyncio.sleep(0.01)
        finally:
            gc.enable()


async def test_requests_at_a_time_have_connections_of_their_own() -> None:
    server = Server(*[[WHOLE]] * 6)
    async with pool_of(server) as pool:
        assert await asyncio.gather(*(answer(pool) for _ in range(3))) == [(200, BODY)] * 3
        assert server.connections == 3
        assert await asyncio.gather(*(answer(pool) for _ in range(3))) == [(200, BODY)] * 3
        assert server.connections == 3


@pytest.mark.parametrize(
    "sent", [b"", WHOLE[:20], WHOLE[:-1], CHUNKED, b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\n\r\nx"]
)
async def test_a_response_that_does_not_come_as_a_whole_is_an_error(sent: bytes) -> None:
    server = Server([sent], hangs_up=True)
    async with pool_of(server) as pool:
        with pytest.raises(ConnectionLostError):
            await answer(pool)


async def test_endless_headers_are_refused() -> None:
    server = Server([b"HTTP/1.1 200 OK\r\n", *[b"x: " + b"y" * 1000 + b"\r\n"] * 200])
    async with pool_of(server) as pool:
        with pytest.raises(ConnectionLostError):
            await answer(pool)


@pytest.mark.parametrize("first", [CLOSING, WHOLE + b"HTTP/1.1 200 OK\r\n", WHOLE + WHOLE, ENDED + ENDED])
async def test_a_connection_that_is_closed_or_out_of_step_is_not_used_again(first: bytes) -> None:
    server = Server([first], [WHOLE])
    async with pool_of(server) as pool:
        assert await answer(pool) == (200, BODY)
        await asyncio.sleep(0.05)
        assert await answer(pool) == (200, BODY)
        assert server.connections == 2


async def test_interim_responses_are_skipped() -> None:
    async with pool_of(Server([b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + WHOLE])) as pool:
        assert await answer(pool) == (200, BODY)


async def test_a_server_waits_for_a_reader_that_is_slower() -> None:
    part = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    server = Server([CHUNKED, *[part] * 400, b"0\r\n\r\n"])
    async with pool_of(server) as pool:
        connection = await posted(pool)
        await connection.wait_for_head()
        await asyncio.sleep(0.3)
        assert server.written < 15 * 2**20, "beyond what the kernel and the connection hold"
        assert len(await connection.whole_body()) == len(BODY) + 400 * 65536
        pool.release(connection)
        assert connection.is_open


async def test_closing_fails_requests_in_progress_and_refuses_new_ones() -> None:
    async with pool_of(Server([b"HTTP/1.1 200 OK\r\n"])) as pool:
        waiting = asyncio.ensure_future(answer(pool))
        await asyncio.sleep(0.05)
        pool.close()
        with pytest.raises(ConnectionLostError):
            await waiting
        with pytest.raises(ConnectionAbortedError):
            await pool.connection()
