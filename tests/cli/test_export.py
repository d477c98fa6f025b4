import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from capplan import Plan
from capplan.deploy import EXPORTERS, Exporter, Loss, Setting, _export, vllm_files
from capplan.spec import Cache, PlanBase, RebalanceSettings, Scheduler, Totals
from tests.cli.conftest import Run, error_line
from tests.cli.examples import group, small_plan, verdict, write_inputs
from tests.deploy.lint.inputs import one_group, running


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
    monkeypatch.setattr("capplan.planner.verify_as_served", lambda *_, **__: plan)


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
        "verified again as vllm serves it, without scheduler chameleon and cache lru: ok on 3 seeds"
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
    assert "--workload: is required to verify the plan as vllm serves it, without re-balancing;" in line
    assert run("export", path, "--target", "vllm", "-o", tmp_path / "deploy", "--unverified").exit_code == 0


@pytest.mark.parametrize("flags", [("--workload", "w.yaml"), ("--profile", "p.json")])
@pytest.mark.parametrize("reason", ["--unverified", "a plan that vllm serves as it is"])
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
    line = error_line(run(*export))
    assert "--workload: is required to verify the plan as vllm serves it, without scheduler" in line
    base = small_plan()
    verdicts = [each.replace(ok=False, note="TTFT is long") for each in base.verification.groups]
    failed = base.verification.replace(ok=False, verdict="failed", groups=tuple(verdicts))
    verified_as(monkeypatch, base.replace(verification=failed))
    line = error_line(run(*export, "--workload", write_inputs(tmp_path)))
    assert "must hold as vllm serves it, without scheduler chameleon and cache lru (group g0: TTFT" in line
    assert not out.exists()
    assert run(*export, "--unverified").exit_code == 0
    assert contents(out) == vllm_files(Plan.from_json(path))


RANDOM = Loss("the router draws the server of a request", router="random")
EVERYWHERE = Loss("every adapter is loaded everywhere", everywhere=True)


def exports_with(monkeypatch: pytest.MonkeyPatch, *losses: Loss, serves: bool = True) -> None:
    """Make ``mine`` a target with losses and a setting."""

    def files(plan: Plan, settings: dict[str, str]) -> dict[str, str]:
        return {"mine.txt": settings["image"]}

    target = Exporter(
        files,
        frozenset({"mine.txt"}),
        serves=serves,
        settings=(Setting("image", "default", "an image"),),
        losses=lambda _: losses,
    )
    monkeypatch.setattr(_export, "EXPORTERS", {"mine": target})


def apart(*, replicas: int = 1, base: bool = False) -> Plan:
    """Return a plan of two groups without a common adapter."""
    groups = [
        group("g0", replicas=replicas, adapters=(("a", 8, 1.0, None),)),
        group("g1", adapters=(("b", 8, 1.0, None),)),
    ]
    if base:
        groups = [each.replace(base=PlanBase(rate_rps=1.0, share=0.5)) for each in groups]
    return small_plan(groups=tuple(groups), totals=Totals(gpus=replicas + 1, lower_bound_gpus=1))


def test_settings_reach_the_exporter(run: Run, plan_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exports_with(monkeypatch)
    out = plan_json.parent / "deploy"
    export = ("export", plan_json, "--target", "mine", "-o", out, "--force")
    assert run(*export).exit_code == 0
    assert contents(out) == {"mine.txt": "default"}
    assert run(*export, "--set", "image=a", "--set", "image=b=c").exit_code == 0
    assert contents(out) == {"mine.txt": "b=c"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("image", "--set: must be NAME=VALUE (got 'image')"),
        ("=x", "--set: must be NAME=VALUE (got '=x')"),
        ("imgae=x", "--set: must be one of image (got 'imgae')"),
        ("image=", "--set: image: must be printable text (got '')"),
    ],
)
def test_a_wrong_setting_is_one_line(
    run: Run, plan_json: Path, monkeypatch: pytest.MonkeyPatch, given: str, message: str
) -> None:
    exports_with(monkeypatch, RANDOM)  # refused before anything is verified
    line = error_line(
        run("export", plan_json, "--target", "mine", "-o", plan_json.parent / "d", "--set", given)
    )
    assert message in line
    assert list(plan_json.parent.iterdir()) == [plan_json]


