"""`capplan compare`: rows for people and machines, a page, and an end that scripts can branch on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capplan.planner import SOLVERS, SolverComparison, SolverResult
from capplan.reports.pages import comparison_page
from tests.cli.conftest import Run, error_line
from tests.cli.examples import WORKLOAD
from tests.cli.test_report import HOSTILE, figures_of, parsed

FEW = ("--solvers", "capplan,maxbase,slora-contiguous", "--seeds", "2")


def row(solver: str, **values: Any) -> SolverResult:
    known = {
        "estimator": "twin",
        "gpus": 2,
        "instances": 2,
        "adapters_per_gpu": (7, 6),
        "slots_per_gpu": (4, 4),
        "served_fraction": 0.987,
        "throughput_tok_s": 1234.0,
        "itl_ms_mean": 21.5,
        "ttft_s_p99": 0.4,
        "solve_s": 0.012,
    }
    return SolverResult(solver, **{**known, **values})


GOOD = row("capplan")
STARVED = row("random", starved=1, served_fraction=0.42)
TIGHT = row("latency", short_of_headroom=1)
NO_START = row("maxbase", memory_errors=2, throughput_tok_s=0.0, itl_ms_mean=float("nan"))
REFUSED = SolverResult("milp", failure="solver: milp solves at most 24", exit_code=2)
INFEASIBLE = SolverResult("greedy", failure="gpus: too few", exit_code=3)


def told(*rows: SolverResult) -> SolverComparison:
    return SolverComparison(
        profile="some/profile",
        gpus=4,
        lower_bound_gpus=1,
        headroom=0.1,
        adapters=13,
        rate_rps=0.9,
        seeds=(11, 12),
        duration_s=3600.0,
        rows=rows,
    )


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand in for the library; what it was called with is kept, and its rows are set by the test."""
    calls: list[dict[str, Any]] = []

    def compare(workload: object, solvers: tuple[str, ...], **settings: Any) -> SolverComparison:
        calls.append({"solvers": solvers, **settings})
        return told(*ROWS)

    monkeypatch.setattr("capplan.planner.compare", compare)
    ROWS[:] = [GOOD, STARVED, REFUSED]
    return calls


ROWS: list[SolverResult] = []


def test_a_small_workload_is_compared_and_every_solver_has_a_row(run: Run, workload_yaml: Path) -> None:
    result = run("compare", workload_yaml, *FEW, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [each["solver"] for each in document["solvers"]] == ["capplan", "maxbase", "slora-contiguous"]
    assert len(document["seeds"]) == 2
    ours = document["solvers"][0]
    assert ours["holds"]
    assert (ours["starved"], ours["late"], ours["memory_errors"]) == (0, 0, 0)
    assert ours["gpus"] >= document["lower_bound_gpus"] >= 1
    assert sum(ours["adapters_per_gpu"]) == 13
    assert ours["throughput_tok_s"] > 0


def test_the_same_seed_gives_the_same_rows_but_for_the_time(run: Run, workload_yaml: Path) -> None:
    documents = [json.loads(run("compare", workload_yaml, *FEW, "--json").stdout) for _ in range(2)]
    for document in documents:
        for each in document["solvers"]:
            del each["solve_s"]
    assert documents[0] == documents[1]


def test_what_is_asked_reaches_the_library(
    run: Run, workload_yaml: Path, answers: list[dict[str, Any]]
) -> None:
    run(
        "compare", workload_yaml, "--solvers", "greedy, milp", "--gpus", "3", "--seeds", "7", "--seed", "2",
        "--solver-time-limit", "9",
    )  # fmt: skip
    run("compare", workload_yaml)
    first, second = answers
    assert first["solvers"] == ("greedy", "milp")
    wanted = {"gpus": 3, "seeds": 7, "seed": 2, "time_limit_s": 9.0}
    assert {key: first[key] for key in wanted} == wanted
    assert second["solvers"][0] == "capplan"
    assert second["solvers"] == SOLVERS


def test_the_table_tells_counts_reasons_and_the_best(
    run: Run, workload_yaml: Path, answers: list[dict[str, Any]]
) -> None:
    text = run("compare", workload_yaml).stdout
    lines = {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line.strip()}
    assert lines["capplan"].endswith("holds")
    assert "98.7 %" in lines["capplan"]
    assert lines["random"].startswith("random 2 1 0 0 0 42.0 %")
    assert lines["random"].endswith("fails")
    assert "milp solves at most 24" in lines["milp"]
    assert "fewest GPUs that hold: 2 (capplan); lower bound 1" in text


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([GOOD, STARVED, REFUSED], 0),
        ([TIGHT, INFEASIBLE], 0),
        ([STARVED, NO_START, INFEASIBLE], 1),
        ([INFEASIBLE, REFUSED], 3),
        ([REFUSED], 2),
    ],
)
def test_the_exit_status_tells_whether_any_answer_holds(
    run: Run, workload_yaml: Path, answers: list[dict[str, Any]], rows: list[SolverResult], status: int
) -> None:
    ROWS[:] = rows
    result = run("compare", workload_yaml)
    assert result.exit_code == status
    assert all(each.solver in result.stdout for each in rows)
    assert ("no solver has an answer" in result.stderr) is (status > 1)


def test_an_unknown_solver_is_refused_with_the_names(run: Run, workload_yaml: Path) -> None:
    line = error_line(run("compare", workload_yaml, "--solvers", "capplan,magic"))
    assert "--solvers: must be one of capplan, greedy" in line
    assert "magic" in line


@pytest.mark.parametrize(("flag", "value"), [("--seeds", "0"), ("--seed", "-1"), ("--gpus", "0")])
def test_a_wrong_number_is_refused(run: Run, workload_yaml: Path, flag: str, value: str) -> None:
    assert flag.strip("-") in error_line(run("compare", workload_yaml, *FEW[:2], flag, value))


def test_a_workload_that_no_gpu_can_serve_exits_3(run: Run, workload_yaml: Path) -> None:
    small = "max_model_len: 4096, gpu_memory_utilization: 0.2"
    workload_yaml.write_text(WORKLOAD.replace("max_model_len: 4096", small))
    result = run("compare", workload_yaml, "--solvers", "capplan,random", "--seeds", "1")
    assert result.exit_code == 3
    assert "memory" in result.stderr.splitlines()[-1]


def test_the_page_shows_every_solver_and_where_it_comes_from(
    run: Run, workload_yaml: Path, answers: list[dict[str, Any]]
) -> None:
    out = workload_yaml.with_name("compare.html")
    assert run("compare", workload_yaml, "--html", out).exit_code == 0
    text = out.read_text()
    for each in ROWS:
        assert f">{each.solver}</td>" in text
    assert "integer programming by HiGHS" in text
    assert len(figures_of(text)) == 5
    parsed(text)


@pytest.mark.parametrize("rows", [(INFEASIBLE,), (NO_START,), (GOOD, TIGHT, NO_START, REFUSED)])
def test_the_page_is_whole_whatever_failed(rows: tuple[SolverResult, ...]) -> None:
    parsed(comparison_page(told(*rows), "workload.yaml"))


def test_names_that_users_chose_cannot_become_markup() -> None:
    hostile = replace(INFEASIBLE, failure=HOSTILE)
    text = comparison_page(told(hostile), HOSTILE)
    assert HOSTILE not in text


def test_a_page_that_cannot_be_written_is_refused_before_the_work(run: Run, tmp_path: Path) -> None:
    assert "cannot be written" in error_line(run("compare", "absent.yaml", "--html", tmp_path))
