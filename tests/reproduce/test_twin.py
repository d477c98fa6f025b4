"""The digital twin paper's experiments: what their rows rest on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from capplan.planner import SolverResult, compare
from capplan.reproduce import read_recipe
from capplan.reproduce.twin import EXPERIMENTS
from capplan.reproduce.twin._fidelity import Scenario, hour
from capplan.reproduce.twin._motivation import last_slots, max_pack
from capplan.reproduce.twin._placement import Cell, Placed, drawn_adapters, paper_workload, placed, reach
from capplan.reproduce.twin._setting import setting
from capplan.reproduce.twin._tuning import HALVING, LEAST_ROWS, rounds_of, subset

HELD = SolverResult("capplan", gpus=1, instances=1, served_fraction=1.0)
CELLS = (
    Cell("llama", 1, "mixed", "mixed", 160, 0),
    Cell("llama", 4, "low", "mixed", 1280, 0),
    Cell("qwen", 1, "low", "high", 384, 0),
    Cell("qwen", 4, "high", "low", 96, 0),
)


def test_every_figure_of_the_recipe_has_its_experiment() -> None:
    assert {figure.id for figure in read_recipe("twin").figures} == set(EXPERIMENTS)


def test_cells_of_a_curve_grow_by_adapters_and_models_share_them() -> None:
    small, large = (drawn_adapters("mixed", "mixed", count, 0) for count in (16, 64))
    assert large[:16] == small
    assert {each.rate_rps for each in large} == set(setting().placement.rates_rps["mixed"])
    assert {each.rank for each in large} == set(setting().placement.ranks["mixed"])
    assert drawn_adapters("mixed", "mixed", 64, 1) != large


def test_reach_ends_at_the_first_answer_that_does_not_hold() -> None:
    failing = replace(HELD, served_fraction=0.8)
    assert reach({8: HELD, 16: HELD, 32: failing, 64: HELD}) == 16
    assert reach({8: failing, 16: HELD}) == 0


def test_packing_ends_at_the_highest_throughput_without_starvation() -> None:
    assert max_pack([8, 16, 32], [100.0, 190.0, 210.0], [1.0, 0.95, 0.6]) == (16, 190.0)
    assert max_pack([8], [50.0], [0.5]) == (0, 0.0)


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-2-13b"])
def test_a_larger_rank_ends_memory_earlier_and_more_memory_later(model: str) -> None:
    ends = [last_slots(model, rank, (1, 8, 40_000)) for rank in (8, 16, 32)]
    assert ends == sorted(ends, reverse=True)
    assert last_slots(model, 8, (1, 8, 60_000)) > ends[0]


@pytest.mark.parametrize("family", ["knn", "forest", "svm"])
def test_a_subset_of_a_grid_is_drawn_from_every_kind(family: str) -> None:
    for grid in setting().grids[family].values():
        drawn = subset(grid, 8, 0)
        assert subset(grid, 8, 0) == drawn
        assert len(drawn) == min(8, len(drawn))
        assert {each.get("kernel") for each in drawn} == {
            value for kind in grid for value in kind.get("kernel", (None,))
        }


def test_halving_leaves_enough_rows_for_its_first_round() -> None:
    assert rounds_of(1, 10_000) == 1
    rounds = rounds_of(100, 2_000)
    assert 2_000 // HALVING ** (rounds - 1) >= LEAST_ROWS


def test_unpredictable_arrivals_scatter_more_than_poisson() -> None:
    calm = Scenario("llama", "low", (8,), 32, 32, 0)
    assert hour(replace(calm, unpredictable=True))["scatter"] > hour(calm)["scatter"]


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_capplan_holds_every_workload_that_another_solver_holds(cell: Cell) -> None:
    """On fresh seeds of an hour each, without headroom, and on no more GPUs."""
    adapters = drawn_adapters(cell.rates, cell.ranks, cell.adapters, cell.draw)
    workload = paper_workload(cell.model, adapters, headroom=0.0)
    found = compare(workload, ["capplan", "greedy", "maxbase", "random"], gpus=cell.gpus)
    ours, *others = found.rows
    assert all(ours.holds and ours.gpus <= row.gpus for row in others if row.holds)
    assert all(row.gpus >= found.lower_bound_gpus for row in found.rows if row.holds)


@pytest.mark.long
def test_the_baselines_fail_as_the_paper_reports() -> None:
    busy = Cell("llama", 1, "low", "high", 256, 0)
    assert placed(Placed(busy, "MaxBase"))["memory_errors"] == 1
    assert placed(Placed(busy, "Proposed"))["memory_errors"] == 0
