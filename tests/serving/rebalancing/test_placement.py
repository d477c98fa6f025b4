"""Algorithm 1 of LoRAServe: invariants of the placement and of the server budgets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError
from capplan.serving.rebalancing import AdapterDemand, place
from capplan.serving.rebalancing._placement import LoraservePlacement, server_budgets

Cluster = tuple[list[AdapterDemand], dict[int, float], int]
RANKS = (8, 16, 32, 64, 128)
POINTS = {8: 5000.0, 16: 4800.0, 32: 4400.0, 64: 3500.0, 128: 2200.0}
"""Tokens per second that a server sustains, by rank."""


def loads(*adapters: tuple[int, float]) -> list[AdapterDemand]:
    """Return adapters of these ranks and demands; rank 8 takes 8 bytes."""
    return [AdapterDemand(f"a{i}", rank, tok_s, size_bytes=rank) for i, (rank, tok_s) in enumerate(adapters)]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[AdapterDemand], dict[int, float], int]:
    """Draw adapters, some idle, operating points that fall with the rank, and a number of servers."""
    demand = st.one_of(st.just(0.0), st.floats(0.1, 20_000.0))
    adapters = draw(st.lists(st.tuples(st.sampled_from(RANKS), demand), min_size=1, max_size=30))
    shrink = draw(st.floats(0.5, 1.0))
    points = {rank: 4000.0 * shrink**i for i, rank in enumerate(RANKS)}
    return loads(*adapters), points, draw(st.integers(1, 9))


def charged(
    adapters: Sequence[AdapterDemand], points: Mapping[int, float], shares: Sequence[Mapping[str, float]]
) -> list[float]:
    """Return the utilization of each server, charged at the largest rank with demand."""
    load_of = {load.name: load for load in adapters}
    used = []
    for server in shares:
        busy = [load_of[name] for name in server if load_of[name].tok_s > 0.0]
        tok_s = sum(server[load.name] * load.tok_s for load in busy)
        used.append(tok_s / points[max(load.rank for load in busy)] if busy else 0.0)
    return used


def stored(made: LoraservePlacement) -> list[set[str]]:
    return [set(server) for server in made.shares]


@given(clusters(), st.booleans())
def test_shares_of_every_adapter_sum_to_one(cluster: Cluster, literal: bool) -> None:
    adapters, points, servers = cluster
    made = place(adapters, points, servers, literal_leftovers=literal)
    assert len(made.shares) == servers
    for load in adapters:
        shares = [server[load.name] for server in made.shares if load.name in server]
        assert math.fsum(shares) == pytest.approx(1.0, abs=1e-9)
        assert all(0.0 < share <= 1.0 + 1e-12 for share in shares)
        assert load.tok_s > 0.0 or len(shares) == 1, "an idle adapter is on one server"


@given(clusters())
def test_servers_exceed_the_final_cap_by_small_rests_only(cluster: Cluster) -> None:
    adapters, points, servers = cluster
    made = place(adapters, points, servers)
    load_of = {load.name: load for load in adapters}
    for server, used in zip(made.shares, charged(adapters, points, made.shares), strict=True):
        rests = 0.01 * sum(load_of[name].tok_s for name in server) / min(points.values())
        assert used <= made.cap * (1.0 + 1e-6) + rests
    assert charged(adapters, points, made.shares) == pytest.approx(made.utilization)
    assert made.cap >= made.target


@given(clusters(), st.booleans())
def test_an_unchanged_demand_copies_no_adapter(cluster: Cluster, literal: bool) -> None:
    adapters, points, servers = cluster
    first = place(adapters, points, servers, literal_leftovers=literal)
    again = place(adapters, points, servers, stored=stored(first), literal_leftovers=literal)
    assert again.bytes_to_copy == 0
    assert again.shares == first.shares, "among labellings of the same cost, the identity"


@given(clusters(), st.data())
def test_bytes_to_copy_do_not_depend_on_the_order_of_servers(cluster: Cluster, data: st.DataObject) -> None:
    adapters, points, servers = cluster
    before = data.draw(
        st.lists(
            st.sets(st.sampled_from([load.name for load in adapters])), min_size=servers, max_size=servers
        )
    )
    other = data.draw(st.permutations(before))
    cost = place(adapters, points, servers, stored=before).bytes_to_copy
    assert place(adapters, points, servers, stored=other).bytes_to_copy == cost


@given(clusters(), st.data())
def test_bytes_to_copy_are_minimal_over_all_labellings(cluster: Cluster, data: st.DataObject) -> None:
    adapters, points, _ = cluster
    names = [load.name for load in adapters]
    before = data.draw(st.lists(st.sets(st.sampled_from(names)), min_size=4, max_size=4))
    made = place(adapters, points, 4, stored=before)
    bytes_of = {load.name: load.size_bytes for load in adapters}

    def copied(servers: Sequence[Mapping[str, float]]) -> int:
        pairs = zip(servers, before, strict=True)
        return sum(bytes_of[name] for served, there in pairs for name in served if name not in there)

    assert made.bytes_to_copy == copied(made.shares) == min(map(copied, permutations(made.shares)))


@given(clusters(), st.booleans(), st.data())
def test_the_placement_does_not_depend_on_the_order_of_adapters(
    cluster: Cluster, literal: bool, data: st.DataObject
) -> None:
    adapters, points, servers = cluster
    shuffled = data.draw(st.permutations(adapters))
    one = place(adapters, points, servers, literal_leftovers=literal)
    assert place(shuffled, points, servers, literal_leftovers=literal) == one


@given(clusters(), st.integers(1, 3))
def test_max_replicas_is_kept(cluster: Cluster, most: int) -> None:
    adapters, points, servers = cluster
    bounded = [AdapterDemand(a.name, a.rank, a.tok_s, a.size_bytes, max_replicas=most) for a in adapters]
    made = place(bounded, points, servers)
    assert all(sum(load.name in server for server in made.shares) <= most for load in bounded)


@given(st.integers(1, 8), st.integers(1, 20), st.floats(1.0, 10_000.0))
def test_a_single_rank_uses_all_servers_at_the_target(servers: int, count: int, tok_s: float) -> None:
    made = place(loads(*[(32, tok_s)] * count), POINTS, servers)
    assert made.budgets == {32: servers}
    assert made.utilization == pytest.approx([made.target] * servers, rel=0.02)
    replicas = sum(len(server) for server in made.shares)
    assert replicas <= count + servers - 1, "next fit with splitting makes at most b - 1 more replicas"


@given(clusters())
def test_one_server_serves_everything(cluster: Cluster) -> None:
    adapters, points, _ = cluster
    (server,) = place(adapters, points, 1).shares
    assert server == pytest.approx({load.name: 1.0 for load in adapters})


@given(st.lists(st.sampled_from(list(POINTS)), min_size=1, max_size=20), st.integers(1, 5))
def test_idle_adapters_are_balanced_by_bytes(ranks: list[int], servers: int) -> None:
    made = place(loads(*((rank, 0.0) for rank in ranks)), POINTS, servers)
    homes = [name for server in made.shares for name in server]
    assert sorted(homes) == sorted(f"a{i}" for i in range(len(ranks)))
    assert made.target == 0.0
    bytes_there = [sum(ranks[int(name[1:])] for name in server) for server in made.shares]
    assert max(bytes_there) - min(bytes_there) <= max(ranks), "each on the server with the fewest bytes"


def test_a_rank_without_a_server_is_placed_beside_other_ranks() -> None:
    """The paper's Uniform trace: every share is 0.8 of a server and rounds to 1, five servers in total."""
    adapters = loads(*((rank, POINTS[rank] / 5 * 0.5) for rank in POINTS for _ in range(5)))
    made = place(adapters, POINTS, 4)
    assert made.budgets == {8: 0, 16: 1, 32: 1, 64: 1, 128: 1}
    assert made.target == pytest.approx(5 * 0.5 / 4)
    assert made.utilization == pytest.approx([made.cap] * 4, rel=0.2)
    low = {f"a{i}" for i in range(5)}
    assert sum(bool(low & set(server)) for server in made.shares) >= 3


