"""What every placement of Algorithm 1 keeps, whatever the demand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError
from capplan.planner.solvers.loraserve_placement import (
    AdapterDemand,
    LoraservePlacement,
    PlacementVariants,
    place,
)
from tests.planner.loraserve.clusters import POINTS, clusters, loads

Cluster = tuple[list[AdapterDemand], dict[int, float], int]
VARIANTS = st.builds(PlacementVariants, largest_remainder=st.booleans(), literal_leftovers=st.booleans())


def charged(
    adapters: Sequence[AdapterDemand], points: Mapping[int, float], made: LoraservePlacement
) -> list[float]:
    """Return each server's utilisation, its whole demand at the operating point of its largest busy rank."""
    load_of = {load.name: load for load in adapters}
    used = []
    for server in made.shares:
        busy = [load_of[name] for name in server if load_of[name].tok_s > 0.0]
        tok_s = sum(server[load.name] * load.tok_s for load in busy)
        used.append(tok_s / points[max(load.rank for load in busy)] if busy else 0.0)
    return used


def stored(made: LoraservePlacement) -> list[set[str]]:
    return [set(server) for server in made.shares]


@given(clusters(), VARIANTS)
def test_shares_sum_to_one_and_no_adapter_is_lost(cluster: Cluster, variants: PlacementVariants) -> None:
    adapters, points, servers = cluster
    made = place(adapters, points, servers, variants=variants)
    assert len(made.shares) == servers
    for load in adapters:
        shares = [server[load.name] for server in made.shares if load.name in server]
        assert math.fsum(shares) == pytest.approx(1.0, abs=1e-9)
        assert all(0.0 < share <= 1.0 + 1e-12 for share in shares)
        assert load.tok_s > 0.0 or len(shares) == 1, "an idle adapter lives on one server"


@given(clusters(), VARIANTS)
def test_budgets_are_within_the_servers(cluster: Cluster, variants: PlacementVariants) -> None:
    adapters, points, servers = cluster
    budgets = place(adapters, points, servers, variants=variants).budgets
    assert sum(budgets.values()) <= servers
    assert min(budgets.values()) >= 0


@given(clusters(), st.booleans())
def test_no_server_is_above_the_final_cap_but_for_small_rests(cluster: Cluster, remainder: bool) -> None:
    adapters, points, servers = cluster
    made = place(adapters, points, servers, variants=PlacementVariants(largest_remainder=remainder))
    load_of = {load.name: load for load in adapters}
    for server, used in zip(made.shares, charged(adapters, points, made), strict=True):
        rests = 0.01 * sum(load_of[name].tok_s for name in server) / min(points.values())
        assert used <= made.cap * (1.0 + 1e-6) + rests
    assert charged(adapters, points, made) == pytest.approx(made.utilization)
    assert made.cap >= made.target


@given(clusters(), VARIANTS)
def test_equal_demand_twice_moves_nothing(cluster: Cluster, variants: PlacementVariants) -> None:
    adapters, points, servers = cluster
    first = place(adapters, points, servers, variants=variants)
    again = place(adapters, points, servers, stored=stored(first), variants=variants)
    assert again.bytes_to_copy == 0
    assert again.shares == first.shares, "among maps of the same cost, the identity"


@given(clusters(), st.data())
def test_relabelling_servers_changes_no_cost(cluster: Cluster, data: st.DataObject) -> None:
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
def test_bytes_to_copy_are_the_fewest_of_all_labels(cluster: Cluster, data: st.DataObject) -> None:
    adapters, points, _ = cluster
    names = [load.name for load in adapters]
    before = data.draw(st.lists(st.sets(st.sampled_from(names)), min_size=4, max_size=4))
    made = place(adapters, points, 4, stored=before)
    bytes_of = {load.name: load.bytes for load in adapters}

    def copied(servers: Sequence[Mapping[str, float]]) -> int:
        pairs = zip(servers, before, strict=True)
        return sum(bytes_of[name] for served, there in pairs for name in served if name not in there)

    assert made.bytes_to_copy == copied(made.shares) == min(map(copied, permutations(made.shares)))


@given(clusters(), VARIANTS, st.data())
def test_the_order_of_adapters_does_not_matter(
    cluster: Cluster, variants: PlacementVariants, data: st.DataObject
) -> None:
    adapters, points, servers = cluster
    shuffled = data.draw(st.permutations(adapters))
    one = place(adapters, points, servers, variants=variants)
    assert place(shuffled, points, servers, variants=variants) == one


