"""Settings of a server: its limits, and its part in a distributed adapter pool."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from capplan.errors import InputError
from capplan.processes import open_file_limit
from capplan.spec import is_printable

_MIB: Final = 2**20
_BYTES_PER_TOKEN: Final = 16
"""Of a request body: a token id in JSON takes up to 8 bytes, a token of escaped text up to 12."""
_BUFFERED_BODIES: Final = 64
_MOST_CONNECTIONS: Final = 8192
"""Default cap: an idle connection costs about 10 kB."""
_RESERVED_FILES: Final = 64
"""For the engine core, libraries, and adapters being loaded."""
OPEN_ADAPTERS: Final = 1000
"""Adapter numbers reserved if adapters come at run time; each costs some dozen bytes."""
_MAX_NAME_LENGTH: Final = 256
NAME_RULE: Final = f"must be 1 to {_MAX_NAME_LENGTH} printable characters"


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server, the same for a single server and a router.

    Parameters
    ----------
    max_body_bytes
        Maximum size of a request body; None: the larger of 1 MiB and 16 bytes per token of ``max_model_len``.
    body_timeout_s
        Maximum time for a whole body.
    max_buffered_bytes
        Maximum size of all requests together that are not complete, or not passed on yet; the oldest
        incomplete ones are refused first. None: 64 bodies, at least 64 MiB.
    max_header_bytes, max_header_count
        Maximum size of request line and headers, and number of headers.
    header_timeout_s
        Maximum time for complete headers, and for the rest of a body that is refused.
    client_buffer_bytes
        Size of a client's buffer. A response that fits into it has ended for the engine, whether or not its
        client reads.
    send_timeout_s
        Maximum time for a client to read three quarters of its full buffer; it is disconnected then.
    max_connections
        Maximum number of open connections; beyond it the one that has waited longest for a request gets 503,
        or is closed if it is idle. None: by the limit of open files, at most 8192.
    chat_template_timeout_s
        Maximum time in which the model's chat template turns a conversation into a prompt.
    lora_timeout_s
        Maximum time to load or unload an adapter.

    Raises
    ------
    InputError
        If a limit is out of range.
    """

    max_body_bytes: int | None = None
    body_timeout_s: float = 60.0
    max_buffered_bytes: int | None = None
    max_header_bytes: int = 64 * 1024
    max_header_count: int = 100
    header_timeout_s: float = 15.0
    client_buffer_bytes: int = 512 * 1024
    send_timeout_s: float = 30.0
    max_connections: int | None = None
    chat_template_timeout_s: float = 2.0
    lora_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if limit.name.endswith("_s"):
                if not 0 < value < math.inf:
                    raise InputError("must be a finite number > 0", value, limit.name)
            elif value is not None and value < 1:
                raise InputError("must be >= 1", value, limit.name)
        if (self.max_buffered_bytes or math.inf) < (self.max_body_bytes or _MIB):
            rule = f"must be at least max_body_bytes, {self.max_body_bytes or _MIB}"
            raise InputError(rule, self.max_buffered_bytes, "max_buffered_bytes")

    def body_bytes(self, max_model_len: int) -> int:
        """Return the maximum size of a request body."""
        return self.max_body_bytes or max(_MIB, _BYTES_PER_TOKEN * max_model_len)

    def buffered_bytes(self, max_model_len: int) -> int:
        """Return the maximum size of all incomplete requests together."""
        return self.max_buffered_bytes or _BUFFERED_BODIES * max(_MIB, self.body_bytes(max_model_len))

    def connections(self, files_each: int = 1) -> int:
        """Return the maximum number of connections.

        Parameters
        ----------
        files_each
            Open files of the server per connection: a router has a second one, to the instance.
        """
        available = max(1, (open_file_limit() - _RESERVED_FILES) // files_each)
        return min(available, self.max_connections or _MOST_CONNECTIONS)


def is_name(name: str) -> bool:
    """Return whether a model or adapter may have a name, which metrics, logs and terminals show."""
    return 1 <= len(name) <= _MAX_NAME_LENGTH and is_printable(name)


@dataclass(frozen=True)
class PoolSettings:
    """Settings of a server that shares adapters with others.

    Parameters
    ----------
    registry
        Adapter registry: SQLite file or URL.
    server_name
        Name in the registry; None: host and port.
    server_url
        Where other servers reach this one, an http(s) URL; None: where it listens.
    announce_host
        Host at which other servers reach the port where this one listens, instead of `server_url`.
    allow_location
        URLs of hosts, such as ``https://10.0.0.9:9000``, from which adapters' locations are fetched.
    base_model
        Base model in the registry of the adapters to serve; None: the name of the server's.
    max_stored_gib
        Limit of the files of all adapters that the server stores.
    """

    registry: str
    server_name: str | None = None
    server_url: str | None = None
    base_model: str | None = None
    max_stored_gib: float = 64.0
    announce_host: str | None = None
    allow_location: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("registry", "server_name", "server_url", "announce_host"):
            if getattr(self, name) == "":
                raise InputError("must not be empty", location=name)
        if self.server_url is not None and not _is_reachable(self.server_url):
            rule = (
                "must be an http(s) URL at which other servers reach this one, such as http://10.0.0.3:8000"
            )
            raise InputError(rule, self.server_url, "server_url")
        if self.announce_host is not None and not _is_reachable(_url(self.announce_host, 1)):
            rule = "must be a host at which other servers reach this machine, such as 10.0.0.3"
            raise InputError(rule, self.announce_host, "announce_host")
        for url in self.allow_location:
            if not _is_reachable(url) or urlsplit(url).path not in ("", "/"):
                rule = "must be an http(s) URL of a host, such as https://10.0.0.9:9000"
                raise InputError(rule, url, "allow_location")
        if not 0 < self.max_stored_gib < float("inf"):
            raise InputError("must be a finite number > 0", self.max_stored_gib, "max_stored_gib")

    def url_of(self, listening: str) -> str:
        """Return where other servers reach a server that listens at a URL."""
        if self.announce_host is None:
            return self.server_url or listening
        return _url(self.announce_host, urlsplit(listening).port or 0)

    @property
    def has_url(self) -> bool:
        """Whether other servers reach this one elsewhere than where it listens."""
        return self.server_url is not None or self.announce_host is not None

    @property
    def max_stored_bytes(self) -> int:
        """Limit in bytes."""
        return int(self.max_stored_gib * 2**30)


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Parameters
    ----------
    model_name
        Name of the base model.
    host, port
        Address; port 0 is any free one.
    api_key
        Required as ``Authorization: Bearer KEY`` for all paths under ``/v1/``; None: not required.
    admin_api_key
        Required instead to load and unload adapters.
    lora_root
        Folder of adapters that may be loaded at run time; None: none can be loaded or unloaded.
    pool
        Adapter registry whose adapters are served on demand, and stored below `lora_root`.
    max_requests
        Maximum number of prompts in the engine, running and waiting; further ones get 429.
    drain_timeout_s
        Time for running requests after SIGTERM.
    limits
        Limits of requests and connections.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    admin_api_key: str | None = None
    lora_root: Path | None = None
    pool: PoolSettings | None = None
    max_requests: int = 1024
    drain_timeout_s: float = 30.0
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise InputError("must be a port from 0 to 65535", self.port, "port")
        if not 0 <= self.drain_timeout_s < float("inf"):
            raise InputError("must be a finite number >= 0", self.drain_timeout_s, "drain_timeout_s")
        for name in ("api_key", "admin_api_key"):
            if getattr(self, name) == "":
                raise InputError("must not be empty", location=name)
        if self.admin_api_key is not None and self.admin_api_key == self.api_key:
            rule = "must be another key than --api-key, which all clients have"
            raise InputError(rule, location="admin_api_key")
        if not (self.model_name and is_printable(self.model_name)):  # of any length: it may be a path
            raise InputError("must be printable characters, not empty", self.model_name, "served_model_name")
        if self.lora_root is not None and not self.lora_root.is_dir():
            raise InputError("must be a folder", str(self.lora_root), "lora_root")
        if self.lora_root is not None and self.admin_api_key is None:
            rule = "requires --admin-api-key: the key of those who may load and unload adapters"
            raise InputError(rule, location="lora_root")
        if self.pool is not None and self.lora_root is None:
            rule = "requires --lora-root: the folder of adapters that this server stores"
            raise InputError(rule, location="registry")
        if self.pool is not None and not self.pool.has_url and _is_wildcard(self.host):
            rule = "is required if --host is a wildcard address, which other servers cannot use"
            raise InputError(rule, self.host, "server_url")


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host, by its notation."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_reachable(url: str) -> bool:
    """Return whether a URL may be that of a server on another machine; paths of files are appended to it."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:  # a port that is none, or half of an IPv6 address
        return False
    is_plain = is_printable(url) and not (" " in url or parts.query or parts.fragment or "@" in parts.netloc)
    return parts.scheme in ("http", "https") and bool(host) and is_plain and not _is_wildcard(host or "")


def _is_wildcard(host: str) -> bool:
    """Return whether a host is the address 0.0.0.0 or ::, in any notation."""
    with contextlib.suppress(OSError):
        return not any(socket.inet_aton(host))
    with contextlib.suppress(OSError):
        return not any(socket.inet_pton(socket.AF_INET6, host))
    return False
