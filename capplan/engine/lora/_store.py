"""Files of adapters below a folder, by digest: received beside, checked, and renamed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import threading
from pathlib import Path
from typing import BinaryIO, Final

from capplan.engine.lora._adapter import PeftFolder
from capplan.errors import InputError
from capplan.registry import ADAPTER_FILES, digest_of, file_digest
from capplan.spec import ADAPTER_CONFIG, MAX_CONFIG_BYTES, WEIGHTS_FILE, open_regular, sync

MAX_ADAPTER_BYTES: Final = 2**34
"""Of an adapter whose bytes the registry does not know."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_HIDDEN = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")


class AdapterStore:
    """Adapters that a server stores: a folder for each below the root, named by its digest.

    A folder of this name is complete. What a killed process leaves are hidden folders, which the next start
    removes. Other folders below the root are left alone.

    Parameters
    ----------
    root
        Folder, with all links resolved.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        for path in root.iterdir():
            if _HIDDEN.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def digests(self) -> set[str]:
        """Return the digests of all stored adapters."""
        found = (path for path in self._root.iterdir() if _DIGEST.fullmatch(path.name))
        return {path.name for path in found if path.is_dir() and not path.is_symlink()}

    def __contains__(self, digest: str) -> bool:
        path = self._root / digest
        return bool(_DIGEST.fullmatch(digest)) and path.is_dir() and not path.is_symlink()

    def size_bytes(self, digest: str) -> int:
        """Return the bytes of a stored adapter; files that are missing have none."""
        found = 0
        for name in ADAPTER_FILES:
            with contextlib.suppress(OSError):
                found += (self._root / digest / name).lstat().st_size
        return found

    def is_intact(self, digest: str) -> bool:
        """Return whether an adapter is stored and its bytes, which are read, have its digest.

        Raises
        ------
        OSError
            If the files cannot be opened for a reason that says nothing of them, such as too many open files.
        """
        if digest not in self:
            return False
        hashes = {}
        for name in ADAPTER_FILES:
            path = self._root / digest / name
            try:
                is_regular = stat.S_ISREG(path.lstat().st_mode)
            except FileNotFoundError:
                is_regular = False
            if not is_regular:
                return False
            try:
                with self.open(digest, name) as file:
                    hashes[name] = file_digest(file)[1]
            except InputError as error:
                raise OSError(errno.EAGAIN, str(error)) from None
            except OSError as error:
                if error.errno == errno.EIO:
                    return False
                raise
        return digest_of(hashes) == digest

    def folder(self, digest: str) -> PeftFolder:
        """Return a stored adapter; no link below the root is followed when it is read."""
        return self._peft(digest, digest)

    def open(self, digest: str, name: str) -> BinaryIO:
        """Open a file of a stored adapter.

        Raises
        ------
        InputError
            If there is none.
        """
        return open_regular(self._root / digest / name, self._root, f"{digest}/{name}")

    def receive(self, digest: str, size_bytes: int | None) -> IncomingAdapter:
        """Return a new adapter to write, which must be stored or discarded.

        Parameters
        ----------
        size_bytes
            Bytes of both files; None: at most `MAX_ADAPTER_BYTES`.
        """
        path = self._hidden(digest)
        return IncomingAdapter(path, self._root / digest, self._peft(path.name, digest), size_bytes)

    def delete(self, digest: str) -> None:
        """Delete an adapter; files that are being read stay readable."""
        path = self._hidden(digest)
        with contextlib.suppress(FileNotFoundError):
            (self._root / digest).rename(path)
            shutil.rmtree(path, ignore_errors=True)

    def _hidden(self, digest: str) -> Path:
        return self._root / f".{digest}.{secrets.token_hex(8)}.tmp"

    def _peft(self, folder: str, name: str) -> PeftFolder:
        path = self._root / folder
        return PeftFolder(name, path / ADAPTER_CONFIG, path / WEIGHTS_FILE, self._root)


class IncomingAdapter:
    """Adapter that is being received; its files are written one after the other.

    Attributes
    ----------
    peft
        Its files.
    size_bytes
        Bytes received.
    is_stored
        Whether it is in its place.
    """

    def __init__(self, path: Path, target: Path, peft: PeftFolder, size_bytes: int | None) -> None:
        self.peft = peft
        self.size_bytes = 0
        self._path = path
        self._target = target
        self._left_bytes = MAX_ADAPTER_BYTES if size_bytes is None else size_bytes
        self._hashes = {name: hashlib.sha256() for name in ADAPTER_FILES}
        self._config_bytes = 0
        self._lock = threading.Lock()
        self._is_discarded = False
        self.is_stored = False

    def write(self, name: str, data: bytes) -> None:
        """Append bytes to a file.

        Raises
        ------
        InputError
            If the adapter becomes larger than the registry says, or its config than a config may be.
        OSError
            If they cannot be written, or the adapter is discarded.
        """
        self._left_bytes -= len(data)
        if name == ADAPTER_CONFIG:
            self._config_bytes += len(data)
        if self._left_bytes < 0 or self._config_bytes > MAX_CONFIG_BYTES:
            raise InputError("must not be larger than the registry says", location=name)
        with self._lock:
            if self._is_discarded:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            self._path.mkdir(exist_ok=True)
            with (self._path / name).open("ab") as file:
                file.write(data)
        self._hashes[name].update(data)
        self.size_bytes += len(data)

    def require_digest(self) -> None:
        """Check the digest of the files.

        Raises
        ------
        InputError
            If it is another one.
        """
        found = digest_of({name: each.hexdigest() for name, each in self._hashes.items()})
        if found != self._target.name:
            raise InputError(f"must have the digest {self._target.name}", found, "files")

    def store(self) -> None:
        """Flush the files to the disk and put the folder in its place; one that is discarded is left."""
        with self._lock:
            if self._is_discarded:
                return
            for name in ADAPTER_FILES:
                sync(self._path / name)
            sync(self._path)
            try:
                self._path.rename(self._target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                shutil.rmtree(self._path, ignore_errors=True)  # stored meanwhile: the same bytes
            self.is_stored = True
            sync(self._target.parent)

    def discard(self) -> None:
        """Delete what has not been stored; a thread that still writes or stores it is waited for."""
        with self._lock:
            self._is_discarded = True
            shutil.rmtree(self._path, ignore_errors=True)
