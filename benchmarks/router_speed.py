"""Speed of routers: ``python -m benchmarks.router_speed`` prints tables of the docs.

``decisions``: microseconds of one decision among 256 instances with 10,000 adapters, for every router, when
every instance holds every adapter and when each adapter has two holders. *rule* is the call of the compiled
rule from Python, *choice* that of the running router, which also looks for instances that are up.

``http``: the running router between a client and instances that respond at once, all on loopback, open loop
at 500 requests per second. The overhead is the latency through the router over that of the same instances
without it, percentile by percentile. Client, router and instances are three processes; ``--pin`` binds the
router to one core and the others to the next. CPU time is that of the router's process. Imported objects
are kept out of the client's garbage collections, which otherwise delay requests.

``states``: CPU time of reading the states of instances, without requests: a router that reads them less one
that does not.

``streams``: delay of the tokens of 200 streams at 10 tokens per second each, from the instance to the client.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.common import command_line, records_table
from capplan.fleet import RoutingSettings
from capplan.fleet._routing import InstanceRouter
from capplan.serving.routers import ROUTERS, ArrivingRequest, Performance, RoutingRule, WorkModel, route
from capplan.spec import PLAN_ROUTER, STATE_PERIOD_S
from capplan.twin.cluster._routers import plain_rule

if TYPE_CHECKING:
    from capplan.fleet import InstanceSpec

INSTANCES: Final = 256
ADAPTERS: Final = 10_000
RANKS: Final = (8, 16, 32, 64, 128)
REPEAT: Final = 7
CALLS: Final = 300
RATE_RPS: Final = 500.0
SECONDS: Final = 20.0
BACKENDS: Final = 4
PARTS: Final = ("decisions", "http", "states", "streams")
FLEETS: Final = (4, 64, 256)
STREAMS: Final = 200
TOKEN_PERIOD_S: Final = 0.1
PERCENTILES: Final = (50, 90, 99)


def rule_of(name: str, instances: int) -> RoutingRule:
    """Return a rule with models of round numbers."""
    rule = plain_rule(name, 200.0)
    if name.startswith("toppings"):
        models = [Performance(0.002, 20.0, 0.0035, 20.0, 0.05)] * instances
    elif name == "least-work-left":
        models = [WorkModel(10.0, 0.1, 0.003, 1e-4, 0.05, 1e-4, 15.0, 2048, padded=True)] * instances
    else:
        return rule
    return rule._replace(models=np.array([model.row for model in models]), slo_ms=36.0)


def state(rng: np.random.Generator, adapters: Sequence[str]) -> bytes:
    """Return the state of a busy instance, as it reports it."""
    by_rank = {}
    for rank in RANKS:
        waiting, running = rng.integers(0, 4, 2).tolist()
        by_rank[str(rank)] = [waiting + running, waiting, 300 * waiting]
    running = sum(present - waiting for present, waiting, _ in by_rank.values())
    sizes = {"free_blocks": 9000, "blocks": 10_000, "block_size": 16, "max_num_seqs": 256, "max_loras": 64}
    counts = {"running": running, "queued": sum(waiting for _, waiting, _ in by_rank.values())}
    tokens = {"running_tokens": 400 * running, "partial_tokens": 300}
    own = {"active_adapters": 12, "queued_adapters": 3, "adapters": dict.fromkeys(adapters[:32], 5)}
    return json.dumps({**sizes, **counts, **tokens, **own, "by_rank": by_rank}).encode()


def decision_row(name: str) -> dict[str, str]:
    """Return the times of one router."""
    row = {"router": name}
    for holders, title in ((INSTANCES, "all hold all"), (2, "two holders each")):
        names = [f"a{i}" for i in range(ADAPTERS)]
        held: list[dict[str, float]] = [{} for _ in range(INSTANCES)]
        for number, adapter in enumerate(names):
            for copy in range(holders):
                held[(number * 7 + copy * 128) % INSTANCES if holders == 2 else copy][adapter] = 1.0
        rank_of = {adapter: RANKS[i % len(RANKS)] for i, adapter in enumerate(names)}
        router = InstanceRouter(held, None, RoutingSettings(rule_of(name, INSTANCES), rank_of))
        rng = np.random.default_rng(0)
        for i, own in enumerate(held):
            router.report(i, state(rng, list(own)), time.monotonic_ns())
        row[f"{title}: rule, us"] = f"{rule_us(router, rng):.1f}"
        row[f"{title}: choice, us"] = f"{choice_us(router, rng, names):.1f}"
    return row


def rule_us(router: InstanceRouter, rng: np.random.Generator) -> float:
    """Return the microseconds of the compiled rule."""
    rule, fleet, placement = router._rule, router._fleet, router._placement
    now_ns = time.monotonic_ns()
    requests = [
        ArrivingRequest(int(rng.integers(1, ADAPTERS + 1)), 16, 300, 200.0, float(rng.random()), now_ns)
        for _ in range(CALLS)
    ]
    return fastest_us(lambda: [route(rule, fleet, placement, request) for request in requests])


def choice_us(router: InstanceRouter, rng: np.random.Generator, names: Sequence[str]) -> float:
    """Return the microseconds of a choice of the running router."""
    asked = [names[i] for i in rng.integers(0, ADAPTERS, CALLS).tolist()]
    return fastest_us(lambda: [router.choose(name, 300) for name in asked])


def fastest_us(run: object) -> float:
    """Return the median over repetitions of the microseconds of one of CALLS calls, after a first one."""
    assert callable(run)
    run()
    times = []
    for _ in range(REPEAT):
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    return median(times)


def serve_backends(pipe: Connection, count: int = BACKENDS) -> None:
    """Serve instances that respond at once."""
    asyncio.run(_serve_backends(pipe, count))


async def _serve_backends(pipe: Connection, count: int) -> None:
    from aiohttp import web

    body = json.dumps({"choices": [{"text": "x"}]}).encode()
    report = state(np.random.default_rng(0), ["a0"])

    async def complete(request: web.Request) -> web.StreamResponse:
        asked = json.loads(await request.read())
        if not asked.get("stream"):
            return web.Response(body=body, content_type="application/json")
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for _ in range(asked["max_tokens"]):
            await stream.write(b"data: %d\n\n" % time.perf_counter_ns())
            await asyncio.sleep(TOKEN_PERIOD_S)
        return stream

    async def other(request: web.Request) -> web.Response:
        return web.Response(
            body=report if request.path == "/state" else b"{}", content_type="application/json"
        )

    urls = []
    for _ in range(count):
        app = web.Application()
        app.router.add_post("/v1/completions", complete)
        app.router.add_get("/{path:.*}", other)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        urls.append("http://{}:{}".format(*runner.addresses[0][:2]))
    pipe.send(urls)
    await asyncio.to_thread(pipe.recv)


def serve_router(pipe: Connection, urls: Sequence[str], name: str) -> None:
    """Serve a router over running instances."""
    from capplan.fleet import InstanceSpec, RouterConfig, run_router
    from capplan.server import ServerSettings

    server = ServerSettings("base", port=0)
    specs = [
        InstanceSpec(
            name=f"i{number}",
            group="g0",
            model="",
            adapters={"a0": 8},
            engine={"max_model_len": 4096},
            server=server,
            shares={"a0": 1.0 / len(urls)},
        )
        for number in range(len(urls))
    ]
    plain = name == PLAN_ROUTER
    routing = RoutingSettings() if plain else RoutingSettings(rule_of(name, len(urls)), {"a0": 8})
    run_router(RouterConfig(specs, RunningInstances(urls), server, routing=routing), pipe.send)


class RunningInstance:
    """Handle of an instance that somebody else runs."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def ended(self) -> str:
        return str(await asyncio.Event().wait())

    def is_stopped(self) -> bool:
        return False

    async def stop(self, grace_s: float) -> None: ...


