import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from capplan.testing import check_integrity
from tests.golden import replay
from tests.golden.__main__ import ROOT, main
from tests.golden.cases import Case, limits_of, read_cases

RECORDED = Path(__file__).with_name("recorded.json")
RECORDED_033 = Path(__file__).with_name("recorded_033.json")


@pytest.fixture
def recording() -> dict[str, Any]:
    """One small case that preempts, to be damaged by a test."""
    cases = json.loads(RECORDED.read_text())["cases"]
    preempting = [case for case in cases if any(preempted for _, _, preempted, _ in case["steps"])]
    return {"vllm_version": "0.32.0", "cases": [min(preempting, key=lambda case: len(case["steps"]))]}


def write(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize("form", ["compiled", "uncompiled", "reference"])
def test_every_step_is_the_one_that_vllm_took(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--form", form, str(RECORDED), str(RECORDED_033)]) == 0
    shown = capsys.readouterr().out
    for file in (RECORDED, RECORDED_033):
        cases = read_cases(file)
        steps = sum(len(case.steps) for case in cases)
        assert f"{file}: {len(cases)} cases, {steps} steps, 0 mismatches" in shown


@pytest.mark.long
@pytest.mark.parametrize("name", ["golden.json", "golden_033.json"])
def test_the_command_replays_the_published_recordings(name: str, reference_dir: Path) -> None:
    path = reference_dir / "vllm_scheduler" / name
    if not path.is_file():
        pytest.skip("no recording of vLLM's scheduler beside the checkout")
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden", "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = json.loads(done.stdout)["files"].values()
    assert report["cases"] == len(json.loads(path.read_text())["cases"])
    assert set(report["forms"]) == {"compiled", "uncompiled", "reference"}
    for form in report["forms"].values():
        assert form == {"steps": report["steps"], "mismatches": 0, "first": []}


@pytest.mark.parametrize(
    "case", [*read_cases(RECORDED), *read_cases(RECORDED_033)], ids=lambda case: case.name
)
def test_the_state_holds_together_after_every_step(case: Case) -> None:
    taken, difference = replay.first_difference(case, replay.FlatForm(case, check_integrity))
    assert difference is None
    assert taken == len(case.steps)


def test_the_recording_contains_what_the_rules_differ_in() -> None:
    cases = read_cases(RECORDED)
    configs = [case.config for case in cases]
    for key in ("reserve_full_isl", "prefix_caching", "async_sched"):
        assert {config[key] for config in configs} == {False, True}
    assert any(config["long_prefill"] for config in configs)
    assert any(config.get("watermark") for config in configs)
    assert {config["max_loras"] for config in configs} == {1, 2, 3, 4}
    assert sum(len(step.preempted) for case in cases for step in case.steps) > 50
    assert any(len(step.preempted) > 1 for case in cases for step in case.steps)


@pytest.mark.parametrize(
    ("rule", "wrong", "file"),
    [
        ("async_scheduling", 0, RECORDED),
        ("prefix_caching", 0, RECORDED),
        ("unhashed_to_front", 0, RECORDED),
        ("lone_prefill_exempt", 0, RECORDED),
        ("reverse_skipped", 1, RECORDED),
        ("reserve_full_sequence", 0, RECORDED),
        ("long_prefill_tokens", 0, RECORDED),
        ("watermark_blocks", 0, RECORDED),
        ("hold_ending", 0, RECORDED_033),
    ],
)
@pytest.mark.parametrize("form", ["compiled", "reference"])
def test_a_broken_rule_is_seen_and_the_first_differing_step_named(
    rule: str,
    wrong: int,
    file: Path,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(replay, "limits_of", lambda case: limits_of(case)._replace(**{rule: wrong}))
    assert main(["--form", form, "--json", str(file)]) == 1
    ((report,),) = (each["forms"].values() for each in json.loads(capsys.readouterr().out)["files"].values())
    assert report["mismatches"] == len(report["first"]) > 0
    steps = {case.name: {step.number: step for step in case.steps} for case in read_cases(file)}
    for first in report["first"]:
        step = steps[first["case"]][first["step"]]
        tokens, preempted, free_blocks = first["expected"]
        assert [tuple(each) for each in tokens] == step.tokens
        assert (preempted, free_blocks) == (step.preempted, step.free_blocks)
        assert first["found"] != first["expected"]


@pytest.mark.parametrize("position", [1, 2, 3])
def test_one_wrong_entry_is_found_at_its_step(
    position: int, recording: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = recording["cases"][0]["steps"]
    at = next(i for i, step in enumerate(steps) if step[2])
    steps[at][position] = [{**steps[at][1], "0": 77}, [], steps[at][3] + 1][position - 1]
    steps[at + 1][3] += 1  # later differences must not be named
    path = write(tmp_path / "wrong.json", recording)
    assert main(["--form", "reference", path]) == 1
    output = capsys.readouterr().out
    assert f"{path}: 1 cases, {len(steps)} steps, 1 mismatches" in output
    assert f"{recording['cases'][0]['name']}: step {steps[at][0]} is the first that differs" in output


def damage(recording: dict[str, Any], *keys: Any, value: object) -> dict[str, Any]:
    damaged = copy.deepcopy(recording)
    at: Any = damaged["cases"][0]
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    return damaged


@pytest.mark.parametrize(
    ("keys", "value", "named"),
    [
        (("config", "block_size"), 0, "config.block_size"),
        (("config", "num_blocks"), "many", "config.num_blocks"),
        (("config", "reserve_full_isl"), None, "config.reserve_full_isl"),
        (("config", "watermark"), float("nan"), "config.watermark"),
        (("workload", 0), [0, 1, 1], "request 0"),
        (("workload", 0, 1), 10**6, "request 0"),
        (("steps",), [], "steps"),
        (("steps", 0, 1), {"99999": 1}, "steps[0]"),
        (("steps", 1, 0), 0, "rising"),
    ],
)
def test_a_damaged_recording_is_refused_in_one_line(
    keys: tuple[Any, ...],
    value: object,
    named: str,
    recording: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path / "damaged.json", damage(recording, *keys, value=value))
    assert main([path]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: {path}: case 0")
    assert named in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"cases": []}', '{"cases": [1]}', "\x00\xff"])
def test_what_is_no_recording_is_refused_in_one_line(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.json"
    path.write_text(content, encoding="latin-1")
    assert main([str(path)]) == 2
    assert main([str(tmp_path / "absent.json")]) == 2
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_a_configuration_key_without_meaning_is_named(
    recording: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "more.json", damage(recording, "config", "speed", value=3))
    assert main(["--form", "reference", path]) == 0
    assert "config.speed means nothing here" in capsys.readouterr().err
