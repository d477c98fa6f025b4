"""Transfers of adapters to this server: from other servers, from a URL, or from a folder."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Collection, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from capplan.engine.lora import IncomingAdapter
from capplan.errors import InputError, printable
from capplan.registry import ADAPTER_FILES
from capplan.server._adapters import ReaderThreads
from capplan.server._state import PEER_PATH, transfer_key
from capplan.spec import error_reason, open_regular, parse_json

_PART_BYTES: Final = 2**20
_MAX_ANSWER_BYTES: Final = 4096
_MAX_REASON: Final = 200
_HTTP: Final = ("http://", "https://")
_PORTS: Final = {"http": 80, "https": 443}


class TransferError(Exception):
    """A source does not deliver an adapter; the message says why."""


class _WriteError(Exception):
    """The adapter cannot be written here, for the reason of its cause; no fault of the source."""


@dataclass(frozen=True)
class TransferParams:
    """Times of transfers."""

    connect_timeout_s: float = 3.0
    stall_timeout_s: float = 5.0
    """Time without any bytes after which a source is given up."""
    max_transfers: int = 4
    """Transfers to a server at a time; further ones wait."""
    check_bytes_per_s: float = 5e7
    """Rate at which a server reads a copy to check it, at least; slower ones do not confirm their copies."""

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "stall_timeout_s", "max_transfers", "check_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise InputError("must be > 0", getattr(self, name), name)


@dataclass(frozen=True)
class Source:
    """Place that an adapter can be fetched from: URL of the folder, or its path on this machine.

    The name is that of a server in the registry, and empty for a location. The key is what a server requires
    for the adapter; None: none is sent.
    """

    kind: Literal["server", "location"]
    name: str
    at: str
    key: str | None = None

    def __str__(self) -> str:
        return f"server {self.name}" if self.kind == "server" else "its location"


def peer(server: str, url: str, digest: str, admin_key: str | None) -> Source:
    """Return the source of an adapter on another server."""
    key = None if admin_key is None else transfer_key(admin_key, digest)
    return Source("server", server, f"{url.rstrip('/')}{PEER_PATH}/{digest}", key)


def location(at: str) -> Source:
    """Return the source of an adapter at its location."""
    return Source("location", "", at.removeprefix("file://"))


def origin_of(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port of an HTTP URL; raise `ValueError` for another one, or with a user."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname or "@" in parts.netloc:
        raise ValueError("must be an http(s) URL without a user")
    port = _PORTS[parts.scheme] if parts.port is None else parts.port
    return parts.scheme, parts.hostname, port


class _Resolver(AbstractResolver):
    """Addresses of host names; those that no name of a store or server should have are left out.

    The addresses that are checked are those that are connected to: a name that changes its address between
    both (DNS rebinding) is no way around.
    """

    def __init__(self, kind: Literal["server", "location"]) -> None:
        self._kind = kind
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        may_be_loopback = self._kind == "server" or host == "localhost"
        found = [
            each
            for each in await self._resolver.resolve(host, port, family)
            if _is_public(each["host"], may_be_loopback)
        ]
        if not found:
            raise OSError(None, "its name has no address that is allowed")
        return found

    async def close(self) -> None:
        await self._resolver.close()


def _is_public(address: str, may_be_loopback: bool) -> bool:
    """Return whether an address may be that of a store or server."""
    found = ipaddress.ip_address(address.partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    if found.is_loopback:
        return may_be_loopback
    return not (found.is_link_local or found.is_multicast or found.is_unspecified)


class Fetcher:
    """HTTP client and threads of transfers; it belongs to the event loop.

    Folders are read in `readers`, files written in `threads`. `allowed_locations` are URLs of the hosts that
    locations may name.
    """

    def __init__(
        self,
        params: TransferParams,
        readers: ReaderThreads,
        threads: Executor,
        allowed_locations: Collection[str] = (),
    ) -> None:
        self._params = params
        self._readers = readers
        self._threads = threads
        self._allowed = {origin_of(url) for url in allowed_locations}
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def fetch(self, source: Source, adapter: IncomingAdapter, timeout_s: float) -> None:
        """Write the files of an adapter as a source has them.

        If the source does not deliver them, or more bytes than the registry says, raise `TransferError`, and
        if they cannot be written `OSError`.
        """
        with _reasons(self._params, timeout_s):
            async with asyncio.timeout(timeout_s):
                if source.at.startswith(_HTTP):
                    self._require_allowed(source)
                    for name in ADAPTER_FILES:
                        await self._download(source, name, adapter)
                elif "://" in source.at:
                    raise TransferError("it is neither a folder nor an http(s) URL")
                else:
                    await self._readers.run(lambda: _copy(Path(source.at), adapter))

    async def confirms(self, source: Source, size_bytes: int) -> bool | None:
        """Let a server check its copy; return whether it is intact, or None if the server does not tell."""
        headers = {} if source.key is None else {"Authorization": f"Bearer {source.key}"}
        timeout_s = self._params.stall_timeout_s + size_bytes / self._params.check_bytes_per_s
        timeout = aiohttp.ClientTimeout(timeout_s, self._params.connect_timeout_s)
        try:
            self._require_allowed(source)
            answer = self._connected(source.kind).post(
                source.at, headers=headers, timeout=timeout, allow_redirects=False
            )
            async with answer as response:
                found = parse_json((await response.content.read(_MAX_ANSWER_BYTES)).decode(), "answer")
                # Another server may listen at a former address.
                is_own = isinstance(found, dict) and found.get("server") == source.name
                return found.get("intact") is True if is_own and response.status == 200 else None
        except (aiohttp.ClientError, TransferError, TimeoutError, InputError, OSError, ValueError):
            return None

    def _require_allowed(self, source: Source) -> None:
        """Check the host of a URL: one of a location is named by the operator of this server."""
        scheme, host, port = origin_of(source.at)
        if source.kind == "location":
            if (scheme, host, port) not in self._allowed:
                shown = f"[{host}]" if ":" in host else host
                raise TransferError(f"--allow-location does not name {scheme}://{shown}:{port}")
            return
        with contextlib.suppress(ValueError):  # a name, which the resolver checks
            if not _is_public(host, may_be_loopback=True):
                raise TransferError(f"servers have no address such as {host}")

    async def _download(self, source: Source, name: str, adapter: IncomingAdapter) -> None:
        headers = {} if source.key is None else {"Authorization": f"Bearer {source.key}"}
        url = f"{source.at.rstrip('/')}/{quote(name)}"
        # A redirect leads to hosts that nobody has allowed.
        answer = self._connected(source.kind).get(url, headers=headers, allow_redirects=False)
        async with answer as response:
            if 300 <= response.status < 400:
                raise TransferError(f"status {response.status}: redirects are not followed")
            if response.status != 200:
                raise TransferError(f"status {response.status}")
            async for part in response.content.iter_chunked(_PART_BYTES):
                await asyncio.get_running_loop().run_in_executor(self._threads, _write, adapter, name, part)

    def _connected(self, kind: Literal["server", "location"]) -> aiohttp.ClientSession:
        if kind not in self._sessions:
            params = self._params
            self._sessions[kind] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=_Resolver(kind)),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(
                    total=None, connect=params.connect_timeout_s, sock_read=params.stall_timeout_s
                ),
            )
        return self._sessions[kind]

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()


def _copy(folder: Path, adapter: IncomingAdapter) -> None:
    for name in ADAPTER_FILES:
        with open_regular(folder / name, None, name) as file:
            while part := file.read(_PART_BYTES):
                _write(adapter, name, part)


def _write(adapter: IncomingAdapter, name: str, part: bytes) -> None:
    try:
        adapter.write(name, part)
    except OSError as error:
        raise _WriteError(error) from error


@contextlib.contextmanager
def _reasons(params: TransferParams, timeout_s: float) -> Iterator[None]:
    """Raise whatever keeps a source from delivering as `TransferError`, and errors of writing as they are."""
    try:
        yield
    except _WriteError as error:
        raise error.args[0] from None
    except aiohttp.ConnectionTimeoutError:
        raise TransferError(f"no connection within {params.connect_timeout_s:g} s") from None
    except aiohttp.SocketTimeoutError:
        raise TransferError(f"no bytes for {params.stall_timeout_s:g} s") from None
    except TimeoutError:
        raise TransferError(f"not complete within {timeout_s:.3g} s") from None
    except aiohttp.ClientError as error:
        reason = printable(" ".join(str(error).split()))[:_MAX_REASON]  # may quote what the source sends
        raise TransferError(f"the connection failed: {reason}") from None
    except InputError as error:
        raise TransferError(str(error)) from None
    except (OSError, ValueError) as error:
        raise TransferError(error_reason(error)) from None
