"""Speed of routers: ``python -m benchmarks.router_speed`` prints tables of the docs.

``decisions``: microseconds of one decision among 256 instances with 10,000 adapters, for every router, when
every instance holds every adapter and when each adapter has two holders. *rule* is the call of the compiled
rule from Python, *choice* that of the running router, which also looks for instances that are up.

``http``: the running router between a client and instances that respond at once, all on loopback, open loop
at 500 requests per second. The overhead is the latency through the router over that of the same instances
without it, percentile by percentile. Client, router and instances are three processes.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import command_line, records_table
from capplan.engine.router.routing import InstanceRouter, RoutingSettings
from capplan.serving.routers import ROUTERS, Performance, WorkModel
from capplan.serving.routers.choose import RoutingRule, route
from capplan.serving.routers.fleet import ArrivingRequest
from capplan.spec.routing import PLAN_ROUTER
from capplan.twin.cluster.routers import plain_rule

if TYPE_CHECKING:
    from capplan.engine.router.instances import InstanceSpec

INSTANCES: Final = 256
ADAPTERS: Final = 10_000
RANKS: Final = (8, 16, 32, 64, 128)
REPEAT: Final = 7
CALLS: Final = 300
RATE_RPS: Final = 500.0
SECONDS: Final = 20.0
BACKENDS: Final = 4
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


def serve_backends(pipe: Connection) -> None:
    """Serve instances that respond at once."""
    asyncio.run(_serve_backends(pipe))


async def _serve_backends(pipe: Connection) -> None:
    from aiohttp import web

    body = json.dumps({"choices": [{"text": "x"}]}).encode()
    report = state(np.random.default_rng(0), ["a0"])

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def other(request: web.Request) -> web.Response:
        return web.Response(
            body=report if request.path == "/state" else b"{}", content_type="application/json"
        )

    urls = []
    for _ in range(BACKENDS):
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
    from capplan.engine.router.instances import InstanceSpec
    from capplan.engine.router.process import run_router
    from capplan.engine.router.supervisor import RouterConfig
    from capplan.engine.server import ServerSettings

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


def http_table(names: Sequence[str], seconds: float) -> str:
    """Return the latencies without a router, and the overheads of routers."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    backends = context.Process(target=serve_backends, args=(theirs,), daemon=True)
    backends.start()
    urls = ours.recv()
    asyncio.run(latencies_ms(urls, 2.0))
    direct = np.percentile(asyncio.run(latencies_ms(urls, seconds)), PERCENTILES)
    rows = [{"router": "none (latency)", **dict(zip(_heads(), _cells(direct), strict=True))}]
    for name in names:
        mine, its = context.Pipe()
        router = context.Process(target=serve_router, args=(its, urls, name), daemon=True)
        router.start()
        url = mine.recv()
        asyncio.run(latencies_ms([url], 2.0))
        through = np.percentile(asyncio.run(latencies_ms([url], seconds)), PERCENTILES)
        rows.append(
            {"router": f"{name} (overhead)", **dict(zip(_heads(), _cells(through - direct), strict=True))}
        )
        router.terminate()
        router.join()
    ours.send(None)
    backends.terminate()
    return records_table(rows)


def _heads() -> list[str]:
    return [f"p{percent}, ms" for percent in PERCENTILES]


def _cells(values: NDArray[np.float64]) -> list[str]:
    return [f"{value:.2f}" for value in values]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("what", nargs="*", choices=["decisions", "http"], default=["decisions", "http"])
    parser.add_argument("--routers", nargs="+", choices=list(ROUTERS), default=list(ROUTERS))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    given = parser.parse_args(arguments)
    if "decisions" in given.what:
        print(records_table([decision_row(name) for name in given.routers]))
    if "http" in given.what:
        chosen = [name for name in given.routers if name in ("smooth-shares", "least-work-left", "toppings")]
        print(http_table(chosen, given.seconds))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
