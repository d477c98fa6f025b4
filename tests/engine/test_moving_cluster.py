"""Adapters that move between real engine processes: each stays stored, each request is answered."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from benchmarks.moving_cluster import (
    MODEL,
    RANKS,
    MovingCluster,
    RandomSchedule,
    make_adapters,
    placed_at_first,
    plan_of,
    write_adapter,
)
from capplan.engine.models import model_config
from capplan.registry import read_adapter
from tests.conftest import http_server, reply

pytestmark = [pytest.mark.long, pytest.mark.process]

NAMES = tuple(f"a{number}" for number in range(6))
SCHEDULES = 2  # `python -m benchmarks.running_cluster` plays more
SCHEDULE_S = 4.0


def cluster_below(top: Path) -> MovingCluster:
    plan = plan_of(placed_at_first(NAMES, 2), NAMES)
    if not (top / "registry.db").exists():
        make_adapters(top, NAMES, plan.base_model)
    return MovingCluster(top, plan, NAMES)


@contextlib.asynccontextmanager
async def started(top: Path) -> AsyncIterator[MovingCluster]:
    """Run a cluster whose servers have the only copies."""
    cluster = cluster_below(top)
    async with asyncio.timeout(150), cluster.running():
        await cluster.learn()
        if (top / "source").exists():
            cluster.lose_sources()
        yield cluster


async def ask_all(cluster: MovingCluster, times: int = 1) -> None:
    await asyncio.gather(*(cluster.ask(name) for name in NAMES * times))
    assert not cluster.outcomes.wrong, cluster.outcomes.wrong[:3]


async def all_are_answered(cluster: MovingCluster) -> None:
    """Check that every adapter is answered, in an attempt in which no instance is down."""
    await cluster.until_up()
    before = cluster.outcomes.answered
    await ask_all(cluster)
    assert cluster.outcomes.answered == before + len(NAMES), cluster.outcomes.refused


async def only_the_placement_is_stored(cluster: MovingCluster) -> None:
    """Wait until no server stores an adapter without a share of it, unless it has the last copy."""
    async with asyncio.timeout(40):
        while True:
            shares, _ = cluster.fleet.router.shares()
            wanted = {
                name: {spec.name for spec, own in zip(cluster.specs, shares, strict=True) if name in own}
                for name in NAMES
            }
            if all(len(there) == 1 or there <= wanted[name] for name, there in cluster.stored().items()):
                return
            cluster.check_stored()
            await asyncio.sleep(0.2)


async def test_random_schedules_keep_every_adapter_and_every_request(tmp_path: Path) -> None:
    async with started(tmp_path) as cluster:
        for seed in range(SCHEDULES):
            schedule = RandomSchedule(cluster, seed, SCHEDULE_S)
            await schedule.run()
            assert schedule.events.total() > 0
            await cluster.until_up()
        assert cluster.outcomes.answered > 50
        cluster.check_stored()
        await all_are_answered(cluster)


@contextlib.contextmanager
def stalled_server() -> Iterator[str]:
    """Accept connections and never respond."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


async def test_faults_while_adapters_move_lose_nothing_and_the_next_round_repairs(tmp_path: Path) -> None:
    """One test, because every start takes seconds."""
    async with started(tmp_path) as cluster:
        await unfit_holders(cluster)
        await a_locked_registry(cluster)
        await an_instance_that_dies(cluster)
        assert (await cluster.loop.rebalance()).reason is None
        await all_are_answered(cluster)
        cluster.check_stored()
        await only_the_placement_is_stored(cluster)


async def unfit_holders(cluster: MovingCluster) -> None:
    """Transfers stall, or deliver wrong bytes: the next source is asked."""
    registry = cluster._registry
    cluster.loop.updates.in_force = [dict.fromkeys(NAMES, 0.5)] * 2  # nothing is removed meanwhile
    assert await cluster.loop.updates.update()
    with http_server(lambda handler: reply(handler, b"wrong")) as wrong, stalled_server() as stalled:
        for server, url in (("wrong", wrong), ("stalled", stalled)):
            registry.announce(server, url)
            for name in NAMES:
                registry.hold(name, str(registry.get(name).digest), server)
        await fetch_everywhere(cluster)
    for server in ("wrong", "stalled"):
        registry.forget(server)
    assert sum(cluster.outcomes.refused.values()) == 0
    assert all(len(there) == 2 for there in cluster.stored().values())


