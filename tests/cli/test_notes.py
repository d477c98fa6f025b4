"""Lines below plans and simulations: extrapolations (refused by --strict), compressed traces, hints."""

import json
from pathlib import Path

import pytest

from capplan.reports.tables import plan_notes
from capplan.spec import Percentiles, Slo
from tests.cli.conftest import Run
from tests.cli.examples import small_plan

WORKLOAD = """\
base_model: meta-llama/Llama-3.1-8B-Instruct
profile: h100-64g/llama-3.1-8b/vllm-0.8.5
gpus: {{count: 1}}
requests: {{prompt_tokens: {{mean: 200}}, output_tokens: {{mean: 50}}}}
adapters:
  - {{name: "a-{{i}}", count: 8, rank: {rank}, rate_rps: 0.2}}
"""
LINE = "extrapolation: slots of rank 64"


@pytest.fixture
def beyond(tmp_path: Path) -> Path:
    path = tmp_path / "w.yaml"
    path.write_text(WORKLOAD.format(rank=64))
    return path


def test_plan_explain_and_report_name_the_same_lines(run: Run, beyond: Path, tmp_path: Path) -> None:
    made, page = tmp_path / "plan.json", tmp_path / "plan.html"
    result = run("plan", beyond, "--no-verify", "-o", made, "--strict")
    assert result.exit_code == 3
    assert LINE in result.stdout
    assert f"--strict: {LINE}" in result.stderr
    explained = run("explain", made)
    assert explained.exit_code == 0
    assert LINE in explained.stdout
    assert run("report", made, "-o", page).exit_code == 0
    assert LINE in page.read_text()


def test_simulate_names_them_in_table_json_and_report(run: Run, beyond: Path, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    given = ("simulate", beyond, "--max-loras", "8", "--duration", "30")
    result = run(*given, "--strict", "--html", page)
    assert result.exit_code == 3
    assert f"{LINE}" in result.stdout
    assert LINE in page.read_text()
    document = json.loads(run(*given, "--json").stdout)
    assert {each["quantity"] for each in document["extrapolations"]} == {"s_max", "rank"}


def test_strict_accepts_what_was_measured(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(WORKLOAD.format(rank=16))
    result = run("simulate", path, "--max-loras", "8", "--duration", "30", "--strict")
    assert result.exit_code == 0, result.output
    assert "extrapolation" not in result.stdout


TRACED = """\
base_model: meta-llama/Llama-3.1-8B-Instruct
profile: h100-64g/llama-3.1-8b/vllm-0.8.5
gpus: {{count: 1}}
trace: {{file: trace.csv{rate}}}
adapters:
  - {{name: a, rank: 8, rate_rps: 1.0}}
"""


@pytest.mark.parametrize(("rate", "shown"), [("", False), (", rate_rps: 2.0", True)])
def test_a_trace_compressed_in_time_says_so(run: Run, tmp_path: Path, rate: str, shown: bool) -> None:
    rows = "\n".join(f"{second},a,100,20" for second in range(1, 61))
    (tmp_path / "trace.csv").write_text(f"arrival_s,adapter,prompt_tokens,output_tokens\n{rows}\n")
    path = tmp_path / "w.yaml"
    path.write_text(TRACED.format(rate=rate))
    line = "trace at 2 times its recorded rate: time is compressed"
    planned = run("plan", path, "-o", tmp_path / "plan.json")
    assert planned.exit_code == 0, planned.output
    assert (line in planned.stdout) == shown
    assert (line in run("explain", tmp_path / "plan.json").stdout) == shown
    simulated = run("simulate", path, "--max-loras", "1")
    assert (line in simulated.stdout) == shown
    assert "(" in planned.stdout.split("gpu-0")[1].split("1 GPU")[0]  # bootstrap samples have an interval


def test_long_waits_without_a_bound_hint_at_the_key_to_set() -> None:
    waiting = small_plan()
    groups = [g.replace(predicted=g.predicted.replace(ttft_s=Percentiles(p99=42.0))) for g in waiting.groups]
    slow = waiting.replace(groups=groups, slo=Slo())
    (hint,) = plan_notes(slow)
    assert "slo.ttft_p99_s" in hint
    assert "42.0 s" in hint
    assert plan_notes(slow.replace(slo=Slo(ttft_p99_s=60.0))) == ()
    assert plan_notes(waiting.replace(slo=Slo())) == ()
