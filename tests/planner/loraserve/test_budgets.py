"""Servers per rank: rounding, its repair, and the other way to share them out."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from capplan.planner.solvers.loraserve_placement import server_budgets

UTILIZATIONS = st.dictionaries(
    st.sampled_from([8, 16, 32, 64, 128]), st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1
)


@given(UTILIZATIONS, st.integers(1, 20))
def test_rounding_gives_no_more_servers_than_there_are(used: dict[int, float], servers: int) -> None:
    budgets = server_budgets(used, servers)
    assert sum(budgets.values()) <= servers
    total = sum(used.values())
    for rank, budget in budgets.items():
        ratio = used[rank] / total * servers if total else 0.0
        assert 0 <= budget <= math.floor(ratio + 0.5)
        assert budget >= math.floor(ratio + 0.5) - 1


@given(UTILIZATIONS, st.integers(1, 20))
def test_largest_remainder_gives_away_every_server(used: dict[int, float], servers: int) -> None:
    budgets = server_budgets(used, servers, largest_remainder=True)
    total = sum(used.values())
    assert sum(budgets.values()) == (servers if total else 0)
    for rank, budget in budgets.items():
        ratio = used[rank] / total * servers if total else 0.0
        assert abs(budget - ratio) < 1.0 + 1e-9


def test_five_equal_ranks_on_four_servers_take_one_back_from_the_lowest() -> None:
    used = dict.fromkeys((8, 16, 32, 64, 128), 0.7)
    assert server_budgets(used, 4) == {8: 0, 16: 1, 32: 1, 64: 1, 128: 1}
    assert server_budgets(used, 4, largest_remainder=True) == {8: 0, 16: 1, 32: 1, 64: 1, 128: 1}


def test_the_rank_whose_rounding_gained_most_gives_back() -> None:
    # Ratios 0.5, 0.55, 2.95 round to 1, 1, 3: one too many, and rank 64 gained half a server.
    assert server_budgets({64: 0.5, 16: 0.55, 8: 2.95}, 4) == {64: 0, 16: 1, 8: 3}


def test_a_half_is_rounded_up_not_to_the_even_number() -> None:
    assert server_budgets({8: 0.5, 16: 1.5}, 2) == {8: 0, 16: 2}  # 1 + 2, less the one that gained most
    assert server_budgets({8: 2.5, 16: 1.25, 32: 1.25}, 5) == {8: 3, 16: 1, 32: 1}


def test_servers_may_be_left_over() -> None:
    """The start of Shifting Skew: one rank has half the traffic, four have an eighth each."""
    used = {8: 0.125, 16: 0.125, 32: 0.125, 64: 0.125, 128: 0.9}
    assert server_budgets(used, 3) == {8: 0, 16: 0, 32: 0, 64: 0, 128: 2}
