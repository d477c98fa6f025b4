"""Durable writes: a file or folder at a path is the old one or the new one, also after a crash.

The new one is written beside the old one under an unused name, flushed to the disk, and put in its place by
one call of the operating system. What a killed process leaves are hidden files with the ending .tmp.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from capplan.errors import InputError
from capplan.spec.files import error_reason

_READ_AND_RUN: Final = 0o755
_LONGEST_STEM: Final = 100  # characters; file systems allow names of 255 bytes
_WITHOUT_SYNC: Final = (errno.EINVAL, errno.ENOTSUP)  # file systems that cannot flush a folder
_WITHOUT_EXCHANGE: Final = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_AT_WORKING_DIRECTORY: Final = -100  # AT_FDCWD of <fcntl.h>
_EXCHANGE: Final = 2  # RENAME_EXCHANGE of <linux/fs.h>


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
        beside = unused_beside(target)
        try:
            with beside.open("xb") as file:
                file.write(data)
            replace_durably(beside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise InputError(f"cannot be written: {error_reason(error)}", location=os.fspath(path)) from None


def unused_beside(target: Path) -> Path:
    """Return an unused hidden path in the folder of ``target``: ``.NAME.RANDOM.tmp``."""
    return target.with_name(f".{target.name[:_LONGEST_STEM]}.{secrets.token_hex(8)}.tmp")


def replace_durably(beside: Path, target: Path) -> None:
    """Move a complete file to ``target``, which may exist, and flush both to the disk."""
    sync(beside)
    beside.replace(target)
    sync(target.parent)


def write_folder_atomic(target: Path, files: Mapping[str, str], executable: frozenset[str]) -> None:
    """Write a folder so that readers see the old one or the new one, never a part.

    Parameters
    ----------
    target : Path
        The folder, no link; one that exists is replaced.
    files : mapping of str to str
        Text of each file, by its path within the folder.
    executable : frozenset of str
        Files that can be run.

    Raises
    ------
    OSError
        When the folder cannot be written; an existing one is then left as it was.
    """
    beside = unused_beside(target)
    try:
        _fill(beside, files, executable)
        if target.is_dir():
            _exchange(beside, target)  # afterwards the old folder is beside the new one
        else:
            beside.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _fill(folder: Path, files: Mapping[str, str], executable: frozenset[str]) -> None:
    folder.mkdir()
    folders = {folder}
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
        if name in executable:
            file.chmod(_READ_AND_RUN)
        sync(file)
        folders.add(file.parent)
    for each in folders:
        sync(each)


def _exchange(new: Path, old: Path) -> None:
    """Exchange two folders, in one call if the operating system has one."""
    call = _renameat2()
    here = _AT_WORKING_DIRECTORY
    if call is not None and call(here, os.fsencode(new), here, os.fsencode(old), _EXCHANGE) == 0:
        return
    code = errno.ENOSYS if call is None else ctypes.get_errno()
    if code not in _WITHOUT_EXCHANGE:
        raise OSError(code, os.strerror(code))
    aside = unused_beside(old)
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise
    aside.rename(new)


@cache
def _renameat2() -> Any:
    """Return the C library's function, which Python has not; None without one."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return call


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    try:
        number = os.open(path, os.O_RDONLY)
    except PermissionError:  # a folder that may be written, but not listed
        return
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _WITHOUT_SYNC:
            raise
    finally:
        os.close(number)
