"""A router follows its registry: added adapters become servable, removed ones are retired."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.fleet import RegistrySettings
from capplan.fleet._registered_adapters import (
    RateLimit,
    RegisteredAdapters,
    RegistrySnapshot,
    placed_by_registry,
)
from capplan.registry import AdapterRegistry, RegisteredAdapter
from tests.engine.fake_instances import Routed, routed
from tests.engine.test_rebalance_loop import MODEL, RANKS, config_of, placement, registry

pytestmark = pytest.mark.process

__all__ = ["registry"]  # a fixture

QUICK_S = 0.05


def entry(name: str, rank: int = 8, **facts: Any) -> RegisteredAdapter:
    digest = name.encode().hex().ljust(64, "0")[:64]
    return RegisteredAdapter(
        **{"name": name, "base_model": MODEL, "rank": rank, "digest": digest, "location": "s3://x", **facts}
    )


@asynccontextmanager
async def running(
    registry: AdapterRegistry, *, rebalance: bool = True, **settings: Any
) -> AsyncIterator[tuple[Routed, RegisteredAdapters]]:
    """Run a router whose instances are fake ones."""
    source = RegistrySettings(registry.location, MODEL, frozenset({MODEL, "base"}), timeout_s=0.2)
    source = replace(source, **{"refresh_s": QUICK_S, **settings})
    moving = config_of() if rebalance else None
    async with asyncio.timeout(60), routed(rebalancing=moving, registry=source) as router:
        registered = router.state.fleet.registered
        assert registered is not None
        yield router, registered


async def models(r: Routed) -> set[str]:
    async with r.client.get("/v1/models") as answer:
        return {card["id"] for card in (await answer.json())["data"]}


async def status_of(r: Routed, name: str) -> int:
    return (await r.post(name))[0]


async def test_an_adapter_that_is_added_is_served_and_listed_without_a_request(
    registry: AdapterRegistry,
) -> None:
    async with running(registry) as (r, _):
        assert await models(r) == {"base", *RANKS}
        registry.add(entry("new"))
        await r.until(lambda: "new" in r.state.fleet)
        assert await models(r) == {"base", "new", *RANKS}
        in_force = (await placement(r))["placement"]
        [holder] = [server for server, each in in_force.items() if "new" in each["adapters"]]
        [other] = {"g0-1", "g1-1"} - {holder}
        assert {(await r.post("new"))[1]["instance"] for _ in range(4)} == {holder}
        await r.until(lambda: r.launcher[holder].shares.get("new") == 1.0)
        await r.until(lambda: r.launcher[other].shares.get("new") == 0.0)
        assert any(line == "registry: served from now on: new" for line in r.log)


async def test_an_adapter_that_is_removed_is_unknown_and_its_running_requests_end(
    registry: AdapterRegistry,
) -> None:
    async with running(registry) as (r, _):
        asked = asyncio.ensure_future(r.post("b", hold=True))
        await r.launcher["g1-1"].streaming.wait()
        registry.remove("b")
        await r.until(lambda: "b" not in r.state.fleet)
        status, body, _headers = await r.post("b")
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert await models(r) == {"base", "a", "shared"}
        async with r.client.get("/v1/models/b") as answer:
            assert answer.status == 404
        await r.until(lambda: "b" not in r.launcher["g1-1"].shares or r.launcher["g1-1"].shares["b"] == 0.0)
        r.launcher["g1-1"].resume.set()
        assert (await asked)[0] == 200
        assert (await r.client.get("/health")).status == 200
        registry.add(entry("b", 4))
        await r.until(lambda: "b" in r.state.fleet)
        assert await status_of(r, "b") == 200


async def test_a_request_finds_an_adapter_that_was_added_just_now(registry: AdapterRegistry) -> None:
    async with running(registry, refresh_s=3600.0) as (r, registered):
        registry.add(*(entry(f"n{number}") for number in range(4)))
        got = await asyncio.gather(*(r.post(f"n{number % 4}") for number in range(80)))
        assert [status for status, *_ in got] == [200] * 80
        assert registered.look_ups <= 4, "requests of the same adapter share one look-up"
        in_force = (await placement(r))["placement"]
        new = [sum(name.startswith("n") for name in each["adapters"]) for each in in_force.values()]
        assert new == [2, 2], "new adapters are spread"
        registry.add(entry("last"))
        async with r.client.get("/v1/models/last") as answer:
            assert answer.status == 200


async def test_unknown_names_cause_few_look_ups(registry: AdapterRegistry) -> None:
    async with running(registry, refresh_s=3600.0, look_ups_per_s=2.0) as (r, registered):
        for _ in range(4):
            got = await asyncio.gather(*(status_of(r, f"no{number}") for number in range(50)))
            assert set(got) == {404}
        assert await status_of(r, "x" * 300) == 404
        assert 1 <= registered.look_ups <= 12
        assert await status_of(r, "a") == 200


@pytest.mark.parametrize(
    ("name", "facts", "reason"),
    [
        ("large", {"rank": 64}, "rank: must be at most max_lora_rank, 16, not 64"),
        ("blank", {"digest": None}, "digest: is required"),
        ("other", {"base_model": "other/model"}, None),
        ("base", {}, None),
    ],
)
async def test_what_the_instances_cannot_serve_is_not_routed(
    registry: AdapterRegistry, name: str, facts: dict[str, Any], reason: str | None
) -> None:
    async with running(registry) as (r, _):
        registry.add(entry(name, **facts), entry("good"))
        await r.until(lambda: "good" in r.state.fleet)
        assert name not in r.state.fleet
        assert await status_of(r, name) == (200 if name == "base" else 404)
        lines = [line for line in r.log if f"adapter {name} is not served: " in line]
        assert len(lines) == (0 if reason is None else 1)
        assert reason is None or reason in lines[0]
        await asyncio.sleep(3 * QUICK_S)
        assert len([line for line in r.log if "is not served" in line]) == len(lines), "said once"


async def test_an_adapter_that_is_replaced_by_one_of_another_rank_is_routed_by_it(
    registry: AdapterRegistry,
) -> None:
    async with running(registry) as (r, _):
        router = r.state.fleet.router
        registry.add(entry("b", 16), replace=True)
        await r.until(lambda: router.ranks["b"] == 16)
        assert await status_of(r, "b") == 200
        registry.add(entry("b", 256), replace=True)
        await r.until(lambda: "b" not in r.state.fleet)
        assert any("adapter b is not served: rank" in line for line in r.log)


async def test_a_registry_that_is_locked_or_gone_leaves_the_adapters_in_force(
    registry: AdapterRegistry, tmp_path: Path
) -> None:
    async with running(registry, refresh_s=3600.0) as (r, registered):
        (tmp_path / "r.db").rename(tmp_path / "elsewhere.db")
        assert not await registered.refresh()
        assert not await registered.refresh()
        assert [await status_of(r, name) for name in RANKS] == [200] * 3
        status, body, headers = await r.post("unknown")
        assert (status, body["error"]["code"]) == (503, "registry_unavailable")
        assert headers["Retry-After"] == "1"
        (tmp_path / "elsewhere.db").rename(tmp_path / "r.db")
        registry.add(entry("new"))
        assert await registered.refresh()
        assert await status_of(r, "new") == 200
        assert len([line for line in r.log if "the adapters in force stay" in line]) == 1


async def test_a_round_places_the_adapters_that_the_registry_has_then(registry: AdapterRegistry) -> None:
    async with running(registry, refresh_s=3600.0) as (r, _):
        loop = r.state.fleet.rebalancing
        assert loop is not None
        registry.remove("a")
        registry.add(entry("c", 12, size_bytes=7))
        made = await loop.rebalance()
        assert (made.reason, set(r.state.fleet.router.ranks)) == (None, {"b", "c", "shared"})
        for _ in range(20):
            assert await status_of(r, "c") == 200
        registry.add(entry("d"))
        assert await status_of(r, "d") == 200
        made = await loop.rebalance()
        assert (made.reason, made.requests) == (None, 21)
        in_force = (await placement(r))["placement"]
        for name in ("b", "c", "d", "shared"):
            assert sum(each["adapters"].get(name, 0.0) for each in in_force.values()) == pytest.approx(1.0)


async def test_a_router_that_starts_again_serves_the_same_adapters(registry: AdapterRegistry) -> None:
    """The plan has a, b and shared; whatever a former router had served is in the registry."""
    registry.remove("b")
    registry.add(entry("new"), entry("stored"))
    registry.announce("g1-1", "http://127.0.0.1:1")
    registry.hold("stored", str(registry.get("stored").digest), "g1-1")
    for _ in range(2):
        async with running(registry, refresh_s=3600.0) as (r, _):
            assert await models(r) == {"base", "a", "shared", "new", "stored"}
            assert await status_of(r, "b") == 404
            assert (await r.post("stored"))[1]["instance"] == "g1-1", "which stores it"


async def test_a_registry_without_adapters_leaves_the_base_model(registry: AdapterRegistry) -> None:
    async with running(registry) as (r, _):
        registry.remove(*RANKS)
        await r.until(lambda: not r.state.fleet.router.ranks)
        assert await models(r) == {"base"}
        assert [await status_of(r, name) for name in ("base", "a")] == [200, 404]


async def test_a_plan_that_is_not_rebalanced_follows_its_registry_too(registry: AdapterRegistry) -> None:
    async with running(registry, rebalance=False) as (r, _):
        assert (await placement(r))["rebalancing"] is None
        shares = r.state.fleet.router.shares()
        registry.add(entry("new"))
        assert await status_of(r, "new") == 200
        registry.remove("new")
        await r.until(lambda: "new" not in r.state.fleet)
        assert await status_of(r, "new") == 404
        assert r.state.fleet.router.shares() == shares, "the plan's shares stay in force"
        registry.add(entry("other"))
        await r.until(lambda: "other" in r.state.fleet)
        registry.remove("a")
        await r.until(lambda: "a" not in r.state.fleet)
        assert await models(r) == {"base", "b", "shared", "other"}
        assert r.launcher["g0-1"].share_posts == r.launcher["g1-1"].share_posts == 0


async def test_a_damaged_registry_ends_nothing(registry: AdapterRegistry, tmp_path: Path) -> None:
    async with running(registry, refresh_s=3600.0) as (r, registered):
        with closing(sqlite3.connect(tmp_path / "r.db")) as file:
            file.execute("UPDATE capplan_adapters SET rank = 0 WHERE name = 'a'")
            file.execute("UPDATE capplan_registry SET changes = changes + 1")
            file.commit()
        assert not await registered.refresh()
        assert await status_of(r, "a") == 200


NAMES = ("u", "v", "w", "x", "y")


@given(
    st.lists(st.dictionaries(st.sampled_from(NAMES), st.floats(0.1, 1.0)), min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 16)),
    st.data(),
)
def test_every_adapter_of_the_registry_has_an_instance_that_can_serve_it(
    shares: list[dict[str, float]], ranks: dict[str, int], data: st.DataObject
) -> None:
    count = len(shares)
    largest = [16, *(data.draw(st.integers(0, 16)) for _ in range(count - 1))]
    up = data.draw(st.sets(st.integers(0, count - 1)))
    stored = [data.draw(st.sets(st.sampled_from(NAMES))) for _ in range(count)]
    placed = placed_by_registry(shares, RegistrySnapshot((0, 0), ranks, {}, stored, {}), largest, up)
    assert {name for own in placed for name in own} == ranks.keys()
    for i, own in enumerate(placed):
        assert all(ranks[name] <= largest[i] for name in own)
        for name, share in own.items():
            if shares[i].get(name) == share:
                continue  # as before
            able = {j for j in range(count) if ranks[name] <= largest[j]}
            among = able & up or able
            assert i in among
            assert name in stored[i] or not any(name in stored[j] for j in among)
    held = [{**own} for own in placed]
    for name in ranks.keys() - {name for own in shares for name in own}:
        for i in range(count):
            if ranks[name] <= largest[i]:
                held[i].setdefault(name, 0.0)
    snapshot = RegistrySnapshot((0, 0), ranks, {}, stored, {})
    if not any(ranks.get(n, 0) > k for own, k in zip(shares, largest, strict=True) for n in own):
        assert placed_by_registry(shares, snapshot, largest, up, everywhere=True) == held
    for i, own in enumerate(shares):
        stay = {name for name in own if name in ranks and ranks[name] <= largest[i]}
        assert stay <= placed[i].keys()


@given(st.floats(0.5, 50.0), st.lists(st.floats(0.0, 2.0), max_size=80))
def test_a_rate_is_kept_over_every_time(per_s: float, gaps: list[float]) -> None:
    limit, now_s, admitted = RateLimit(per_s), 100.0, list[float]()
    for gap in gaps:
        now_s += gap
        if limit.admits(now_s):
            admitted.append(now_s)
    for first, start_s in enumerate(admitted):
        for last in range(first, len(admitted)):
            assert last - first + 1 <= max(1.0, per_s) + per_s * (admitted[last] - start_s) + 1e-6