@given(clusters(), st.integers(1, 3))
def test_replicas_are_bounded_where_the_user_says_so(cluster: Cluster, most: int) -> None:
    adapters, points, servers = cluster
    bounded = [AdapterDemand(a.name, a.rank, a.tok_s, a.bytes, max_replicas=most) for a in adapters]
    made = place(bounded, points, servers)
    assert all(sum(load.name in server for server in made.shares) <= most for load in bounded)


@given(st.integers(1, 8), st.integers(1, 20), st.floats(1.0, 10_000.0))
def test_one_rank_alone_has_all_servers_at_the_target(servers: int, count: int, tok_s: float) -> None:
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
def test_without_any_demand_every_adapter_lives_somewhere(ranks: list[int], servers: int) -> None:
    made = place(loads(*((rank, 0.0) for rank in ranks)), POINTS, servers)
    homes = [name for server in made.shares for name in server]
    assert sorted(homes) == sorted(f"a{i}" for i in range(len(ranks)))
    assert made.target == 0.0
    bytes_there = [sum(ranks[int(name[1:])] for name in server) for server in made.shares]
    assert max(bytes_there) - min(bytes_there) <= max(ranks), "each to the server with fewest bytes"


def test_five_equal_ranks_on_four_servers_leave_the_lowest_rank_to_the_others() -> None:
    """The paper's own Uniform trace: every ratio is 0.8 and rounds to 1, five servers in all."""
    adapters = loads(*((rank, POINTS[rank] / 5 * 0.5) for rank in POINTS for _ in range(5)))
    made = place(adapters, POINTS, 4)
    assert made.budgets == {8: 0, 16: 1, 32: 1, 64: 1, 128: 1}
    assert made.target == pytest.approx(5 * 0.5 / 4)
    # The lowest rank fills what is free beside each of the others, the highest max rank first.
    assert made.utilization == pytest.approx([made.cap] * 4, rel=0.2)
    low = {f"a{i}" for i in range(5)}
    assert sum(bool(low & set(server)) for server in made.shares) >= 3


def test_an_adapter_with_the_demand_of_three_servers_is_split_over_three() -> None:
    made = place(loads((64, 3 * POINTS[64]), (8, POINTS[8])), POINTS, 4)
    assert made.target == pytest.approx(1.0)
    assert sorted(server.get("a0", 0.0) for server in made.shares) == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    assert [set(server) for server in made.shares].count({"a1"}) == 1


def test_literal_leftovers_pile_on_the_server_of_the_largest_rank() -> None:
    """To the letter the highest max rank wins, though empty servers are there."""
    adapters = loads((128, 1000.0), *((rank, 75.0 * POINTS[rank] / POINTS[128]) for rank in (64, 32, 16, 8)))
    literal = place(adapters, POINTS, 4, variants=PlacementVariants(literal_leftovers=True))
    ours = place(adapters, POINTS, 4)
    assert literal.budgets == ours.budgets == {128: 3, 64: 0, 32: 0, 16: 0, 8: 0}
    assert [bool(server) for server in literal.shares] == [True, True, True, False]
    assert all(ours.shares)
    assert max(ours.utilization) < max(literal.utilization)


def test_too_much_demand_is_spread_evenly() -> None:
    """An orchestrator has to go on; who plans looks at the target."""
    made = place(loads((8, 20_000.0), (128, 20_000.0)), POINTS, 2)
    assert made.target > 1.0
    assert max(made.utilization) <= made.cap * 1.01


@pytest.mark.parametrize("point", [None, 0.0, -1.0, math.inf, math.nan])
def test_a_rank_without_an_operating_point_is_refused(point: float | None) -> None:
    points = {8: 100.0} if point is None else {8: 100.0, 16: point}
    with pytest.raises(InputError, match="operating point of rank 16: must be given"):
        place(loads((8, 1.0), (16, 1.0)), points, 2)


def test_bad_input_is_refused() -> None:
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
        AdapterDemand("a", 0, 1.0)
    with pytest.raises(InputError, match="cap_step"):
        PlacementVariants(cap_step=0.0)
    with pytest.raises(InputError, match="least_rest"):
        PlacementVariants(least_rest=1.0)
