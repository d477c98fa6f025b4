"""`capplan surrogate rules` shows the small trees of a profile as rules, drawing, source and JSON."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

import capplan.models.surrogates as files
from capplan.models.surrogates import FEATURES, LOG_OVER_EXPECTED, Tree
from capplan.models.surrogates._tree import PROBABILITY
from tests.cli.conftest import Run, error_line

LEAF = -1
PROFILE = "h100-64g/llama-3.1-8b/vllm-0.8.5"


def stump(answer: str, feature: str, at_most: float, values: tuple[float, float]) -> Tree:
    nodes = ((FEATURES.index(feature), LEAF, LEAF), (at_most, 0.0, 0.0), (1, LEAF, LEAF), (2, LEAF, LEAF))
    return Tree(answer, *nodes, (0.0, *values), (1.0, 0.25, 0.75))


class Trees(NamedTuple):
    throughput_tree: Tree = stump(LOG_OVER_EXPECTED, "a_max", 48.0, (0.0, -0.693))
    starvation_tree: Tree = stump(PROBABILITY, "adapters", 96.0, (0.1, 0.9))


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []

    def load(profile: str, kind: str) -> Trees:
        calls.append((profile, kind))
        return Trees()

    monkeypatch.setattr(files, "load_surrogate", load)
    return calls


def test_rules_are_printed_for_people_most_covering_first(run: Run, asked: list[tuple[str, str]]) -> None:
    lines = run("surrogate", "rules", PROFILE).stdout.splitlines()
    rules = [line.split("if ", 1) for line in lines if " if " in line]
    assert asked == [(PROFILE, "tree")]
    assert [(share.strip(), rule.strip()) for share, rule in rules] == [
        ("75.0 %", "a_max > 48 then throughput = 0.5 x expected"),
        ("25.0 %", "a_max <= 48 then throughput = 1 x expected"),
        ("75.0 %", "adapters > 96 then starved (probability 0.90)"),
        ("25.0 %", "adapters <= 96 then not starved (probability 0.10)"),
    ]


def test_one_target_is_shown_alone(run: Run) -> None:
    shown = run("surrogate", "rules", PROFILE, "--target", "starvation").stdout
    assert "starved" in shown
    assert "throughput" not in shown


def test_json_has_rules_and_trees_that_can_be_read_again(run: Run) -> None:
    document = json.loads(run("surrogate", "rules", PROFILE, "--json").stdout)
    trees = {name: Tree.from_document(each["tree"]) for name, each in document.items()}
    assert trees == {"throughput": Trees().throughput_tree, "starvation": Trees().starvation_tree}
    first = document["starvation"]["rules"][0]
    assert first["conditions"] == [{"feature": "adapters", "above": 96.0, "at_most": None}]
    assert (first["value"], first["share_of_scenarios"]) == (0.9, 0.75)


def test_python_is_the_source_of_both_functions(run: Run) -> None:
    module = ast.parse(run("surrogate", "rules", PROFILE, "--python").stdout)
    assert [each.name for each in module.body if isinstance(each, ast.FunctionDef)] == [
        "throughput",
        "starvation",
    ]


def test_the_drawing_is_one_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "trees.svg"
    assert str(file) in run("surrogate", "rules", PROFILE, "--svg", file).stdout
    text = file.read_text()
    ElementTree.fromstring(text)
    assert "throughput of" in text
    assert "starvation of" in text


@pytest.mark.parametrize(
    "arguments", [("--svg", "missing/x.svg"), ("--python", "--json"), ("--target", "latency")]
)
def test_what_cannot_be_done_is_said_before_anything_is_loaded(
    run: Run, asked: list[tuple[str, str]], arguments: tuple[str, ...]
) -> None:
    error_line(run("surrogate", "rules", PROFILE, *arguments))
    assert asked == []