async def fetch_everywhere(cluster: MovingCluster) -> None:
    """Ask every instance for every adapter."""
    for index in (0, 1):
        cluster.fleet.router.set_available(1 - index, False)
        await ask_all(cluster)
        cluster.fleet.router.set_available(1 - index, True)


async def a_locked_registry(cluster: MovingCluster) -> None:
    """Requests of adapters that are not there are refused, others are answered."""
    locking = asyncio.ensure_future(cluster.lock_registry(1.0))
    await asyncio.sleep(0.2)
    await cluster.loop.rebalance()
    await ask_all(cluster, 2)
    await locking
    assert (await cluster.loop.rebalance()).reason is None
    await all_are_answered(cluster)


async def an_instance_that_dies(cluster: MovingCluster) -> None:
    await asyncio.gather(*(cluster.ask(NAMES[0]) for _ in range(8)))
    asking = asyncio.gather(*(cluster.ask(name) for name in NAMES * 4))
    made = await cluster.loop.rebalance()
    assert made.reason is None
    cluster.kill(0)
    await asking
    await cluster.loop.rebalance()
    cluster.check_stored()
    await all_are_answered(cluster)
    assert not cluster.outcomes.wrong


async def test_a_router_that_ends_in_the_middle_of_a_swap_is_repaired_by_the_next_one(
    tmp_path: Path,
) -> None:
    """Instances have been told their new shares and have fetched, but the routing table is the old one."""
    async with started(tmp_path) as cluster:
        every = [dict.fromkeys(NAMES, 0.5)] * 2
        assert await cluster.loop.updates.announce(every, (0, 1)) == []
        await fetch_everywhere(cluster)
        assert all(len(there) == 2 for there in cluster.stored().values())
        for index in (0, 1):
            cluster.kill(index)
    async with started(tmp_path) as cluster:
        cluster.check_stored()
        await all_are_answered(cluster)
        assert (await cluster.loop.rebalance()).reason is None
        await all_are_answered(cluster)
        await only_the_placement_is_stored(cluster)
        cluster.check_stored()


async def test_adapters_come_and_go_while_a_cluster_runs_and_after_its_router_has_started_again(
    tmp_path: Path,
) -> None:
    cluster = cluster_below(tmp_path)
    async with asyncio.timeout(150), cluster.running():
        await cluster.learn()
        registry, router = cluster._registry, cluster.fleet.router
        write_adapter(tmp_path / "new", model_config(MODEL), RANKS[0], 77)
        registry.add(read_adapter("new", tmp_path / "new", cluster.plan.base_model))
        cluster.names += ("new",)
        cluster.right["new"] = await tokens(cluster, "new")
        assert cluster.right["new"] not in [cluster.right[name] for name in NAMES]
        await cluster.ask("new", stream=True)
        registry.remove("a1")
        async with asyncio.timeout(20):
            while "a1" in router:
                await asyncio.sleep(0.05)
        assert (await cluster.post("a1"))[0] == 404
        assert (await cluster.loop.rebalance()).reason is None
        assert router.ranks.keys() == {*NAMES, "new"} - {"a1"}
        await cluster.ask("new")
        async with asyncio.timeout(30):
            while cluster.stored()["a1"]:
                await asyncio.sleep(0.2)
        assert not cluster.outcomes.wrong
        assert sum(cluster.outcomes.refused.values()) == 0
    cluster.names = tuple(name for name in NAMES if name != "a1")
    async with asyncio.timeout(60), cluster.running():
        assert cluster.fleet.router.ranks.keys() == {*NAMES, "new"} - {"a1"}
        assert (await cluster.post("a1"))[0] == 404
        await tokens(cluster, "new")


async def tokens(cluster: MovingCluster, name: str) -> list[int]:
    status, body = await cluster.post(name)
    assert status == 200, body
    return list(json.loads(body)["choices"][0]["token_ids"])
