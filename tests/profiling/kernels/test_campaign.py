"""A campaign runs slices in turn, resumes them, and continues after failures."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from capplan import InputError
from capplan.models import read_kernel_table
from capplan.profiling.campaign import (
    MOST_SLICE_S,
    PARTS,
    RECORD,
    Campaign,
    Slice,
    SliceResult,
    SliceSettings,
    kernel_shares,
    main,
    slices,
)


class Clock:
    """Clock that slices advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def part(name: str, needs_s: float, clock: Clock, budget_s: float = 100.0, **more: Any) -> Slice:
    """Return a slice that needs `needs_s` seconds in total."""
    left = [needs_s]

    def run(setting: SliceSettings) -> SliceResult:
        worked = min(left[0], setting.budget_s)
        left[0] -= worked
        clock.now += worked
        return SliceResult(left[0] <= 0.0, f"{left[0]:g} s left")

    return Slice(name, run, budget_s, **more)


def record(folder: Path) -> dict[str, dict[str, object]]:
    return json.loads((folder / RECORD).read_text())["slices"]


def test_slices_run_in_order_until_all_are_complete(tmp_path: Path) -> None:
    clock, lines = Clock(), []
    campaign = Campaign(tmp_path, "cpu", [part("a", 10.0, clock), part("b", 20.0, clock)])
    assert campaign.run(1e9, lines.append, clock)
    assert campaign.pending_parts() == []
    assert [line.partition(":")[0] for line in lines] == ["a", "a", "b", "b"]
    assert {name: each["spent_s"] for name, each in record(tmp_path).items()} == {"a": 10.0, "b": 20.0}


def test_a_time_limit_ends_a_slice_and_the_next_run_resumes_it(tmp_path: Path) -> None:
    clock = Clock()
    parts = [part("a", 10.0, clock), part("b", 60.0, clock)]
    Campaign(tmp_path, "cpu", parts).run(40.0, now_s=clock)
    assert clock.now == 40.0
    second = Campaign(tmp_path, "cpu", parts)
    assert [each.name for each in second.pending_parts()] == ["b"]
    second.run(1e9, now_s=clock)
    assert second.pending_parts() == []
    assert clock.now == 70.0
    assert len(record(tmp_path)["b"]["runs"]) == 2  # type: ignore[arg-type]


def test_a_slice_ends_with_its_budget(tmp_path: Path) -> None:
    clock = Clock()
    campaign = Campaign(tmp_path, "cpu", [part("a", 500.0, clock), part("b", 1.0, clock)])
    campaign.run(1e9, now_s=clock)
    assert campaign.pending_parts() == []
    assert not record(tmp_path)["a"]["is_complete"]
    assert record(tmp_path)["a"]["spent_s"] == 100.0


def test_slices_that_cannot_end_in_time_are_not_started(tmp_path: Path) -> None:
    clock, lines = Clock(), []
    parts = [part("a", 30.0, clock), part("long", 60.0, clock, least_s=60.0), part("b", 5.0, clock)]
    Campaign(tmp_path, "cpu", parts).run(80.0, lines.append, clock)
    assert clock.now == 35.0
    assert "long: takes 60 s at least, 50 s are left" in lines
    assert [each.name for each in Campaign(tmp_path, "cpu", parts).pending_parts()] == ["long"]
    Campaign(tmp_path, "cpu", parts).run(60.0, now_s=clock)
    assert Campaign(tmp_path, "cpu", parts).pending_parts() == []


def test_slices_may_be_shortened(tmp_path: Path) -> None:
    clock = Clock()
    parts = [part("a", 30.0, clock), part("b", 5.0, clock)]
    Campaign(tmp_path, "cpu", parts).run(1e9, now_s=clock, slice_s=10.0)
    assert clock.now == 15.0
    assert [each.name for each in Campaign(tmp_path, "cpu", parts).pending_parts()] == ["a"]


def test_an_unknown_slice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--out", str(tmp_path), "--slices", "copies,decod"]) == 2
    assert "--slices: must be some of correctness, copies" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_slice_without_budget_for_another_run_is_done(tmp_path: Path) -> None:
    """Otherwise a campaign with a slice that is always void would never end."""
    clock = Clock()

    def void(_: SliceSettings) -> SliceResult:
        clock.now += 50.0
        raise RuntimeError("void")

    campaign = Campaign(tmp_path, "cpu", [Slice("a", void, 100.0, least_s=60.0)])
    assert not campaign.run(1e9, now_s=clock)
    assert campaign.pending_parts() == []


def test_a_slice_waits_for_its_prerequisites(tmp_path: Path) -> None:
    clock, lines = Clock(), []
    parts = [part("a", 60.0, clock), part("b", 1.0, clock, after=("a",)), part("c", 1.0, clock)]
    Campaign(tmp_path, "cpu", parts).run(30.0, lines.append, clock)
    assert "b: waits for a" in lines
    assert [each.name for each in Campaign(tmp_path, "cpu", parts).pending_parts()] == ["a", "b", "c"]
    Campaign(tmp_path, "cpu", parts).run(1e9, lines.append, clock)
    assert record(tmp_path)["b"]["runs"][0]["note"] == "0 s left"  # type: ignore[index]


def test_incomplete_prerequisites_are_noted(tmp_path: Path) -> None:
    clock = Clock()
    parts = [part("a", 500.0, clock), part("b", 1.0, clock, after=("a",))]
    Campaign(tmp_path, "cpu", parts).run(1e9, now_s=clock)
    assert record(tmp_path)["b"]["runs"][0]["note"] == "0 s left; not complete before it: a"  # type: ignore[index]


