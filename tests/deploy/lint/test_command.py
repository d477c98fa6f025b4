import json
from pathlib import Path
from typing import Any

import pytest

from capplan.deploy.lint import RULES
from tests.cli.conftest import Run, error_line, run
from tests.cli.examples import small_plan
from tests.deploy.lint.inputs import running, serve, workload, write

__all__ = ["run"]


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """Write a script with an error and a warning."""
    words = "--enable-lora --max-lora-rank 12 --lora-modules a=/a b=/b"
    return write(tmp_path, serve(words), "a, b: 100%.sh")


@pytest.fixture
def warned(tmp_path: Path) -> Path:
    """Write a workload with a warning."""
    return write(tmp_path, workload(slo=""))


def test_a_line_per_finding_with_place_level_rule_reason_and_fix(run: Run, bad: Path) -> None:
    result = run("lint", bad)
    assert result.exit_code == 1
    first, second = result.stdout.splitlines()
    assert first == (
        f"{bad}:2: warning CAP202 2 adapters, and host memory holds 1; set --max-cpu-loras to the number of "
        "adapters"
    )
    assert second.startswith(f"{bad}:2: error CAP203 --max-lora-rank 12 is none of vLLM: 1, 8,")
    assert result.stderr == "1 error and 1 warning in 1 input\n"


def test_warnings_alone_are_0_unless_strict(run: Run, warned: Path) -> None:
    assert run("lint", warned).exit_code == 0
    assert run("lint", warned, "--strict").exit_code == 1
    assert run("lint", warned, "--strict", "--ignore", "CAP602,CAP601").exit_code == 0


def test_a_good_input_is_0_and_prints_no_line(run: Run, tmp_path: Path) -> None:
    result = run("lint", write(tmp_path, small_plan().to_json()))
    assert (result.exit_code, result.stdout) == (0, "")


def test_what_is_not_understood_is_2_on_one_line(run: Run, bad: Path, tmp_path: Path) -> None:
    unknown = write(tmp_path, "text", "unknown")
    assert "is not understood" in error_line(run("lint", bad, unknown))
    assert "must be one of text, json, sarif, github" in error_line(run("lint", bad, "--format", "xml"))
    assert "--rules` lists" in error_line(run("lint", bad, "--select", "CAP9"))
    assert "FILE: is required" in error_line(run("lint"))
    assert "created_by" in error_line(run("lint", bad, "--plan", write(tmp_path, "{}", "plan")))


def test_the_rules_are_listed(run: Run) -> None:
    result = run("lint", "--rules")
    assert result.exit_code == 0
    assert all(rule.id in result.stdout for rule in RULES)


def test_json_has_the_fields_of_a_finding(run: Run, bad: Path) -> None:
    document = json.loads(run("lint", bad, "--format", "json").stdout)
    assert [each["id"] for each in document] == ["CAP202", "CAP203"]
    assert set(document[0]) == {"file", "line", "level", "id", "reason", "fix", "anchor"}
    assert json.loads(run("lint", bad, "--format", "json", "--select", "CAP001").stdout) == []


def test_github_annotates_the_line_with_escaped_properties(run: Run, bad: Path) -> None:
    first, second = run("lint", bad, "--format", "github").stdout.splitlines()
    folder = str(bad.parent).replace(":", "%3A")
    assert first.startswith(f"::warning file={folder}/a%2C b%3A 100%25.sh,line=2,title=CAP202::2 adapters, ")
    assert second.startswith("::error file=")


def test_sarif_has_the_required_parts(run: Run, bad: Path, warned: Path) -> None:
    log = json.loads(run("lint", bad, warned, "--format", "sarif").stdout)
    assert log["version"] == "2.1.0"
    (found,) = log["runs"]
    driver = found["tool"]["driver"]
    assert driver["name"] == "capplan"
    assert [each["id"] for each in driver["rules"]] == [rule.id for rule in RULES]
    assert {each["ruleId"] for each in found["results"]} == {"CAP202", "CAP203", "CAP602"}
    for each in found["results"]:
        _check_result(each, driver["rules"])


def _check_result(result: dict[str, Any], rules: list[dict[str, Any]]) -> None:
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    assert result["level"] in ("error", "warning")
    assert result["message"]["text"]
    (location,) = result["locations"]
    place = location["physicalLocation"]
    assert " " not in place["artifactLocation"]["uri"]
    assert place.get("region", {"startLine": 1})["startLine"] >= 1


def test_a_running_server_is_an_input(run: Run, tmp_path: Path) -> None:
    plan = write(tmp_path, small_plan().to_json())
    with running("a") as url:
        result = run("lint", url, "--plan", plan)
    assert result.exit_code == 1
    assert result.stdout.startswith(f"{url}: error CAP801 1 adapters of group g0 are not served: shared; ")


def test_a_server_without_a_list_of_models_is_not_understood(run: Run) -> None:
    with running(models=["no list"]) as url:
        assert "with /v1/models" in error_line(run("lint", url))
