"""`capplan reproduce`: files, tables and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capplan.reproduce import PAPERS, read_recipe
from tests.cli.conftest import Run, error_line

CHEAP = ("chameleon", "fig5")
"""A figure that needs no trace and takes no time."""


def test_the_command_writes_rows_document_table_and_page(run: Run, tmp_path: Path) -> None:
    shown = run("reproduce", *CHEAP, "-o", str(tmp_path / "results"))
    assert CHEAP[1] in shown.stdout
    rows = json.loads((tmp_path / "results" / "chameleon.json").read_text())["results"][0]["rows"]
    assert {"paper", "ours", "low", "high", "seeds", "inside", "reason", "assumptions"} <= set(rows[0])
    assert "fig5" in (tmp_path / "results" / "chameleon.md").read_text()
    assert "fig5" in (tmp_path / "results" / "reproduction.md").read_text()
    assert "<html" in (tmp_path / "results" / "index.html").read_text()


def test_the_shipped_run_is_shown_without_simulating(run: Run, tmp_path: Path) -> None:
    shown = json.loads(run("reproduce", "all", "--shipped", "--json", "-o", str(tmp_path)).stdout)
    assert {row["figure"] for row in shown} >= {"fig5"}
    assert not (tmp_path / "cases").exists()


def test_the_list_names_every_figure(run: Run) -> None:
    shown = run("reproduce", "list").stdout
    assert all(figure.id in shown for paper in PAPERS for figure in read_recipe(paper).figures)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nobody", "-o", "DIR"], "PAPER: must be one of"),
        (["chameleon", "fig99", "-o", "DIR"], "FIGURE: must be a figure of chameleon"),
        (["all", "fig5", "-o", "DIR"], "FIGURE: goes with one paper"),
        (["chameleon"], "--output: is required"),
        (["chameleon", "fig11", "-o", "DIR"], "--traces: must be a folder that holds"),
    ],
)
def test_wrong_words_are_one_line(run: Run, words: list[str], expected: str, tmp_path: Path) -> None:
    given = [str(tmp_path) if word == "DIR" else word for word in words]
    assert expected in error_line(run("reproduce", *given))
