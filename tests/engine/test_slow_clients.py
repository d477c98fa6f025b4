"""Clients that never read: they hold neither the queues of a plan nor a connection for long."""

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router needs aiohttp (extra `engine`)")

from capplan.engine.server import ServerLimits
from capplan.spec import QueueClass, Queues, Wrs
from tests.engine.fake_instances import QUICK, Routed, routed, tiny_plan
from tests.engine.live import live

WRS = Wrs(a=0.4, b=0.6, max_prompt_tokens=100, max_output_tokens=100, max_adapter_bytes=1)
ONE_AT_A_TIME = Queues(wrs=WRS, classes=(QueueClass(upper_wrs=None, quota_tokens=1),))


def run(check: Callable[[Routed], Awaitable[None]], **settings: Any) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), routed(**settings) as router:
            await check(router)

    asyncio.run(whole())


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


def test_a_response_that_fits_the_buffer_frees_its_quota_unread() -> None:
    async def check(r: Routed) -> None:
        with ExitStack() as stack:
            for _ in range(3):
                # Beyond the kernel's buffers, and within the limit; the third fits no buffer of 64 KiB.
                stack.enter_context(silent_client(str(r.client._base_url), model="a", flood=6000))
            await r.until(lambda: len(r.launcher["g0-1"].bodies) == 3)
            assert (await r.post("a"))[0] == 200
        await r.until(lambda: r.state.in_flight == 0)

    limits = ServerLimits(client_buffer_bytes=8 * 2**20)
    run(check, plan=tiny_plan(ONE_AT_A_TIME), groups=["g0"], limits=limits)


def test_a_client_that_never_reads_is_disconnected_from_the_router() -> None:
    async def check(r: Routed) -> None:
        started_s = time.monotonic()
        with silent_client(str(r.client._base_url), model="a", flood=20_000):
            await r.until(lambda: r.launcher["g0-1"].busy == 1)
            assert (await r.post("a"))[0] == 200  # after the send timeout
            assert 0.3 <= time.monotonic() - started_s < 20
        await r.until(lambda: r.state.in_flight == 0)

    limits = ServerLimits(client_buffer_bytes=64 * 1024, send_timeout_s=0.3)
    run(check, plan=tiny_plan(ONE_AT_A_TIME), groups=["g0"], limits=limits)


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


def test_a_stalled_instance_leaves_the_rotation_and_comes_back() -> None:
    async def check(r: Routed) -> None:
        stalled, supervisor = r.launcher["g1-1"], r.state.fleet.instances[1]
        held = [asyncio.ensure_future(r.post("b", hold=True)) for _ in range(2)]
        await r.until(lambda: r.state.in_flight == 2 and stalled.busy == 1)
        stalled.stopped = True
        await r.until(lambda: supervisor.state == "stalled")
        assert {(await r.post("shared"))[1]["instance"] for _ in range(5)} == {"g0-1"}
        done, running = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result()[1]["error"]["code"] for task in done] == ["no_instance"]  # it had waited
        health = await (await r.client.get("/health")).json()
        assert health["instances"]["g1-1"] == {"state": "stalled", "restarts": 0}
        stalled.stopped = False
        await r.until(lambda: supervisor.is_up)
        stalled.resume.set()
        assert [(await task)[0] for task in running] == [200]
        stalled.refusing = True  # as an instance whose core is stopped
        await r.until(lambda: supervisor.state == "stalled")
        assert r.log == [f"instance g1-1 {end}" for end in ("is stalled", "responds again", "is stalled")]

    policy = replace(QUICK, ping_every_s=0.05, ping_timeout_s=0.2)
    run(check, plan=tiny_plan(ONE_AT_A_TIME), policy=policy)


def test_an_instance_that_stays_stalled_is_restarted() -> None:
    async def check(r: Routed) -> None:
        r.launcher["g0-1"].refusing = True
        await r.until(lambda: len(r.launcher.lives["g0-1"]) == 2)
        await r.until(lambda: r.state.fleet.instances[0].is_up)

    run(check, policy=replace(QUICK, ping_every_s=0.05, probe_timeout_s=0.2))
