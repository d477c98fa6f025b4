import hashlib
import json
from pathlib import Path

import pytest

from capplan import Plan
from capplan.deploy import EXPORTERS, vllm_files
from capplan.spec import Cache, RebalanceSettings, Scheduler
from tests.cli.conftest import Run, error_line
from tests.cli.examples import small_plan, write_inputs


@pytest.fixture
def plan_json(tmp_path: Path) -> Path:
    small_plan().to_json(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_directory_holds_exactly_what_the_exporter_returns(run: Run, plan_json: Path) -> None:
    out = plan_json.parent / "deploy"
    result = run("export", plan_json, "--target", "vllm", "-o", out, "--port", "9100")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"3 launch scripts, routing.json and plan.json written to {out}\n"
    assert contents(out) == vllm_files(small_plan(), port=9100)
    assert sorted(plan_json.parent.iterdir()) == [out, plan_json]


def test_scripts_can_be_run_and_the_table_cannot(run: Run, plan_json: Path) -> None:
    out = plan_json.parent / "deploy"
    run("export", plan_json, "--target", "vllm", "-o", out, "--runtime-updates")
    for script in (out / "launch").iterdir():
        assert script.stat().st_mode & 0o111 == 0o111
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in script.read_text()
    assert (out / "routing.json").stat().st_mode & 0o111 == 0


def test_an_existing_directory_is_kept_unless_forced(run: Run, plan_json: Path) -> None:
    out = plan_json.parent / "deploy"
    first = ("export", plan_json, "--target", "vllm", "-o", out)
    run(*first, "--port", "9100")
    assert "exists already; --force replaces it" in error_line(run(*first, "--port", "9200"))
    assert json.loads((out / "routing.json").read_text())["groups"]["g0"]["instances"][0]["port"] == 9100
    assert run(*first, "--port", "9200", "--force").exit_code == 0
    assert contents(out) == vllm_files(small_plan(), port=9200)
    assert sorted(plan_json.parent.iterdir()) == [out, plan_json]


def test_force_removes_no_file_that_no_export_wrote(run: Run, plan_json: Path) -> None:
    out = plan_json.parent / "deploy"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    line = error_line(run("export", plan_json, "--target", "vllm", "-o", out, "--force"))
    assert "thesis.tex" in line
    assert contents(out) == {"thesis.tex": "years of work"}


def test_an_unknown_target_gets_the_known_ones(run: Run, plan_json: Path) -> None:
    line = error_line(run("export", plan_json, "--target", "vlm", "-o", plan_json.parent / "deploy"))
    assert f"--target: must be one of {', '.join(EXPORTERS)} (got 'vlm')" in line
    assert list(plan_json.parent.iterdir()) == [plan_json]


@pytest.mark.parametrize("where", ["plan.json", "plan.json/deploy", "absent/deploy", "", "a\0b"])
def test_an_impossible_directory_is_one_line(
    run: Run, plan_json: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plan_json.parent)
    error_line(run("export", plan_json, "--target", "vllm", "-o", where))
    assert list(plan_json.parent.iterdir()) == [plan_json]


def test_a_port_out_of_range_leaves_nothing(run: Run, plan_json: Path) -> None:
    line = error_line(
        run("export", plan_json, "--target", "vllm", "-o", plan_json.parent / "d", "--port", "0")
    )
    assert "--port: must be from 1 to" in line
    assert list(plan_json.parent.iterdir()) == [plan_json]


def test_a_link_is_not_followed(run: Run, plan_json: Path) -> None:
    target, link = plan_json.parent / "real", plan_json.parent / "link"
    target.mkdir()
    link.symlink_to(target)
    error_line(run("export", plan_json, "--target", "vllm", "-o", link, "--force"))
    assert link.readlink() == target
    assert list(target.iterdir()) == []


def scheduled_plan(folder: Path) -> Path:
    """Write a verified plan with a scheduler and a cache."""
    plan = small_plan()
    policies = {"scheduler": Scheduler(policy="chameleon"), "cache": Cache(policy="lru")}
    small_plan(groups=tuple(each.replace(**policies) for each in plan.groups)).to_json(folder / "plan.json")
    return folder / "plan.json"


def verified_as(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    monkeypatch.setattr("capplan.planner.verify_without_scheduling", lambda *_, **__: plan)


def test_a_plan_with_a_scheduler_is_exported_as_verified_without_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = scheduled_plan(tmp_path), tmp_path / "deploy"
    base = small_plan()
    slots = [each.replace(engine_args=each.engine_args.replace(max_loras=3)) for each in base.groups]
    again = base.replace(groups=tuple(slots))
    verified_as(monkeypatch, again)
    result = run("export", path, "--target", "vllm", "-o", out, "--workload", write_inputs(tmp_path))
    assert result.exit_code == 0, result.output
    line = result.stdout.splitlines()[0]
    assert line.startswith(
        "verified again without scheduler chameleon and cache lru, which vllm does not have"
    )
    assert line.endswith("with 3 adapter slots")
    assert contents(out) == vllm_files(again)
    digest = hashlib.sha256((out / "plan.json").read_bytes()).hexdigest()
    assert json.loads((out / "routing.json").read_text())["plan_sha256"] == digest
    assert Plan.from_json(out / "plan.json") == again


def test_a_plan_with_rebalancing_is_not_exported_as_verified(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    small_plan(rebalance=RebalanceSettings(every_s=600.0)).to_json(path)
    line = error_line(run("export", path, "--target", "vllm", "-o", tmp_path / "deploy"))
    assert "--workload: is required to verify the plan without its re-balancing, which vllm does not" in line
    assert run("export", path, "--target", "vllm", "-o", tmp_path / "deploy", "--unverified").exit_code == 0


@pytest.mark.parametrize("flags", [("--workload", "w.yaml"), ("--profile", "p.json")])
@pytest.mark.parametrize("reason", ["--unverified", "a plan without scheduler, cache and re-balancing"])
def test_an_option_of_another_verification_is_refused_without_one(
    run: Run, tmp_path: Path, plan_json: Path, flags: tuple[str, str], reason: str
) -> None:
    path = scheduled_plan(tmp_path) if reason.startswith("--") else plan_json
    unverified = [reason] if reason.startswith("--") else []
    line = error_line(run("export", path, "--target", "vllm", "-o", tmp_path / "d", *flags, *unverified))
    assert f"{flags[0]}: does not go with {reason}" in line
    assert not (tmp_path / "d").exists()


def test_a_plan_that_fails_without_its_scheduler_is_exported_on_demand_only(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = scheduled_plan(tmp_path), tmp_path / "deploy"
    export = ("export", path, "--target", "vllm", "-o", out)
    assert "--workload: is required to verify the plan without its scheduler" in error_line(run(*export))
    base = small_plan()
    verdicts = [each.replace(ok=False, note="TTFT is long") for each in base.verification.groups]
    failed = base.verification.replace(ok=False, verdict="failed", groups=tuple(verdicts))
    verified_as(monkeypatch, base.replace(verification=failed))
    line = error_line(run(*export, "--workload", write_inputs(tmp_path)))
    assert "must hold without its scheduler chameleon and cache lru" in line
    assert "group g0: TTFT is long" in line
    assert not out.exists()
    assert run(*export, "--unverified").exit_code == 0
    assert contents(out) == vllm_files(Plan.from_json(path))
