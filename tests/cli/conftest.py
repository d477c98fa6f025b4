import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
from typer.testing import CliRunner, Result

from capplan.cli.app import app
from tests.cli.examples import small_plan, write_inputs

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


@pytest.fixture
def workload_yaml(tmp_path: Path) -> Path:
    """Return a workload file, with its profile beside it."""
    return write_inputs(tmp_path)


@pytest.fixture
def plan_json(tmp_path: Path) -> Path:
    """Return the file of a verified plan."""
    small_plan().to_json(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.fixture
def profile(workload_yaml: Path) -> Path:
    """Return the profile of the workload."""
    return workload_yaml.with_name("profile.json")


def command(arguments: Sequence[object]) -> list[str]:
    """Return the command line of a capplan process."""
    return [sys.executable, "-m", "capplan", *map(str, arguments)]


def environment() -> dict[str, str]:
    """Return an environment in which a process finds this checkout from any folder."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def interrupted(words: Sequence[object], has_begun: Callable[[], bool]) -> "subprocess.CompletedProcess[str]":
    """Press Ctrl-C in a process of a command once it has begun, and return how it ended."""
    pipe = subprocess.PIPE
    started = subprocess.Popen(command(words), env=environment(), stdout=pipe, stderr=pipe, text=True)
    deadline = time.monotonic() + 120
    while not has_begun() and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    stdout, stderr = started.communicate(timeout=60)
    assert started.returncode == 130, stderr
    assert "Traceback" not in stderr
    return subprocess.CompletedProcess(started.args, started.returncode, stdout, stderr)


def error_line(result: Result) -> str:
    """Return the one line that a refused command prints."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("compiling the ")]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]
