"""Limits on files and simulations are options before the command."""

from pathlib import Path

import pytest

from tests.cli.conftest import Run, error_line
from tests.cli.examples import small_plan, write_inputs


@pytest.mark.parametrize(
    ("flags", "words", "rule"),
    [
        (
            ("--max-adapters", "3"),
            ("simulate", "workload.yaml", "--max-loras", "2"),
            "at most 3 adapters; capplan --max-adapters",
        ),
        (
            ("--max-duration-s", "10"),
            ("simulate", "workload.yaml", "--max-loras", "2", "--duration", "20"),
            "at most 10 seconds; capplan --max-duration-s",
        ),
        (("--max-instances", "1"), ("explain", "plan.json"), "at most 1 instances; capplan --max-instances"),
        (("--max-instances", "1"), ("plan", "workload.yaml"), "gpus: must be at most 1 instances"),
        (("--max-trace-rows", "0"), ("profiles",), "--max-trace-rows: must be a whole number >= 1"),
        (
            ("--max-duration-s", "1e10"),
            ("profiles",),
            "--max-duration-s: must be a number of seconds above 0",
        ),
    ],
)
def test_each_limit_is_an_option_of_the_command_line(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    words: tuple[str, ...],
    rule: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    small_plan().to_json("plan.json")
    assert rule in error_line(run(*flags, *words))
    assert run("profiles").exit_code == 0  # a limit ends with its command