def test_a_hot_adapter_is_split_over_three_servers() -> None:
    made = place(loads((64, 3 * POINTS[64]), (8, POINTS[8])), POINTS, 4)
    assert made.target == pytest.approx(1.0)
    assert sorted(server.get("a0", 0.0) for server in made.shares) == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    assert [set(server) for server in made.shares].count({"a1"}) == 1


def test_literal_leftovers_go_to_the_server_of_the_largest_rank() -> None:
    """Empty servers are not used."""
    adapters = loads((128, 1000.0), *((rank, 75.0 * POINTS[rank] / POINTS[128]) for rank in (64, 32, 16, 8)))
    literal = place(adapters, POINTS, 4, literal_leftovers=True)
    ours = place(adapters, POINTS, 4)
    assert literal.budgets == ours.budgets == {128: 3, 64: 0, 32: 0, 16: 0, 8: 0}
    assert [bool(server) for server in literal.shares] == [True, True, True, False]
    assert all(ours.shares)
    assert max(ours.utilization) < max(literal.utilization)


def test_an_overload_is_spread_evenly() -> None:
    """The solver rejects a target above 1; `place` does not."""
    made = place(loads((8, 20_000.0), (128, 20_000.0)), POINTS, 2)
    assert made.target > 1.0
    assert max(made.utilization) <= made.cap * 1.01