def test_a_target_without_settings_refuses_one(run: Run, plan_json: Path) -> None:
    export = ("export", plan_json, "--target", "vllm", "-o", plan_json.parent / "d")
    line = error_line(run(*export, "--set", "image=x"))
    assert "--set: does not go with target vllm (got 'image')" in line


def test_losses_are_told_after_the_export(run: Run, plan_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exports_with(monkeypatch, Loss("no colours"), Loss("no sound"))
    result = run("export", plan_json, "--target", "mine", "-o", plan_json.parent / "deploy")
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == ["loss: no colours", "loss: no sound"]


@pytest.mark.parametrize(
    ("plan", "losses", "words"),
    [
        (small_plan(), [RANDOM], "by router random"),
        (apart(replicas=2), [RANDOM], "by router random"),
        (apart(base=True), [RANDOM], "by router random"),
        (apart(), [EVERYWHERE], "with every adapter on every server"),
        (apart(), [EVERYWHERE, RANDOM], "by router random and with every adapter on every server"),
        (
            apart(replicas=2).replace(rebalance=RebalanceSettings(every_s=600.0)).with_digest(),
            [RANDOM],
            "without re-balancing and by router random",
        ),
    ],
)
def test_a_loss_that_changes_what_runs_is_verified(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan, losses: list[Loss], words: str
) -> None:
    plan.to_json(tmp_path / "plan.json")
    exports_with(monkeypatch, *losses)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "capplan.planner.verify_as_served", lambda plan, _workload, **options: asked.append(options) or plan
    )
    export = ("export", tmp_path / "plan.json", "--target", "mine", "-o", tmp_path / "deploy")
    rule = f"--workload: is required to verify the plan as mine serves it, {words}; --unverified exports"
    assert rule in error_line(run(*export))
    result = run(*export, "--workload", write_inputs(tmp_path))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"verified again as mine serves it, {words}: ok on 3 seeds of 3600 s")
    assert asked[0]["router"] == ("random" if RANDOM in losses else None)
    assert asked[0]["everywhere"] == (EVERYWHERE in losses)
    assert run(*export, "--unverified", "--force").exit_code == 0
    assert len(asked) == 1


ALONE = small_plan(
    groups=(group("g0", adapters=(("a", 8, 1.0, None),), replicas=3),),
    verification=small_plan().verification.replace(groups=(verdict("g0"),)),
)


EVEN = small_plan(
    groups=tuple(
        group(name, adapters=(("shared", 8, 0.5 * replicas / 1.5, None),), replicas=replicas)
        for name, replicas in (("g0", 2), ("g1", 1))
    )
)


@pytest.mark.parametrize(
    ("plan", "losses", "serves"),
    [
        (apart(), [RANDOM], True),
        (small_plan(router="random"), [RANDOM], True),
        (small_plan(), [Loss("the plan's router", router="smooth-shares")], True),
        (ALONE, [EVERYWHERE], True),
        (EVEN, [EVERYWHERE], True),
        (small_plan(), [RANDOM, EVERYWHERE], False),
    ],
)
def test_a_loss_that_changes_nothing_is_not_verified(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plan: Plan,
    losses: list[Loss],
    serves: bool,
) -> None:
    """Nothing to route, the router of the plan, equal servers, or files that start no server."""
    plan.to_json(tmp_path / "plan.json")
    exports_with(monkeypatch, *losses, serves=serves)
    result = run("export", tmp_path / "plan.json", "--target", "mine", "-o", tmp_path / "deploy")
    assert result.exit_code == 0, result.output
    assert "verified again" not in result.stdout


