"""Measurement of a tiny engine into a folder, resumed and calibrated."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError, Profile
from capplan.models import explain_kernels, read_kernel_table
from capplan.models.calibration._tables import read_table
from capplan.profiling.engine import EngineProfilingOptions, profile_engine
from capplan.profiling.engine import _profiler as served
from capplan.profiling.engine._options import STAGES
from capplan.profiling.engine._profiler import iteration_cases
from capplan.profiling.server._closed_loop import LoopError, RequestSender, ServerPoint, closed_loop
from capplan.spec import EngineConfig, Kernel
from capplan.twin.calibration import CalibrationOptions as HowToCalibrate
from capplan.twin.calibration import CalibrationTables, calibrate
from tests.models.memory import kv_tokens

pytestmark = pytest.mark.process

LIMITS = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128)


def tiny(**fields: object) -> EngineProfilingOptions:
    known = {
        "model": "tiny-llama",
        "a_max": (2,),
        "s_max": (16,),
        "ranks": (8, 16),
        "engine": LIMITS,
        "stages": ("memory", "loads", "steps"),
        "budget_s": 600.0,
        "tolerance": 0.0,
    }
    return EngineProfilingOptions(**{**known, **fields})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    outcome = profile_engine(folder, tiny())
    assert outcome.is_complete
    return folder


def test_existing_rows_are_not_measured_again(measured: Path) -> None:
    before = pd.read_parquet(measured / "steps.parquet")
    outcome = profile_engine(measured, tiny(budget_s=0.0))
    assert outcome.rows["steps.parquet"] == len(before)
    assert outcome.is_complete


def test_a_folder_of_another_engine_is_refused(measured: Path) -> None:
    with pytest.raises(InputError, match="which this folder is of"):
        profile_engine(measured, tiny(lora_kernel="padded"))


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 2},
        {"engine": LIMITS.replace(max_num_seqs=2)},
        {"engine": LIMITS.replace(max_num_batched_tokens=32)},
        {"engine": LIMITS.replace(max_model_len=96)},
        {"ranks": (16,)},
    ],
)
def test_other_options_are_refused_in_the_same_folder(measured: Path, change: dict[str, Any]) -> None:
    before = (measured / "provenance.json").read_bytes()
    with pytest.raises(InputError, match=rf"{next(iter(change))}: must be .* choose another folder"):
        profile_engine(measured, tiny(**change))
    assert (measured / "provenance.json").read_bytes() == before


def test_loads_are_measured_by_rank_and_kind(measured: Path) -> None:
    loads = read_table(measured / "loading.csv", ("rank", "ms"), ("kind",), text=("kind",))
    assert set(zip(loads["rank"], loads["kind"], strict=True)) == {
        (rank, kind) for rank in (8.0, 16.0) for kind in ("gpu", "disk")
    }
    assert (loads["ms"] > 0).all()


def test_the_tables_calibrate_a_profile(measured: Path) -> None:
    base = Profile.model_validate(json.loads((measured / "base.json").read_text()))
    assert base.engine.kernel is Kernel.MBGMV
    tables = CalibrationTables(
        steps=str(measured / "steps.parquet"),
        memory=str(measured / "memory.csv"),
        loading=str(measured / "loading.csv"),
    )
    made = calibrate(base, tables, HowToCalibrate(form="additive")).profile
    memory = pd.read_csv(measured / "memory.csv")
    for row in memory.itertuples():
        predicted = kv_tokens(made, int(row.a_max), int(row.s_max), 0.9, 4)
        assert predicted == pytest.approx(row.kv_tokens, rel=1e-3)
    # Which terms so short a measurement shows depends on the machine; that steps take time does not.
    assert any(coefficient.value > 0 for coefficient in made.step_latency.coefficients.values())
    assert made.loading.value("serving_factor") == 1.0


def test_iterations_cover_the_grid_of_the_paper_and_are_fitted(tmp_path: Path) -> None:
    options = tiny(
        engine=LIMITS.replace(max_num_seqs=8, max_num_batched_tokens=256),
        stages=("iterations",),
        budget_s=20.0,
    )
    assert {each.configuration for each in iteration_cases(32, 0)} >= {
        f"{n}x{r}" for n in (4, 32) for r in (8, 64)
    }
    profile_engine(tmp_path, options)
    table = read_kernel_table(tmp_path / "iterations.parquet")
    assert set(table["phase"]) == {"decode", "prefill"}
    prompts = table[table["phase"] == "prefill"]
    assert (prompts["tokens"] == 16 * prompts["requests"]).all()
    assert set(table["kernel"]) == {"compiled"}  # what the engine takes for float32 on a CPU
    reports = explain_kernels(table)
    assert {report.meant for report in reports} == {"toppings-mbgmv"}


def test_iterations_are_incomplete_without_time(tmp_path: Path) -> None:
    options = tiny(engine=LIMITS.replace(max_num_seqs=2), stages=("iterations",))
    assert profile_engine(tmp_path, options).is_complete
    file = tmp_path / "iterations.parquet"
    whole = pd.read_parquet(file)
    whole[whole["case"] != whole["case"].iloc[0]].to_parquet(file)
    assert not profile_engine(tmp_path, replace(options, budget_s=0.0)).is_complete
    assert profile_engine(tmp_path, options).is_complete
    assert profile_engine(tmp_path, replace(options, budget_s=0.0)).is_complete


@given(st.sets(st.sampled_from(STAGES), min_size=1))
def test_the_last_requested_stage_gets_the_rest_of_the_time(chosen: set[str]) -> None:
    options = tiny(stages=tuple(chosen))
    timed = [stage for stage in ("steps", "iterations", "served") if stage in chosen]
    left = 1.0
    for stage in timed:
        assert 0.0 < options.share(stage) <= 1.0
        left *= 1.0 - options.share(stage)
    assert left == (0.0 if timed else 1.0)


def test_failed_points_of_the_server_are_reported_and_the_others_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are in falling order: the smaller slots hold the second one only."""
    measured_points: list[str] = []

    async def fails_now_and_then(sender: RequestSender, point: ServerPoint, *more: Any) -> Any:
        measured_points.append(point.name)
        if len(measured_points) % 2 == 0:
            raise LoopError("http_500: no")
        return await closed_loop(sender, point, *more)

    monkeypatch.setattr(served, "closed_loop", fails_now_and_then)
    options = tiny(ranks=(16, 8), s_max=(8, 16), stages=("memory", "served"), budget_s=3.0, point_s=0.5)
    failed: list[str] = []
    for _ in range(4):  # starting a server may take all the time
        outcome = profile_engine(tmp_path, options)
        failed += outcome.failed
        if outcome.is_complete:
            break
    assert outcome.is_complete
    assert len(failed) == len(measured_points) // 2 > 0
    assert all("http_500" in line for line in failed)
    steps = pd.read_parquet(tmp_path / "served.parquet")
    assert set(steps["setting"]) == {"a2-s8", "a2-s16"}
    good = {name for at, name in enumerate(measured_points) if at % 2 == 0}
    assert {run.partition("-b")[2] for run in steps["run"]} <= {name[1:] for name in good}
    assert (steps["step_ms"] > 0.0).all()
    assert (steps["rate_rps"] > 0.0).all()
    assert (steps["streams"] >= steps["requests"]).all()
    runs = pd.read_csv(tmp_path / "runs.csv")
    assert dict(zip(runs["setting"], runs["ranks"], strict=True)) == {"a2-s8": 8, "a2-s16": 16}


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"stages": ("all",)}, "some of memory"),
        ({"ranks": (64,)}, "must reach the largest rank"),
        ({"ranks": (16, 32), "s_max": (8, 32)}, "must each hold an adapter: the smallest rank is 16"),
        ({"a_max": ()}, "whole numbers"),
    ],
)
def test_invalid_options_are_refused(fields: dict[str, object], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        tiny(**fields)
