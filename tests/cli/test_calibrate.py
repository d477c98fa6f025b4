"""`capplan calibrate` end to end, and what it refuses."""

import json
from pathlib import Path

import pandas as pd
import pytest

from capplan import load_profile, load_workload, simulate
from tests.cli.conftest import Run, error_line
from tests.cli.examples import profile_document
from tests.cli.test_report import own, parsed
from tests.models.calibration.step_tables import ADDITIVE_TRUTH, steps_of

WORKLOAD = """\
base_model: meta-llama/Llama-3.1-8B-Instruct
profile: ./base.json
requests: {{prompt_tokens: {{mean: 100, std: 50}}, output_tokens: {{mean: {output}, std: 20}}}}
adapters:
  - {{name: "a{{i}}", count: 8, rank: 8, rate_rps: {rate}}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A base profile and a step table of 200 rows."""
    (tmp_path / "base.json").write_text(json.dumps(profile_document()))
    steps_of("additive", ADDITIVE_TRUTH, rows=200, noise=0.01).to_csv(tmp_path / "steps.csv", index=False)
    return tmp_path


def given(folder: Path, *more: object) -> tuple[object, ...]:
    return ("calibrate", "--base", folder / "base.json", "-o", folder / "out.json", *more)


def test_a_step_table_becomes_a_profile_and_an_offline_report(run: Run, folder: Path) -> None:
    report = folder / "report.html"
    steps = ("--steps", folder / "steps.csv", "--name", "mine/llama/vllm-0.8.5", "--source", "a test")
    done = run(*given(folder, *steps, "--html", report))
    assert done.exit_code == 0, done.stderr
    made = load_profile(folder / "out.json")
    assert made.name == "mine/llama/vllm-0.8.5"
    assert (made.provenance.kind, made.provenance.source) == ("measured", "a test")
    assert made.provenance.command == (
        f"capplan calibrate --output {folder}/out.json --steps {folder}/steps.csv --base {folder}/base.json"
        f" --name mine/llama/vllm-0.8.5 --source 'a test' --html {report}"
    )
    for name, truth in ADDITIVE_TRUTH.items():
        fitted = made.step_latency.coefficients[name]
        assert fitted.std_error is not None
        assert abs(fitted.value - truth) < 5 * fitted.std_error + 0.1 * truth, name
    assert made.memory == load_profile(folder / "base.json").memory
    assert made.step_latency.fit.cross_validated_error is not None
    for shown in ("toppings-mbgmv", "digital-twin", "un-queued", "slot-bound", "a_max 64", "standard error"):
        assert shown in done.stdout
    page = report.read_text(encoding="utf-8")
    for shown in (
        "mine/llama/vllm-0.8.5",
        "additive-without-kv",
        "slot-bound",
        "ms_per_ktoken",
        "R²",
    ):
        assert shown in page
    parsed(page)
    assert len(own(page)) < 5_000_000


def test_machines_get_the_same_facts(run: Run, folder: Path) -> None:
    done = run(*given(folder, "--steps", folder / "steps.csv", "--json"))
    told = json.loads(done.stdout)
    made = load_profile(folder / "out.json")
    assert told["profile"] == made.name == f"{told['base']}-calibrated"
    assert told["steps"]["chosen"] == "additive"
    assert told["adapter_loads"] == "the table"
    assert told["steps"]["forms"][0]["held_out_error"] <= told["steps"]["forms"][1]["held_out_error"]
    assert sum(part["rows"] for part in told["steps"]["by_regime"]) == 200
    assert set(told["changed"]) == {"step_latency", "loading"}
    assert (
        told["changed"]["step_latency"]["coefficients"]
        == json.loads(made.step_latency.model_dump_json(include={"coefficients"}))["coefficients"]
    )
    assert told["runs"] is None