# Check and diff ----------------------------------------------------------------------------------


def export_to(run: Run, plan: Path, target: str, *words: object) -> Any:
    return run("export", plan, "--target", target, *words)


def test_a_file_with_an_error_is_not_written(run: Run, plan_json: Path) -> None:
    schemas = plan_json.parent / "schemas.yaml"
    schemas.write_text(
        "kind: CustomResourceDefinition\n"
        "spec: {group: model.aibrix.ai, names: {kind: ModelAdapter}, versions: [{name: v1alpha1, "
        "served: true, schema: {openAPIV3Schema: {type: integer}}}]}\n"
    )
    out = plan_json.parent / "deploy"
    words = ("--unverified", "-o", out, "--check", schemas)
    result = export_to(run, plan_json, "aibrix", *words)
    assert result.exit_code == 1
    assert "aibrix.yaml:" in result.stdout
    assert "CAP402 ModelAdapter" in result.stdout
    assert not out.exists()
    schemas.write_text(
        schemas.read_text().replace("type: integer", "type: object").replace("properties: {spec", "x: {y")
    )
    assert export_to(run, plan_json, "aibrix", *words).exit_code == 0
    assert out.is_dir()


def test_an_export_has_no_difference_from_itself_and_writes_nothing(run: Run, plan_json: Path) -> None:
    out = plan_json.parent / "deploy"
    export_to(run, plan_json, "vllm", "-o", out)
    before = contents(out)
    result = export_to(run, plan_json, "vllm", "--diff", out)
    assert (result.exit_code, result.stdout) == (0, f"{out}: as planned\n")
    changed = export_to(run, plan_json, "vllm", "--port", "9100", "--diff", out)
    assert changed.exit_code == 1
    assert "--- deployed/launch/g1.sh" in changed.stdout
    assert any(line.startswith("+") and "9100" in line for line in changed.stdout.splitlines())
    (out / "launch" / "old.sh").write_text("vllm serve x\n")
    removed = export_to(run, plan_json, "vllm", "--diff", out)
    assert "--- deployed/launch/old.sh\n+++ /dev/null\n" in removed.stdout
    (out / "launch" / "old.sh").unlink()
    assert contents(out) == before


def test_a_difference_needs_a_folder_and_an_export_somewhere_to_go(run: Run, plan_json: Path) -> None:
    assert "must be a folder" in error_line(export_to(run, plan_json, "vllm", "--diff", "nowhere"))
    assert "--output: is required, or --check or --diff" in error_line(export_to(run, plan_json, "vllm"))


@pytest.mark.parametrize(
    ("served", "slots", "lines"),
    [
        (("a", "b"), 2, ()),
        (("a", "c"), 2, ("-adapter c", "+adapter b")),
        (("a",), 4, ("-max_loras 4", "+max_loras 2", "+adapter b")),
    ],
)
def test_a_running_server_is_compared_with_its_group(
    run: Run, tmp_path: Path, served: tuple[str, ...], slots: int, lines: tuple[str, ...]
) -> None:
    one_group(("a", 16, None), ("b", 16, None)).to_json(tmp_path / "plan.json")
    with running(*served, max_loras=slots) as url:
        result = export_to(run, tmp_path / "plan.json", "vllm", "--unverified", "--diff", url)
    expected = (f"--- {url}", "+++ group g", *lines) if lines else (f"{url}: as planned",)
    assert result.stdout.splitlines() == list(expected)
    assert result.exit_code == int(bool(lines))


def test_a_gateway_is_compared_with_the_whole_plan(run: Run, plan_json: Path) -> None:
    with running(*small_plan().adapters) as url:
        result = export_to(run, plan_json, "vllm", "--diff", url)
    assert (result.exit_code, result.stdout) == (0, f"{url}: as planned\n")
