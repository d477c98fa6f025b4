"""The report of a training tells what training found, on a page that needs no network."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from capplan import load_profile
from capplan.models.surrogates import FEATURES
from capplan.models.training import DatasetRequest, DatasetResult, Manifest, Trained
from capplan.models.training._refinement import FrontPoint, Refinement
from capplan.reports.pages import training_page
from tests.cli.test_report import HOSTILE, figures_of, parsed
from tests.cli.test_report_browser import CHROMIUM, browse, drawn
from tests.cli.test_surrogate import Trees

pytestmark = pytest.mark.process

PROFILE = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")
KINDS = ("best", "forest", "tree")
SIZES = {"best": 1_234_567, "forest": 2_345_678, "tree": 4_321}
TREES = {"throughput": Trees().throughput_tree, "starvation": Trees().starvation_tree}


def model(name: str, task: str, score: float) -> dict[str, Any]:
    scores = {"all": score, "paper-grid": score, "near the edge": score + 0.01}
    return {"name": name, "task": task, "params": {"depth": 3, "rate": 0.123456}, "scores": scores}


def told() -> dict[str, Any]:
    """Return a report in which every figure differs."""
    return {
        "scenarios": {"paper-grid": 300, "space-filling": 400},
        "starved_share": 0.4321,
        "judged_on": "scenarios of other groups, 5 folds",
        "error_formula": "100 * mean(|p - a| / (|p| + |a|))",
        "options": {"budget": 7, "paper_space": False, "seed": 3},
        "models": [
            *(model("knn", task, 0.5) for task in TREES),
            *(model("physics", task, 0.6) for task in TREES),
        ],
        "chosen": {"throughput": "physics", "starvation": "knn"},
        "importance": {task: {name: 1 / (i + 2) for i, name in enumerate(FEATURES)} for task in TREES},
        "front": {"throughput": [[1, 20.0], [2, 5.5], [9, 5.1]], "starvation": [[1, 60.0], [2, 3.25]]},
        "kinds": {
            kind: {
                "throughput_smape": {"all": 1.11 + i, "paper-grid": 2.22 + i, "near the edge": 3.33 + i},
                "starvation_macro_f1": {"all": 0.911 + i / 100, "near the edge": 0.811 + i / 100},
                "interval_coverage": {"all": 0.901 + i / 100, "paper-grid": 0.8, "near the edge": 0.85},
                "reliability": [[0.05, 0.04, 100], [0.95, 0.9, 50]],
                "rules": [1_000 + i, 2_000 + i],
            }
            for i, kind in enumerate(KINDS)
        },
    }


def trained(report: dict[str, Any]) -> Trained:
    points = {"throughput": FrontPoint(2, 5.5, TREES["throughput"])}
    points["starvation"] = FrontPoint(2, 3.25, TREES["starvation"])
    refined = {
        task: Refinement((point,), point, np.zeros(1), "teacher", {}) for task, point in points.items()
    }
    small = SimpleNamespace(throughput_tree=TREES["throughput"], starvation_tree=TREES["starvation"])
    return Trained({"tree": small}, report, refined)  # type: ignore[dict-item]


def dataset(design: str, duration_s: float) -> Manifest:
    asked = DatasetRequest(
        design=design,
        seed=3,
        scenarios=345,
        duration_s=duration_s,
        profile=PROFILE.name,
        profile_digest="0",
        features=FEATURES,
        probe=("1", "2"),
        capplan="0",
    )
    answered = DatasetResult(rows=300, refused_for_memory=41, without_requests=4, shards=())
    return Manifest(asked=asked, answered=answered)


def page(report: dict[str, Any] | None = None, duration_s: float = 3600.0) -> str:
    data = [dataset(design, duration_s) for design in ("paper-grid", "space-filling")]
    return training_page(PROFILE, data, trained(report or told()), SIZES)


def test_everything_that_training_found_is_on_the_page() -> None:
    text = parsed(page()).text
    for kind, each in told()["kinds"].items():
        assert f"{SIZES[kind]:,}" in text
        for score in each["throughput_smape"].values():
            assert f"{score:.2f}" in text
        for score in each["starvation_macro_f1"].values():
            assert f"{score:.3f}" in text
    for shown in (PROFILE.name, "700 scenarios", "43.2 %", "physics, chosen", "rate 0.1235", "345", "41"):
        assert shown in text
    for rule in ("if a_max > 48 then throughput = 0.5 x expected", "starved (probability 0.90)"):
        assert rule in text
    assert "Not all were simulated" not in text


def test_data_of_another_duration_is_marked() -> None:
    assert "Not all were simulated for 3,600 s" in parsed(page(duration_s=60.0)).text


def test_every_chart_has_axes_with_units_and_a_title() -> None:
    found = figures_of(page())
    assert len(found) == 8
    units = {"SMAPE, %", "macro-F1", "importance, %", "inside the interval, %", "share that starved"}
    units.add("100 × (1 - macro-F1), %")
    for figure in found:
        assert figure["title"]
        axes = (figure["layout"]["xaxis"], figure["layout"]["yaxis"])
        assert units & {axis["title"]["text"] for axis in axes}


def test_only_the_features_with_the_largest_importance_are_drawn() -> None:
    found = [
        each for each in figures_of(page()) if each["layout"]["xaxis"]["title"]["text"] == "importance, %"
    ]
    assert [each["data"][0]["y"] for each in found] == [list(FEATURES[:15])] * 2


def test_the_chosen_number_of_rules_is_marked_on_the_front() -> None:
    front = next(e for e in figures_of(page()) if e["layout"]["xaxis"]["title"]["text"] == "decision rules")
    chosen = front["data"][-1]
    assert chosen["name"] == "chosen: 2 rules"
    assert (chosen["x"], chosen["y"]) == ([2], [5.5])


def test_the_page_loads_nothing_and_names_stay_text() -> None:
    report = copy.deepcopy(told())
    report["models"][0]["name"] = HOSTILE
    document = page(report)
    assert HOSTILE not in document
    assert HOSTILE in parsed(document).text


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine to look at the report with")
def test_a_browser_draws_the_page_and_complains_about_nothing(tmp_path: Path) -> None:
    file = tmp_path / "train.html"
    file.write_text(page(), encoding="utf-8")
    drawn(file, browse(file, "--dump-dom"))
