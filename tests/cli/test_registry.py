import json
from pathlib import Path

import pytest

from capplan import load_workload
from tests.cli.conftest import Run, error_line
from tests.spec.test_registry import peft_folder


@pytest.fixture
def registry(run: Run, tmp_path: Path) -> Path:
    """A registry with an adapter by folder and one by reference."""
    file = tmp_path / "fleet.db"
    folder = peft_folder(tmp_path / "legal")
    assert run("registry", "add", f"legal={folder}", "--registry", file).stdout == f"1 adapter in {file}\n"
    reference = ("support=s3://bucket/support", "--rank", 16, "--base-model", "org/model")
    assert run("registry", "add", *reference, "--registry", file).exit_code == 0
    return file


def test_adapters_are_listed_and_shown(run: Run, registry: Path) -> None:
    legal, support = json.loads(run("registry", "list", "--registry", registry, "--json").stdout)
    assert (legal["name"], legal["rank"], legal["target_modules"]) == ("legal", 4, ["v_proj"])
    assert (support["location"], support["digest"]) == ("s3://bucket/support", None)
    table = run("registry", "list", "--registry", registry).stdout
    assert "all-linear" in table
    assert "v_proj" in table
    assert run("registry", "list", "--registry", registry, "--base-model", "x", "--json").stdout == "[]\n"
    shown = run("registry", "show", "legal", "--registry", registry).stdout
    assert legal["digest"] in shown
    assert (
        json.loads(run("registry", "show", "legal", "--registry", registry, "--json").stdout)["holders"] == {}
    )


def test_the_registry_can_come_from_the_environment(
    run: Run, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPPLAN_REGISTRY", str(registry))
    assert run("registry", "remove", "legal", "support").stdout == f"2 adapters removed from {registry}\n"
    assert run("registry", "list", "--json").stdout == "[]\n"


def test_a_workload_of_the_registry_can_be_loaded(run: Run, registry: Path, tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(
        "base_model: org/model\nprofile: p\nrequests: {prompt_tokens: {mean: 9}, output_tokens: {mean: 9}}\n"
        "adapters: {registry: fleet.db, rate_rps: 1}\n"
    )
    assert [adapter.name for adapter in load_workload(path).adapters] == ["legal", "support"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add", "x"], "must be NAME=LOCATION"),
        (["add", "x=s3://y"], "--rank: is required: s3://y is no folder"),
        (["add", "x=s3://y", "--rank", 8], "--base-model: is required"),
        (["add", "legal=s3://y", "--rank", 8, "--base-model", "m"], "is taken by another adapter"),
        (
            ["add", "x=s3://y", "--rank", 999, "--base-model", "m"],
            "rank: must be a whole number from 1 to 512",
        ),
        (["add", "x={folder}", "--rank", 8], "--rank: is read from the folder"),
        (["add", "x=s3://y", "--digest", "q", "--rank", 8, "--base-model", "m"], "must be a SHA-256"),
        (["show", "none"], "must be the name of an adapter in the registry"),
        (["remove", "none"], "must be the name of an adapter in the registry"),
        (["remove", "legal", "support", "legal"], "names of adapters: must be unique (got 'legal')"),
        (["remove"], "NAME: is required, or --server"),
        (["remove", "legal", "--server", "s"], "--server: does not go with NAME"),
        (["remove", "--server", "s"], "must be the name of a server"),
        (["list", "--server", "s"], "must be the name of a server"),
        (["list", "--registry", "none.db"], "none.db: is missing: 'capplan registry add' makes a registry"),
    ],
)
def test_a_fault_is_one_line(
    run: Run, registry: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    given = [str(word).format(folder=tmp_path / "legal") for word in words]
    chosen = [] if "--registry" in given else ["--registry", registry]
    before = run("registry", "list", "--registry", registry, "--json").stdout
    assert message in error_line(run("registry", *given, *chosen))
    assert run("registry", "list", "--registry", registry, "--json").stdout == before


def test_an_adapter_is_replaced_on_demand(run: Run, registry: Path) -> None:
    new = ("legal=s3://new", "--rank", 8, "--base-model", "org/model", "--replace", "--registry", registry)
    assert run("registry", "add", *new).exit_code == 0
    shown = json.loads(run("registry", "show", "legal", "--registry", registry, "--json").stdout)
    assert (shown["location"], shown["rank"]) == ("s3://new", 8)
