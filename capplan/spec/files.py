"""Reading and writing text files, with one-line errors."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from capplan.errors import InputError

MAX_BYTES: Final = 64 * 2**20  # a workload or plan beyond this is a mistake, not a document


def read_text(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a UTF-8 file, without a byte-order mark.

    Raises
    ------
    InputError
        When it is missing, a directory, unreadable, larger than ``max_bytes``, or not UTF-8.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise InputError(f"cannot be read: {reason(error)}", location=os.fspath(path)) from None
    if len(raw) > max_bytes:
        raise InputError(f"must not be larger than {max_bytes / 2**20:g} MiB", location=os.fspath(path))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError("must be UTF-8 text", location=f"{os.fspath(path)}:{line}") from None


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8; as :func:`write_bytes_atomic`."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"cannot be written: {error.reason}", location=os.fspath(path)) from None
    write_bytes_atomic(path, data)


def write_bytes_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` so that readers see the old file or the new one, never a part.

    The data is written beside the target and renamed. A device or a pipe is written to directly.

    Raises
    ------
    InputError
        When the file cannot be written; an existing file is then left as it was.
    """
    try:
        target = Path(os.path.realpath(path))  # a link stays a link, and what it points to is replaced
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        _write_and_rename(target, data)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be written: {reason(error)}", location=os.fspath(path)) from None


def _write_and_rename(target: Path, data: bytes) -> None:
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with beside.open("xb") as file:
            file.write(data)
        beside.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def reason(error: Exception) -> str:
    """Return why the operating system refused, in its own words."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
