"""Queues on the command line: asked for, shown, explained."""

import json
from pathlib import Path
from typing import Any

import pytest

from capplan import Plan
from capplan.reports.tables import scheduling_words
from capplan.spec import Cache, QueueClass, QueueConfig, Queues, Scheduler, Wrs
from tests.cli.conftest import Run, error_line
from tests.cli.examples import WORKLOAD, small_plan, write_inputs

QUEUES = Queues(
    wrs=Wrs(a=0.4, b=0.6, max_prompt_tokens=1000, max_output_tokens=100, max_adapter_bytes=10**8),
    classes=(
        QueueClass(upper_wrs=0.125, quota_tokens=12_345),
        QueueClass(upper_wrs=0.5, quota_tokens=6_789),
        QueueClass(upper_wrs=None, quota_tokens=54_321),
    ),
)


def queued_plan() -> Plan:
    plan = small_plan()
    return plan.replace(groups=(plan.groups[0].replace(queues=QUEUES), *plan.groups[1:]))


@pytest.mark.parametrize(
    ("section", "flags", "wanted"),
    [
        ("", [], None),
        ("", ["--queues"], QueueConfig()),
        ("queues: {max_queues: 2}\n", [], QueueConfig(max_queues=2)),
        ("queues: {max_queues: 2}\n", ["--queues"], QueueConfig(max_queues=2)),
    ],
    ids=["none", "flag", "file", "both"],
)
def test_the_flag_asks_for_queues_where_the_file_does_not(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    flags: list[str],
    wanted: QueueConfig | None,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("capplan.planner.plan", lambda workload, **_: asked.append(workload) or small_plan())
    assert run("plan", write_inputs(tmp_path, WORKLOAD + section), *flags).exit_code == 0
    assert [workload.queues for workload in asked] == [wanted]


def test_a_plan_with_queues_is_verified_with_them(run: Run, tmp_path: Path) -> None:
    made = tmp_path / "plan.json"
    text = write_inputs(tmp_path, WORKLOAD + "queues: {max_queues: 2}\n")
    result = run("plan", text, "-o", made, "--seeds", "1")
    assert result.exit_code == 0, result.output
    plan = Plan.from_json(made)
    assert (plan.verification.ok, plan.verification.not_simulated) == (True, ())
    wanted = (Scheduler(policy="chameleon", queues=QueueConfig(max_queues=2)), Cache(policy="none"))
    for group in plan.groups:
        assert (group.scheduler, group.cache) == wanted
        assert group.queues is not None
        assert f"{group.queues.classes[0].quota_tokens:,}" in result.stdout
    plan.require_verified()
    page = tmp_path / "plan.html"
    assert run("report", made, "-o", page).exit_code == 0
    assert "interrupted share of E2E, mean" in page.read_text()


@pytest.mark.parametrize(
    ("section", "flags", "wanted"),
    [
        ("", ["--scheduler", "sjf"], ("sjf", "none")),
        ("", ["--cache", "lru"], ("fifo", "lru")),
        ("queues: {}\n", ["--scheduler", "{policy: static}"], ("static", "none")),
        ("cache: chameleon\n", ["--scheduler", "slora", "--cache", "none"], ("slora", "none")),
        ("scheduler: chameleon\n", ["--queues"], ("chameleon", "none")),
        ("scheduler: sjf\ncache: gdsf\n", ["--cache", "chameleon"], ("sjf", "chameleon")),
    ],
)
def test_flags_win_over_the_file(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    flags: list[str],
    wanted: tuple[str, str],
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("capplan.planner.plan", lambda workload, **_: asked.append(workload) or small_plan())
    assert run("plan", write_inputs(tmp_path, WORKLOAD + section), *flags).exit_code == 0
    ((scheduler, cache),) = [workload.scheduling for workload in asked]
    assert (scheduler.policy, cache.policy) == wanted


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scheduler", "chamelion"], "--scheduler: must be one of chameleon, fifo"),
        (["--scheduler", "{policy: fifo, refesh_s: 1}"], "--scheduler.refesh_s: unknown key; did you mean"),
        (["--cache", "lrv"], "did you mean 'lru'? (got 'lrv')"),
        (["--scheduler", "slora", "--cache", "lru"], "--cache: must be none beside scheduler slora"),
        (["--scheduler", ""], "--scheduler: must be one of chameleon, fifo"),
        (["--scheduler", "[fifo]"], "--scheduler: must be one of chameleon, fifo"),
        (
            ["--cache", "{policy: lru, weights: {size: 1}}"],
            "--cache.weights.size: goes with policy chameleon",
        ),
    ],
)
def test_a_mistake_is_one_line(
    run: Run, tmp_path: Path, command: str, flags: list[str], message: str
) -> None:
    assert message in error_line(run(command, write_inputs(tmp_path), *flags))


