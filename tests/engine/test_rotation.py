"""Rotation of a router: instances that stall, refuse requests or are busy, and their requests."""

import asyncio
import errno
import time
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from capplan.fleet._instance import InstanceClient
from tests.engine.fake_instances import QUICK, events
from tests.engine.test_router import running

pytestmark = pytest.mark.process

PINGS = replace(QUICK, ping_every_s=0.05, ping_timeout_s=0.2)


async def test_a_stalled_instance_leaves_the_rotation_and_comes_back() -> None:
    async with running(policy=PINGS) as r:
        stalled, supervisor = r.launcher["g1-1"], r.state.fleet.instances[1]
        held = [asyncio.ensure_future(r.post("b", hold=True)) for _ in range(2)]
        await r.until(lambda: stalled.busy == 2)
        stalled.stopped = True
        await r.until(lambda: supervisor.state == "stalled")
        assert {(await r.post("shared"))[1]["instance"] for _ in range(5)} == {"g0-1"}
        assert (await r.post("b"))[1]["error"]["code"] == "no_instance"
        health = await (await r.client.get("/health")).json()
        assert health["instances"]["g1-1"] == {"state": "stalled", "restarts": 0}
        stalled.stopped = False
        await r.until(lambda: supervisor.is_up)
        stalled.resume.set()
        assert [(await task)[0] for task in held] == [200, 200]
        stalled.refusal = "engine_stopped"
        await r.until(lambda: supervisor.state == "stalled")
        ends = ("is stalled: no response", "responds again", "is stalled: engine_stopped")
        assert r.log == [f"instance g1-1 {end}" for end in ends]


async def test_an_instance_that_stays_stalled_is_restarted() -> None:
    async with running(policy=replace(PINGS, probe_timeout_s=0.2)) as r:
        r.launcher["g0-1"].refusal = "engine_stopped"
        await r.until(lambda: len(r.launcher.lives["g0-1"]) == 2)
        await r.until(lambda: r.state.fleet.instances[0].is_up)


async def test_an_instance_that_streams_stays_in_the_rotation_however_slow_its_pings() -> None:
    async with running(policy=replace(PINGS, probe_timeout_s=0.2)) as r:
        busy = r.launcher["g0-1"]
        streamed = {"model": "a", "prompt": [1], "stream": True, "ticks": True}
        async with r.client.post("/v1/completions", json=streamed) as stream:
            busy.stopped = busy.hung = True
            until_s = time.monotonic() + 1.0  # several timeouts of pings and probes
            while time.monotonic() < until_s:
                await stream.content.readuntil(b"\n\n")
            assert r.state.fleet.instances[0].is_up
            assert (await r.post("a"))[0] == 200
            busy.resume.set()
            assert events(await stream.content.read())[-1] == b"[DONE]"
        await r.until(lambda: r.log != [])  # it streams no longer


async def test_a_late_event_loop_of_the_router_is_no_fault_of_the_instances() -> None:
    async with running(policy=replace(PINGS, ping_every_s=0.01)) as r:
        for _ in range(8):
            time.sleep(0.3)  # longer than the timeout of a ping
            for _ in range(3):
                await asyncio.sleep(0)
        assert r.log == []


async def test_requests_of_an_instance_that_stays_stalled_end_with_an_error() -> None:
    async with running(policy=replace(PINGS, abandon_after_s=0.2)) as r:
        stalled, supervisor = r.launcher["g0-1"], r.state.fleet.instances[0]
        streamed = {"model": "a", "prompt": [1], "stream": True}
        async with r.client.post("/v1/completions", json=streamed) as stream:
            plain = asyncio.ensure_future(r.post("a", hold=True))
            await r.until(lambda: stalled.busy == 2)
            await stream.content.readuntil(b"\n\n")
            stalled.stopped = True
            [last] = events(await stream.content.read())
            assert last["error"]["code"] == "instance_failed"
        status, body, headers = await plain
        assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "instance_failed", "1")
        stalled.stopped = False
        await r.until(lambda: supervisor.is_up)
        assert (await r.post("a"))[0] == 200
        assert supervisor.restarts == 0


async def test_too_many_open_files_of_the_router_are_no_fault_of_an_instance() -> None:
    error = OSError(errno.EMFILE, "Too many open files")

    async def connect(request: Any, *_: Any, **__: Any) -> Any:
        raise aiohttp.ClientConnectorError(request.connection_key, error)

    async def connection() -> Any:
        raise error

    async with running(policy=replace(PINGS, max_refused_probes=2)) as r:
        supervisor = r.state.fleet.instances[0]
        assert supervisor.client is not None
        await supervisor.client.close()
        instance = r.launcher["g0-1"]
        client = supervisor.client = InstanceClient(instance.url, instance.key)
        connector: Any = client._session.connector
        pool: Any = client.pool
        connector._create_connection = connect
        pool.connection = connection
        await asyncio.sleep(20 * PINGS.ping_every_s)
        status, body, _ = await r.post("a")
        assert (status, body["error"]["code"]) == (503, "overloaded")
        del connector._create_connection, pool.connection
        assert (await r.post("a"))[0] == 200
        assert r.log == []


async def test_a_request_that_its_instance_aborts_is_not_sent_again() -> None:
    async with running(policy=replace(QUICK, ping_every_s=30.0)) as r:
        for name in ("g0-1", "g1-1"):
            r.launcher[name].refusal = "aborted"
        status, body, _ = await r.post("shared")
        assert (status, body["error"]["code"]) == (503, "aborted")
        assert sum(len(r.launcher[name].bodies) for name in ("g0-1", "g1-1")) == 1
        assert r.state.retries == 0


async def test_the_first_refused_request_takes_an_instance_out_of_the_rotation() -> None:
    async with running(policy=replace(QUICK, ping_every_s=30.0)) as r:
        ending, supervisor = r.launcher["g1-1"], r.state.fleet.instances[1]
        async with r.client.post(
            "/v1/completions", json={"model": "b", "prompt": [1], "stream": True}
        ) as stream:
            await r.until(lambda: ending.busy == 1)
            ending.refusal = "shutting_down"
            answers = [await r.post("shared") for _ in range(8)]
            assert {(status, body["instance"]) for status, body, _ in answers} == {(200, "g0-1")}
            assert len(ending.bodies) == 2
            assert supervisor.state == "stalled"
            assert r.log == ["instance g1-1 is stalled: shutting_down"]
            ending.resume.set()  # its running requests go on
            assert events(await stream.content.read())[-1] == b"[DONE]"
