"""Measurement of kernels into a folder: complete, resumed, interrupted."""

import json
from pathlib import Path

import numpy as np
import pytest

from capplan import InputError
from capplan.models import COLUMNS, crossover, read_kernel_table
from capplan.profiling.kernels import KernelProfilingOptions, SamplingLimits, measure

pytestmark = pytest.mark.long

WIDTH = 16
SHORT = SamplingLimits(budget_s=60.0, max_passes=2, calls=1)


def options(**changed: object) -> KernelProfilingOptions:
    given = {"grids": ("tiny",), "widths": (WIDTH,), "limits": SHORT, **changed}
    return KernelProfilingOptions(**given)  # type: ignore[arg-type]


def test_every_point_is_a_row_per_half_with_its_batch(tmp_path: Path) -> None:
    outcome = measure(tmp_path, options())
    table = read_kernel_table(outcome.table)
    assert tuple(table.columns) == COLUMNS
    assert set(table["half"]) == {"shrink", "expand"}
    assert set(table["kernel"]) == {"padded", "grouped"}
    assert outcome.is_complete
    assert len(table) == 2 * outcome.points
    assert (table["median_us"] > 0).all()
    assert (table["rank_sum"] <= table["requests"] * table["max_rank"]).all()
    assert (table["rank_tokens"] >= table["rank_sum"]).all()
    medians = [np.median(times) for times in table["visits_us"]]
    assert np.allclose(table["median_us"], medians)
    assert [len(times) for times in table["visits_us"]] == table["visits"].to_list()


def test_a_resumed_measurement_adds_passes(tmp_path: Path) -> None:
    first = measure(tmp_path, options())
    before = read_kernel_table(first.table)
    second = measure(tmp_path, options(limits=SamplingLimits(budget_s=60.0, max_passes=4, calls=1)))
    after = read_kernel_table(second.table)
    assert second.restored == len(before) // 2
    assert set(before["visits"]) == {2}
    assert set(after["visits"]) == {4}
    key = ["kernel", "half", "width", "case"]
    kept = before.merge(after, on=key, suffixes=("_before", "_after"))
    assert len(kept) == len(before)
    for old, new in zip(kept["visits_us_before"], kept["visits_us_after"], strict=True):
        assert list(new[: len(old)]) == list(old)
    record = json.loads((tmp_path / "provenance.json").read_text())
    assert len(record["sessions"]) == 2


def test_the_provenance_names_device_and_versions(tmp_path: Path) -> None:
    measure(tmp_path, options())
    record = json.loads((tmp_path / "provenance.json").read_text())
    session = record["sessions"][0]
    assert record["settings"]["dtype"] == "float32"
    assert record["settings"]["threads"] == session["cpu"]["threads"] == 1
    assert session["versions"]["torch"]
    assert session["date"].endswith("+00:00")
    assert session["cpu"]["cache_bytes"] > 0


def test_other_widths_join_the_table_and_other_settings_are_refused(tmp_path: Path) -> None:
    measure(tmp_path, options())
    outcome = measure(tmp_path, options(widths=(2 * WIDTH,)))
    assert set(read_kernel_table(outcome.table)["width"]) == {WIDTH, 2 * WIDTH}
    with pytest.raises(InputError, match="choose another folder"):
        measure(tmp_path, options(dtype="bfloat16"))
    with pytest.raises(InputError, match="choose another folder"):
        measure(tmp_path, options(threads=2))


def test_an_interrupt_keeps_the_measured_passes(tmp_path: Path) -> None:
    calls = iter(range(7))

    def interrupted(*_: object) -> None:
        if next(calls) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, options(limits=SamplingLimits(budget_s=60.0)), interrupted)
    assert read_kernel_table(tmp_path / "kernels.parquet")["visits"].sum() == 2 * 7


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"device": "cuda"}, "sees no CUDA device"),
        ({"dtype": "int4"}, "float32, bfloat16"),
        ({"widths": (7,)}, "even numbers"),
        ({"kernels": ("bmm",)}, "padded, grouped"),
        ({"grids": ("papers",)}, "paper, wide"),
        ({"phases": ("crossover",)}, "must include kernels of the phases crossover"),
    ],
)
def test_invalid_options_are_refused(
    changed: dict[str, object], rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match=rule):
        measure(tmp_path, options(**changed))


def test_triton_kernels_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the kernels need triton (extra `engine`)")
    limits = SamplingLimits(budget_s=60.0, max_passes=1, calls=1)
    kernels = ("bgmv", "mbgmv", "sgmv")
    outcome = measure(tmp_path, options(kernels=kernels, phases=("prefill",), limits=limits))
    assert outcome.is_complete
    table = read_kernel_table(outcome.table)
    assert set(table["kernel"]) == set(kernels)
    outcome = measure(tmp_path, options(kernels=kernels, phases=("crossover",), limits=limits))
    found = crossover(read_kernel_table(outcome.table))
    assert found is not None
    assert found.cases == 3
