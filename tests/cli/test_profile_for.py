"""`capplan profile for`: the best profile, its error, and the command that makes it, or the nearest names."""

import json
import shlex
from pathlib import Path

import pytest

from capplan import load_profile
from tests.cli.conftest import Run, error_line


def test_a_published_profile_wins_and_needs_no_command(run: Run) -> None:
    name, error = run("profile", "for", "h100-64g", "llama-3.1-8b").stdout.splitlines()
    assert name.startswith("h100-64g/llama-3.1-8b/vllm-0.8.5: published, shipped; source: ")
    assert error.startswith("error: 1.58 % on 10,757 samples, 1.63 % on samples left out (")


def test_a_composed_profile_that_ships_is_written(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    result = run("profile", "for", "l40s", "meta-llama/Llama-3.1-8B-Instruct", "--tp", 2, "-o", path)
    assert "composed, shipped" in result.stdout
    assert "error: mean " in result.stdout
    assert result.stdout.rstrip().endswith(f"written to {path}")
    written = load_profile(path)
    assert written == load_profile("l40s/llama-3.1-8b/vllm-0.15.1-tp2")


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (("l4", "phi-4", "--tp", "2"), "roofline"),
        (("l4", "qwen3-8b", "--dtype", "fp8"), "roofline"),
        (("h100-80g", "mistral-7b"), "composed"),
        (("h100-80g", "gemma-7b", "--dtype", "fp8"), "composed"),
    ],
)
def test_the_command_makes_the_profile_that_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], kind: str
) -> None:
    if kind == "composed":
        pytest.importorskip("aiconfigurator_core", reason="needs the operator tables (extra `measured`)")
    monkeypatch.chdir(tmp_path)
    found = json.loads(run("profile", "for", *given, "-o", "own.json", "--json").stdout)
    assert (found["kind"], found["shipped"]) == (kind, False)
    program, *words = shlex.split(found["command"])
    assert program == "capplan"
    assert run(*words).exit_code == 0
    assert Path("profile.json").read_bytes() == Path("own.json").read_bytes()


def test_a_roofline_says_why_it_is_none_better(run: Run) -> None:
    assert "no operators were measured on this GPU" in run("profile", "for", "l4", "phi-4", "--tp", 2).stdout


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (("h100", "llama-3.1-8b"), "GPU: must be a known GPU, such as h100-64g, h100-80g"),
        (("h100-80g", "llama-3.1-7b"), "MODEL: must be a known model, such as llama-3.1-70b, llama-3.1-8b"),
        (("h100-80g", "phi-4", "--dtype", "int5"), "--dtype: must be one of "),
        (("a10", "llama-3.1-70b"), "131.4 GiB of weights per GPU do not fit"),
    ],
)
def test_what_is_not_known_is_one_line(run: Run, given: tuple[str, ...], rule: str) -> None:
    assert rule in error_line(run("profile", "for", *given))
