"""Stages of closed loops: void measurements are removed, those that disagree stay."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from capplan.profiling.validation import _loop as loop
from capplan.profiling.validation._loop import ClosedLoop, LoopSettings, VoidError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    document = {"groups": [{"predicted": {"load_over_capacity": 0.7}}]}
    (tmp_path / "plan.json").write_text(json.dumps(document))
    return tmp_path


def finding(*faults: str) -> Callable[..., str]:
    """Return a stand-in for `capplan validate`, which disagrees."""

    def run(words: Sequence[str], threads: int, fine: Sequence[int] = (0,)) -> str:
        found = {"agrees": False, "groups": [{"faults": list(faults)}]}
        Path(words[words.index("-o") + 1]).write_text(json.dumps(found))
        Path(words[words.index("--html") + 1]).write_text("<p>")
        return ""

    return run


def test_a_void_validation_is_removed_and_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "run_capplan", finding("3 requests failed", "the client could not keep up"))
    with pytest.raises(VoidError, match="validation-90 is void: 3 requests failed; the client"):
        ClosedLoop(folder, LoopSettings()).validate(0.9, 1.0)
    assert not list(folder.glob("validation-*"))
    monkeypatch.setattr(loop, "run_capplan", finding())
    assert not ClosedLoop(folder, LoopSettings()).validate(0.9, 1.0)["agrees"]


def test_a_valid_validation_is_reused_and_a_void_one_repeated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "run_capplan", finding())
    before = ClosedLoop(folder, LoopSettings()).validate(0.9, 1.0)
    monkeypatch.setattr(loop, "run_capplan", None)
    assert ClosedLoop(folder, LoopSettings()).validate(0.9, 1.0) == before
    (folder / "validation-90.json").write_text('{"agrees": false, "groups": [{"faults": ["stopped"]}]}')
    monkeypatch.setattr(loop, "run_capplan", finding())
    assert ClosedLoop(folder, LoopSettings()).validate(0.9, 1.0) == before
