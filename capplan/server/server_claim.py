"""Claim of a server to its name in the registry, and to its folder of adapters: one running server has both.

Two servers of one name would take each other's copies for their own. A running server renews its claim in the
registry. Another one that comes up under the same name watches the claim for some renewals, and is refused if
it is renewed. No clock of another machine is read. A server that restarts on its folder is the same owner,
and comes up at once.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import BinaryIO, Final

from capplan.errors import InputError
from capplan.registry import AdapterRegistry, RegistryUnavailableError
from capplan.registry.adapter import RegisteredServer

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None  # type: ignore[assignment]

OWNER_FILE: Final = ".capplan-server"
"""File of a folder of adapters with the identity of its server, locked while that runs."""
_MISSED: Final = 3
"""Renewals that a server must miss to lose its name."""
_LOOKS_PER_RENEWAL: Final = 10
_IDENTITY: Final = re.compile(rb"[0-9a-f]{32}")
_WITHOUT_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)  # some network file systems


class OwnedFolder:
    """Folder of adapters of one running server, which has it until `close`.

    Attributes
    ----------
    owner
        Identity of the server: host, and a number that is kept in the folder.

    Raises
    ------
    InputError
        If another running server has the folder.
    OSError
        If its file cannot be written.
    """

    def __init__(self, root: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file: BinaryIO = os.fdopen(os.open(root / OWNER_FILE, flags, 0o600), "r+b")
        try:
            self._lock(root)
            self.owner = f"{socket.gethostname()}/{self._identity()}"
        except BaseException:
            self._file.close()
            raise

    def _lock(self, root: Path) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rule = "must be the folder of one running server, and another one has it; --lora-root sets it"
            raise InputError(rule, str(root), "lora_root") from None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise

    def _identity(self) -> str:
        found = self._file.read()
        if not _IDENTITY.fullmatch(found):
            found = secrets.token_hex(16).encode()
            self._file.seek(0)
            self._file.truncate()
            self._file.write(found)
            self._file.flush()
        return found.decode()

    def close(self) -> None:
        """Leave the folder to the next server."""
        self._file.close()


class ServerClaim:
    """Claim of a server to its name in the registry.

    Parameters
    ----------
    renew_s
        Time between renewals, the same for all servers.
    """

    def __init__(
        self, registry: AdapterRegistry, server: RegisteredServer, folder: OwnedFolder, renew_s: float
    ) -> None:
        self._registry = registry
        self._server = server
        self._folder = folder
        self._renew_s = renew_s
        self._renewed_s = -math.inf

    def take(self) -> None:
        """Register the server; blocks for some renewals if another one that may be gone has the name.

        Raises
        ------
        InputError
            If another running server has the name.
        RegistryUnavailableError
            If the registry cannot be used.
        """
        name, url, owner = self._server.name, self._server.url, self._folder.owner
        other = self._registry.announce(name, url, owner)
        if other is None:
            self._renewed_s = time.monotonic()
            return
        until_s = time.monotonic() + _MISSED * self._renew_s
        while time.monotonic() < until_s:
            time.sleep(self._renew_s / _LOOKS_PER_RENEWAL)
            if self._registry.announce(name, url, owner) != other:
                break
        if self._registry.announce(name, url, owner, unrenewed=other) is not None:
            where = f"{other.url} on host {other.owner.partition('/')[0]}"
            raise self._refusal(f"{where} has it")
        self._renewed_s = time.monotonic()

    def keep(self) -> None:
        """Renew the claim if that is due, between the parts of work that takes long.

        Raises
        ------
        InputError
            If another server has the name now.
        RegistryUnavailableError
            If the registry cannot be used.
        """
        if time.monotonic() - self._renewed_s < self._renew_s:
            return
        if not self.renew():
            raise self._refusal("another one has taken it")
        self._renewed_s = time.monotonic()

    def _refusal(self, reason: str) -> InputError:
        rule = (
            f"must be the name of one running server in {self._registry.location}, and {reason}; "
            "--server-name sets another one"
        )
        return InputError(rule, self._server.name, "server_name")

    def renew(self) -> bool:
        """Renew the claim; return False if another server has the name now.

        Raises
        ------
        RegistryUnavailableError
            If the registry cannot be used.
        """
        return self._registry.renew(self._server.name, self._server.url, self._folder.owner)

    def leave(self) -> None:
        """Leave name and folder to the next server."""
        with contextlib.suppress(RegistryUnavailableError):
            self._registry.leave(self._server.name, self._folder.owner)
        self._folder.close()
