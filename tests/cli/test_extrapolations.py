"""Extrapolations are in the output of every command on a plan or simulation, and --strict refuses them."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

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
    given = ("simulate", beyond, "--a-max", "8", "--duration", "30")
    result = run(*given, "--strict", "--report", page)
    assert result.exit_code == 3
    assert f"{LINE}" in result.stdout
    assert LINE in page.read_text()
    document = json.loads(run(*given, "--json").stdout)
    assert {each["quantity"] for each in document["extrapolations"]} == {"s_max", "rank"}


def test_strict_accepts_what_was_measured(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(WORKLOAD.format(rank=16))
    result = run("simulate", path, "--a-max", "8", "--duration", "30", "--strict")
    assert result.exit_code == 0, result.output
    assert "extrapolation" not in result.stdout
