"""Studies of Optuna on disk that survive a kill: a journal of JSON lines, with nothing that runs on load."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import optuna
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend

from capplan.errors import InputError

_FIRST: Final = b'{"op_code":'


class _HeldAlready:
    """No lock of Optuna's own: what a killed process left of it would hold up the next for half a minute."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


@contextmanager
def quiet_storage(path: Path | None) -> Iterator[BaseStorage]:
    """Give the storage of a study, with Optuna's messages silenced meanwhile.

    Parameters
    ----------
    path
        The journal, made if there is none; None: in memory.

    Raises
    ------
    InputError
        When the journal cannot be opened, is damaged, or another process is at it.
    """
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        if path is None:
            yield InMemoryStorage()
            return
        with _held(path) as file:
            _drop_half_line(file, path)
            try:
                # Optuna does not export the class that its locks derive from.
                backend = JournalFileBackend(str(path), lock_obj=_HeldAlready())  # type: ignore[arg-type]
                storage = JournalStorage(backend)
                storage.get_all_studies()  # reads the journal
            except (ValueError, LookupError, TypeError, AttributeError, AssertionError):
                # Whatever replaying lines that are none of Optuna's may raise.
                raise InputError("damaged; delete it to start anew", location=str(path)) from None
            yield storage
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def _held(path: Path) -> Iterator[BinaryIO]:
    """Give the journal, locked until the end of the block or of the process."""
    try:
        file = path.open("a+b")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", location=str(path)) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError("another search is at it", location=str(path)) from None
        yield file


def _drop_half_line(file: BinaryIO, path: Path) -> None:
    """Cut off what a kill left half written, since Optuna would append to it; other files stay."""
    file.seek(0)
    written = file.read()
    if written[: len(_FIRST)] != _FIRST[: len(written)]:
        raise InputError("no journal of a search", location=str(path))
    lines = written.splitlines(keepends=True)
    if lines and not _is_whole(lines[-1]):
        file.truncate(sum(map(len, lines[:-1])))


def _is_whole(line: bytes) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
