import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
from typer.testing import CliRunner, Result

from capplan.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
Run: TypeAlias = Callable[..., Result]
Process: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run() -> Run:
    """Run a command in this process; an error that is not reported as such fails the test."""

    def invoke(*arguments: object) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="capplan")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def process() -> Process:
    """Run a command in a process of its own."""

    def start(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(arguments), env=environment(), capture_output=True, text=True, timeout=300
        )

    return start


def command(arguments: Sequence[object]) -> list[str]:
    """Return the command line of a capplan process."""
    return [sys.executable, "-m", "capplan", *map(str, arguments)]


def environment() -> dict[str, str]:
    """Return an environment in which a process finds this checkout from any folder."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def error_line(result: Result) -> str:
    """Return the one line that a refused command prints."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("compiling the digital twin")]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]