def test_a_slice_that_fails_is_recorded_and_the_others_run(tmp_path: Path) -> None:
    def fail(_: SliceSettings) -> SliceResult:
        raise RuntimeError("out of memory\nand more")

    clock = Clock()
    campaign = Campaign(tmp_path, "cpu", [Slice("a", fail), part("b", 1.0, clock)])
    assert not campaign.run(1e9, now_s=clock)
    assert [each.name for each in campaign.pending_parts()] == ["a"]
    assert record(tmp_path)["a"]["runs"][0]["note"] == "failed: out of memory"  # type: ignore[index]
    assert record(tmp_path)["b"]["is_complete"]


def test_an_interrupt_leaves_the_record(tmp_path: Path) -> None:
    def stop(_: SliceSettings) -> SliceResult:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Campaign(tmp_path, "cpu", [Slice("a", stop)]).run(1e9)
    assert record(tmp_path)["a"]["runs"][0]["note"] == "interrupted"  # type: ignore[index]


def test_a_folder_of_another_campaign_is_refused(tmp_path: Path) -> None:
    Campaign(tmp_path, "cpu", [part("a", 1.0, Clock())]).run(1e9)
    with pytest.raises(InputError, match="as in the campaign"):
        Campaign(tmp_path, "cpu", [], tiny=True)
    (tmp_path / RECORD).write_text("[]")
    with pytest.raises(InputError, match="must be the record"):
        Campaign(tmp_path, "cpu", [])


def test_slices_have_unique_names_and_stay_under_nine_minutes() -> None:
    every = slices()
    assert len({each.name for each in every}) == len(every)
    assert all(each.budget_s <= MOST_SLICE_S < 540.0 for each in every)
    before: set[str] = set()
    for each in every:
        assert set(each.after) <= before
        before.add(each.name)
    engine = {name for name in before if name.startswith("engine-")}
    assert all(engine <= set(each.after) for each in every if each.name.startswith(("plan", "validation-")))
    names = [each.name for each in every]
    assert names[-1] == "decode-long"
    assert names[:5] == ["correctness", "copies", "kernels-decode-4096", "kernels-prefill-4096", "decode"]
    assert names[5] == "prompts"
    assert all(
        name.startswith(tuple(start for starts in PARTS.values() for start in starts)) for name in names
    )
    assert "decode-tp2" not in names
    assert [each.name for each in slices(gpus=2)] == [*names, "decode-tp2"]
    with pytest.raises(ValueError, match="at most 480"):
        Slice("long", lambda _: SliceResult(True, ""), 600.0)


@pytest.mark.long
def test_the_campaign_runs_from_end_to_end_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One slice of each kind: the others differ in sizes, stages or loads alone."""
    kinds = ("correctness", "copies", "kernels-decode-4096", "kernels-prefill-4096", "decode")
    kinds = (*kinds, "prompts")
    kept = (*kinds, "engine-loads", "engine-served", "profile", "plan", "validation-90")
    assert main(["--device", "cpu", "--out", str(tmp_path), "--tiny", "--slices", ",".join(kept)]) == 0
    total = len(kept)
    assert f"{total} of {total} slices done" in capsys.readouterr().out
    table = read_kernel_table(tmp_path / "kernels" / "kernels.parquet")
    assert set(table["phase"]) == {"decode", "prefill"}
    machine = record(tmp_path)["kernels-decode-4096"]["runs"][0]["machine"]  # type: ignore[index]
    assert {"date", "device", "versions", "cpu"} <= set(machine)
    page = (tmp_path / "README.md").read_text()
    titles = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    first = ["Correctness", "Copies", "Shrink and expand", "Decode steps against their bytes"]
    assert titles[:7] == [*first, "A prompt beside decodes", "Engine", "Profile"]
    assert all(f"| {name} |" in page for name in kept)


def test_a_kernel_that_differs_fails_its_slice_and_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"dtype": "float32", "lora_kernel": "padded", "error": 0.5, "limit": 1e-4}
    row |= {"attention_kernel": "torch", "cuda_graphs": False, "compared": 3}
    monkeypatch.setattr("capplan.profiling.engine._checks.correctness_rows", lambda *_: [row])
    started = Campaign(tmp_path, "cpu", slices()[:1], tiny=True)
    assert not started.run(60.0)
    assert "kernels differ from PyTorch's: padded, float32: 5.0e-01" in str(record(tmp_path))
    assert "5.0e-01" in (tmp_path / "README.md").read_text()


def test_a_page_that_cannot_be_written_stops_no_slice(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "kernels.parquet").write_text("broken")
    (tmp_path / "copies.csv").write_text("source,bytes,bytes_per_s\ndevice,1,1.0\n")
    clock, lines = Clock(), []
    started = Campaign(tmp_path, "cpu", [part("a", 1.0, clock), part("b", 1.0, clock)])
    assert started.run(1e9, lines.append, clock)
    assert started.pending_parts() == []
    assert sum("README.md is not written" in line for line in lines) == 2


def test_shares_of_the_bandwidth_count_every_row_once() -> None:
    columns = {"half": ["shrink", "expand"], "width": 10, "tokens": 3, "adapter_rank_sum": 8}
    table = pd.DataFrame({**columns, "rank_tokens": 24, "median_us": 1.0})
    shares = kernel_shares(table, item_bytes=2, bytes_per_s=1e9)["share"]
    moved = [2 * (8 * 10 + 3 * 10) + 4 * 24, 2 * (8 * 10 + 2 * 3 * 10) + 4 * 24]
    assert shares.tolist() == pytest.approx([each / 1e3 for each in moved])


def test_without_a_gpu_the_default_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--out", str(tmp_path)]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err