def test_runs_alone_make_a_profile_that_predicts_them(run: Run, folder: Path) -> None:
    truth = profile_document()
    truth["step_latency"]["coefficients"]["base_ms"]["value"] = 14.0
    (folder / "truth.json").write_text(json.dumps(truth))
    rows = []
    for number, (rate, output) in enumerate([(0.2, 60), (0.6, 30), (1.5, 60), (4.0, 40), (1.0, 120)]):
        name = f"w{number}.yaml"
        (folder / name).write_text(WORKLOAD.format(rate=rate, output=output))
        a_max = (8, 4)[number % 2]
        result = simulate(
            load_workload(folder / name),
            load_profile(folder / "truth.json"),
            a_max=a_max,
            s_max=8,
            duration_s=40.0,
            seed=100 + number,
        )
        rows.append(
            {
                "workload": name,
                "a_max": a_max,
                "s_max": 8,
                "duration_s": 40.0,
                "throughput_tok_s": result.throughput_tok_s,
                "itl_ms_mean": result.itl_ms_mean,
            }
        )
    pd.DataFrame(rows).to_csv(folder / "runs.csv", index=False)
    options = ("--runs", folder / "runs.csv", "--free", "base_ms", "--workers", "1", "--folds", "2")
    done = run(*given(folder, *options, "--html", folder / "report.html"))
    assert done.exit_code == 0, done.stderr
    made = load_profile(folder / "out.json")
    assert made.step_latency.value("base_ms") == pytest.approx(14.0, rel=0.05)
    assert made.step_latency.value("ms_per_ktoken") == 20.0
    assert "itl_ms_mean" in done.stdout
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Whole runs" in page
    assert "ITL mean, ms" in page


def test_without_a_base_the_model_and_the_gpu_are_said(run: Run, folder: Path) -> None:
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 8,
        "vocab_size": 32000,
    }
    (folder / "config.json").write_text(json.dumps(sizes))
    known = ["--model-config", folder / "config.json", "--base-model", "org/tiny", "--gpu", "Some GPU"]
    rest = ["--gpu-memory-gib", "24", "--steps", folder / "steps.csv", "-o", folder / "out.json", "-q"]
    done = run("calibrate", *known, *rest)
    assert (done.exit_code, done.stdout) == (0, "")
    made = load_profile(folder / "out.json")
    assert (made.gpu.name, made.model.hf_ids, made.model.layers) == ("Some GPU", ("org/tiny",), 8)
    assert made.memory.fit.source == "assumed, not measured"
    assert "--gpu: is required without --base" in error_line(run("calibrate", *known[:4], *rest))
    both = run("calibrate", "--base", folder / "base.json", *known, *rest)
    assert "--model-config: does not go with --base" in error_line(both)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda frame: frame.drop(columns="kv_tokens"), "steps.csv: kv_tokens: column is missing"),
        (
            lambda frame: frame.assign(tokens=float("nan")),
            "steps.csv: tokens, row 1: must be a finite number",
        ),
        (lambda frame: frame.assign(step_ms=0.0), "steps.csv: step_ms, row 1: must be above 0"),
        (lambda frame: frame.head(0), "steps.csv: must hold at least one row"),
        (lambda frame: frame.head(9), "steps.csv: must leave at least"),
        (lambda frame: frame.assign(run="one"), "steps.csv: must hold two runs"),
    ],
)
def test_a_broken_table_is_one_line_and_nothing_is_written(
    run: Run, folder: Path, change: object, rule: str
) -> None:
    frame = pd.read_csv(folder / "steps.csv")
    assert callable(change)
    change(frame).to_csv(folder / "steps.csv", index=False)
    before = sorted(folder.iterdir())
    report = ("--html", folder / "report.html")
    assert rule in error_line(run(*given(folder, "--steps", folder / "steps.csv", *report)))
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (("--form", "cubic"), "--form: must be one of additive"),
        (("--kernel", "cuda"), "--kernel: must be one of bgmv, mbgmv, vllm"),
        (("--free", "base_ms"), "--free: needs a table of runs"),
        (("--html", "out.json"), "--html: must be another file than --output"),
        (("--html", "missing/report.html"), "report.html: cannot be written"),
    ],
)
def test_an_option_that_cannot_be_is_one_line(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], rule: str
) -> None:
    monkeypatch.chdir(folder)
    done = run(*given(folder, "--steps", folder / "steps.csv", *options))
    assert rule in error_line(done)
    assert not (folder / "out.json").exists()


def test_without_any_table_nothing_is_calibrated(run: Run, folder: Path) -> None:
    assert "needs a table of steps, runs, memory, loading or kernels" in error_line(run(*given(folder)))
