"""Output files and folders of commands: checked before the work, written completely or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from capplan.errors import InputError
from capplan.reports import finite
from capplan.spec import error_reason, resolved_output, write_folder_atomic, write_text_atomic


def require_writable_files(*paths: str | None) -> None:
    """Check that files can be written at the paths that are given, and leave nothing behind."""
    for path in (each for each in paths if each is not None):
        with _write_errors(path):
            target = resolved_output(path)
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
    """Check that a folder can be made at ``path``, or with ``force`` replaced.

    One with other names at its top than `known`, those that an earlier run may have left, is never replaced.
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
    """Write a folder completely, or leave an existing one as it was."""
    with _write_errors(path):
        write_folder_atomic(Path(os.path.realpath(path)), files, executable)


@contextlib.contextmanager
def _write_errors(path: str) -> Iterator[None]:
    """Raise the errors of the operating system as input errors about ``path``."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise InputError(f"cannot be written: {error_reason(error)}", location=path) from None
