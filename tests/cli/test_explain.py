"""What the twin adds to `explain`, and the page of `report`."""

import json
from pathlib import Path

import pytest

from capplan import Plan
from tests.cli.conftest import Run, error_line
from tests.cli.examples import WORKLOAD, small_plan, write_inputs
from tests.cli.test_report import HOSTILE, figures_of, parsed
from tests.cli.test_report_browser import CHROMIUM, browse, drawn

MORE = "--workload FILE also explains"


@pytest.fixture
def planned(run: Run, tmp_path: Path) -> tuple[Path, Path]:
    """Return a plan and the workload that it is for."""
    workload, plan = write_inputs(tmp_path), tmp_path / "plan.json"
    assert run("plan", workload, "-o", plan, "--quiet").exit_code == 0
    return plan, workload


def test_the_workload_adds_what_the_twin_knows(run: Run, planned: tuple[Path, Path]) -> None:
    plan, workload = planned
    alone, whole = run("explain", plan).stdout, run("explain", plan, "--workload", workload).stdout
    assert alone.rstrip().endswith("one GPU fewer or more")
    assert MORE in alone
    assert MORE not in whole
    slots = Plan.from_json(plan).groups[0].engine_args.max_loras
    for shown in (
        f"A_max {slots}: ",
        f"{slots} ◀ chosen",
        "holds 16 x the planned load, and more was not tried",
        "KV-cache memory",
        "max_num_seqs",
        "what follows",
        "this plan",
        "one GPU more",
    ):
        assert shown in whole
        assert shown not in alone


def test_machines_get_the_same(run: Run, planned: tuple[Path, Path]) -> None:
    plan, workload = planned
    assert "explanation" not in json.loads(run("explain", plan, "--json").stdout)
    told = json.loads(run("explain", plan, "--workload", workload, "--json").stdout)["explanation"]
    group = Plan.from_json(plan).groups[0]
    (only,) = told["groups"]
    assert only["ids"] == [group.id]
    assert only["curve"]["chosen"] == group.engine_args.max_loras
    assert [point["a_max"] for point in only["curve"]["points"]] == [
        p["value"] for p in only["curve"]["points"]
    ]
    assert only["why_a_max"].startswith(f"A_max {group.engine_args.max_loras}: ")
    assert {use["resource"] for use in only["room"]["uses"]} >= {"kv", "slots", "requests", "compute"}
    assert [each["gpus"] for each in told["what_if"]] == [2]


def test_one_group_is_explained_by_itself(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    small_plan().to_json(path)
    text = run("explain", path, "--group", "g1").stdout
    assert "g1: " in text
    assert "g0: " not in text
    (only,) = json.loads(run("explain", path, "--group", "g1", "--json").stdout)["groups"]
    assert only["id"] == "g1"


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (("--group", "g7"), "--group: must be a group of the plan: g0, g1 (got 'g7')"),
        (("--profile", "p.json"), "--profile: goes with --workload"),
        (("--workload", "none.yaml"), "none.yaml"),
    ],
)
def test_what_is_not_there_is_one_line(run: Run, tmp_path: Path, flags: tuple[str, str], rule: str) -> None:
    path = tmp_path / "plan.json"
    small_plan().to_json(path)
    assert rule in error_line(run("explain", path, *flags))


@pytest.mark.parametrize("command", ["explain", "report"])
def test_the_workload_of_another_plan_is_refused(
    run: Run, planned: tuple[Path, Path], tmp_path: Path, command: str
) -> None:
    plan, workload = planned
    workload.write_text(WORKLOAD.replace("rate_rps: 0.05", "rate_rps: 0.06"))
    page = tmp_path / "report.html"
    more = ("-o", page) if command == "report" else ()
    line = error_line(run(command, plan, "--workload", workload, *more))
    assert f"{workload}: must be the workload that the plan was made for" in line
    assert not page.exists()


def test_a_report_is_one_page_that_loads_nothing(
    run: Run, planned: tuple[Path, Path], tmp_path: Path
) -> None:
    plan, workload = planned
    pages = {}
    for name, more in (("alone", ()), ("whole", ("--workload", workload))):
        path = tmp_path / f"{name}.html"
        assert run("report", plan, "-o", path, *more).exit_code == 0
        pages[name] = path.read_text()
        page = parsed(pages[name])
        for heading in ("Summary", "Groups", "Bottlenecks", "Adapters", "Provenance"):
            assert f">{heading}</h2>" in pages[name]
        for adapter in Plan.from_json(plan).groups[0].adapters:
            assert adapter.name in page.text
    added = ("Choice of A_max", "Utilization and headroom", "One GPU fewer or more")
    for heading in added:
        assert f">{heading}</h2>" not in pages["alone"]
        assert f">{heading}</h2>" in pages["whole"]
    assert MORE in pages["alone"]
    chosen = Plan.from_json(plan).groups[0].engine_args.max_loras
    shapes = [shape for each in figures_of(pages["whole"]) for shape in each["layout"].get("shapes", ())]
    assert f"chosen: {chosen}" in {shape["name"] for shape in shapes}


def test_names_in_a_report_stay_text(run: Run, tmp_path: Path) -> None:
    path, page = tmp_path / "plan.json", tmp_path / "report.html"
    small_plan(provenance={HOSTILE: HOSTILE}, created_by=HOSTILE).to_json(path)
    run("report", path, "-o", page)
    assert HOSTILE not in page.read_text()
    assert parsed(page.read_text()).text.count(HOSTILE) == 3


def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    run: Run, planned: tuple[Path, Path], tmp_path: Path
) -> None:
    plan, workload = planned
    gone = tmp_path / "no" / "report.html"
    assert str(gone) in error_line(run("report", plan, "-o", gone, "--workload", workload))


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine to look at the report with")
def test_a_browser_draws_the_whole_report_and_complains_about_nothing(
    run: Run, planned: tuple[Path, Path], tmp_path: Path
) -> None:
    plan, workload = planned
    page = tmp_path / "report.html"
    run("report", plan, "-o", page, "--workload", workload)
    seen = browse(page, "--dump-dom")
    drawn(page, seen)
