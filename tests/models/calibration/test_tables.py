"""Reading and validation of step tables."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from capplan import InputError
from capplan.models.calibration import read_steps
from capplan.models.calibration._tables import STEP_COLUMNS, regimes, step_table
from tests.models.calibration.step_tables import ADDITIVE_TRUTH, steps_of


@pytest.fixture
def frame() -> pd.DataFrame:
    return steps_of("additive", ADDITIVE_TRUTH, rows=60)


def written(frame: pd.DataFrame, path: Path) -> Path:
    frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)
    return path


@pytest.mark.parametrize("name", ["steps.csv", "steps.parquet"])
def test_both_formats_read_alike(frame: pd.DataFrame, tmp_path: Path, name: str) -> None:
    table = read_steps(written(frame, tmp_path / name))
    assert table.source == name
    assert table.step_ms == pytest.approx(frame["step_ms"].to_numpy())
    assert table.slots_per_adapter == pytest.approx(
        np.minimum(1.0, frame["a_max"] / frame["adapters_served"]).to_numpy()
    )
    assert len(table.run_names) == frame["run"].nunique()
    assert [table.run_names[number] for number in table.run] == frame["run"].astype(str).tolist()


@pytest.mark.parametrize("name", STEP_COLUMNS)
def test_a_missing_column_is_named(frame: pd.DataFrame, tmp_path: Path, name: str) -> None:
    path = written(frame.drop(columns=name), tmp_path / "steps.csv")
    with pytest.raises(InputError, match=f"steps.csv: {name}: column is missing"):
        read_steps(path)


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("step_ms", 0.0, "must be above 0"),
        ("step_ms", -1.0, "must be a finite number >= 0"),
        ("tokens", float("nan"), "must be a finite number >= 0"),
        ("kv_tokens", float("inf"), "must be a finite number >= 0"),
        ("a_max", "many", "must be a finite number >= 0"),
        ("prefills", None, "must be a finite number >= 0"),
        ("adapters_served", 0, "must be above 0"),
    ],
)
def test_a_value_that_breaks_a_rule_is_named_with_its_row(
    frame: pd.DataFrame, tmp_path: Path, column: str, value: object, rule: str
) -> None:
    frame[column] = frame[column].astype(object)
    frame.loc[6, column] = value
    with pytest.raises(InputError, match=rf"steps\.csv: {column}, row 7: {rule}"):
        read_steps(written(frame, tmp_path / "steps.csv"))


@pytest.mark.parametrize("content", ["", ",".join(STEP_COLUMNS) + "\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=r"steps\.csv: (must not be empty|must hold at least one row)"):
        read_steps(path)


def test_a_file_that_is_not_a_table_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "steps.parquet"
    broken.write_bytes(b"no table")
    for path, rule in ((broken, "column is missing"), (tmp_path / "missing.csv", "cannot be read")):
        with pytest.raises(InputError, match=rule):
            read_steps(path)


def test_regimes_follow_from_limits_and_load() -> None:
    frame = pd.DataFrame(
        {
            "tokens": [100, 100, 2040, 100, 100, 100],
            "requests": [10, 10, 10, 10, 10, 900],
            "kv_tokens": [500, 980, 980, 500, 500, 500],
            "waiting": [0.4, 5.0, 5.0, 5.0, 5.0, 24_500],
            "a_max": [8, 8, 8, 8, 32, 8],
            "adapters_served": [32] * 6,
            "kv_capacity": [1000] * 6,
            "token_budget": [2048] * 6,
            "in_flight_limit": [25_000] * 6,
        }
    )
    expected = ["un-queued", "KV-bound", "overloaded", "slot-bound", "queued", "overloaded"]
    assert regimes(frame).tolist() == expected
    unlimited = frame.drop(columns=["kv_capacity", "token_budget", "in_flight_limit"])
    assert regimes(unlimited).tolist() == [
        "un-queued",
        "slot-bound",
        "slot-bound",
        "slot-bound",
        "queued",
        "slot-bound",
    ]


def test_a_column_of_regimes_takes_precedence(frame: pd.DataFrame) -> None:
    named = step_table(frame.assign(regime="night"), "steps.csv")
    assert set(named.regime.tolist()) == {"night"}


def test_counts_within_window_means_are_poisson() -> None:
    frame = steps_of("additive", ADDITIVE_TRUTH, rows=40)
    single = step_table(frame, "steps.csv")
    mean = np.linspace(0.0, 3.0, 40)
    assert single.probability_of_any(mean).tolist() == [0.0] + [1.0] * 39
    windows = step_table(frame.assign(steps=500), "steps.csv")
    assert windows.probability_of_any(mean) == pytest.approx(1.0 - np.exp(-mean))


def test_step_times_are_those_at_one_speed_of_the_machine(frame: pd.DataFrame, tmp_path: Path) -> None:
    slower = np.where(np.arange(len(frame)) % 3 == 0, 2.0, 1.0)
    measured = frame.assign(step_ms=frame["step_ms"] * slower, probe_ms=0.05 * slower)
    table = read_steps(written(measured, tmp_path / "steps.csv"))
    assert table.step_ms == pytest.approx(frame["step_ms"].to_numpy())
    assert table.probe_ms == pytest.approx(0.05)
    measured.loc[0, "probe_ms"] = np.nan  # unknown: as measured
    table = read_steps(written(measured, tmp_path / "blank.csv"))
    assert table.step_ms[0] == pytest.approx(2.0 * frame["step_ms"][0])
    assert step_table(frame, "steps.csv").probe_ms is None


def test_rows_without_a_run_form_blocks(frame: pd.DataFrame) -> None:
    table = step_table(frame.drop(columns="run"), "steps.csv", folds=4)
    assert table.run_names == ()
    assert table.run.tolist() == sorted(table.run.tolist())
    assert np.bincount(table.run).tolist() == [15] * 4
