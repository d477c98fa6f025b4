"""Clients that never read: they hold neither an instance nor a connection for long."""

import json
import socket
import time
from contextlib import ExitStack
from typing import Any

import pytest

from capplan.server import ServerLimits
from tests.engine.live import live
from tests.engine.test_router import running

pytestmark = pytest.mark.process


def silent_client(url: str, **fields: Any) -> socket.socket:
    """Send a request whose response is never read; the kernel holds little of it."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    body = json.dumps({"prompt": [1, 2, 3], "stream": True, **fields})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    client.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
    return client


async def test_a_response_that_fits_the_buffer_frees_its_instance_unread() -> None:
    limits = ServerLimits(client_buffer_bytes=8 * 2**20)
    async with running(groups=["g0"], limits=limits) as r:
        instance = r.launcher["g0-1"]
        with ExitStack() as stack:
            for _ in range(3):
                # Beyond the kernel's buffers, and within the limit; the third fits no buffer of 64 KiB.
                stack.enter_context(silent_client(str(r.client._base_url), model="a", flood=6000))
            await r.until(lambda: len(instance.bodies) == 3 and instance.busy == 0)
        await r.until(lambda: r.state.in_flight == 0)


async def test_a_client_that_never_reads_is_disconnected_from_the_router() -> None:
    limits = ServerLimits(client_buffer_bytes=64 * 1024, send_timeout_s=0.3)
    async with running(groups=["g0"], limits=limits) as r:
        started_s = time.monotonic()
        with silent_client(str(r.client._base_url), model="a", flood=20_000):
            await r.until(lambda: r.launcher["g0-1"].busy == 1)
            await r.until(lambda: r.state.in_flight == 0)  # after the send timeout
            assert 0.3 <= time.monotonic() - started_s < 20
        await r.until(lambda: r.launcher["g0-1"].busy == 0)


def test_a_client_that_never_reads_is_disconnected_from_a_server() -> None:
    limits = ServerLimits(client_buffer_bytes=4096, send_timeout_s=0.3)
    asked = {"model": "a", "prompt": [[1]] * 60, "max_tokens": 500, "ignore_eos": True, "logprobs": 20}
    with live({"a": 8}, limits=limits) as server, silent_client(server.url, **asked):
        until_s = time.monotonic() + 60
        while not server.on_loop(lambda: bool(server.service.engine.in_flight)):
            assert time.monotonic() < until_s
        while server.on_loop(lambda: bool(server.server.server_state.connections)):
            assert time.monotonic() < until_s
            time.sleep(0.05)
        server.check_idle()
