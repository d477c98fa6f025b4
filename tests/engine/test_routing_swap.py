"""A routing table is replaced as a whole: shares follow the one in force, and no state is lost."""

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import InputError
from capplan.fleet import RoutingSettings
from capplan.fleet._routing import InstanceRouter, RoutingTable
from capplan.spec import ROUTER_NAMES
from tests.engine.fake_instances import idle_state
from tests.engine.test_routing import rule_and_reference
from tests.oracle.routers import SmoothShares

NAMES = ("x", "y", "z")
RANK = {"x": 8, "y": 16, "z": 8}
INSTANCES = 4


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, float]]:
    """Return shares of every adapter at one instance or more."""
    held: list[dict[str, float]] = [{} for _ in range(INSTANCES)]
    for name in NAMES:
        holders = draw(st.sets(st.integers(0, INSTANCES - 1), min_size=1))
        parts = [draw(st.integers(1, 4)) for _ in holders]
        for instance, part in zip(sorted(holders), parts, strict=True):
            held[instance][name] = part / sum(parts)
    return held


def asked(router: InstanceRouter, adapter: str | None, requests: int) -> Counter[int | None]:
    return Counter(router.choose(adapter, 4) for _ in range(requests))


@given(st.lists(tables(), min_size=2, max_size=4), st.integers(0, 30))
def test_shares_follow_the_table_in_force(sequence: list[list[dict[str, float]]], before: int) -> None:
    router = InstanceRouter(sequence[0])
    for held in sequence[1:]:
        for name in NAMES:
            asked(router, name, before)
        router.swap(router.table(held))
        shares, base = router.shares()
        assert [own == pytest.approx(new) for own, new in zip(shares, held, strict=True)] == [
            True
        ] * INSTANCES
        assert base == [1 / INSTANCES] * INSTANCES
        for name in NAMES:
            got = asked(router, name, 240)
            assert set(got) <= {i for i, own in enumerate(held) if name in own}
            for i, own in enumerate(held):
                assert abs(got[i] - 240 * own.get(name, 0.0)) <= 2 * INSTANCES
        assert asked(router, None, 40) == dict.fromkeys(range(INSTANCES), 10)


@given(tables(), tables(), st.integers(0, 7))
def test_holders_that_stay_go_on_where_they_were(
    first: list[dict[str, float]], second: list[dict[str, float]], requests: int
) -> None:
    """Many short windows must not begin every time with the same instance."""
    plain, swapped = InstanceRouter(first), InstanceRouter(first)
    for name in NAMES:
        assert asked(plain, name, requests) == asked(swapped, name, requests)
    swapped.swap(swapped.table(first))
    assert [plain.choose("x") for _ in range(20)] == [swapped.choose("x") for _ in range(20)]
    swapped.swap(swapped.table(second))
    swapped.swap(swapped.table(first))
    assert set(asked(swapped, "x", 20)) <= set(plain.holders("x"))


@given(st.lists(tables(), min_size=2, max_size=4), st.lists(st.sampled_from(NAMES), max_size=12))
def test_credits_at_a_swap_are_those_of_the_twins_reference(
    sequence: list[list[dict[str, float]]], requests: list[str]
) -> None:
    table = RoutingTable.of(sequence[0])
    router, reference = InstanceRouter(sequence[0]), SmoothShares()
    for held in sequence:
        before, table = table, router.table(held)
        reference.swap(before.placement, table.placement)
        router.swap(table)
        for name in requests:
            number = table.numbers[name]
            places = range(*table.placement.start[number : number + 2].tolist())
            rows = table.placement
            candidates: Any = [
                SimpleNamespace(instance=rows.instance[k], share=rows.share[k]) for k in places
            ]
            request: Any = SimpleNamespace(adapter=number)
            chosen = candidates[reference(request, candidates)].instance
            assert router.choose(name) == chosen


@pytest.mark.parametrize("name", ROUTER_NAMES)
@settings(max_examples=10)
@given(data=st.data())
def test_every_rule_routes_to_holders_of_the_table_in_force(name: str, data: st.DataObject) -> None:
    rule, _ = rule_and_reference(name, 0)
    rule = rule._replace(models=np.tile(rule.models[:1], (INSTANCES, 1)))
    router = InstanceRouter(data.draw(tables()), None, RoutingSettings(rule, RANK))
    for _ in range(3):
        held = data.draw(tables())
        asked_ns = data.draw(st.integers(0, 10**9))
        router.swap(router.table(held))
        for each in NAMES:
            holders = {i for i, own in enumerate(held) if each in own}
            assert set(asked(router, each, 6)) <= holders
            down = min(holders)
            router.set_available(down, False)
            assert router.choose(each) in ((holders - {down}) or {None})
            router.set_available(down, True)
        if router.reads_state:
            router.report(
                0, json.dumps({**idle_state(), "adapters": dict.fromkeys(NAMES, 7)}).encode(), asked_ns
            )


def test_requests_sent_before_the_swap_still_count_at_their_instances() -> None:
    rule, _ = rule_and_reference("least-loaded", 0)
    router = InstanceRouter([{"x": 1.0}, {"y": 1.0}, {"z": 1.0}, {}], None, RoutingSettings(rule, RANK))
    for _ in range(3):
        assert router.choose("x", 4, now_ns=10) == 0
    router.swap(router.table([{"y": 1.0}, {"x": 0.5}, {"z": 1.0, "x": 0.5}, {}]))
    assert router.choose("x", 4, now_ns=11) in (1, 2)
    assert int(router._fleet.instances.queued[0]) == 3
    router.report(0, json.dumps({**idle_state(), "adapters": {"x": 1}}).encode(), 10)
    assert int(router._fleet.instances.queued[0]) == 3, "sent since the report was asked for"
    router.report(0, json.dumps(idle_state()).encode(), 12)
    assert int(router._fleet.instances.queued[0]) == 0


