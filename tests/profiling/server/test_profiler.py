"""Measurement of a server with known step and load times."""

import json
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from capplan import InputError
from capplan.models.calibration import read_steps
from capplan.models.calibration._components import LOADING_COLUMNS, MEMORY_COLUMNS
from capplan.profiling import MeasurementFolder
from capplan.profiling import _tables as files
from capplan.profiling.load import Target
from capplan.profiling.server import (
    EngineSetting,
    ServerProfilingOptions,
    ServerProfilingResult,
    profile_server,
)
from capplan.profiling.server import _profiler as profiler
from capplan.profiling.server._closed_loop import ServerPoint
from capplan.profiling.server._profiler import OnProgress
from capplan.spec import EngineConfig
from capplan.twin.calibration._runs import read_runs
from tests.profiling.load.servers import toy_server

pytestmark = pytest.mark.process

RANKS = {"a0": 8, "a1": 8, "a2": 16, "a3": 8}

QUICK = ServerProfilingOptions(
    budget_s=8.0,
    point_s=2.0,
    max_streams=4,
    prompt_tokens=16,
    output_tokens=16,
    idle_repeats=5,
    load_rounds=2,
)

QUICKER = replace(QUICK, budget_s=2.0, idle_repeats=1, load_rounds=1)


def measure(
    url: str,
    path: Path,
    a_max: int | None = None,
    options: ServerProfilingOptions = QUICK,
    ranks: Mapping[str, int] = RANKS,
    base_model: str = "base",
    on_progress: OnProgress | None = None,
) -> ServerProfilingResult:
    setting = EngineSetting(a_max, 16, EngineConfig(max_num_seqs=32, max_num_batched_tokens=512))
    target = Target(url, base_model=base_model)
    return profile_server(target, ranks, setting, MeasurementFolder(path), options, on_progress)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ServerProfilingResult]:
    path = tmp_path_factory.mktemp("measured")
    with toy_server() as (url, _):
        return path, measure(url, path)


def test_calibration_reads_the_tables(measured: tuple[Path, ServerProfilingResult]) -> None:
    path, done = measured
    table = read_steps(path / files.STEPS)
    assert table.rows == done.step_rows > 0
    assert len(table.run_names) == done.points
    assert done.points + len(done.failed) == 4  # on a busy machine too few steps may pass at some
    assert not table.unknown_loads.any()
    runs = read_runs(path / files.RUNS, "base")
    assert all(set(run.measured) == {"ttft_s_p50"} for run in runs)
    assert set(LOADING_COLUMNS) <= set(pd.read_csv(path / files.LOADING).columns)
    assert set(MEMORY_COLUMNS) <= set(pd.read_csv(path / files.MEMORY).columns)
    assert done.setting == "a2-s16-b32-t512"  # the slots are what the server says
    assert done.kv_tokens == 64_000


def test_steps_last_as_long_as_on_the_server(measured: tuple[Path, ServerProfilingResult]) -> None:
    """Steps last at least as long as the server sleeps; a busy machine lengthens them."""
    table = pd.read_parquet(measured[0] / files.STEPS)
    wanted = 8.0 + 0.1 * table["tokens"]
    assert (table["step_ms"] > 0.95 * wanted).all()
    assert (table["requests"] >= 0.9).all()
    assert (table["adapters"] <= np.minimum(table["requests"] + 0.1, 2.01)).all()


def test_an_adapter_without_a_slot_takes_longer(measured: tuple[Path, ServerProfilingResult]) -> None:
    loads = pd.read_csv(measured[0] / files.LOADING)
    assert set(loads["rank"]) <= {8, 16}
    assert (loads["ms"] > 5.0).all()


def test_first_tokens_take_longer_for_longer_prompts(measured: tuple[Path, ServerProfilingResult]) -> None:
    first = pd.read_csv(measured[0] / files.FIRST_TOKENS).sort_values("prompt_tokens")
    assert first["ttft_ms_p50"].iloc[-1] > first["ttft_ms_p50"].iloc[0]


def test_measuring_resumes_and_keeps_other_settings(tmp_path: Path) -> None:
    with toy_server(load_ms=0.0) as (url, _):
        first = measure(url, tmp_path, options=QUICKER)
        rows = len(pd.read_parquet(tmp_path / files.STEPS))
        second = measure(url, tmp_path, options=QUICKER)
        both = pd.read_parquet(tmp_path / files.STEPS)
        assert second.skipped == len(set(both["run"][:rows]))
        assert second.loads == 0  # they were measured
        assert len(both) >= rows
        assert both.groupby("run").size().max() <= 3
        third = measure(url, tmp_path, a_max=1, options=QUICKER)
    assert third.skipped == 0
    assert set(pd.read_csv(tmp_path / files.MEMORY)["a_max"]) == {1, 2}
    assert set(pd.read_parquet(tmp_path / files.STEPS)["setting"]) == {first.setting, third.setting}


