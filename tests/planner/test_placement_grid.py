"""The benchmarks of placement: a named subset of section 8.4, and what their tables rest on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.papers import placement_grid as grid
from benchmarks.papers.placement_grid import (
    CI,
    RATES_RPS,
    SIZES,
    Cell,
    GridSettings,
    cells,
    chosen,
    report,
    workload,
    worse,
)
from benchmarks.papers.placement_records import Record, Settings, Store, assignments_of
from benchmarks.placement_small import OUTCOMES, UNDECIDED, Pair, small_case
from capplan import InputError, plan
from capplan.planner import SolverResult

pytestmark = pytest.mark.long

ASKED = ("capplan", "plan", "greedy", "maxbase", "random")
SMALLEST = next(cells())


def run(folder: Path, solvers: Sequence[str], pattern: str = SMALLEST.name, **settings: int) -> list[Record]:
    return grid.run_cells(
        grid.Run(Store(folder), GridSettings(**settings), tuple(solvers)), chosen(pattern), quiet=True
    )


def held(solver: str, gpus: int) -> SolverResult:
    return SolverResult(solver, gpus=gpus, instances=gpus, served_fraction=1.0)


def record(*rows: SolverResult, at_least: int = 1) -> Record:
    return Record(SMALLEST.name, asdict(SMALLEST), {}, 4, 0.5, at_least, rows)


@pytest.fixture(scope="module")
def subset(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    return {r.name: r for r in run(tmp_path_factory.mktemp("grid"), ASKED, "ci")}


@pytest.mark.parametrize("solver", ["capplan", "plan"])
def test_capplan_holds_every_workload_that_another_solver_holds(
    subset: dict[str, Record], solver: str
) -> None:
    """Verified on five fresh seeds of an hour each, without headroom."""
    assert worse(subset.values(), solver) == []
    rows = [row for each in subset.values() if (row := each.row(solver)) is not None and row.answered]
    assert len(rows) >= 3
    assert [(row.starved, row.memory_errors, row.late) for row in rows] == [(0, 0, 0)] * len(rows)


def test_the_baselines_fail_as_the_paper_reports(subset: dict[str, Record]) -> None:
    maxbase, random = (
        [row for each in subset.values() if (row := each.row(name)) is not None]
        for name in ("maxbase", "random")
    )
    assert any(row.starved for row in maxbase)
    assert any(row.memory_errors for row in maxbase)
    assert not all(row.holds for row in random)


def test_no_solver_beats_the_lower_bound(subset: dict[str, Record]) -> None:
    assert set(subset) == set(CI)
    for each in subset.values():
        assert each.possible
        assert (each.fewest_gpus() or each.lower_bound_gpus) >= each.lower_bound_gpus


def test_stored_answers_are_kept(tmp_path: Path) -> None:
    """A second run adds missing solvers only."""
    (first,) = run(tmp_path, ["random"], seeds=1)
    (second,) = run(tmp_path, ["random", "maxbase"], seeds=1)
    assert second.row("random") == first.row("random")
    assert second.row("maxbase") is not None
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    run(tmp_path, ["random", "maxbase"], seeds=1)
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_folder_with_other_settings_is_rejected(tmp_path: Path) -> None:
    run(tmp_path, ["random"], seeds=1)
    with pytest.raises(InputError, match="same settings"):
        run(tmp_path, ["maxbase"], seeds=2)


def test_dropped_solvers_run_again(tmp_path: Path) -> None:
    run(tmp_path, ["random", "maxbase"], seeds=1)
    assert Store(tmp_path).drop(["random"]) == 1
    (left,) = Store(tmp_path).all()
    assert [row.solver for row in left.rows] == ["maxbase"]
    (again,) = run(tmp_path, ["random", "maxbase"], seeds=1)
    assert again.row("random") is not None


def test_cells_beyond_the_lower_bound_are_not_tried(tmp_path: Path) -> None:
    (found,) = run(tmp_path, ["random"], "llama.1gpu.high-rates.low-sizes.1280")
    assert not found.possible
    assert found.rows == ()
    assert json.loads((tmp_path / f"{found.name}.json").read_text())["lower_bound_gpus"] > 1


def test_a_failure_round_trips_through_its_file(tmp_path: Path) -> None:
    """Its NaN values are not JSON."""
    failed = record(SolverResult("greedy", failure="gpus: too few", exit_code=3))
    Store(tmp_path).put(failed)
    (back,) = Store(tmp_path).all()
    (row,) = back.rows
    assert row.solve_s != row.solve_s
    assert (row.failure, row.exit_code, row.slots_per_gpu) == ("gpus: too few", 3, ())
    assert replace(back, rows=()) == replace(failed, rows=())


def test_cells_of_a_curve_grow_by_adapters_and_models_share_them() -> None:
    small, large = (workload(Cell("llama", 4, "mixed", "mixed", n), GridSettings()) for n in (16, 64))
    assert large.adapters[:16] == small.adapters
    assert workload(Cell("qwen", 1, "mixed", "mixed", 64), GridSettings()).adapters == large.adapters
    assert {a.rate_rps for a in large.adapters} == set(RATES_RPS["mixed"])
    assert {a.rank for a in large.adapters} == set(SIZES["mixed"])
    assert workload(Cell("llama", 4, "mixed", "mixed", 64), GridSettings(draw=1)).adapters != large.adapters


def test_an_unknown_cell_is_named() -> None:
    with pytest.raises(InputError, match="no-such-cell"):
        chosen("no-such-cell")


@pytest.mark.parametrize(
    ("ours", "is_worse"),
    [
        (held("capplan", 2), False),
        (held("capplan", 1), False),
        (held("capplan", 3), True),
        (replace(held("capplan", 2), starved=1), True),
        (SolverResult("capplan", failure="gpus: too few"), True),
    ],
)
def test_worse_means_no_answer_a_failing_one_or_more_gpus(ours: SolverResult, is_worse: bool) -> None:
    told = record(ours, held("greedy", 2), replace(held("maxbase", 1), memory_errors=1))
    assert bool(worse([told], "capplan")) is is_worse
    assert worse([record(ours, replace(held("maxbase", 1), starved=1))], "capplan") == []


def test_the_report_names_solvers_below_the_lower_bound() -> None:
    assert f"by someone: {SMALLEST.name}" in report(
        [record(held("greedy", 1), held("capplan", 2), at_least=2)]
    )


def test_a_plan_is_verified_without_repair() -> None:
    """The hot adapter's shares sum to 1, each on another GPU."""
    cell = replace(SMALLEST, gpus=4, rates="low")
    hot = workload(cell, GridSettings()).adapters[0].model_copy(update={"rate_rps": 40.0})
    work = workload(cell, GridSettings())
    made = plan(work.model_copy(update={"adapters": (hot, *work.adapters[1:])}), gpus=4, verify=False)
    answers = assignments_of(made)
    shares: dict[str, float] = {}
    for share in (share for each in answers for share in each.shares):
        shares[share.name] = shares.get(share.name, 0.0) + share.fraction
    assert shares == pytest.approx({a.name: 1.0 for a in work.adapters})
    on = [[share for share in each.shares if share.name == hot.name] for each in answers]
    assert max(map(len, on)) == 1
    assert sum(share.rate_rps for shares in on for share in shares) == pytest.approx(40.0)
    assert [each.a_max for each in answers] == [group.engine_args.max_loras for group in made.groups]


