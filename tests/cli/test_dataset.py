"""`capplan dataset generate`: data that a kill at any moment does not change."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from capplan.models.training import read_tables
from tests.cli.conftest import Process, Run, command, environment, error_line

pytestmark = pytest.mark.long


def asked(profile: Path, folder: Path, *more: object) -> tuple[object, ...]:
    """Return a command for twenty scenarios of some seconds."""
    short = ("--scenarios", 20, "--duration", 5, "--workers", 1)
    return ("dataset", "generate", profile, "-o", folder, *short, *more)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("design", ["paper-grid", "space-filling", "near-starvation"])
def test_a_dataset_is_made_and_told_of(run: Run, profile: Path, tmp_path: Path, design: str) -> None:
    made = run(*asked(profile, tmp_path / "data", "--design", design, "--seed", 3, "--json"))
    assert made.exit_code == 0, made.stderr
    document = json.loads(made.stdout)
    assert document.pop("directory") == str(tmp_path / "data")
    assert document == json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert document["asked"]["design"] == design
    assert document["asked"]["seed"] == 3
    shown = run(*asked(profile, tmp_path / "data", "--design", design, "--seed", 3))
    assert shown.stdout.endswith(f"written to {tmp_path / 'data'}\n")
    assert f"{document['answered']['rows']}" in shown.stdout


def test_equal_seeds_give_equal_bytes_and_nothing_tells_who_made_them(
    run: Run, process: Process, profile: Path, tmp_path: Path
) -> None:
    assert run(*asked(profile, tmp_path / "one")).exit_code == 0
    elsewhere = process(*asked(profile, tmp_path / "two", "--workers", 2))
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
    everything = b"".join(bytes_of(tmp_path / "one").values())
    assert os.uname().nodename.encode() not in everything
    assert str(tmp_path).encode() not in everything


def test_a_training_table_can_be_read_from_it(run: Run, profile: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    made = run("dataset", "generate", profile, "-o", folder, "--scenarios", 240, "--duration", 60, "--json")
    table = read_tables([folder])
    assert len(table) == json.loads(made.stdout)["answered"]["rows"]
    assert 0 < table.starved.sum() < len(table)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--seed", 1), "manifest.json: seed is 0 there; give the same, or a new folder (got 1)"),
        (("--duration", 6), "manifest.json: duration_s is 5.0 there"),
        (("--scenarios", 19), "manifest.json: scenarios is 20 there, and cannot fall (got 19)"),
        (("--design", "paper-grid"), "manifest.json: design is 'space-filling' there"),
        (("--design", "grid"), "--design: must be one of paper-grid, space-filling, near-starvation"),
        (("--duration", 0), "--duration: must be a finite number > 0"),
        (("-o", "/nowhere/data"), "/nowhere/data: cannot be written: No such file"),
    ],
)
def test_a_mistake_is_one_line(
    run: Run, profile: Path, tmp_path: Path, arguments: tuple[object, ...], told: str
) -> None:
    folder = tmp_path / "data"
    assert run(*asked(profile, folder)).exit_code == 0
    before = bytes_of(folder)
    assert told in error_line(run(*asked(profile, folder, *arguments)))
    assert bytes_of(folder) == before


@pytest.mark.long
def test_a_run_killed_at_random_moments_ends_in_the_same_bytes(profile: Path, tmp_path: Path) -> None:
    """SIGKILL leaves a process no time to stop its workers."""

    def started(folder: Path) -> subprocess.Popen[bytes]:
        more = ("--scenarios", 384, "--duration", 30, "--workers", 2)
        return subprocess.Popen(
            command(asked(profile, folder, *more)),
            env=environment(),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    folder = tmp_path / "killed"
    chance = random.Random(0)
    for files in range(1, 4):  # the manifest, then a shard more each time, of three
        run = started(folder)
        while run.poll() is None and len(list(folder.glob("[mp]*"))) < files:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.5))
        run.send_signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
        _require_no_survivors(run.pid)
    for end in (folder, tmp_path / "undisturbed"):
        assert started(end).wait() == 0
    assert bytes_of(folder) == bytes_of(tmp_path / "undisturbed")


def _require_no_survivors(group: int) -> None:
    """Wait until no process of a group is left: workers end with the process that they work for."""
    deadline = time.monotonic() + 60.0
    while _alive(group):
        if time.monotonic() > deadline:
            os.killpg(group, signal.SIGKILL)
            pytest.fail("workers outlive the process that started them")
        time.sleep(0.05)


def _alive(group: int) -> bool:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
