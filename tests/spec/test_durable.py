"""Files and folders are the old ones or the new ones, whatever fails and whenever the process is killed."""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capplan import InputError
from capplan.spec import _files as durable
from capplan.spec import write_bytes_atomic, write_folder_atomic

CALLS = ("fsync", "replace", "rename", "mkdir", "chmod")
"""Calls of the operating system that a fault is injected into."""

OLD = {"launch/a.sh": "old a", "launch/b.sh": "old b", "routing.json": "old"}
NEW = {"launch/a.sh": "new a", "routing.json": "new"}


class Fault:
    """The n-th of the calls raises an error, or kills the process; counts them all."""

    def __init__(self, number: int, effect: Callable[[], None]) -> None:
        self.number, self.effect, self.seen = number, effect, 0

    def installed(self, patch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            original = getattr(os, name)

            def call(*arguments: Any, original: Any = original, **named: Any) -> Any:
                self.seen += 1
                if self.seen == self.number:
                    self.effect()
                return original(*arguments, **named)

            patch.setattr(os, name, call)


def raising(code: int) -> Callable[[], None]:
    def effect() -> None:
        raise OSError(code, os.strerror(code))

    return effect


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def write_file(folder: Path) -> None:
    write_bytes_atomic(folder / "plan.json", b"new")


def write_folder(folder: Path) -> None:
    write_folder_atomic(folder / "out", NEW, frozenset(["launch/a.sh"]))


def prepared(folder: Path) -> None:
    (folder / "plan.json").write_bytes(b"old")
    write_folder_atomic(folder / "out", OLD, frozenset())


def is_old_or_new(folder: Path) -> bool:
    return (folder / "plan.json").read_bytes() in (b"old", b"new") and contents(folder / "out") in (OLD, NEW)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("write", [write_file, write_folder])
def test_an_error_at_any_call_leaves_the_old_or_the_new_and_nothing_else(
    tmp_path: Path, write: Callable[[Path], None], code: int
) -> None:
    failed = 0
    for number in range(1, 100):
        folder = tmp_path / str(number)
        folder.mkdir()
        prepared(folder)
        fault = Fault(number, raising(code))
        with pytest.MonkeyPatch.context() as patch:
            fault.installed(patch)
            try:
                write(folder)
            except (InputError, OSError):
                failed += 1
        assert is_old_or_new(folder)
        if fault.seen < number:
            break
        assert sorted(path.name for path in folder.iterdir()) == ["out", "plan.json"]
    assert failed >= 3


@pytest.mark.parametrize("write", [write_file, write_folder])
def test_a_kill_at_any_call_leaves_the_old_or_the_new(tmp_path: Path, write: Callable[[Path], None]) -> None:
    killed = 0
    for number in range(1, 100):
        folder = tmp_path / str(number)
        folder.mkdir()
        prepared(folder)
        process = os.fork()
        if process == 0:
            with pytest.MonkeyPatch.context() as patch:
                Fault(number, lambda: os.kill(os.getpid(), signal.SIGKILL)).installed(patch)
                write(folder)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        assert is_old_or_new(folder)
        if status == 0:
            break
        killed += 1
        write(folder)  # what the killed process left is not in the way
    assert killed >= 3


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    prepared(tmp_path)
    process = os.fork()
    if process == 0:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        try:
            write_bytes_atomic(tmp_path / "plan.json", b"x" * 1000)
        except InputError:
            os._exit(2)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plan.json"]
    assert (tmp_path / "plan.json").read_bytes() == b"old"


def test_the_data_is_on_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(number: int) -> None:
        seen.append(Path(f"/proc/self/fd/{number}").readlink().name)
        fsync(number)

    def recorded_replace(old: Any, new: Any) -> None:
        seen.append("replace")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    write_file(tmp_path)
    data, name, folder = seen
    assert data.startswith(".plan.json.")
    assert (name, folder) == ("replace", tmp_path.name)


def test_names_of_killed_processes_are_not_in_the_way(tmp_path: Path) -> None:
    stale = tmp_path / f".plan.json.{os.getpid()}.tmp"
    stale.write_text("left by a process of the same number")
    write_file(tmp_path)
    assert (tmp_path / "plan.json").read_bytes() == b"new"


def test_a_name_of_255_characters_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    write_bytes_atomic(path, b"data")
    assert path.read_bytes() == b"data"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems rename twice")
def test_the_folder_is_there_at_any_time(tmp_path: Path) -> None:
    prepared(tmp_path)
    stop, missing = threading.Event(), []

    def watch() -> None:
        while not stop.is_set():
            if not (tmp_path / "out" / "routing.json").exists():
                missing.append(1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(50):
        write_folder(tmp_path)
    stop.set()
    watcher.join()
    assert not missing


def test_without_an_exchange_folders_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_renameat2", lambda: None)
    prepared(tmp_path)
    write_folder(tmp_path)
    assert contents(tmp_path / "out") == NEW
    assert os.access(tmp_path / "out" / "launch" / "a.sh", os.X_OK)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plan.json"]