def test_requests_without_a_holder_that_is_up_go_to_instances_that_fetch() -> None:
    held: list[dict[str, float]] = [{"x": 1.0}, {"y": 1.0}, {}]
    for rule in (None, rule_and_reference("least-work-left", 0)[0]):
        strict = InstanceRouter(held, None, RoutingSettings(rule, RANK))
        fetching = InstanceRouter(held, None, RoutingSettings(rule, RANK, fetch_ranks=(16, 16, 16)))
        for router in (strict, fetching):
            router.set_available(0, False)
        assert strict.choose("x", 4) is None
        assert {fetching.choose("x", 4) for _ in range(8)} == {1, 2}
        assert fetching.choose("x", 4, excluded=[1]) == 2
        assert fetching.choose("x", 4, excluded=[1, 2]) is None
        fetching.set_available(0, True)
        assert fetching.choose("x", 4) == 0
        assert fetching.choose("x", 4, excluded=[0]) is None, "its holder is up"


def test_requests_go_to_instances_whose_slots_are_large_enough_for_the_adapter() -> None:
    held: list[dict[str, float]] = [{"x": 1.0, "y": 1.0}, {}, {}, {}]
    assert (RANK["x"], RANK["y"]) == (8, 16)
    for rule in (None, rule_and_reference("least-work-left", 0)[0]):
        router = InstanceRouter(held, None, RoutingSettings(rule, RANK, fetch_ranks=(16, 8, 0, 8)))
        router.set_available(0, False)
        assert {router.choose("x", 4) for _ in range(12)} == {1, 3}
        assert router.choose("x", 4, excluded=[3]) == 1
        assert router.choose("x", 4, excluded=[1, 3]) is None
        assert router.choose("y", 4) is None
        router.set_available(0, True)
        assert {router.choose(name, 4) for name in ("x", "y")} == {0}


@pytest.mark.parametrize("name", ["smooth-shares", "toppings", "lora-affinity", "least-work-left"])
@settings(max_examples=10)
@given(data=st.data())
def test_adapters_come_and_go_and_the_others_go_on_where_they_were(name: str, data: st.DataObject) -> None:
    """Also with ranks beyond those of the start, by which compiled rules count."""
    rule, _ = rule_and_reference(name, 0)
    rule = rule._replace(models=np.tile(rule.models[:1], (INSTANCES, 1)))
    first = data.draw(tables())
    chosen = None if name == "smooth-shares" else rule
    moving, still = (InstanceRouter(first, None, RoutingSettings(chosen, RANK)) for _ in range(2))
    for step in range(4):
        ranks = data.draw(
            st.dictionaries(st.sampled_from(("x", "u", "v", "w")), st.sampled_from((4, 16, 512)))
        )
        ranks["x"] = RANK["x"]
        held = [{"x": own["x"]} if "x" in own else {} for own in first]
        for number, each in enumerate(sorted(ranks.keys() - {"x"})):
            held[(number + step) % INSTANCES][each] = 1.0
        moving.swap(moving.table(held, None, ranks))
        assert moving.ranks == ranks
        assert set(moving.adapters) == {None, *ranks}
        assert "y" not in moving
        for each in ranks:
            assert set(moving.holders(each)) == {i for i, own in enumerate(held) if each in own}
            if each != "x":
                assert set(asked(moving, each, 3)) == set(moving.holders(each))
        if chosen is None:
            assert [moving.choose("x") for _ in range(7)] == [still.choose("x") for _ in range(7)]
        if moving.reads_state:
            by_rank = {"512": (1, 1, 9), "4": (1, 0, 0)}
            state = {**idle_state(), "by_rank": by_rank, "adapters": dict.fromkeys(("w", "y"), 7)}
            state["awaiting"] = {"v": (1, 5), "gone": (1, 5)}
            moving.report(step % INSTANCES, json.dumps(state).encode(), step)


def test_requests_of_an_adapter_that_is_removed_still_count_at_their_instance() -> None:
    rule, _ = rule_and_reference("least-loaded", 0)
    router = InstanceRouter([{"x": 1.0}, {"y": 1.0}, {"z": 1.0}, {}], None, RoutingSettings(rule, RANK))
    for _ in range(3):
        assert router.choose("x", 4, now_ns=10) == 0
    router.swap(router.table([{"y": 0.5}, {"y": 0.5}, {"z": 1.0}, {}], None, {"y": 16, "z": 8}))
    router.report(0, json.dumps({**idle_state(), "adapters": {"x": 1}}).encode(), 10)
    assert int(router._fleet.instances.queued[0]) == 3
    assert router.choose("y", 4, now_ns=11) == 1
    router.report(0, json.dumps(idle_state()).encode(), 12)
    assert int(router._fleet.instances.queued[0]) == 0


@pytest.mark.parametrize(
    "held",
    [
        [{"x": 1.0}, {"y": 1.0}],
        [{"x": 1.0}, {"y": 1.0}, {}],
        [{"x": 1.0, "y": 1.0}, {"z": 1.0, "new": 1.0}, {}],
        [{"x": 1.0, "y": 1.0, "z": 1.0}],
    ],
)
def test_a_table_that_loses_an_adapter_is_refused(held: Any) -> None:
    router = InstanceRouter([{"x": 1.0}, {"y": 1.0}, {"z": 1.0}])
    with pytest.raises(InputError, match="shares: must"):
        router.table(held)
    assert router.choose("z") == 2
