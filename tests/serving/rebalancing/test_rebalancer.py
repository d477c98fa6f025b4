"""Re-balancing: shares of every window, bytes that move, servers that are down, solvers that are injected."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError
from capplan.serving.rebalancing import AdapterDemand, Rebalanced, Rebalancer, ReplanRequest
from capplan.serving.rebalancing._placement import covering_points
from capplan.spec import FORECASTS, REBALANCE_SOLVERS, Forecast, RebalanceSettings, RebalanceSolver

RANKS = (8, 32, 128)
POINTS = {0: 5000.0, 8: 4800.0, 32: 4400.0, 128: 2200.0}
SERVERS = 4
NAMES = [f"a{i}" for i in range(12)]
ADAPTERS = [AdapterDemand(name, RANKS[i % 3], 100.0, RANKS[i % 3] * 1000) for i, name in enumerate(NAMES)]
SIZES = {adapter.name: adapter.size_bytes for adapter in ADAPTERS}
WINDOWS = st.lists(st.dictionaries(st.sampled_from(NAMES), st.floats(0.0, 4000.0)), min_size=1, max_size=6)


def new(settings: RebalanceSettings | None = None, servers: int = SERVERS) -> Rebalancer:
    return Rebalancer(ADAPTERS, servers, POINTS, settings or RebalanceSettings())


def missing_bytes(shares: Sequence[Mapping[str, float]], stored: Sequence[set[str]]) -> int:
    pairs = zip(shares, stored, strict=True)
    return sum(SIZES[name] for served, there in pairs for name in served if name not in there)


@given(WINDOWS, st.sampled_from(FORECASTS), st.booleans(), st.sampled_from(REBALANCE_SOLVERS))
def test_every_adapter_is_served_in_shares_that_sum_to_one(
    windows: list[dict[str, float]], forecast: Forecast, permute: bool, solver: RebalanceSolver
) -> None:
    rebalancer = new(RebalanceSettings(forecast=forecast, permute=permute, solver=solver))
    stored: list[set[str]] = [set(NAMES[i::SERVERS]) for i in range(SERVERS)]
    shares: Sequence[Mapping[str, float]] = [dict.fromkeys(own, 1.0) for own in stored]
    for window in windows:
        requests = {name: tok_s // 100.0 for name, tok_s in window.items()}
        made = rebalancer.step(window, stored, shares, arrived_requests=requests)
        for name in NAMES:
            assert math.fsum(own.get(name, 0.0) for own in made.shares) == pytest.approx(1.0, abs=1e-9)
        assert all(share > 0.0 for own in made.shares for share in own.values())
        assert made.moved_bytes == missing_bytes(made.shares, stored) <= made.unpermuted_bytes
        assert permute or made.moved_bytes == made.unpermuted_bytes
        stored, shares = [{*own} for own in made.shares], made.shares


@given(WINDOWS)
def test_the_same_windows_give_the_same_shares(windows: list[dict[str, float]]) -> None:
    def run(as_array: bool) -> list[Rebalanced]:
        rebalancer, stored = new(), [set(NAMES)] * SERVERS
        arrays = [np.array([window.get(name, 0.0) for name in NAMES]) for window in windows]
        given_windows = arrays if as_array else windows
        return [rebalancer.step(window, stored, [{}] * SERVERS) for window in given_windows]

    assert run(as_array=True) == run(as_array=False)


@given(WINDOWS, st.sampled_from(REBALANCE_SOLVERS))
def test_an_unchanged_demand_moves_nothing(windows: list[dict[str, float]], solver: RebalanceSolver) -> None:
    rebalancer = new(RebalanceSettings(forecast="last", solver=solver))
    for window in windows:
        first = rebalancer.step(window, [set[str]()] * SERVERS, [{}] * SERVERS)
    again = rebalancer.step(windows[-1], [set(own) for own in first.shares], first.shares)
    assert again.moved_bytes == 0
    for before, after in zip(first.shares, again.shares, strict=True):
        assert after == pytest.approx(before, rel=1e-9)


@given(st.sets(st.integers(0, SERVERS - 1), min_size=1))
def test_servers_that_are_down_serve_nothing(up: set[int]) -> None:
    stored = [set(NAMES)] * SERVERS
    made = new().step({"a0": 4000.0}, stored, [{}] * SERVERS, sorted(up))
    assert all(bool(own) <= (server in up) for server, own in enumerate(made.shares))
    assert sum(own.get("a0", 0.0) for own in made.shares) == pytest.approx(1.0)
    assert made.target == pytest.approx(made.demand_tok_s["a0"] / POINTS[8] / len(up))


def test_the_declared_demand_holds_until_a_window_is_closed() -> None:
    rebalancer = new()
    nothing, stored = [dict[str, float]()] * SERVERS, [set[str]()] * SERVERS
    assert set(rebalancer.step(None, stored, nothing).demand_tok_s.values()) == {100.0}
    assert rebalancer.step({"a1": 7.0}, stored, nothing).demand_tok_s["a1"] == 7.0
    assert rebalancer.step(None, stored, nothing).demand_tok_s["a1"] == 7.0


def test_an_overload_is_balanced_and_reported() -> None:
    made = new().step(dict.fromkeys(NAMES, 4000.0), [set[str]()] * SERVERS, [{}] * SERVERS)
    assert made.is_overloaded
    assert made.target == pytest.approx(sum(4000.0 / POINTS[a.rank] for a in ADAPTERS) / SERVERS)
    assert all(made.shares)
    assert not new().step({"a0": 1.0}, [set[str]()] * SERVERS, [{}] * SERVERS).is_overloaded


def test_an_injected_solver_plans_from_the_plan_in_force() -> None:
    seen: list[ReplanRequest] = []

    def turn(request: ReplanRequest) -> list[dict[str, float]]:
        seen.append(request)
        return [dict(own) for own in (*request.shares[1:], *request.shares[:1])]

    settings = RebalanceSettings(solver="capplan", price_per_gb=0.5)
    rebalancer = Rebalancer(ADAPTERS, 3, POINTS, settings, turn)
    shares = [dict.fromkeys(NAMES[i::3], 1.0) for i in range(3)]
    made = rebalancer.step({"a0": 9.0}, [set(own) for own in shares], shares)
    assert seen[0].price_per_gb == 0.5
    assert seen[0].adapters[0] == AdapterDemand("a0", 8, 9.0, 8000)
    assert list(made.shares) == shares, "the labels of the servers in force"
    assert made.moved_bytes == 0
    assert made.unpermuted_bytes == sum(SIZES.values())


@pytest.mark.parametrize(
    ("shares", "rule"),
    [
        ([{}], "replan: must be shares of 2 servers"),
        ([dict.fromkeys(NAMES, 1.0), {"a0": 1.0}], "replan: adapter a0: shares must sum to 1"),
        ([dict.fromkeys([*NAMES, "x"], 1.0), {}], "replan: must be an adapter of the cluster"),
    ],
)
def test_invalid_shares_of_a_solver_are_rejected(shares: list[dict[str, float]], rule: str) -> None:
    rebalancer = Rebalancer(ADAPTERS, 2, POINTS, RebalanceSettings(solver="capplan"), lambda _: shares)
    with pytest.raises(InputError, match=rule):
        rebalancer.step(None, [set[str]()] * 2, [{}] * 2)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"every_s": 0.0}, r"every_s: must be"),
        ({"forecast": "oracle"}, r"forecast: must be .*holt"),
        ({"solver": "greedy"}, r"solver: must be .*loraserve"),
        ({"price_per_gb": -1.0}, r"price_per_gb: must be"),
    ],
)
def test_invalid_settings_are_rejected(fields: dict[str, object], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        RebalanceSettings(**fields)  # type: ignore[arg-type]


def test_invalid_arguments_are_rejected() -> None:
    rebalancer = new()
    stored, shares = [set[str]()] * SERVERS, [dict[str, float]()] * SERVERS
    with pytest.raises(InputError, match="stored: must have an entry for each of 4 servers"):
        rebalancer.step({}, stored[1:], shares)
    with pytest.raises(InputError, match="arrived_tok_s: must be an adapter of the cluster"):
        rebalancer.step({"x": 1.0}, stored, shares)
    with pytest.raises(InputError, match="available: must be numbers of the 4 servers"):
        rebalancer.step({}, stored, shares, [4])
    with pytest.raises(InputError, match="operating point of rank 8"):
        Rebalancer(ADAPTERS, 2, {32: 1.0, 128: 1.0}, RebalanceSettings())


def test_ten_thousand_adapters_on_many_servers_are_balanced() -> None:
    rng = np.random.default_rng(0)
    weight = rng.permutation(1.0 / np.arange(1, 10_001))
    tok_s = 0.7 * 256 * 4000.0 * weight / weight.sum()
    names = [f"a{i}" for i in range(tok_s.size)]
    adapters = [AdapterDemand(name, RANKS[i % 3], 0.0, 1000) for i, name in enumerate(names)]
    rebalancer = Rebalancer(adapters, 256, POINTS, RebalanceSettings(forecast="last"))
    first = rebalancer.step(tok_s, [set[str]()] * 256, [{}] * 256)
    again = rebalancer.step(
        tok_s * rng.uniform(0.9, 1.1, tok_s.size), [*map(set, first.shares)], first.shares
    )
    assert len({name for own in again.shares for name in own}) == 10_000
    assert again.moved_bytes < again.unpermuted_bytes


@given(WINDOWS, st.sampled_from(FORECASTS), st.sampled_from(REBALANCE_SOLVERS))
def test_adapters_that_stay_keep_their_demand_when_others_come_and_go(
    windows: list[dict[str, float]], forecast: Forecast, solver: RebalanceSolver
) -> None:
    """As if the removed ones had never been there, and the new ones had been idle."""
    settings = RebalanceSettings(forecast=forecast, solver=solver)
    stay = ADAPTERS[3:]
    changed = [*reversed(stay), AdapterDemand("new", 20, 0.0, 7)]
    moving = Rebalancer(ADAPTERS, SERVERS, POINTS, settings)
    still = Rebalancer(changed, SERVERS, {**POINTS, 20: POINTS[32]}, settings)
    nothing = [set[str]()] * SERVERS, [dict[str, float]()] * SERVERS
    for window in windows:
        rest = {name: tok_s for name, tok_s in window.items() if name not in NAMES[:3]}
        requests = {name: tok_s // 100.0 for name, tok_s in window.items()}
        moving.step(window, *nothing, arrived_requests=requests)
        still.step(rest, *nothing, arrived_requests={name: requests[name] for name in rest})
    moving.replace_adapters(changed)
    made, wanted = (each.step(None, *nothing) for each in (moving, still))
    if forecast != "gamma-poisson":  # which shrinks to the mean of all adapters
        assert made == wanted
    assert made.demand_tok_s["new"] == 0.0 or forecast == "gamma-poisson"
    assert {name for own in made.shares for name in own} == {adapter.name for adapter in changed}
    with pytest.raises(InputError, match="arrived_tok_s: must be an adapter of the cluster"):
        moving.step({NAMES[0]: 1.0}, *nothing)


def test_a_rank_without_operating_point_has_that_of_the_next_larger_one() -> None:
    points = {0: 5.0, 8: 4.0, 32: 2.0}
    assert covering_points(points, [0, 4, 8, 9, 32, 64]) == {0: 5.0, 4: 4.0, 8: 4.0, 9: 2.0, 32: 2.0, 64: 2.0}
    with pytest.raises(InputError, match="operating point of rank 0"):
        covering_points({8: 4.0}, [0])
    with pytest.raises(InputError, match="operating point of rank 8"):
        covering_points({0: 4.0}, [8])


def test_adapters_given_twice_leave_those_in_force() -> None:
    rebalancer = new()
    with pytest.raises(InputError, match="must be given once"):
        rebalancer.replace_adapters([ADAPTERS[0], ADAPTERS[0]])
    assert rebalancer.adapters == tuple(ADAPTERS)


@given(
    st.dictionaries(st.sampled_from(NAMES), st.floats(0.0, 4000.0)),
    st.lists(st.sets(st.sampled_from(NAMES)), min_size=SERVERS, max_size=SERVERS),
    st.sets(st.integers(0, SERVERS - 1), min_size=1),
    st.sampled_from(REBALANCE_SOLVERS),
)
def test_servers_do_not_serve_what_they_refuse_if_another_one_can(
    window: dict[str, float], refused: list[set[str]], up: set[int], solver: RebalanceSolver
) -> None:
    stored: list[set[str]] = [set(NAMES[i::SERVERS]) for i in range(SERVERS)]
    rebalancer = new(RebalanceSettings(forecast="last", solver=solver))
    made = rebalancer.step(window, stored, [{}] * SERVERS, sorted(up), refused=refused)
    for name in NAMES:
        shares = [own.get(name, 0.0) for own in made.shares]
        assert math.fsum(shares) == pytest.approx(1.0, abs=1e-9)
        able = {i for i in up if name not in refused[i]}
        assert {i for i, share in enumerate(shares) if share} <= (able or up)
    assert made.moved_bytes == missing_bytes(made.shares, stored) <= made.unpermuted_bytes
    again = new(RebalanceSettings(forecast="last", solver=solver))
    none = [set[str]()] * SERVERS
    first = again.step(window, stored, [{}] * SERVERS, sorted(up), refused=none)
    assert first == new(again.settings).step(window, stored, [{}] * SERVERS, sorted(up))
