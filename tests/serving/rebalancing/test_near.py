"""Placement near the one in force: balance against copied bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.serving.rebalancing import AdapterDemand, place_near
from tests.serving.rebalancing.test_placement import charged

RANKS = (8, 32, 128)
POINTS = {8: 4800.0, 32: 4400.0, 128: 2200.0}
GB = 10**9


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[AdapterDemand], list[dict[str, float]]]:
    """Draw adapters, some idle or bounded, and shares in force on some servers, perhaps of a part of them."""
    count, servers = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    demand = st.one_of(st.just(0.0), st.floats(1.0, 3000.0))
    replicas = st.sampled_from([None, None, 1, 2])
    adapters = [
        AdapterDemand(f"a{i}", draw(st.sampled_from(RANKS)), draw(demand), GB, draw(replicas))
        for i in range(count)
    ]
    shares: list[dict[str, float]] = [{} for _ in range(servers)]
    for adapter in adapters:
        if draw(st.integers(0, 4)):
            shares[draw(st.integers(0, servers - 1))][adapter.name] = 1.0
    return adapters, shares


def utilization(adapters: Sequence[AdapterDemand], shares: Sequence[Mapping[str, float]]) -> list[float]:
    return charged(adapters, POINTS, shares)


def copied(shares: Sequence[Mapping[str, float]], stored: Sequence[Mapping[str, float]]) -> int:
    return sum(name not in there for own, there in zip(shares, stored, strict=True) for name in own)


@given(fleets(), st.floats(0.0, 1.0))
def test_shares_sum_to_one_within_the_allowed_replicas(
    fleet: tuple[list[AdapterDemand], list[dict[str, float]]], price: float
) -> None:
    adapters, shares = fleet
    made = place_near(adapters, POINTS, shares, shares, price)
    for adapter in adapters:
        served = [own[adapter.name] for own in made if adapter.name in own]
        assert math.fsum(served) == pytest.approx(1.0, abs=1e-9)
        assert min(served) > 0.0
        assert len(served) <= (adapter.max_replicas or len(made))


@given(fleets())
def test_moves_reduce_the_highest_utilization(
    fleet: tuple[list[AdapterDemand], list[dict[str, float]]],
) -> None:
    adapters, shares = fleet
    first = place_near(adapters, POINTS, shares, shares, 1e9)  # only what no server serves
    made = place_near(adapters, POINTS, first, first, 0.0)
    assert max(utilization(adapters, made)) <= max(utilization(adapters, first)) + 1e-9


@given(fleets())
def test_no_adapter_moves_at_a_prohibitive_price(
    fleet: tuple[list[AdapterDemand], list[dict[str, float]]],
) -> None:
    adapters, shares = fleet
    complete = place_near(adapters, POINTS, shares, shares, 1e9)
    assert copied(complete, shares) == sum(not any(a.name in own for own in shares) for a in adapters)
    assert place_near(adapters, POINTS, complete, complete, 1e9) == complete


def test_equal_adapters_of_one_server_are_spread_evenly() -> None:
    adapters = [AdapterDemand(f"a{i}", 8, 480.0, GB) for i in range(8)]
    here = [{adapter.name: 1.0 for adapter in adapters}, {}, {}, {}]
    made = place_near(adapters, POINTS, here, here, 0.001)
    assert utilization(adapters, made) == pytest.approx([0.2] * 4)
    assert copied(made, here) == 6, "no adapter is split"


def test_a_hot_adapter_is_split() -> None:
    adapters = [AdapterDemand("hot", 8, 4800.0, GB), AdapterDemand("cold", 8, 10.0, GB)]
    here = [{"hot": 1.0, "cold": 1.0}, {}]
    made = place_near(adapters, POINTS, here, here, 0.01)
    assert max(utilization(adapters, made)) == pytest.approx(0.5, abs=0.02)


def test_the_price_weighs_bytes_against_balance() -> None:
    rng = np.random.default_rng(0)
    adapters = [AdapterDemand(f"a{i}", 8, tok_s, GB) for i, tok_s in enumerate(rng.uniform(0, 900, 24))]
    here = [{f"a{i}": 1.0 for i in range(24) if i % 8 // 2 == server} for server in range(4)]
    made = [place_near(adapters, POINTS, here, here, price) for price in (0.0, 0.02, 0.1)]
    moves = [copied(each, here) for each in made]
    worst = [max(utilization(adapters, each)) for each in made]
    assert moves[0] >= moves[1] >= moves[2]
    assert worst[0] <= worst[1] <= worst[2]


def test_a_share_of_zero_is_none() -> None:
    adapters = [AdapterDemand("base", 0, 600.0), *(AdapterDemand(f"a{i}", 8, 400.0, GB) for i in range(3))]
    points = POINTS | {0: 4800.0}
    here: list[dict[str, float]] = [
        {"base": 0.0, "a0": 1.0, "a1": 1.0, "a2": 1.0},
        {"base": 0.0},
        {"base": 0.0},
    ]
    without = [{name: share for name, share in own.items() if share} for own in here]
    made = place_near(adapters, points, here, here, 0.0)
    assert made == place_near(adapters, points, here, without, 0.0)
    assert sum(own.get("base", 0.0) for own in made) == pytest.approx(1.0)