def test_points_are_measured_once_per_pass_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [ServerPoint(streams, 1, prompt_tokens=8, output_tokens=16) for streams in (1, 2)]
    monkeypatch.setattr(profiler, "design", lambda *_: points)
    with toy_server(load_ms=0.0) as (url, _):
        once = measure(url, tmp_path, options=replace(QUICKER, budget_s=4.0))
        twice = measure(url, tmp_path, options=replace(QUICKER, budget_s=4.0, passes=2))
        table = pd.read_parquet(tmp_path / files.STEPS)
        thrice = measure(url, tmp_path, options=replace(QUICKER, budget_s=4.0, passes=2))
    assert (once.points, once.skipped) == (2, 0)
    assert (twice.points, twice.skipped) == (2, 2)
    assert (thrice.points, thrice.skipped) == (0, 4)
    visits = table["visit"].drop_duplicates().tolist()
    assert visits == [f"a2-s16-b32-t512-{point.name}{nth}" for nth in ("", "#2") for point in points]
    assert (table["visit"].str.partition("#")[0] == table["run"]).all()
    assert table.groupby("visit").size().max() <= 3  # windows


def test_failed_points_are_reported_and_the_others_measured(tmp_path: Path) -> None:
    with toy_server(refuse="base") as (url, _):
        done = measure(
            url, tmp_path, a_max=2, options=replace(QUICK, point_s=2.0, idle_repeats=1, load_rounds=1)
        )
    assert done.failed
    assert all("http_500" in line for line in done.failed)
    assert done.points + len(done.failed) == 4


def test_a_failed_stage_does_not_end_the_others(tmp_path: Path) -> None:
    with toy_server(refuse="a0") as (url, _):
        done = measure(url, tmp_path, options=QUICKER)
    assert [line.partition(":")[0] for line in done.failed[:2]] == ["first tokens", "adapter loads"]
    assert all("http_500" in line for line in done.failed[:2])
    assert done.points + len(done.failed) == 3  # the point uses the base model


def test_a_point_without_decode_steps_is_reported(tmp_path: Path) -> None:
    with toy_server(base_ms=90.0) as (url, _):
        done = measure(url, tmp_path, a_max=4, options=QUICKER)
    assert done.points == 0
    assert done.failed
    assert all("no request decoded for long enough" in line for line in done.failed)


@pytest.mark.parametrize("stage", ["first tokens", "adapter loads", "operating points"])
def test_an_interrupt_keeps_the_measured_rows(tmp_path: Path, stage: str) -> None:
    sent = []

    def interrupt(at: str, done: int, total: int) -> None:
        if at == stage and not sent:
            sent.append(at)
            os.kill(os.getpid(), signal.SIGINT)

    with toy_server(load_ms=0.0) as (url, _):
        done = measure(url, tmp_path, options=QUICKER, on_progress=interrupt)
    assert done.partial
    assert done.points == 0
    assert done.failed == ()
    assert (tmp_path / files.FIRST_TOKENS).exists() == (stage != "first tokens")
    noted = json.loads((tmp_path / files.PROVENANCE).read_text())[done.setting]
    assert (noted["points"], noted["ranks"]) == (0, RANKS)


def test_an_interrupt_keeps_the_points_in_the_provenance(
    measured: tuple[Path, ServerProfilingResult], tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(measured[0], folder)

    def interrupt(at: str, done: int, total: int) -> None:
        if done == 0:
            os.kill(os.getpid(), signal.SIGINT)

    with toy_server() as (url, _):
        done = measure(url, folder, on_progress=interrupt)
    assert done.partial
    noted = json.loads((folder / files.PROVENANCE).read_text())[done.setting]
    assert noted["points"] == measured[1].points > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_model": "a0", "ranks": {"a1": 8, "a2": 16, "a3": 8}}, "base_model: must be base"),
        ({"ranks": RANKS | {"a1": 16}}, "ranks: must be"),
    ],
)
def test_a_folder_of_another_server_is_refused(
    measured: tuple[Path, ServerProfilingResult], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(measured[0], folder)
    before = (folder / files.PROVENANCE).read_bytes()
    with toy_server() as (url, _), pytest.raises(InputError, match=message):
        measure(url, folder, **change)
    assert (folder / files.PROVENANCE).read_bytes() == before


def test_a_measurement_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must name an adapter"):
        profile_server(Target("http://127.0.0.1:9"), {}, EngineSetting(1, 16), MeasurementFolder(tmp_path))
