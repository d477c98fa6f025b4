import json
from pathlib import Path

import yaml

from capplan import load_workload
from tests.cli.conftest import Run, error_line

PROFILE = "h100-64g/llama-2-7b/s-lora-c1ddf48"
TEXT = f"""
version: 1
base_model: meta-llama/Llama-2-7b-hf
profile: {PROFILE}
gpus: {{count: 1}}
requests: {{prompt_tokens: {{mean: 100}}, output_tokens: {{mean: 20}}}}
adapters:
  - {{name: "a{{i}}", count: 4, rank: 8, rate_rps: 1.0}}
"""


def test_settings_are_shown_beside_those_before_and_written_for_a_workload_file(run: Run, tmp_path: Path):
    workload, found = tmp_path / "workload.yaml", tmp_path / "found.yaml"
    workload.write_text(TEXT)
    given = ("tune", workload, "--duration", 40, "--windows", 2, "--trials", 2)
    result = run(*given, "-o", found)
    assert result.exit_code == 0
    assert "P99 TTFT s, held out" in result.stdout
    assert "2 trials; 2 windows of 20 s, every second one held out" in result.stdout
    document = json.loads(run(*given, "--json").stdout)
    assert document["found"]["search_ttft_p99_s"] <= document["before"]["search_ttft_p99_s"]
    assert document["before"]["scheduler"]["refresh_s"] == 300.0
    fragment = yaml.safe_load(found.read_text())
    assert set(fragment) == {"scheduler", "cache"}
    workload.write_text(TEXT + found.read_text())
    assert load_workload(workload).scheduler.model_dump(mode="json") == document["found"]["scheduler"]


def test_a_scheduler_without_such_settings_is_refused(run: Run, tmp_path: Path):
    workload = tmp_path / "workload.yaml"
    workload.write_text(TEXT + "scheduler: fifo\n")
    assert "scheduler: must be chameleon, whose settings are searched" in error_line(run("tune", workload))
