"""Toppings' rule on the example of its Figure 6, and the corners of its score."""

import numpy as np
import pytest

from capplan.serving.routers import (
    BGMV,
    MBGMV,
    PRESENT,
    ArrivingRequest,
    Fleet,
    Performance,
    Placement,
    Toppings,
    new_fleet,
    route,
)
from capplan.twin.cluster._routers import plain_rule

# A line through the printed BGMV points gives 36.05 ms for the new one; these are within their rounding.
FIGURE_6 = {
    BGMV: Performance(0.0035, 32.166, 0.0035, 32.166),
    MBGMV: Performance(0.00234375, 33.5, 0.00234375, 33.5),
}


def ask(
    fleet: Fleet, placement: Placement, rank: int, slo_ms: float, kernel: int = BGMV, turn: int = -1
) -> int:
    """Return the place that a request of this rank goes to."""
    router = Toppings(kernel="bgmv" if kernel == BGMV else "mbgmv")
    models = np.array([FIGURE_6[kernel].row] * fleet.instances.size)
    rule = plain_rule(router, 200.0)._replace(models=models, slo_ms=slo_ms, turn=np.array([turn]))
    place, _ = route(rule, fleet, placement, ArrivingRequest(0, rank, 100, 200.0, 0.0, 0))
    return int(place)


def choose(
    running: list[dict[int, int]], rank: int, slo_ms: float, kernel: int = BGMV, turn: int = -1
) -> int:
    """Return the instance chosen for a rank; every instance is given as running requests by rank."""
    n = len(running)
    fleet = new_fleet(n, np.array([8, 16, 32, 64]), by_rank=True)
    for i, ranks in enumerate(running):
        fleet.instances.running[i] = sum(ranks.values())
        for own, count in ranks.items():
            fleet.by_rank[i, PRESENT, own] = count
    fleet.instances.free_blocks, fleet.instances.block_size = 10_000, 16
    placement = Placement(
        np.array([0, n, n]), np.arange(n, dtype=np.int32), np.zeros(n, np.int32), np.full(n, 1.0 / n)
    )
    return ask(fleet, placement, rank, slo_ms, kernel, turn)


@pytest.mark.parametrize(("kernel", "chosen"), [(BGMV, 1), (MBGMV, 0)])
def test_figure_6_goes_to_the_second_instance_when_padded_and_to_the_first_otherwise(
    kernel: int, chosen: int
) -> None:
    assert choose([{32: 24}, {64: 16}], 64, 36.0, kernel) == chosen


def test_idle_instances_rotate() -> None:
    idle = [{}, {}, {}]
    assert [choose(idle, 32, 36.0, turn=turn) for turn in (-1, 0, 1, 2)] == [0, 1, 2, 0]


def test_an_idle_instance_comes_before_a_busy_one() -> None:
    assert choose([{8: 1}, {}, {8: 1}], 8, 36.0) == 1


def test_instances_within_the_slo_come_first() -> None:
    assert choose([{64: 18}, {64: 10}, {64: 17}], 64, 36.0) == 1


def test_if_all_exceed_the_slo_the_cost_decides() -> None:
    assert choose([{64: 40}, {64: 30}, {64: 20}], 64, 1.0) == 2


def test_equal_ranks_are_grouped_with_padding_kernels() -> None:
    """A small rank joins the small ones, although more of them run there."""
    assert choose([{64: 10}, {8: 14}], 8, 36.0) == 1
    assert choose([{64: 10}, {8: 10}], 64, 36.0) == 0


def test_instances_without_memory_come_last() -> None:
    fleet = new_fleet(2, np.array([8]), by_rank=True)
    fleet.instances.block_size = 16
    fleet.instances.free_blocks[1] = 7  # 112 tokens
    fleet.instances.running[1] = fleet.by_rank[1, PRESENT, 8] = 5
    placement = Placement(
        np.array([0, 2, 2]), np.arange(2, dtype=np.int32), np.zeros(2, np.int32), np.ones(2) / 2
    )
    assert ask(fleet, placement, 8, 36.0) == 1