@pytest.mark.parametrize("point", [None, 0.0, -1.0, math.inf, math.nan])
def test_a_rank_without_an_operating_point_is_rejected(point: float | None) -> None:
    points = {8: 100.0} if point is None else {8: 100.0, 16: point}
    with pytest.raises(InputError, match="operating point of rank 16: must be given"):
        place(loads((8, 1.0), (16, 1.0)), points, 2)


def test_invalid_arguments_are_rejected() -> None:
    one = loads((8, 1.0))
    with pytest.raises(InputError, match="servers: must be >= 1"):
        place(one, POINTS, 0)
    with pytest.raises(InputError, match="stored: must have an entry for each of the 2 servers"):
        place(one, POINTS, 2, stored=[set()])
    with pytest.raises(InputError, match="adapters: must be given once"):
        place([*one, *one], POINTS, 2)
    with pytest.raises(InputError, match="demand of adapter a: must be a finite number >= 0"):
        AdapterDemand("a", 8, -1.0)
    with pytest.raises(InputError, match="rank of adapter a"):
        AdapterDemand("a", -1, 1.0)


UTILIZATIONS = st.dictionaries(
    st.sampled_from([8, 16, 32, 64, 128]), st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1
)


@given(UTILIZATIONS, st.integers(1, 20))
def test_budgets_are_rounded_and_within_the_servers(used: dict[int, float], servers: int) -> None:
    budgets = server_budgets(used, servers)
    assert sum(budgets.values()) <= servers
    total = sum(used.values())
    for rank, budget in budgets.items():
        ratio = used[rank] / total * servers if total else 0.0
        assert 0 <= budget <= math.floor(ratio + 0.5)
        assert budget >= math.floor(ratio + 0.5) - 1


def test_equal_ranks_take_a_server_back_from_the_lowest() -> None:
    used = dict.fromkeys((8, 16, 32, 64, 128), 0.7)
    assert server_budgets(used, 4) == {8: 0, 16: 1, 32: 1, 64: 1, 128: 1}


def test_a_server_is_taken_back_from_the_rank_whose_rounding_gained_most() -> None:
    # Ratios 0.5, 0.55, 2.95 round to 1, 1, 3: one too many, and rank 64 gained half a server.
    assert server_budgets({64: 0.5, 16: 0.55, 8: 2.95}, 4) == {64: 0, 16: 1, 8: 3}


def test_halves_are_rounded_up() -> None:
    assert server_budgets({8: 0.5, 16: 1.5}, 2) == {8: 0, 16: 2}  # 1 + 2, less the one that gained most
    assert server_budgets({8: 2.5, 16: 1.25, 32: 1.25}, 5) == {8: 3, 16: 1, 32: 1}


def test_rounding_may_leave_servers_without_a_rank() -> None:
    used = {8: 0.125, 16: 0.125, 32: 0.125, 64: 0.125, 128: 0.9}
    assert server_budgets(used, 3) == {8: 0, 16: 0, 32: 0, 64: 0, 128: 2}
