"""A plan that was changed after its verification does not read as verified."""

import json
from pathlib import Path

import pytest

from capplan import Plan, load_workload, plan
from tests.cli.conftest import Run, error_line
from tests.cli.examples import small_plan, write_inputs

CHANGED = "the plan was changed after its verification"


def with_slots(path: Path, slots: int) -> Path:
    """Give the first group of a plan another number of slots, as an editor would."""
    document = json.loads(path.read_text())
    document["groups"][0]["engine_args"]["max_loras"] = slots
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    small_plan().to_json(tmp_path / "plan.json")
    return with_slots(tmp_path / "plan.json", 7)


@pytest.mark.parametrize("command", ["export", "serve"])
def test_it_is_used_on_demand_only(run: Run, tmp_path: Path, edited: Path, command: str) -> None:
    export = ["--target", "vllm", "-o", tmp_path / "out"]
    more = export if command == "export" else ["--model", tmp_path / "none"]
    line = error_line(run(command, *more, edited))
    assert f"{edited}: verification.digest: must be that of the plan to use it ({CHANGED})" in line
    assert "--unverified uses it as it is" in line
    assert not (tmp_path / "out").exists()
    accepted = run(command, *more, "--unverified", edited)
    if command == "export":
        assert accepted.exit_code == 0, accepted.output
        assert Plan.from_json(tmp_path / "out" / "plan.json") == Plan.from_json(edited)
    else:
        assert "verification" not in error_line(accepted)  # the model is missing


def test_a_plan_without_a_digest_is_used_on_demand_only(run: Run, tmp_path: Path) -> None:
    document = small_plan().model_dump(mode="json")
    del document["verification"]["digest"]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    words = ("export", tmp_path / "plan.json", "--target", "vllm", "-o", tmp_path / "out")
    assert "verification.digest: must be that of the plan" in error_line(run(*words))
    assert run(*words, "--unverified").exit_code == 0


def test_explain_and_report_say_so(run: Run, tmp_path: Path, edited: Path) -> None:
    text = " ".join(run("explain", edited).stdout.split())
    assert f"NOT VERIFIED: {CHANGED}; the verdict was: verified in simulation, 3 × 1 h" in text
    assert text.count("verified at planning; 97.0 %") == 2
    facts = json.loads(run("explain", edited, "--json").stdout)
    assert not facts["verified"]
    assert CHANGED in facts["verdict"]
    assert run("report", edited, "-o", tmp_path / "plan.html").exit_code == 0
    page = (tmp_path / "plan.html").read_text()
    assert CHANGED in page
    assert "at planning" in page


def test_a_failed_verdict_stays_what_it_is(run: Run, tmp_path: Path) -> None:
    failed = small_plan().verification.replace(ok=False, verdict="failed")
    small_plan(verification=failed).to_json(tmp_path / "plan.json")
    text = " ".join(run("explain", with_slots(tmp_path / "plan.json", 7)).stdout.split())
    assert "VERIFICATION DISAGREES in simulation, 3 × 1 h" in text
    assert f"; {CHANGED}" in text
    assert "NOT VERIFIED" not in text


def test_a_plan_as_it_was_verified_is_told_as_such(run: Run, tmp_path: Path) -> None:
    small_plan().to_json(tmp_path / "plan.json")
    result = run("explain", tmp_path / "plan.json")
    assert "changed" not in result.output
    assert "at planning" not in result.output
    assert json.loads(run("explain", tmp_path / "plan.json", "--json").stdout)["verified"]


def test_simulate_and_capacity_say_so(run: Run, tmp_path: Path) -> None:
    workload, path = write_inputs(tmp_path), tmp_path / "plan.json"
    plan(load_workload(workload), gpus=1, profile=str(tmp_path / "profile.json"), seeds=1).to_json(path)
    slo = ("--slo", "ttft_p99_s=50", "--seeds", 1)
    for command in (("simulate", workload), ("capacity", workload, *slo)):
        words = (*command, "--plan", path, "--duration", 60)
        told = run(*words)
        assert told.exit_code == 0, told.output
        assert CHANGED not in told.output
    with_slots(path, Plan.from_json(path).groups[0].engine_args.max_loras - 1)
    for command in (("simulate", workload), ("capacity", workload, *slo)):
        told = run(*command, "--plan", path, "--duration", 60)
        assert told.exit_code == 0, told.output
        assert f"{path}: {CHANGED}" in told.stderr.splitlines()