def test_small_cases_are_small_and_deterministic() -> None:
    drawn = [small_case(Settings(), number) for number in range(20)]
    assert drawn == [small_case(Settings(), number) for number in range(20)]
    assert all(2 <= len(case.workload.adapters) <= 24 and 1 <= case.gpus <= 4 for case in drawn)
    assert len({case.workload.digest() for case in drawn}) == 20


@pytest.mark.parametrize(
    ("ours", "milp", "outcome"),
    [
        (held("capplan", 2), held("milp", 2), OUTCOMES[0]),
        (
            SolverResult("capplan", failure="gpus: no"),
            SolverResult("milp", failure="gpus: no", exit_code=3),
            OUTCOMES[1],
        ),
        (held("capplan", 3), held("milp", 2), OUTCOMES[2]),
        (held("capplan", 1), held("milp", 2), OUTCOMES[3]),
        (held("capplan", 1), SolverResult("milp", failure="gpus: no", exit_code=3), OUTCOMES[4]),
        (SolverResult("capplan", failure="gpus: no"), held("milp", 2), OUTCOMES[5]),
        (held("capplan", 1), SolverResult("milp", failure="time: milp neither", exit_code=3), UNDECIDED),
        (held("capplan", 1), SolverResult("milp", failure="solver: at most 24", exit_code=2), UNDECIDED),
    ],
)
def test_a_pair_of_answers_has_one_outcome(ours: SolverResult, milp: SolverResult, outcome: str) -> None:
    assert Pair(record(ours, milp), ours, milp).outcome == outcome
