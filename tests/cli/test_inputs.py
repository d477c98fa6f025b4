"""Everything a user can get wrong is one line, exit status 2, and no file."""

from pathlib import Path

import pytest

from tests.cli.conftest import Process, Run, error_line
from tests.cli.examples import MODEL, WORKLOAD, write_inputs

HEAD = f"base_model: {MODEL}\nprofile: ./profile.json\ngpus: {{count: 1}}\n"
REQUESTS = "requests: {prompt_tokens: {mean: 100}, output_tokens: {mean: 50}}\n"


def with_adapter(entry: str) -> str:
    return f"{HEAD}{REQUESTS}adapters:\n  - {entry}\n"


BROKEN = {
    "not yaml": (HEAD + "adapters: [", "must be YAML"),
    "not a mapping": ("- 1\n", "must be a mapping"),
    "empty": ("", "must be a mapping"),
    "unknown key": (HEAD + REQUESTS + "adaptors: []\n", "did you mean 'adapters'?"),
    "unknown nested key": (with_adapter("{name: a, rank: 8, rate_rp: 1}"), "did you mean 'rate_rps'?"),
    "negative rate": (
        with_adapter("{name: a, rank: 8, rate_rps: -1}"),
        "rate_rps: must be a finite number >= 0",
    ),
    "NaN rate": (
        with_adapter("{name: a, rank: 8, rate_rps: .nan}"),
        "rate_rps: must be a finite number >= 0",
    ),
    "rank 0": (with_adapter("{name: a, rank: 0, rate_rps: 1}"), "rank: must be a whole number from 1 to 512"),
    "rank 513": (
        with_adapter("{name: a, rank: 513, rate_rps: 1}"),
        "rank: must be a whole number from 1 to 512",
    ),
    "zero adapters": (HEAD + REQUESTS + "adapters: []\n", "adapters: must not be empty"),
    "no adapters": (HEAD + REQUESTS, "must give adapters or trace"),
    "duplicate names": (
        with_adapter("{name: a, rank: 8, rate_rps: 1}\n  - {name: a, rank: 8, rate_rps: 1}"),
        "name: must be unique (got 'a')",
    ),
    "no profile": (f"base_model: {MODEL}\n" + REQUESTS + "adapters: a.csv\n", "profile: is required"),
    "unknown profile": (WORKLOAD.replace("./profile.json", "h100/none"), "profile: must be the path"),
    "absent profile": (WORKLOAD.replace("./profile.json", "./none.json"), "none.json: cannot be read"),
    "another model": (WORKLOAD.replace(MODEL, "mistralai/Mistral-7B-v0.1"), "base_model: must be a model"),
    "absent CSV": (HEAD + REQUESTS + "adapters: none.csv\n", "none.csv: cannot be read"),
    "CSV without a column": (HEAD + REQUESTS + "adapters: short.csv\n", "short.csv"),
}


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*"))


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder with a workload, its profile and a CSV file that lacks its rates."""
    (tmp_path / "short.csv").write_text("name,rank\na,8\n")
    write_inputs(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [("plan", "-o", "plan.json"), ("simulate", "--max-loras", "4")])
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_workload_is_one_line(
    run: Run, inputs: Path, case: str, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs)
    text, rule = BROKEN[case]
    (inputs / "workload.yaml").write_text(text)
    before = files(inputs)
    assert rule in error_line(run(command[0], "workload.yaml", *command[1:]))
    assert files(inputs) == before


def test_the_missing_column_is_named(run: Run, inputs: Path) -> None:
    (inputs / "workload.yaml").write_text(BROKEN["CSV without a column"][0])
    assert "rate_rps" in error_line(run("plan", inputs / "workload.yaml"))


@pytest.mark.parametrize("command", [("plan",), ("simulate", "--max-loras", "4")])
@pytest.mark.parametrize("name", ["absent.yaml", ".", "binary.yaml", "a\0b"])
def test_an_unreadable_workload_is_one_line(
    run: Run, inputs: Path, name: str, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs)
    (inputs / "binary.yaml").write_bytes(b"\xff\x00\xfe")
    error_line(run(command[0], name, *command[1:]))


def test_a_process_says_the_same_line_and_leaves_nothing(process: Process, inputs: Path) -> None:
    (inputs / "workload.yaml").write_text(BROKEN["negative rate"][0])
    before = files(inputs)
    done = process("plan", inputs / "workload.yaml", "-o", inputs / "plan.json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"error: {inputs / 'workload.yaml'}:6: adapters[0].rate_rps: must be" in done.stderr
    assert files(inputs) == before


def test_a_workload_without_gpus_is_one_line_where_all_are_used(run: Run, inputs: Path) -> None:
    (inputs / "workload.yaml").write_text(WORKLOAD.replace("gpus: {count: 2}\n", "objective: min_latency\n"))
    before = files(inputs)
    line = error_line(run("plan", inputs / "workload.yaml", "-o", inputs / "plan.json"))
    assert "gpus: is required for objective min_latency" in line
    assert files(inputs) == before


@pytest.mark.parametrize(
    ("profile", "step"),
    [
        (
            "",
            "profile: is required, unless pools are given; `capplan profiles --model Llama-3.1-8B-Instruct`",
        ),
        (
            "h100-64g/llama-3.1-8b/vllm-0.85",
            "did you mean 'h100-64g/llama-3.1-8b/vllm-0.8.5'? `capplan profiles`",
        ),
        ("a100-40g/llama-3.1-8b/vllm-0.15.1", "`capplan profile roofline --gpu a100-40g --model NAME"),
        ("l4/llama-3.1-8b/vllm-0.15.1", "`capplan profile roofline --gpu l4 --model NAME"),
        ("mi350x/llama-3.1-8b/vllm-0.15.1", "`capplan profile server URL -o DIR` measures a running server"),
        ("h200/llama-3.3-70b/vllm-0.15.1", "`capplan profile compose --gpu h200 --model-config FILE"),
        (
            "h200/qwen2.5-7b/vllm-0.15.1",
            "`capplan profiles --model Llama-3.1-8B-Instruct` lists those of that",
        ),
    ],
)
def test_a_profile_that_does_not_ship_is_one_line_with_the_next_command(
    run: Run, inputs: Path, profile: str, step: str
) -> None:
    named = f"profile: {profile}\n" if profile else ""
    (inputs / "workload.yaml").write_text(WORKLOAD.replace("profile: ./profile.json\n", named))
    assert step in error_line(run("plan", inputs / "workload.yaml"))


def test_a_solver_without_its_surrogate_is_one_line(run: Run, inputs: Path) -> None:
    line = error_line(run("plan", inputs / "workload.yaml", "--solver", "greedy-fast"))
    assert "profile: has no surrogate of kind tree; make one with: capplan train" in line
    assert "surrogates/" not in line.replace("capplan train ", "")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--gpus", "0"), "--gpus: "),
        (("--gpus", "-3"), "--gpus: "),
        (("--solver", "magic"), "--solver: "),
        (("--seed", "-1"), "--seed: "),
        (("--time-limit", "0"), "--time-limit: must be > 0"),
        (("--profile", "h100/none"), "--profile: "),
    ],
)
def test_a_wrong_plan_flag_is_one_line(run: Run, inputs: Path, flags: tuple[str, str], words: str) -> None:
    before = files(inputs)
    line = error_line(run("plan", inputs / "workload.yaml", "-o", inputs / "plan.json", *flags))
    assert words in line
    assert files(inputs) == before


@pytest.mark.parametrize(
    "where", ["", ".", "taken", "absent/plan.json", "workload.yaml/plan.json", "a\0b", "x" * 300]
)
def test_an_output_that_cannot_be_written_stops_the_plan_before_it_starts(
    run: Run, inputs: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs)
    (inputs / "taken").mkdir()
    (inputs / "workload.yaml").write_text("broken: [")  # would be the next error
    before = files(inputs)
    assert "cannot be written" in error_line(run("plan", "workload.yaml", "-o", where))
    assert files(inputs) == before


def test_an_existing_plan_survives_a_failed_one(run: Run, inputs: Path) -> None:
    old = inputs / "plan.json"
    old.write_text("the plan in force")
    (inputs / "workload.yaml").write_text("broken: [")
    error_line(run("plan", inputs / "workload.yaml", "-o", old))
    assert old.read_text() == "the plan in force"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "--max-loras: is required"),
        (("--max-loras", "four"), "--max-loras: must be whole numbers"),
        (("--max-loras", "4,"), "--max-loras: must be whole numbers"),
        (("--max-loras", ""), "--max-loras: must be whole numbers"),
        (("--max-loras", "0"), "must be a whole number from 1 to 2147483647 (got 0)"),
        (("--max-loras", "4", "--max-lora-rank", "8"), "--max-lora-rank: must be at least the largest"),
        (("--max-loras", "4", "--duration", "0"), "--duration: "),
        (("--max-loras", "4", "--duration", "nan"), "--duration: "),
        (("--max-loras", "4", "--duration", "inf"), "--duration: "),
        (("--max-loras", "4", "--seed", "-1"), "--seed: "),
        (("--max-loras", "4", "--gpu-memory-utilization", "1.5"), "--gpu-memory-utilization: "),
        (("--max-loras", "4", "--max-cpu-loras", "1"), "--max-cpu-loras: "),
        (("--max-loras", "4", "--max-in-flight", "0"), "--max-in-flight: "),
        (("--max-loras", "4", "--max-num-seqs", "0"), "--max-num-seqs: "),
        (("--max-loras", "4", "--max-num-batched-tokens", "0"), "--max-num-batched-tokens: "),
        (("--max-loras", "4", "--max-model-len", "0"), "--max-model-len: "),
        (("--max-loras", "4", "--rules", "vllm-1"), "must be one of"),
        (("--max-loras", "4", "--workers", "0"), "--workers: must be a whole number from 1 to 1024"),
    ],
)
def test_a_wrong_simulate_flag_is_one_line(
    run: Run, inputs: Path, flags: tuple[str, ...], words: str
) -> None:
    assert words in error_line(run("simulate", inputs / "workload.yaml", *flags))


def test_a_workload_with_pools_needs_a_profile_to_be_simulated(run: Run, inputs: Path) -> None:
    pools = "pools: [{name: p, profile: ./profile.json, count: 2}]\n"
    text = WORKLOAD.replace("profile: ./profile.json\ngpus: {count: 2}\n", pools)
    (inputs / "workload.yaml").write_text(text)
    line = error_line(run("simulate", inputs / "workload.yaml", "--max-loras", "4"))
    assert "--profile: is required, because the workload names pools" in line
