"""The documentation is true: generated pages are complete, links of the README exist, programs run."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TEXT = frozenset(
    (".cfg", ".in", ".j2", ".json", ".md", ".out", ".py", ".svg", ".toml", ".txt", ".yaml", ".yml")
)
PROGRAMS = (
    "start/first-plan.md",
    "how-it-works/twin.md",
    "how-it-works/cluster.md",
    "how-it-works/surrogates.md",
    "guides/workload.md",
)


def test_the_command_line_reference_explains_every_flag_of_every_command() -> None:
    import typer

    from capplan.cli.app import app

    page = runpy.run_path(str(DOCS / "hooks.py"))["cli_page"]()
    sections = dict(re.findall(r"^## `(capplan [^`]+)`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))

    def check(command: object, path: str) -> None:
        for name, child in getattr(command, "commands", {}).items():
            check(child, f"{path} {name}")
        if not getattr(command, "commands", None):
            rows = dict(re.findall(r"^\| `([^`]+)` \| ([^|]*) \|", sections[path], re.MULTILINE))
            flags = [flag for each in command.params for flag in each.opts if flag.startswith("--")]  # type: ignore[attr-defined]
            explained = " ".join(rows)
            assert [flag for flag in flags if flag != "--help" and flag not in explained] == []

    check(typer.main.get_command(app), "capplan")


@pytest.mark.parametrize("name", ["WorkloadFile", "Plan", "Profile"])
def test_every_key_of_a_document_is_described(name: str) -> None:
    import capplan.spec

    schema = getattr(capplan.spec, name).model_json_schema()
    parts = [schema, *schema["$defs"].values()]
    missing = [
        key
        for part in parts
        for key, value in part.get("properties", {}).items()
        if "description" not in value
    ]
    assert missing == []


def test_links_of_top_level_pages_exist() -> None:
    for page in (
        ROOT / "README.md",
        ROOT / "ARCHITECTURE.md",
        ROOT / "CHANGELOG.md",
        ROOT / "examples" / "README.md",
    ):
        targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        local = [target for target in targets if "://" not in target]
        assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_command_line_reference_names_environment_variables() -> None:
    page = runpy.run_path(str(DOCS / "hooks.py"))["cli_page"]()
    (row,) = re.findall(r"^\| `--admin-api-key[^|]*\|([^|]*)\|", page, re.MULTILINE)
    assert "`CAPPLAN_ADMIN_API_KEY`" in row


def test_no_tracked_file_has_a_merge_conflict() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    marker = re.compile(r"^(<<<<<<<|=======|>>>>>>>)( |$)", re.MULTILINE)
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in TEXT and path.is_file() and marker.search(path.read_text(encoding="utf-8")):
            found.append(name)
    assert found == []


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_programs_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        if "workers=" not in block:  # worker processes need a main module
            exec(block, names)
