"""The benchmark of small placements: its cases, outcomes and stored results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.placement_records import Record, Settings, Store
from benchmarks.placement_small import OUTCOMES, UNDECIDED, Pair, run_case, small_case
from capplan import InputError
from capplan.planner import SolverResult

pytestmark = pytest.mark.long


def held(solver: str, gpus: int) -> SolverResult:
    return SolverResult(solver, gpus=gpus, instances=gpus, served_fraction=1.0)


def record(*rows: SolverResult) -> Record:
    return Record("small.0", {}, {}, 4, 0.5, 1, rows)


def test_stored_answers_are_kept_and_other_settings_refused(tmp_path: Path) -> None:
    first, _ = run_case(Store(tmp_path), Settings(seeds=1), small_case, 0)
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    assert run_case(Store(tmp_path), Settings(seeds=1), small_case, 0)[0] == first
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before
    with pytest.raises(InputError, match="same settings"):
        run_case(Store(tmp_path), Settings(seeds=2), small_case, 0)


def test_a_failure_round_trips_through_its_file(tmp_path: Path) -> None:
    """Its NaN values are not JSON."""
    Store(tmp_path).put(record(SolverResult("greedy", failure="gpus: too few", exit_code=3)))
    (back,) = Store(tmp_path).all()
    (row,) = back.rows
    assert row.solve_s != row.solve_s
    assert (row.failure, row.exit_code, row.slots_per_gpu) == ("gpus: too few", 3, ())


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
