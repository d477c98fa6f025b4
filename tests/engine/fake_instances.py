"""Controllable fake instances behind a real router on loopback."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from capplan import Plan
from capplan.fleet import (
    InstanceSpec,
    RebalancingConfig,
    RegistrySettings,
    RouterConfig,
    RoutingSettings,
    ServingOptions,
    instances_of,
)
from capplan.fleet._app import RouterServer, RouterState
from capplan.fleet._fleet import InstanceFleet
from capplan.fleet._instance import RestartPolicy
from capplan.fleet._launcher import LaunchError
from capplan.server import PoolSettings, ServerSettings, bind, url_of
from capplan.spec import Totals, Verification
from tests.cli.examples import group, small_plan

QUICK = RestartPolicy(initial_delay_s=0.01, max_delay_s=0.02, probe_every_s=0.05, stop_grace_s=1.0)


def tiny_plan() -> Plan:
    """Return a plan of two instances of the tiny model with one private and one shared adapter each."""
    sizes = {"max_model_len": 512, "max_num_seqs": 32, "max_num_batched_tokens": 256}
    groups = (
        group("g0", (("a", 8, 1.0, None), ("shared", 16, 0.25, None)), **sizes),
        group("g1", (("b", 4, 1.0, None), ("shared", 16, 0.75, None)), **sizes),
    )
    check = Verification(ok=True, seeds=(1,), duration_s=60.0, min_served_fraction=1.0)
    totals = Totals(gpus=2, lower_bound_gpus=1)
    return small_plan(groups=groups, totals=totals, verification=check)


def idle_state() -> dict[str, Any]:
    """Return the state of an idle instance."""
    sizes = {"blocks": 100, "free_blocks": 100, "block_size": 16, "max_num_seqs": 32, "max_loras": 2}
    counts = ("running", "queued", "active_adapters", "queued_adapters", "running_tokens", "partial_tokens")
    return {**sizes, **dict.fromkeys(counts, 0), "by_rank": {}, "adapters": {}}


class FakeInstance:
    """Instance that responds with its name."""

    def __init__(self, spec: InstanceSpec, key: str) -> None:
        self.spec = spec
        self.key = key
        self.url = ""
        self.streaming = asyncio.Event()
        self.resume = asyncio.Event()
        self.hung = self.stopped = False
        self.refusal: str | None = None
        """Code of the refusal of all requests and pings."""
        self.cannot_store: set[str] = set()
        """Adapters whose requests are refused with ``storage``."""
        self.busy = 0
        self.scrapes = self.reports = 0
        self.reported = idle_state()
        self.on_state: Callable[[], None] = lambda: None
        self.shares: dict[str, float] = {}
        self.share_posts = 0
        self.refuses_shares = False
        self.bodies: list[dict[str, Any]] = []
        self.stopped_within_s: float | None = None
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._ping)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/state", self._state)
        app.router.add_post("/v1/adapter_shares", self._set_shares)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)

    async def start(self) -> None:
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await self._site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "no key"}, status=401)
        if self.refusal is not None:
            error = {"error": {"code": self.refusal}}
            return web.json_response(error, status=503, headers={"Retry-After": "1"})
        if body["model"] in self.cannot_store:
            return web.json_response({"error": {"code": "storage"}}, status=503)
        if body.get("refuse"):
            return web.json_response({"error": {"code": "full"}}, status=429, headers={"Retry-After": "7"})
        self.busy += 1
        try:
            if body.get("stream"):
                return await self._stream(request, body)
            if body.get("hold"):
                self.streaming.set()
                await self.resume.wait()
            return web.json_response({"instance": self.spec.name})
        finally:
            self.busy -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        if body.get("flood"):
            for _ in range(body["flood"]):
                await answer.write(b"data: " + b"x" * 1000 + b"\n\n")
            return answer
        await answer.write(b'data: {"n": 1}\n\ndata: {"n"')  # and half an event
        self.streaming.set()
        while body.get("ticks") and not self.resume.is_set():
            await asyncio.sleep(0.01)
            await answer.write(b': 1}\n\ndata: {"n"')
        await self.resume.wait()
        await answer.write(b": 2}\n\ndata: [DONE]\n\n")
        return answer

    async def _health(self, _: web.Request) -> web.Response:
        if self.hung:
            await asyncio.sleep(3600)
        return web.json_response({})

    async def _ping(self, _: web.Request) -> web.Response:
        if self.stopped:
            await asyncio.sleep(3600)
        if self.refusal is not None:
            return web.json_response({"status": "unavailable", "reason": self.refusal}, status=503)
        return web.json_response({"status": "ok"})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.scrapes += 1
        await asyncio.sleep(0.2)
        return web.Response(text='# HELP x An x\n# TYPE x gauge\nx{l="1"} 1.0\n# HELP y A y\ny 2.0\n')

    async def _state(self, _: web.Request) -> web.Response:
        self.reports += 1
        self.on_state()
        return web.json_response(self.reported)

    async def _set_shares(self, request: web.Request) -> web.Response:
        self.share_posts += 1
        if self.refuses_shares or request.headers.get("Authorization") != "Bearer admin":
            return web.json_response({"error": {"code": "no"}}, status=500)
        self.shares |= (await request.json())["shares"]
        return web.Response(text="Success")

    async def stop_listening(self) -> None:
        """Refuse connections without ending."""
        await self._site.stop()
        self._cut_off()

    def _cut_off(self) -> None:
        server = self._runner.server
        for connection in [] if server is None else list(server.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def crash(self) -> None:
        """End at once."""
        self._cut_off()
        await self._runner.cleanup()
        if not self._end.done():
            self._end.set_result("by SIGKILL")

    async def ended(self) -> str:
        return await asyncio.shield(self._end)

    def is_stopped(self) -> bool:
        return False

    async def stop(self, grace_s: float) -> None:
        self.stopped_within_s = grace_s
        await self.crash()


class FakeLauncher:
    """Starts fake instances and records them."""

    def __init__(self) -> None:
        self.lives: dict[str, list[FakeInstance]] = {}
        self.is_broken = False
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def launch(self, spec: InstanceSpec, key: str) -> FakeInstance:
        await self.may_start.wait()
        if self.is_broken:
            raise LaunchError(f"instance {spec.name} does not start")
        made = FakeInstance(spec, key)
        await made.start()
        self.lives.setdefault(spec.name, []).append(made)
        return made

    def __getitem__(self, name: str) -> FakeInstance:
        return self.lives[name][-1]


class Routed:
    """A running router and a client."""

    def __init__(
        self, state: RouterState, launcher: FakeLauncher, client: aiohttp.ClientSession, log: list[str]
    ):
        self.state = state
        self.launcher = launcher
        self.client = client
        self.log = log

    async def post(self, model: str, **fields: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Return status, body and headers of a response."""
        body = {"model": model, "prompt": [1, 2, 3], **fields}
        async with self.client.post("/v1/completions", json=body) as answer:
            return answer.status, await answer.json(), dict(answer.headers)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition."""
        async with asyncio.timeout(20):
            while not holds():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def routed(
    plan: Plan | None = None,
    groups: Sequence[str] = (),
    policy: RestartPolicy = QUICK,
    routing: RoutingSettings | None = None,
    rebalancing: RebalancingConfig | None = None,
    registry: str | RegistrySettings | None = None,
    **server: Any,
) -> AsyncIterator[Routed]:
    """Serve a plan with fake instances; check that no task is left at the end.

    With a registry they are servers of a pool; the router reads it if it has settings.
    """
    options = ServingOptions("tiny-llama", "base", max_queue=4)
    specs = instances_of(plan or tiny_plan(), options, groups)
    source = registry if isinstance(registry, RegistrySettings) else None
    location = registry if isinstance(registry, str) else source and source.location
    if location is not None:
        pools = [PoolSettings(location, spec.name) for spec in specs]
        root = {"lora_root": Path(location).parent, "admin_api_key": "admin"}
        specs = tuple(
            replace(spec, server=replace(spec.server, pool=pool, **root))
            for spec, pool in zip(specs, pools, strict=True)
        )
    launcher, log = FakeLauncher(), list[str]()
    settings = ServerSettings("base", **server)
    routing = routing or RoutingSettings()
    config = RouterConfig(specs, launcher, settings, policy, log.append, routing, source, rebalancing)
    state = RouterState(settings, InstanceFleet(config))
    is_ready = asyncio.Event()
    listener = bind("127.0.0.1", 0)
    router = RouterServer(state, is_ready.set)
    serving = asyncio.ensure_future(router.serve([listener]))
    await asyncio.wait((serving, asyncio.ensure_future(is_ready.wait())), return_when="FIRST_COMPLETED")
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    async with aiohttp.ClientSession(url_of(listener), headers=headers) as client:
        made = Routed(state, launcher, client, log)
        made.router, made.serving = router, serving  # type: ignore[attr-defined]
        yield made
    if not serving.done():
        router.end()
    async with asyncio.timeout(20):
        await serving
    assert state.in_flight == 0
    names = [str(task.get_coro()) for task in asyncio.all_tasks() - {asyncio.current_task()}]
    assert [name for name in names if "supervise" in name or "_forward" in name] == []


def events(text: bytes) -> list[Any]:
    """Return the events of a stream, parsed as JSON but for [DONE]."""
    parts = [part.removeprefix(b"data: ") for part in text.split(b"\n\n") if part]
    return [part if part == b"[DONE]" else json.loads(part) for part in parts]
