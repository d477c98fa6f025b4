import json
from pathlib import Path

import pytest

from capplan import load_profile, load_workload, simulate
from capplan.spec import Workload
from tests.cli.conftest import Run, error_line
from tests.cli.examples import WORKLOAD, write_inputs

SHORT = ("--duration", "60")


@pytest.fixture
def workload_yaml(tmp_path: Path) -> Path:
    return write_inputs(tmp_path)


def results(run: Run, *arguments: object) -> list[dict[str, float]]:
    result = run("simulate", *arguments, *SHORT, "--json")
    assert result.exit_code == 0, result.output
    document: dict[str, list[dict[str, float]]] = json.loads(result.stdout)
    return document["results"]


def expected(path: Path, **settings: float) -> dict[str, float]:
    from dataclasses import asdict

    workload: Workload = load_workload(path)
    profile = load_profile(path.parent / "profile.json")
    given = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 4096} | settings
    return asdict(simulate(workload, profile, duration_s=60.0, **given))  # type: ignore[arg-type]


def same(told: dict[str, float], wanted: dict[str, float]) -> bool:
    return all(told[name] == wanted[name] for name in wanted if name != "wall_s")


def test_engine_settings_come_from_the_file_and_the_slot_rank_from_the_adapters(
    run: Run, workload_yaml: Path
) -> None:
    (told,) = results(run, workload_yaml, "--a-max", "4")
    assert told["a_max"] == 4
    assert same(told, expected(workload_yaml, a_max=4, s_max=16))


def test_flags_win_over_the_file(run: Run, workload_yaml: Path) -> None:
    flags = {
        "--s-max": 32,
        "--seed": 7,
        "--max-num-seqs": 2,
        "--max-num-batched-tokens": 512,
        "--max-cpu-loras": 6,
        "--max-model-len": 2000,
        "--gpu-memory-utilization": 0.7,
        "--max-in-flight": 3,
    }
    words = [word for pair in flags.items() for word in pair]
    (told,) = results(run, workload_yaml, "--a-max", "4", *words)
    names = {name.removeprefix("--").replace("-", "_"): value for name, value in flags.items()}
    assert same(told, expected(workload_yaml, a_max=4, **names))
    assert not same(told, expected(workload_yaml, a_max=4, s_max=16))


def test_slots_the_workload_fixes_need_no_flag(run: Run, workload_yaml: Path) -> None:
    workload_yaml.write_text(WORKLOAD.replace("engine: {", "engine: {max_loras: 3, max_lora_rank: 64, "))
    (told,) = results(run, workload_yaml)
    assert told["a_max"] == 3
    assert same(told, expected(workload_yaml, a_max=3, s_max=64))


def test_several_slot_numbers_stand_side_by_side_once_each(run: Run, workload_yaml: Path) -> None:
    assert [each["a_max"] for each in results(run, workload_yaml, "--a-max", "8,2,8")] == [8, 2]
    table = run("simulate", workload_yaml, "--a-max", "8,2", *SHORT).stdout
    head = next(line for line in table.splitlines() if "metric" in line)
    assert head.split() == ["metric", "a_max", "8", "a_max", "2"]
    assert "TTFT p99, s" in table


def test_a_profile_flag_replaces_that_of_the_workload(run: Run, workload_yaml: Path) -> None:
    other = workload_yaml.with_name("other.json")
    document = json.loads(workload_yaml.with_name("profile.json").read_text())
    document["gpu"]["memory_bytes"] //= 2
    other.write_text(json.dumps(document))
    (own,) = results(run, workload_yaml, "--a-max", "4")
    (told,) = results(run, workload_yaml, "--a-max", "4", "--profile", other)
    assert told["kv_tokens"] < own["kv_tokens"]


def test_slots_that_do_not_fit_are_infeasible(run: Run, workload_yaml: Path) -> None:
    result = run("simulate", workload_yaml, "--a-max", "4000", *SHORT)
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: memory: weights, 4000 adapter slots")


def test_slots_that_do_not_fit_leave_the_others_their_column(run: Run, workload_yaml: Path) -> None:
    fits, too_many = results(run, workload_yaml, "--a-max", "4,4000")
    assert fits["completed"] > 0
    assert "memory" in str(too_many["infeasible"])
    assert "a_max 4000: memory" in run("simulate", workload_yaml, "--a-max", "4,4000", *SHORT).stdout


def test_metrics_without_a_completed_request_are_null(run: Run, workload_yaml: Path) -> None:
    workload_yaml.write_text(WORKLOAD.replace("0.05", "0").replace("0.3", "0"))
    (told,) = results(run, workload_yaml, "--a-max", "4")
    assert told["completed"] == 0
    assert told["ttft_s_mean"] is None
    assert "–" in run("simulate", workload_yaml, "--a-max", "4", *SHORT).stdout


def test_the_wait_for_compilation_is_announced(
    run: Run, workload_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capplan.serving import compile as compilation

    monkeypatch.setattr(compilation, "is_compiled", lambda: False)
    text = run("simulate", workload_yaml, "--a-max", "4", *SHORT).stderr
    assert text.startswith("compiling the digital twin (once per version")
    monkeypatch.setattr(compilation, "is_compiled", lambda: True)
    assert run("simulate", workload_yaml, "--a-max", "4", *SHORT).stderr == ""


def test_an_impossible_flag_is_told_before_anything_is_compiled(
    run: Run, workload_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capplan.serving import compile as compilation

    monkeypatch.setattr(compilation, "is_compiled", lambda: False)
    result = run("simulate", workload_yaml, "--a-max", "four")
    assert "compiling" not in result.stderr
    error_line(result)
