"""An adapter that an instance cannot store is placed elsewhere while the reason may stand."""

import asyncio

from capplan.fleet._rebalancing import RefusedAdapters
from capplan.registry import AdapterRegistry
from tests.engine.fake_instances import Routed
from tests.engine.test_rebalance_loop import RANKS, config_of, placement, registry, running

__all__ = ["registry"]  # a fixture


async def holders(r: Routed, name: str) -> set[str]:
    in_force = (await placement(r))["placement"]
    return {server for server, each in in_force.items() if each["adapters"].get(name)}


async def test_an_instance_that_cannot_store_an_adapter_gets_no_share_of_it_in_the_next_rounds(
    registry: AdapterRegistry,
) -> None:
    async with running(registry) as (r, loop):
        assert (await loop.rebalance()).reason is None
        [holder] = await holders(r, "b")
        [other] = {"g0-1", "g1-1"} - {holder}
        r.launcher[holder].cannot_store.add("b")
        for number in range(3):
            assert (await r.post("b"))[1]["instance"] == other
            assert r.state.refused_by_holders == 1, "only before the first round"
            made = await loop.rebalance("retry" if number else "period")
            assert made.reason is None
            assert await holders(r, "b") == {other}
        assert await holders(r, "a") != set()
        for name in RANKS:
            assert (await r.post(name))[0] == 200


async def test_an_instance_is_tried_again_after_three_periods(registry: AdapterRegistry) -> None:
    async with running(registry, config_of(every_s=1.0)) as (r, loop):
        both = r.launcher["g0-1"], r.launcher["g1-1"]
        for each in both:
            each.cannot_store.add("b")
        assert (await r.post("b"))[0] == 503
        assert (await loop.rebalance()).reason is None
        assert await holders(r, "b"), "an adapter that no instance can store has an instance"
        for each in both:
            each.cannot_store.clear()
        assert (await r.post("b"))[0] == 200
        assert [len(each) for each in loop.refused.current()] == [1, 1]
        await asyncio.sleep(3 * loop.every_s)
        assert loop.refused.current() == [set(), set()]


def test_refusals_are_forgotten_and_their_number_is_bounded() -> None:
    refused = RefusedAdapters(2, forget_s=10.0)
    refused.note(0, "x", now_s=0.0)
    refused.note(1, "x", now_s=5.0)
    refused.note(0, "y", now_s=6.0)
    assert refused.current(now_s=9.0) == [{"x", "y"}, {"x"}]
    refused.note(0, "x", now_s=9.0)
    assert refused.current(now_s=15.0) == [{"x", "y"}, set()]
    for number in range(20_000):
        refused.note(1, f"n{number}", now_s=16.0)
    assert [len(each) for each in refused.current(now_s=16.0)] == [0, 10_000]
