"""Connections of the load generator: TLS, redirections, bodies without a length, life and end of sockets."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

pytest.importorskip("httptools", reason="the load generator needs httptools (extra `bench`)")

from capplan import InputError
from capplan.http_connection import ConnectionPool
from capplan.profiling.load import Target
from capplan.profiling.load._client import CompletionClient, open_session
from capplan.profiling.load._preflight import fetch_metrics
from capplan.profiling.load._record import (
    DISCONNECTED,
    FINISHED,
    REFUSED,
    TIMEOUT,
    UNFINISHED,
    RequestOutcome,
)
from tests.profiling.load.servers import STREAM_HEAD, chunk, event, plain, usage

# openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500 -subj /CN=localhost
#   -addext subjectAltName=DNS:localhost,IP:127.0.0.1
CERTIFICATE = Path(__file__).with_name("localhost.pem")
WHOLE = event() * 3 + usage(5, 3)
Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Server whose responses `answer` writes; it counts connections."""

    def __init__(self, answer: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.answer, self.tls = answer, tls
        self.connections = 0
        self.heads: list[str] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = [line for line in head.lower().split("\r\n") if line.startswith("content-length")]
                await reader.readexactly(int(length[0].split(":")[1]) if length else 0)
                self.heads.append(head)
                await self.answer(head.split(" ")[1], writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def serving(
        self, path: str = "", host: str = "127.0.0.1"
    ) -> AsyncIterator[tuple[ConnectionPool, Target]]:
        listening = await asyncio.start_server(self.handle, "127.0.0.1", 0, ssl=self.tls)
        scheme = "http" if self.tls is None else "https"
        target = Target(f"{scheme}://{host}:{listening.sockets[0].getsockname()[1]}{path}", "key")
        async with asyncio.timeout(20), open_session(target) as pool:
            yield pool, target
        listening.close()  # its `wait_closed` waits for handlers since Python 3.12


async def completed(pool: ConnectionPool, target: Target, timeout_s: float = 10.0) -> RequestOutcome:
    return await CompletionClient(pool, target, timeout_s, time.monotonic).complete(0, b"{}", 3)


async def whole_answer(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + chunk(WHOLE) + b"0\r\n\r\n")
    await writer.drain()


async def silence(path: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


def open_sockets() -> int:
    return len(psutil.Process().net_connections("tcp"))


async def test_a_server_may_speak_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    server = Server(whole_answer, context)
    async with server.serving(host="localhost") as (pool, target):
        for _ in range(2):
            outcome = await completed(pool, target)
            assert (outcome.kind, len(outcome.times_s), outcome.output_tokens) == (FINISHED, 3, 3)
        assert server.connections == 1


async def test_an_unknown_certificate_is_refused() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    async with Server(whole_answer, context).serving() as (pool, target):
        outcome = await completed(pool, target)
        assert outcome.kind == REFUSED
        assert "certificate" in outcome.message


async def test_requests_have_key_length_host_and_escaped_path() -> None:
    server = Server(whole_answer)
    async with server.serving(path="/my model/é/v1") as (pool, target):
        await completed(pool, target)
        first, *fields = server.heads[0].split("\r\n")
        assert first == "POST /my%20model/%C3%A9/v1/completions HTTP/1.1"
        wanted = {"Authorization: Bearer key", "Content-Length: 2", "Content-Type: application/json"}
        assert wanted | {f"Host: {target.url.split('/')[2]}"} <= set(fields)


def test_a_key_of_two_lines_is_refused_and_not_shown() -> None:
    with pytest.raises(InputError, match="api_key: must be one line") as caught:
        Target("http://h", "hush\r\nX: y")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(("body", "kind"), [(WHOLE, FINISHED), (event() * 3, DISCONNECTED)])
async def test_an_answer_of_unstated_length_ends_with_the_connection(body: bytes, kind: str) -> None:
    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    async with Server(answer).serving() as (pool, target):
        outcome = await completed(pool, target)
        assert (outcome.kind, len(outcome.times_s)) == (kind, 3)


@pytest.mark.parametrize("location", ["/metrics/", "metrics/", "http://HOST/metrics/"])
async def test_metrics_may_be_redirected(location: str) -> None:
    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/metrics/":
            await plain(writer, 200, b"x 1\n")
            return
        host = server.heads[-1].lower().partition("host: ")[2].split("\r\n")[0]
        where = location.replace("HOST", host).encode()
        writer.write(b"HTTP/1.1 307 X\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % where)

    server = Server(answer)
    async with server.serving() as (pool, target):
        assert await fetch_metrics(pool, target) == "x 1\n"


@pytest.mark.parametrize("location", ["/metrics", "http://[::1", "http://elsewhere.invalid/metrics", ""])
async def test_other_redirections_are_not_followed_without_end(location: str) -> None:
    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 307 X\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % location.encode())

    async with Server(answer).serving() as (pool, target):
        assert await fetch_metrics(pool, target) is None


async def test_an_idle_connection_is_closed_in_time() -> None:
    server = Server(whole_answer)
    async with server.serving() as (pool, target):
        before = open_sockets()
        await completed(pool, target)
        assert open_sockets() == before + 2, "both ends of an idle connection"
        await asyncio.sleep(2.3)
        assert open_sockets() == before
        await completed(pool, target)
        assert server.connections == 2


@pytest.mark.parametrize("when_s", [0.0, 0.2])
async def test_cancelled_requests_are_unfinished_and_leave_no_socket(when_s: float) -> None:
    async with Server(silence).serving() as (pool, target):
        before = open_sockets()
        tasks = [asyncio.create_task(completed(pool, target)) for _ in range(8)]
        await asyncio.sleep(when_s)
        for task in tasks:
            task.cancel()
        assert {each.kind for each in await asyncio.gather(*tasks)} == {UNFINISHED}
        await asyncio.sleep(0.1)
        ours = [each for each in psutil.Process().net_connections("tcp") if each.raddr]
        port = int(target.url.rpartition(":")[2])
        assert [each for each in ours if each.raddr.port == port] == []
        assert open_sockets() <= before + 8, "ends of the server, which sleeps"


async def test_a_time_out_covers_connection_and_answer() -> None:
    async with Server(silence).serving() as (pool, target):
        begin_s = time.monotonic()
        outcome = await completed(pool, target, 0.3)
        assert (outcome.kind, outcome.message) == (TIMEOUT, "took longer than 0.3 s")
        assert 0.3 <= time.monotonic() - begin_s < 2.0
        assert outcome.ended_s - outcome.sent_s >= 0.29


async def test_a_time_out_covers_a_handshake_that_does_not_end() -> None:
    async with Server(silence).serving() as (_, target):
        secure = Target(target.url.replace("http:", "https:"))
        async with open_session(secure) as tls_pool:
            assert (await completed(tls_pool, secure, 0.3)).kind == TIMEOUT


async def test_a_refusal_shows_the_beginning_of_its_body_and_frees_the_connection() -> None:
    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        await plain(writer, 503, b"b" * 1000)

    server = Server(answer)
    async with server.serving() as (pool, target):
        for _ in range(2):
            outcome = await completed(pool, target)
            assert (outcome.kind, outcome.message) == ("http_503", "b" * 300)
        assert server.connections == 1
