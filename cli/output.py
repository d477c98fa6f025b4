"""Output files and folders of commands: checked before the work, written completely or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from capplan.cli.console import finite
from capplan.errors import InputError
from capplan.spec.files import error_reason, write_text_atomic

_READ_AND_RUN: Final = 0o755


def require_writable_files(*paths: str | None) -> None:
    """Check that files can be written at the paths that are given, and leave nothing behind.

    Raises
    ------
    InputError
        If one is a folder, or its folder is missing or not writable.
    """
    for path in (each for each in paths if each is not None):
        with _write_errors(path):
            target = Path(os.path.realpath(path))
            if target.is_dir():
                raise InputError("cannot be written: it is a directory", location=path)
            if target.exists() and not target.is_file():  # a device or a pipe, which opening might block
                if not os.access(target, os.W_OK):
                    raise InputError("cannot be written: Permission denied", location=path)
            else:
                tempfile.TemporaryFile(dir=target.parent).close()


def write_json(path: str | Path, document: Any) -> None:
    """Write a document as indented JSON; numbers that are not finite become null."""
    write_text_atomic(path, json.dumps(finite(document), indent=2) + "\n")


def require_writable_folder(path: str, known: frozenset[str], *, force: bool) -> None:
    """Check that a folder can be made at ``path``.

    Parameters
    ----------
    path : str
        The folder.
    known : frozenset of str
        Names at its top that an earlier run may have left; a folder with others is never replaced.
    force : bool
        Whether an earlier run's folder may be replaced.

    Raises
    ------
    InputError
        If it exists and may not be replaced, or its parent is missing or not writable.
    """
    with _write_errors(path):
        target = Path(path)
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise InputError("must be a directory, or nothing yet", location=path)
        if target.is_dir():
            if not force:
                raise InputError("exists already; --force replaces it", location=path)
            foreign = sorted(entry.name for entry in target.iterdir() if entry.name not in known)
            if foreign:
                raise InputError("holds a file that no export wrote, so it is left alone", foreign[0], path)
        tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent).close()


def write_folder(path: str, files: Mapping[str, str], executable: frozenset[str]) -> None:
    """Write a folder so that readers see the old one or the new one, never a part.

    Parameters
    ----------
    path : str
        The folder; one that exists is replaced.
    files : mapping of str to str
        Text of each file, by its path within the folder.
    executable : frozenset of str
        Files that can be run.

    Raises
    ------
    InputError
        When the folder cannot be written; an existing one is then left as it was.
    """
    with _write_errors(path):
        target = Path(os.path.realpath(path))
        workshop = Path(tempfile.mkdtemp(prefix=f".{target.name[:100]}.", dir=target.parent))
        try:
            _fill(workshop / "new", files, executable)
            _swap(workshop / "new", target, workshop / "old")
        finally:
            shutil.rmtree(workshop, ignore_errors=True)


@contextlib.contextmanager
def _write_errors(path: str) -> Iterator[None]:
    """Raise the errors of the operating system as input errors about ``path``."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise InputError(f"cannot be written: {error_reason(error)}", location=path) from None


def _fill(folder: Path, files: Mapping[str, str], executable: frozenset[str]) -> None:
    folder.mkdir()
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
        if name in executable:
            file.chmod(_READ_AND_RUN)


def _swap(new: Path, target: Path, old: Path) -> None:
    """Put ``new`` in the place of ``target``; what was there is at ``old`` then, or back if this fails."""
    try:
        if target.is_dir():
            target.rename(old)
        new.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            with contextlib.suppress(OSError):
                old.rename(target)
        raise
