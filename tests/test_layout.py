import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINKED = ("cli", "datasets", "models", "profiling", "twin")
OUTSIDE = (".ci", "benchmarks", "docs", "examples", "tests")
TEXT_SUFFIXES = {".cfg", ".csv", ".json", ".md", ".out", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
MACHINE_PATH = re.compile(r"(?<![\w.$}~-])/(?:work|root|home|Users)/")


def real_files(*folders: str) -> Iterator[Path]:
    """Files below the folders; rglob does not enter the links, so each file comes once."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def table_names(page: str) -> list[str]:
    """Return the names in back quotes in the first column of the tables of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)


def packages() -> set[str]:
    found = real_files("capplan", *LINKED)
    return {f"{path.parent.relative_to(ROOT)}/" for path in found if path.name == "__init__.py"}


def declared_dependencies() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return {re.split(r"[<>=!~;\[ ]", requirement)[0] for group in groups for requirement in group}


def test_map_names_every_package_and_the_folders_outside_once_and_no_other() -> None:
    outside = {f"{name}/" for name in OUTSIDE}
    assert sorted(table_names("map.md")) == sorted(packages() | outside)
    assert all((ROOT / folder).is_dir() for folder in outside)


def test_every_dependency_is_explained_and_every_explained_one_is_declared() -> None:
    assert set(table_names("dependencies.md")) == declared_dependencies()


@pytest.mark.parametrize("folder", LINKED)
def test_side_folder_is_tied_in_by_a_relative_link(folder: str) -> None:
    link = ROOT / "capplan" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder).is_symlink()


def test_no_file_names_a_path_of_one_machine() -> None:
    top = (path for path in ROOT.iterdir() if path.is_file())
    offenders = [
        str(path.relative_to(ROOT))
        for path in (*top, *real_files("capplan", *LINKED, *OUTSIDE))
        if (path.suffix in TEXT_SUFFIXES or path.name in ("Makefile", "run"))
        and MACHINE_PATH.search(path.read_text(encoding="utf-8"))
    ]
    assert offenders == []


def test_constraints_pin_exactly_what_the_tests_install() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    pinned = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["bench"], "torch"]
    assert {re.split(r"[<>=!~;\[ ]", name)[0].lower() for name in wanted} - pinned == set()
    assert "triton" not in pinned


@pytest.mark.parametrize("name", ["llvmlite", "numba", "pydantic", "torch", "typer"])
def test_what_a_new_release_may_break_is_bounded_by_the_tested_one(name: str) -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["engine"]])
    (allowed,) = (each.specifier for each in declared if each.name == name)
    major, minor = Version(pins[name]).release[:2]
    assert pins[name] in allowed
    assert f"{major}.{minor + 1}" not in allowed
    assert f"| `{name}` | {major}.{minor + 1} |" in (DOCS / "dependencies.md").read_text(encoding="utf-8")
