"""Fast subsets of the hostile inputs of commands, of exports, and of the faults at writes.

All of them: ``python -m tests.fuzz.commands``, ``.exports`` and ``.write_faults``.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, environment
from tests.cli.examples import small_plan
from tests.fuzz.commands import cases
from tests.fuzz.exports import FIELDS, TEXTS, checked_export, documents, prepare

pytestmark = pytest.mark.fuzz


def ended_without_a_fault(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_2000_inputs_of_commands_and_110_exports() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))
    assert len(names) >= 2000
    assert len(FIELDS) * len(TEXTS) >= 110


def test_hostile_inputs_end_in_one_line_in_bounded_time_and_memory() -> None:
    ended_without_a_fault("tests.fuzz.commands", "--every", "50")


def test_hostile_plans_are_refused_or_exported_as_they_are(tmp_path: Path) -> None:
    prepare(tmp_path)
    base = small_plan().model_dump(mode="json")
    results = [checked_export(document, tmp_path) for _, document in documents(base, TEXTS[::4])]
    assert [fault for result in results for fault in result.faults] == []
    assert any(result.refused for result in results)
    assert not all(result.refused for result in results)


def test_a_fault_at_any_write_of_a_command_leaves_the_old_file_or_the_new_one() -> None:
    ended_without_a_fault("tests.fuzz.write_faults", "--only", "profile")
