"""Instances in Ray actors."""

import asyncio
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="instances on a cluster need Ray (extra `ray`)")

import aiohttp
import ray

from capplan import InputError
from capplan.fleet import RayLauncher, RouterConfig, ServingOptions, instances_of
from capplan.fleet._app import RouterServer, RouterState
from capplan.fleet._fleet import InstanceFleet
from capplan.server import ServerSettings, bind, url_of
from tests.cli.conftest import ROOT
from tests.engine.fake_instances import QUICK, tiny_plan

pytestmark = [pytest.mark.oracle, pytest.mark.long, pytest.mark.process]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield RayLauncher("local", cpus=0.5)
    ray.shutdown()


def engines() -> list[psutil.Process]:
    """Engine processes of the Ray cluster that this process started."""
    return [
        each
        for each in psutil.Process().children(recursive=True)
        if each.status() != psutil.STATUS_ZOMBIE and "capplan.fleet._launcher" in each.cmdline()
    ]


def test_an_actor_restarts_its_engine_and_leaves_no_process(launcher: RayLauncher) -> None:
    specs = instances_of(tiny_plan(), ServingOptions("tiny-llama", "base"), ["g0"])
    log: list[str] = []
    config = RouterConfig(specs, launcher, ServerSettings("base"), restart_policy=QUICK, log=log.append)
    state = RouterState(config.server, InstanceFleet(config))

    async def whole() -> None:
        ready = asyncio.Event()
        listener = bind("127.0.0.1", 0)
        router = RouterServer(state, ready.set)
        serving = asyncio.ensure_future(router.serve([listener]))
        started = asyncio.ensure_future(ready.wait())
        await asyncio.wait((serving, started), return_when="FIRST_COMPLETED")
        assert not serving.done(), serving.result()
        async with aiohttp.ClientSession(url_of(listener)) as client:
            body = {"model": "a", "prompt": [1, 2], "max_tokens": 3}
            async with client.post("/v1/completions", json=body) as answer:
                assert (await answer.json())["usage"]["completion_tokens"] == 3
            body |= {"stream": True, "max_tokens": 400, "ignore_eos": True}
            async with client.post("/v1/completions", json=body) as stream:
                await stream.content.readuntil(b"\n\n")
                [engine] = engines()
                engine.kill()
                assert b"instance_failed" in await stream.content.read()
            while not (state.fleet.instances[0].restarts and state.fleet.instances[0].is_up):
                assert not serving.done()
                await asyncio.sleep(0.1)
            async with client.post("/v1/completions", json={"model": "a", "prompt": [1]}) as answer:
                assert answer.status == 200
        router.end()
        await serving

    asyncio.run(asyncio.wait_for(whole(), 240))
    assert engines() == []
    # On a busy machine a ping may fail first: the instance is stalled then, and its end follows.
    assert log[-2:] == ["instance g0-1 has ended by SIGKILL", "instance g0-1 is back"]


def test_a_setting_refused_by_an_instance_is_reported(launcher: RayLauncher) -> None:
    specs = instances_of(tiny_plan(), ServingOptions("tiny-llama", "base", {"max_model_len": 10**6}), ["g0"])

    async def launch() -> None:
        await launcher.launch(specs[0], "key")

    with pytest.raises(InputError, match="instance g0-1: max_model_len"):
        asyncio.run(asyncio.wait_for(launch(), 240))