@pytest.mark.parametrize("command", ["export", "serve"])
def test_an_unverified_plan_is_used_on_demand_only(run: Run, tmp_path: Path, command: str) -> None:
    path = tmp_path / "plan.json"
    queued_plan().to_json(path)  # its verification is ok, as earlier versions wrote it
    more = (
        ["--target", "vllm", "-o", tmp_path / "out"]
        if command == "export"
        else ["--model", tmp_path / "none"]
    )
    line = error_line(run(command, *more, path))
    assert f"{path}: verification.ok: must be true to use the plan (queues not simulated)" in line
    assert not (tmp_path / "out").exists()
    accepted = run(command, *more, "--unverified", path)
    if command == "export":
        assert accepted.exit_code == 0, accepted.output
    else:
        assert "verification" not in error_line(accepted)  # the model is missing


def test_the_table_shows_quotas_where_a_group_has_queues(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_inputs(tmp_path)
    shown = []
    for plan in (small_plan(), queued_plan()):
        monkeypatch.setattr("capplan.planner.plan", lambda workload, plan=plan, **_: plan)
        shown.append(run("plan", path).stdout)
    for text in ("quotas", "12,345", "6,789", "54,321"):
        assert [text in each for each in shown] == [False, True]


def test_settings_that_differ_from_the_defaults_are_named() -> None:
    group = queued_plan().groups[0]
    assert scheduling_words(group) == "scheduler chameleon, cache none"
    config = QueueConfig(clusters="wcss", max_queues=2)
    scheduler = Scheduler(policy="chameleon", chunked=True, refresh_s=60.0, queues=config)
    cache = Cache(policy="chameleon", weights={"size": 0.1}, prefetch="histogram")
    assert scheduling_words(group.replace(scheduler=scheduler, cache=cache)) == (
        "scheduler chameleon (chunked true, refresh_s 60, queues clusters wcss max_queues 2), "
        "cache chameleon (weights size 0.1, prefetch histogram)"
    )
    learned = Scheduler(policy="static", predictor={"kind": "learned", "file": "/Data/P.json"})
    assert scheduling_words(group.replace(scheduler=learned)) == (
        "scheduler static (predictor kind learned file /Data/P.json), cache none"
    )
    every_step = group.replace(queues=None, scheduler="slora-every-step")
    assert scheduling_words(every_step) == "scheduler slora-every-step, cache none"


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (["--scheduler", "chameleon"], {"squashed requests", "refreshes of the queues", "late prefetches"}),
        (["--scheduler", "fifo", "--cache", "lru"], {"evicted adapters", "late prefetches"}),
        (["--cache", "{policy: none, prefetch: none}"], set()),
        (["--scheduler", "slora"], set()),
    ],
)
def test_a_simulation_shows_and_names_what_its_policies_have(
    run: Run, tmp_path: Path, flags: list[str], shown: set[str]
) -> None:
    page = tmp_path / "page.html"
    more = ["--duration", "20", "--seeds", "2", "--html", page]
    result = run("simulate", write_inputs(tmp_path), *flags, *more)
    assert result.exit_code == 0, result.output
    rows = {"squashed requests", "refreshes of the queues", "evicted adapters", "late prefetches"}
    assert {row for row in rows if row in result.stdout} == shown
    assert "max_loras" not in result.stdout
    assert "A_max" not in page.read_text()


def test_a_plan_with_queues_is_explained(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    queued_plan().to_json(path)
    text = run("explain", path).stdout
    for row in (
        ["below", "0.125", "12,345"],
        ["0.125", "to", "0.5", "6,789"],
        ["0.5", "and", "more", "54,321"],
    ):
        assert any(line.split()[: len(row)] == row for line in text.splitlines())
    groups = json.loads(run("explain", path, "--json").stdout)["groups"]
    assert groups[0]["queues"] == QUEUES.model_dump(mode="json")
    assert groups[1]["queues"] is None