class RunningInstances:
    """Launcher of instances that run already, by the numbers in their names."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls

    async def launch(self, spec: InstanceSpec, key: str) -> RunningInstance:
        return RunningInstance(self._urls[int(spec.name[1:])])


async def latencies_ms(urls: Sequence[str], seconds: float) -> NDArray[np.float64]:
    """Return the latencies of an open loop of requests, spread over the URLs in turn."""
    import aiohttp

    gc.collect()
    gc.freeze()
    found: list[float] = []
    body = json.dumps({"model": "a0", "prompt": "x" * 800, "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def send(url: str, at_s: float) -> None:
            async with session.post(url + "/v1/completions", data=body) as answer:
                await answer.read()
                answer.raise_for_status()
            found.append((time.perf_counter() - at_s) * 1e3)

        begin_s = time.perf_counter()
        tasks = []
        for number in range(int(RATE_RPS * seconds)):
            at_s = begin_s + number / RATE_RPS
            if (left_s := at_s - time.perf_counter()) > 0:
                await asyncio.sleep(left_s)
            tasks.append(asyncio.ensure_future(send(urls[number % len(urls)], time.perf_counter())))
        await asyncio.gather(*tasks)
    return np.array(found[int(RATE_RPS) :])  # without the first second


async def token_delays_ms(urls: Sequence[str], seconds: float) -> NDArray[np.float64]:
    """Return the times from an instance to the client of the tokens of many streams."""
    import aiohttp

    gc.collect()
    gc.freeze()
    found: list[float] = []
    body = {"model": "a0", "prompt": "x" * 800, "max_tokens": int(seconds / TOKEN_PERIOD_S), "stream": True}

    async def follow(session: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(number * TOKEN_PERIOD_S / STREAMS)
        async with session.post(urls[number % len(urls)] + "/v1/completions", json=body) as answer:
            async for part in answer.content.iter_any():
                now_ns = time.perf_counter_ns()  # of all processes
                sent_ns = [int(each.removeprefix(b"data: ")) for each in part.split(b"\n\n")[:-1]]
                found.extend((now_ns - each) * 1e-6 for each in sent_ns)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(follow(session, number) for number in range(STREAMS)))
    return np.array(found)


class Processes:
    """Instances and routers, each in a process; a context manager."""

    def __init__(self, instances: int = BACKENDS, is_pinned: bool = False) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._is_pinned = is_pinned
        self._pipe, theirs = self._context.Pipe()
        self._backends = self._context.Process(target=serve_backends, args=(theirs, instances), daemon=True)
        self._backends.start()
        self.urls: list[str] = self._pipe.recv()
        if is_pinned:
            for pid in (0, self._backends.pid or 0):
                os.sched_setaffinity(pid, {1})

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._backends.terminate()

    @contextmanager
    def router(self, name: str) -> Iterator[tuple[str, Callable[[], float]]]:
        """Run a router; yield its URL, and a function that returns its CPU time in microseconds."""
        mine, its = self._context.Pipe()
        process = self._context.Process(target=serve_router, args=(its, self.urls, name), daemon=True)
        process.start()
        url = mine.recv()
        if self._is_pinned:
            os.sched_setaffinity(process.pid or 0, {0})
        yield url, lambda: cpu_us(process.pid or 0)
        process.terminate()
        process.join()


def cpu_us(pid: int) -> float:
    """Return the CPU time of a process, in microseconds."""
    times = psutil.Process(pid).cpu_times()
    return (times.user + times.system) * 1e6


def http_table(names: Sequence[str], seconds: float, is_pinned: bool) -> str:
    """Return the latencies without a router, and the overheads of routers."""
    with Processes(is_pinned=is_pinned) as processes:
        asyncio.run(latencies_ms(processes.urls, 2.0))
        direct = np.percentile(asyncio.run(latencies_ms(processes.urls, seconds)), PERCENTILES)
        rows = [{"router": "none (latency)", **_cells(direct), "CPU, us per request": ""}]
        for name in names:
            with processes.router(name) as (url, router_cpu_us):
                asyncio.run(latencies_ms([url], 2.0))
                begin_us = router_cpu_us()
                through = np.percentile(asyncio.run(latencies_ms([url], seconds)), PERCENTILES)
                each_us = (router_cpu_us() - begin_us) / (RATE_RPS * seconds)
            cells = {**_cells(through - direct), "CPU, us per request": f"{each_us:.0f}"}
            rows.append({"router": f"{name} (overhead)", **cells})
    return records_table(rows)


def states_table(seconds: float) -> str:
    """Return the CPU time that the states of fleets take."""
    rows = []
    for instances in FLEETS:
        used_us = []
        with Processes(instances) as processes:
            for name in ("least-loaded", PLAN_ROUTER):
                with processes.router(name) as (_, router_cpu_us):
                    time.sleep(2.0)
                    begin_us = router_cpu_us()
                    time.sleep(seconds)
                    used_us.append((router_cpu_us() - begin_us) / seconds)
        each_us = (used_us[0] - used_us[1]) * STATE_PERIOD_S / instances
        rows.append(
            {
                "instances": str(instances),
                "states, % of a core": f"{(used_us[0] - used_us[1]) / 1e4:.1f}",
                "us per state": f"{each_us:.0f}",
                "probes, % of a core": f"{used_us[1] / 1e4:.1f}",
            }
        )
    return records_table(rows)


def streams_table(seconds: float, is_pinned: bool) -> str:
    """Return the delays of tokens without and with a router."""
    rows = []
    with Processes(is_pinned=is_pinned) as processes:
        asyncio.run(token_delays_ms(processes.urls, 1.0))
        delays = asyncio.run(token_delays_ms(processes.urls, seconds))
        rows.append(
            {"through": "none", **_cells(np.percentile(delays, PERCENTILES)), "CPU, us per token": ""}
        )
        with processes.router(PLAN_ROUTER) as (url, router_cpu_us):
            asyncio.run(token_delays_ms([url], 1.0))
            begin_us = router_cpu_us()
            delays = asyncio.run(token_delays_ms([url], seconds))
            each_us = (router_cpu_us() - begin_us) / delays.size
        cells = {**_cells(np.percentile(delays, PERCENTILES)), "CPU, us per token": f"{each_us:.0f}"}
        rows.append({"through": PLAN_ROUTER, **cells})
    return records_table(rows)


def _cells(values: NDArray[np.float64]) -> dict[str, str]:
    return {f"p{percent}, ms": f"{value:.2f}" for percent, value in zip(PERCENTILES, values, strict=True)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("what", nargs="*", choices=PARTS, help="parts; default: all")
    parser.add_argument("--routers", nargs="+", choices=list(ROUTERS), default=list(ROUTERS))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--pin", action="store_true", help="one core for the router, one for the others")
    given = parser.parse_args(arguments)
    parts = given.what or PARTS
    if "decisions" in parts:
        print(records_table([decision_row(name) for name in given.routers]))
    if "http" in parts:
        chosen = [name for name in given.routers if name in ("smooth-shares", "least-work-left", "toppings")]
        print(http_table(chosen, given.seconds, given.pin))
    if "states" in parts:
        print(states_table(given.seconds))
    if "streams" in parts:
        print(streams_table(given.seconds, given.pin))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
