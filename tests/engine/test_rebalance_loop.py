"""Re-balancing of a running router over fake instances: rounds, posts of shares, failures, reports."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capplan.fleet import RebalancingConfig, RegistrySettings
from capplan.fleet._rebalancing import PostParams, RebalanceLoop
from capplan.registry import AdapterRegistry, RegisteredAdapter
from capplan.serving.rebalancing import AdapterDemand, Rebalancer, ReplanRequest
from capplan.spec import RebalanceSettings
from tests.engine.fake_instances import Routed, routed, tiny_plan

pytestmark = pytest.mark.process

RANKS = {"a": 8, "b": 4, "shared": 16}
MODEL = tiny_plan().base_model


@pytest.fixture
def registry(tmp_path: Path) -> AdapterRegistry:
    made = AdapterRegistry(tmp_path / "r.db", create=True, timeout_s=0.2)
    for number, (name, rank) in enumerate(RANKS.items()):
        facts = {"base_model": MODEL, "rank": rank, "size_bytes": 100, "digest": str(number) * 64}
        made.add(RegisteredAdapter(name=name, location="s3://x", **facts))
    return made


def config_of(every_s: float = 3600.0, point: float = 1e6, base: bool = False) -> RebalancingConfig:
    demands = [AdapterDemand(name, rank, 1.0, 100) for name, rank in RANKS.items()]
    demands += [AdapterDemand(MODEL, 0, 1.0)] if base else []
    points = dict.fromkeys((0, *RANKS.values()), point)
    rebalancer = Rebalancer(demands, 2, points, RebalanceSettings(every_s=every_s, forecast="last"))
    posts = PostParams(timeout_s=0.5, attempts=2, retry_s=0.02)
    return RebalancingConfig(
        rebalancer, "admin", balances_base=base, posts=posts, settle_s=3600.0, retry_s=3600.0
    )


@asynccontextmanager
async def running(
    registry: AdapterRegistry, config: RebalancingConfig | None = None, refresh_s: float = 3600.0
) -> AsyncIterator[tuple[Routed, RebalanceLoop]]:
    settings = RegistrySettings(registry.location, MODEL, frozenset({MODEL}), refresh_s, timeout_s=0.2)
    async with (
        asyncio.timeout(60),
        routed(rebalancing=config or config_of(), registry=settings) as router,
    ):
        loop = router.state.fleet.rebalancing
        assert loop is not None
        yield router, loop


def stored_everywhere(registry: AdapterRegistry) -> None:
    for server in ("g0-1", "g1-1"):
        registry.announce(server, "http://127.0.0.1:1")
        for number, name in enumerate(RANKS):
            registry.hold(name, str(number) * 64, server)


async def placement(r: Routed) -> dict[str, Any]:
    async with r.client.get("/v1/placement") as answer:
        return dict(await answer.json())


async def test_a_round_posts_shares_before_requests_follow_them(registry: AdapterRegistry) -> None:
    async with running(registry) as (r, loop):
        first, second = r.launcher["g0-1"], r.launcher["g1-1"]
        await r.until(lambda: first.shares == {"a": 1.0, "shared": 0.25, "b": 0.0})
        assert second.shares == {"b": 1.0, "shared": 0.75, "a": 0.0}
        for _ in range(30):
            assert (await r.post("b"))[1]["instance"] == "g1-1"
        made = await loop.rebalance()
        assert (made.reason, made.requests, made.unavailable) == (None, 30, ())
        in_force = (await placement(r))["placement"]
        assert sum(len(each["adapters"]) for each in in_force.values()) == made.gained - made.lost + 4
        for name in RANKS:
            total = sum(each["adapters"].get(name, 0.0) for each in in_force.values())
            assert total == pytest.approx(1.0)
        for instance in (first, second):
            wanted = dict.fromkeys(RANKS, 0.0) | in_force[instance.spec.name]["adapters"]
            await r.until(lambda i=instance, w=wanted: i.shares == w)
        for name in RANKS:
            got = {(await r.post(name))[1]["instance"] for _ in range(6)}
            assert got <= {each for each, state in in_force.items() if name in state["adapters"]}
        text = await (await r.client.get("/metrics")).text()
        assert 'capplan:rebalances_total{outcome="done"} 1.0' in text
        assert "capplan:rebalance_target 0.0" in text
        assert r.log[-1].startswith("re-balancing 1: 30 requests in")


async def test_no_adapter_moves_when_all_are_stored_and_demand_is_as_before(
    registry: AdapterRegistry,
) -> None:
    stored_everywhere(registry)
    async with running(registry) as (r, loop):
        for _ in range(2):
            for name in RANKS:
                await r.post(name)
            made = await loop.rebalance()
            assert (made.moved_bytes, made.reason) == (0, None)


async def test_shares_that_are_not_acknowledged_leave_the_placement_in_force(
    registry: AdapterRegistry,
) -> None:
    async with running(registry) as (r, loop):
        await r.until(lambda: len(r.launcher["g1-1"].shares) == 3)
        before = (await placement(r))["placement"]
        r.launcher["g1-1"].refuses_shares = True
        for _ in range(9):
            await r.post("a")
        made = await loop.rebalance()
        assert made.reason == "g1-1: the new shares are not acknowledged"
        assert (await placement(r))["placement"] == before
        assert [(await r.post(name))[0] for name in RANKS] == [200] * 3
        r.launcher["g1-1"].refuses_shares = False
        assert (await loop.rebalance()).reason is None
        document = (await placement(r))["rebalancing"]
        assert (document["done"], document["failed"], document["failed_posts"]) == (1, 1, 2)
        assert "failed, the placement in force stays" in " ".join(r.log)


async def test_a_registry_that_is_gone_fails_the_round_and_keeps_the_window(
    registry: AdapterRegistry, tmp_path: Path
) -> None:
    async with running(registry) as (r, loop):
        before = (await placement(r))["placement"]
        assert (await r.post("b"))[0] == 200
        file = tmp_path / "r.db"
        file.rename(tmp_path / "elsewhere.db")
        made = await loop.rebalance()
        assert made.reason is not None
        assert "is missing" in made.reason
        assert (await placement(r))["placement"] == before
        assert (await r.post("b"))[0] == 200
        (tmp_path / "elsewhere.db").rename(file)
        made = await loop.rebalance()
        assert (made.reason, made.requests) == (None, 2)


async def test_a_solver_with_a_defect_fails_the_round_and_the_router_serves_on(
    registry: AdapterRegistry,
) -> None:
    def replan(request: ReplanRequest) -> list[dict[str, float]]:
        raise ZeroDivisionError("no server")

    config = config_of()
    settings = RebalanceSettings(every_s=3600.0, solver="capplan")
    demands = [AdapterDemand(name, rank, 1.0, 100) for name, rank in RANKS.items()]
    rebalancer = Rebalancer(demands, 2, dict.fromkeys(RANKS.values(), 1e6), settings, replan)
    async with running(registry, replace(config, rebalancer=rebalancer)) as (r, loop):
        made = await loop.rebalance()
        assert made.reason == "ZeroDivisionError: no server"
        assert "Traceback" in " ".join(r.log)
        assert [(await r.post(name))[0] for name in RANKS] == [200] * 3


async def test_an_instance_that_is_down_gets_no_shares_and_all_of_them_when_it_is_back(
    registry: AdapterRegistry,
) -> None:
    async with running(registry) as (r, loop):
        r.launcher.may_start.clear()
        await r.launcher["g1-1"].crash()
        await r.until(lambda: not r.state.fleet.instances[1].is_up)
        assert (await r.post("b"))[1]["instance"] == "g0-1", "which fetches it"
        assert (await r.client.get("/health")).status == 200
        made = await loop.rebalance()
        assert (made.reason, made.unavailable) == (None, ("g1-1",))
        in_force = (await placement(r))["placement"]
        assert set(in_force["g0-1"]["adapters"]) == set(RANKS)
        assert in_force["g1-1"]["adapters"] == {}
        r.launcher.may_start.set()
        await r.until(lambda: r.launcher["g1-1"].shares == dict.fromkeys(RANKS, 0.0))
        assert {(await r.post("b"))[1]["instance"] for _ in range(4)} == {"g0-1"}
        assert (await loop.rebalance()).unavailable == ()


async def test_rounds_of_their_own_follow_instances_that_go_and_come_back(registry: AdapterRegistry) -> None:
    async with running(registry, replace(config_of(), settle_s=0.1)) as (r, loop):
        r.launcher.may_start.clear()
        await r.launcher["g1-1"].crash()
        await r.until(lambda: loop.done == 1)
        assert loop.last is not None
        assert (loop.last.trigger, loop.last.unavailable, loop.last.window_s) == ("instances", ("g1-1",), 0.0)
        assert set((await placement(r))["placement"]["g0-1"]["adapters"]) == set(RANKS)
        r.launcher.may_start.set()
        await r.until(lambda: loop.done == 2)
        assert loop.last.unavailable == ()
        await asyncio.sleep(0.5)
        assert loop.done == 2


async def test_a_round_that_has_failed_is_repeated(registry: AdapterRegistry) -> None:
    async with running(registry, replace(config_of(), retry_s=0.1)) as (r, loop):
        r.launcher["g1-1"].refuses_shares = True
        assert (await r.post("b"))[0] == 200
        assert (await loop.rebalance()).reason is not None
        await r.until(lambda: loop.failed >= 2)
        r.launcher["g1-1"].refuses_shares = False
        await r.until(lambda: loop.done == 1)
        assert loop.last is not None
        assert (loop.last.trigger, loop.last.reason) == ("retry", None)
        assert loop.target is not None


async def test_requests_of_the_base_model_follow_the_new_shares(registry: AdapterRegistry) -> None:
    async with running(registry, config_of(base=True)) as (r, loop):
        for model in ("base", "base", "base", "a"):
            assert (await r.post(model))[0] == 200
        assert (await loop.rebalance()).reason is None
        in_force = (await placement(r))["placement"]
        shares = {name: each["base_share"] for name, each in in_force.items()}
        assert sum(shares.values()) == pytest.approx(1.0)
        assert max(shares.values()) < 1.0, "three quarters of the demand need both instances"
        got = [(await r.post("base"))[1]["instance"] for _ in range(60)]
        for name, share in shares.items():
            assert abs(got.count(name) - 60 * share) <= 2


async def test_rounds_come_by_themselves_and_overload_is_reported(registry: AdapterRegistry) -> None:
    async with running(registry, config_of(every_s=0.3, point=0.01)) as (r, loop):
        for _ in range(5):
            await r.post("a")
        await r.until(lambda: loop.done >= 2)
        assert any(line.startswith("overload: the expected demand is") for line in r.log)
        assert loop.target is not None


async def test_a_router_without_rebalancing_shows_its_shares() -> None:
    async with routed(api_key="secret") as r:
        shown = await placement(r)
        assert shown["rebalancing"] is None
        assert shown["placement"]["g1-1"]["adapters"] == {"b": 1.0, "shared": 0.75}
        async with r.client.get("/v1/placement", headers={"Authorization": "Bearer no"}) as answer:
            assert answer.status == 401
            assert json.loads(await answer.read())["error"]["code"] == "invalid_api_key"
