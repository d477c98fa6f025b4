"""A tiny engine measured into a folder, resumed, and made a profile of."""

import json
from pathlib import Path

import pandas as pd
import pytest

from capplan.errors import InputError
from capplan.models.calibration_files import read_table
from capplan.models.kernel_fits import explain_kernels
from capplan.models.kernel_tables import read_kernel_table
from capplan.models.memory import kv_tokens
from capplan.profiling.engine.iterations import batches
from capplan.profiling.engine.options import Options
from capplan.profiling.engine.session import profile_engine
from capplan.spec import Kernel, Profile
from capplan.twin.calibration import Options as HowToCalibrate
from capplan.twin.calibration import Tables, calibrate


def tiny(**fields: object) -> Options:
    known = {
        "model": "tiny-llama",
        "a_max": (2,),
        "s_max": (16,),
        "ranks": (8, 16),
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "stages": ("memory", "loads", "steps"),
        "budget_s": 60.0,
        "tolerance": 0.0,
    }
    return Options(**{**known, **fields})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    outcome = profile_engine(folder, tiny())
    assert outcome.is_complete
    return folder


def test_what_is_there_is_not_measured_again(measured: Path) -> None:
    before = pd.read_parquet(measured / "steps.parquet")
    outcome = profile_engine(measured, tiny(budget_s=0.0))
    assert outcome.rows["steps.parquet"] == len(before)
    assert outcome.is_complete


def test_a_folder_of_another_engine_is_refused(measured: Path) -> None:
    with pytest.raises(InputError, match="which this folder is of"):
        profile_engine(measured, tiny(lora_kernel="padded"))


def test_loads_are_told_by_rank_and_kind(measured: Path) -> None:
    loads = read_table(measured / "loading.csv", ("rank", "ms"), ("kind",), text=("kind",))
    assert set(zip(loads["rank"], loads["kind"], strict=True)) == {
        (rank, kind) for rank in (8.0, 16.0) for kind in ("gpu", "disk")
    }
    assert (loads["ms"] > 0).all()


def test_a_profile_is_made_of_the_tables(measured: Path) -> None:
    base = Profile.model_validate(json.loads((measured / "base.json").read_text()))
    assert base.engine.kernel is Kernel.MBGMV
    tables = Tables(
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


def test_iterations_are_on_the_grid_of_the_paper_and_their_fits_are_made(tmp_path: Path) -> None:
    options = tiny(max_num_seqs=8, max_num_batched_tokens=256, stages=("iterations",), budget_s=20.0)
    assert {each.configuration for each in batches(32, 0)} >= {f"{n}x{r}" for n in (4, 32) for r in (8, 64)}
    profile_engine(tmp_path, options)
    table = read_kernel_table(tmp_path / "iterations.parquet")
    assert set(table["phase"]) == {"decode", "prefill"}
    prompts = table[table["phase"] == "prefill"]
    assert (prompts["tokens"] == 16 * prompts["requests"]).all()
    reports = explain_kernels(table)
    assert {report.meant for report in reports} == {"toppings-mbgmv"}


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"stages": ("all",)}, "some of memory"),
        ({"ranks": (64,)}, "must reach the largest rank"),
        ({"a_max": ()}, "whole numbers"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, object], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        tiny(**fields)
