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
import stat
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from capplan.errors import InputError
from capplan.spec.files import error_reason

_READ_AND_RUN: Final = 0o755
_NEW_FILE: Final = 0o666  # less the umask
_PRIVATE: Final = 0o600
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

    The data is written beside the target and renamed; see :func:`create_beside`. A device, or a pipe that is
    read, is written to directly.

    Raises
    ------
    InputError
        When the file cannot be written; an existing file is then left as it was.
    """
    try:
        target = resolved_output(path)
        if target.exists() and not target.is_file():
            # A FIFO that nobody reads would block.
            flags = os.O_WRONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
            with os.fdopen(os.open(target, flags), "wb") as file:
                os.set_blocking(file.fileno(), True)
                file.write(data)
            return
        beside = create_beside(target)
        try:
            beside.write_bytes(data)
            replace_durably(beside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise InputError(f"cannot be written: {error_reason(error)}", location=os.fspath(path)) from None


def resolved_output(path: str | os.PathLike[str]) -> Path:
    """Return the path that an output is written to: a link stays, and what it points to is replaced.

    Raises
    ------
    OSError
        For links in a loop.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target


def create_beside(target: Path) -> Path:
    """Create an empty hidden file in the folder of ``target``, to be filled and put in its place.

    It has mode and owner of an existing target, as far as this user may set the owner, from the start.
    Other hard links to the target keep the old contents.

    Raises
    ------
    OSError
        If it cannot be created, or the target exists and is no regular file, which a rename would replace.
    """
    before = target.stat() if target.exists() else None
    if before is not None and not stat.S_ISREG(before.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    beside = unused_beside(target)
    mode = _NEW_FILE if before is None else _PRIVATE
    number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        if before is not None:
            with contextlib.suppress(PermissionError):
                os.fchown(number, before.st_uid, before.st_gid)
            os.fchmod(number, stat.S_IMODE(before.st_mode))
    finally:
        os.close(number)
    return beside


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
