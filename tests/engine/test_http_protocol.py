"""Connections of clients, served by an application that the test controls."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from capplan.server import CLIENT, ServerLimits
from capplan.server._http_protocol import ConnectionCap
from capplan.server._state import ByteBudget

REQUEST = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]}
BODY = {"type": "http.response.body", "body": b"body"}

Application = Callable[[Any, Any, Any], Awaitable[None]]


@asynccontextmanager
async def client_of(
    application: Application,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Serve an application and connect to it."""
    cap = ConnectionCap(ServerLimits(), 8, ByteBudget(2**20), Counter())
    config = uvicorn.Config(application, ws="none", access_log=False)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: cap.new_protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    try:
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.close()
        server.close()


async def test_a_head_does_not_wait_for_its_body() -> None:
    async def application(_: Any, __: Any, send: Any) -> None:
        await send(START)
        await go_on.wait()
        await send(BODY)

    go_on = asyncio.Event()
    async with client_of(application) as (reader, writer):
        writer.write(REQUEST)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        go_on.set()
        assert await reader.readexactly(4) == b"body"


@pytest.mark.parametrize("field", [b"", b"Expect: 100-continue\r\n", b"Connection: close\r\n"])
async def test_a_response_is_whole_and_in_order(field: bytes) -> None:
    async def application(_: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(START)
        await send(BODY)

    async with client_of(application) as (reader, writer):
        writer.write(REQUEST.replace(b"Host: x\r\n", b"Host: x\r\n" + field))
        head = await reader.readuntil(b"\r\n\r\n")
        if b"Expect" in field:
            assert head == b"HTTP/1.1 100 Continue\r\n\r\n"
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert await reader.readexactly(4) == b"body"
        if b"close" in field:
            assert await reader.read() == b""


async def test_the_application_is_told_once_that_its_client_is_gone() -> None:
    told = []

    async def application(scope: Any, _: Any, __: Any) -> None:
        link = scope["extensions"][CLIENT]
        link.on_gone(lambda: (told.append("now"), left.set()))
        begun.set()
        await left.wait()
        link.on_gone(lambda: told.append("later"))
        link.on_gone(None)

    begun, left = asyncio.Event(), asyncio.Event()
    async with client_of(application) as (_, writer):
        writer.write(REQUEST)
        await begun.wait()
        writer.transport.abort()
        await left.wait()
        await asyncio.sleep(0.05)
        assert told == ["now", "later"]


@pytest.mark.parametrize("version", [b"1.0", b"2.0"])
@pytest.mark.parametrize("field", [b"", b"Connection: keep-alive\r\n", b"Expect: 100-continue\r\n"])
async def test_a_body_of_unknown_length_ends_with_the_connection_before_http_1_1(
    version: bytes, field: bytes
) -> None:
    """No chunks, no interim response: the client cannot read them."""

    async def application(_: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({**START, "headers": []})
        for part in (b"one", b"", b"two"):
            await send({**BODY, "body": part, "more_body": True})
        await send(BODY)

    async with client_of(application) as (reader, writer):
        writer.write(REQUEST.replace(b"1.1", version).replace(b"Host: x\r\n", b"Host: x\r\n" + field))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body == b"onetwobody"


@pytest.mark.parametrize(
    "rest", [b"\0\xff garbage\r\n\r\n", b"get / http/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nX : y\r\n\r\n"]
)
@pytest.mark.parametrize("requests", [1, 2])
async def test_whole_requests_are_answered_whatever_follows_them(rest: bytes, requests: int) -> None:
    async def application(_: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0.05)
        await send(START)
        await send(BODY)

    async with client_of(application) as (reader, writer):
        writer.write(REQUEST * requests + rest)
        received = await reader.read()
        assert received.count(b"HTTP/1.1 200 OK") == received.count(b"\r\n\r\nbody") == requests
