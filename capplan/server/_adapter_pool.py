"""Distributed adapter pool (LoRAServe, section IV-B), the part of one server.

Each adapter of the registry is stored on at least one server, once a server has fetched it. The first request
of an adapter at a server fetches it from a server that stores it, or else from its location. A server removes
its copy when its share of the adapter's requests is zero, they have ended, and another server has confirmed
that its own copy is intact.

A record in the registry is no proof of another copy: files may be broken, or their machine gone. The other
server therefore reads its copy and compares the digest, on demand. Then the registry removes this server from
the holders, in a transaction that finds the other one among them.

Two servers of one name would take each other's copies for their own, so that one running server has the name,
and its folder of adapters. It renews its claim in the registry. Another one that comes up under the same name
watches the claim for some renewals, and is refused if it is renewed. No clock of another machine is read. A
server that restarts on its folder is the same owner, and comes up at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import math
import os
import random
import re
import secrets
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeVar
from weakref import WeakValueDictionary

from prometheus_client.core import CounterMetricFamily
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.metrics_core import Metric

from capplan.engine.lora import AdapterStore, IncomingAdapter
from capplan.errors import InputError
from capplan.registry import (
    ADAPTER_FILES,
    AdapterRegistry,
    RegisteredAdapter,
    RegisteredServer,
    RegistryUnavailableError,
)
from capplan.server._adapters import ServedAdapters
from capplan.server._metrics import metric_family
from capplan.server._protocol import RETRY, ApiError, overloaded, unknown_model
from capplan.server._settings import PoolSettings, ServerSettings
from capplan.server._transfer import Fetcher, Source, TransferError, TransferParams, location, peer


class PoolCounters:
    """Counts of transfers by kind of source and outcome, of checks of own copies, and of removed copies."""

    def __init__(self) -> None:
        self.transfers: Counter[tuple[str, str]] = Counter()
        self.moved_bytes: Counter[str] = Counter()
        self.moved_s: dict[str, float] = {}
        self.checks = dict.fromkeys(("intact", "broken"), 0)
        self.removed = 0

    def on_transfer(self, kind: str, size_bytes: int, took_s: float) -> None:
        """Count a complete transfer."""
        self.transfers[kind, "done"] += 1
        self.moved_bytes[kind] += size_bytes
        self.moved_s[kind] = self.moved_s.get(kind, 0.0) + took_s

    def collect(self, copies: int, stored_bytes: int, max_bytes: int) -> Iterator[Metric]:
        """Yield the metrics; of the adapters that the server stores: number, bytes, and limit of these."""
        yield Gauge("capplan:adapters_stored", "Adapters stored by this server", copies)
        yield Gauge("capplan:adapters_stored_bytes", "Bytes of these adapters", stored_bytes)
        yield Gauge("capplan:adapters_stored_bytes_limit", "Limit of these bytes", max_bytes)
        outcomes = [(labels, float(count)) for labels, count in sorted(self.transfers.items())]
        help_text = "Transfers of adapters to this server"
        labels = ("source", "outcome")
        yield metric_family(CounterMetricFamily, "capplan:adapter_transfers", help_text, labels, outcomes)
        for counts, name, help_text in (
            (self.moved_bytes, "bytes", "Bytes of adapters transferred to this server"),
            (self.moved_s, "seconds", "Time of these transfers, with checks and writing"),
        ):
            rows = [((source,), float(count)) for source, count in sorted(counts.items())]
            name = f"capplan:adapter_transfer_{name}"
            yield metric_family(CounterMetricFamily, name, help_text, ("source",), rows)
        checks = [((outcome,), float(count)) for outcome, count in self.checks.items()]
        help_text = "Copies of this server whose bytes were compared with their digest"
        name = "capplan:adapter_copy_checks"
        yield metric_family(CounterMetricFamily, name, help_text, ("outcome",), checks)
        help_text = "Copies of adapters removed from this server"
        yield CounterMetricFamily("capplan:adapter_copies_removed", help_text, self.removed)


OWNER_FILE: Final = ".capplan-server"
"""File of a folder of adapters with the identity of its server, locked while that runs."""
_MISSED: Final = 3
"""Renewals that a server must miss to lose its name."""
_LOOKS_PER_RENEWAL: Final = 10
_IDENTITY: Final = re.compile(rb"[0-9a-f]{32}")
_WITHOUT_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)  # some network file systems


class OwnedFolder:
    """Folder of adapters of one running server, which has it until `close`; another one gets an `InputError`.

    The owner is the identity of the server: its host, and a number that is kept in the folder.
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
    """Claim of a server to its name in the registry; all servers renew theirs every `renew_s`."""

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

        If another running server has it, raise `InputError`.
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

        If another server has the name now, raise `InputError`.
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
        """Renew the claim; return False if another server has the name now."""
        return self._registry.renew(self._server.name, self._server.url, self._folder.owner)

    def leave(self) -> None:
        """Leave name and folder to the next server."""
        with contextlib.suppress(RegistryUnavailableError):
            self._registry.leave(self._server.name, self._folder.owner)
        self._folder.close()


_MIB: Final = 2**20
_MAX_CHECKS: Final = 2
"""Copies read at a time for other servers; loads of adapters need threads, too."""
_MAX_LOAD_CHECKS: Final = 4
"""Copies read at a time for loads; further loads wait. Transfers and checks need threads, too."""

Kept = Literal["with a share here", "in use", "without a confirmed other copy", "being loaded or removed"]
"""Why a copy stays."""
T = TypeVar("T")


@dataclass(frozen=True)
class PoolParams:
    """Times of a pool."""

    round_s: float = 5.0
    """Interval of rounds, which remove copies."""
    idle_s: float = 5.0
    """Time without a request after which an adapter whose share is zero may be removed."""
    registry_timeout_s: float = 5.0
    """Time to wait for a lock of the registry."""
    transfers: TransferParams = field(default_factory=TransferParams)
    renew_s: float = 5.0
    """Interval at which a server renews the claim to its name."""


@dataclass(frozen=True)
class PoolServer:
    """One server of a pool: name in the registry, URL for others, admin key of all, limit of its copies."""

    name: str
    url: str
    key: str | None
    max_bytes: int


class AdapterCopies:
    """Copies of a server; it belongs to the event loop.

    `stored` has the digest of each adapter that the server stores, by name. `missing` are adapters whose
    broken copy was removed, and that have not been stored again.
    """

    def __init__(
        self,
        own: PoolServer,
        registry: AdapterRegistry,
        store: AdapterStore,
        served: ServedAdapters,
        fetcher: Fetcher,
        threads: Executor,
        counters: PoolCounters,
    ) -> None:
        self._own = own
        self._registry = registry
        self._store = store
        self._served = served
        self._fetcher = fetcher
        self._threads = threads
        self._counters = counters
        self.stored: dict[str, str] = {}
        self.missing: set[str] = set()
        self._sizes: dict[str, int] = {}
        self._reserved_bytes = 0
        self._shares: dict[str, float] = {}
        self._used_s: OrderedDict[str, float] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._making_room = asyncio.Lock()
        self._checks = asyncio.Semaphore(_MAX_CHECKS)
        self._load_checks = asyncio.Semaphore(_MAX_LOAD_CHECKS)

    def reconcile(self, keep_name: Callable[[], None]) -> None:
        """Let registry and files agree: either may be ahead after a crash.

        `keep_name` renews the claim to the name between adapters, whose number is not bounded.
        """
        own = self._own
        digests = self._store.digests()
        for adapter in self._registry.adapters(server=own.name):
            if adapter.digest not in digests:
                keep_name()
                self._registry.lose(adapter.name, own.name)
        for digest in digests:
            keep_name()
            adapters = self._registry.with_digest(digest)
            for adapter in adapters:
                if own.name not in adapter.holders:  # each change empties the look-up caches of all servers
                    self._registry.hold(adapter.name, digest, own.name)
                self.stored[adapter.name] = digest
            if adapters:
                self._sizes[digest] = self._store.size_bytes(digest)
            else:
                self._store.delete(digest)

    @property
    def stored_bytes(self) -> int:
        return sum(self._sizes.values())

    def touch(self, name: str) -> None:
        """Note a request of an adapter."""
        self._used_s[name] = time.monotonic()
        self._used_s.move_to_end(name)

    def by_use(self) -> list[str]:
        """Return the stored adapters, those used longest ago first."""
        unused = [name for name in self.stored if name not in self._used_s]
        return unused + [name for name in self._used_s if name in self.stored]

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Set shares of the requests of adapters; others keep theirs."""
        self._shares |= shares

    def has_no_share(self, name: str) -> bool:
        """Return whether the share of an adapter has been set to zero."""
        return self._shares.get(name) == 0

    def _has_share(self, name: str) -> bool:
        return self._shares.get(name, 0.0) > 0.0

    def lock_of(self, digest: str) -> asyncio.Lock:
        """Return the lock of those who load or remove an adapter; it exists as long as one of them does.

        Nothing that other servers wait for may happen under it: their requests hold locks of theirs.
        """
        return self._locks.setdefault(digest, asyncio.Lock())

    async def in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        """Return what a function returns, in threads of the pool: a locked registry delays nothing else."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def has(self, digest: str) -> bool:
        """Return whether an intact copy is stored, by reading it; a broken one is discarded.

        Its lock must be held.
        """
        if not await self.in_thread(self._store.__contains__, digest):
            return False
        async with self._load_checks:
            intact = await self._is_intact(digest)
        if intact:
            return True
        await self.discard(digest)
        return False

    async def check(self, digest: str) -> bool:
        """Return whether an intact copy is stored, by reading it."""
        async with self._checks:
            return await self._is_intact(digest)

    async def _is_intact(self, digest: str) -> bool:
        intact = await self._served.readers.run(lambda: self._store.is_intact(digest))
        self._counters.checks["intact" if intact else "broken"] += 1
        return intact

    def add_bytes(self, digest: str, size_bytes: int) -> None:
        """Count the bytes of a copy that has just been stored."""
        self._sizes[digest] = size_bytes

    async def hold(self, name: str, digest: str) -> None:
        """Record a copy that is stored and intact; raise `InputError` if the registry has changed."""
        if digest not in self._sizes:
            self._sizes[digest] = await self.in_thread(self._store.size_bytes, digest)
        try:
            await self.in_thread(self._registry.hold, name, digest, self._own.name)
        except RegistryUnavailableError:
            raise
        except InputError:
            if digest not in self.stored.values():
                await self._delete(digest)
            raise
        self.stored[name] = digest
        self.missing.discard(name)

    async def discard(self, digest: str) -> None:
        """Remove a broken copy; the adapters that it was for are missing then. Its lock must be held.

        If the registry cannot be used, the copy stays.
        """

        def lose() -> set[str]:
            known = self._registry.with_digest(digest)
            held = {each.name for each in known if self._own.name in each.holders}
            for name in held:
                self._registry.lose(name, self._own.name)
            return held

        here = {name for name, each in self.stored.items() if each == digest}
        names = sorted(await self.in_thread(lose) | here)
        if names:
            _log.error("the copy of adapter %s is broken, and is removed", ", ".join(names))
        for name in names:
            self.stored.pop(name, None)
            self.missing.add(name)
            await self._served.withdraw(name)  # it may have been read when it was broken
        await self._delete(digest)

    async def _delete(self, digest: str) -> None:
        self._sizes.pop(digest, None)
        await self.in_thread(self._store.delete, digest)

    async def record_again(self) -> None:
        """Record the copies that the registry no longer has on record."""
        stored = dict(self.stored)

        def unrecorded() -> list[str]:
            known = {name: self._registry.find(name) for name in stored}
            return [
                name
                for name, each in known.items()
                if each is not None and each.digest == stored[name] and self._own.name not in each.holders
            ]

        for name in await self.in_thread(unrecorded):
            lock = self.lock_of(stored[name])
            if lock.locked():  # being loaded, which records it, or removed
                continue
            async with lock:
                if self.stored.get(name) == stored[name]:
                    await self.hold(name, stored[name])

    async def remove_unwanted(self, idle_s: float) -> None:
        """Remove copies whose share is zero, or whose bytes the registry does not know any more.

        The former stay for `idle_s` after the last request. The latter are served to no further requests,
        however recent the last one is.
        """
        stored, unresponsive = dict(self.stored), set[str]()

        def outdated() -> set[str]:
            known = {name: self._registry.find(name) for name in stored}
            return {name for name, each in known.items() if each is None or each.digest != stored[name]}

        unknown = await self.in_thread(outdated)
        for name in unknown:  # first all: each removal may take long
            await self._served.expire(name, stored[name])
        for name in stored:
            if name in unknown:
                await self._remove(name, stored[name], None)
            elif time.monotonic() - self._used_s.get(name, -math.inf) < idle_s:
                continue
            elif self.has_no_share(name):
                await self._release(name, stored[name], unresponsive)
        await self._remove_former()

    async def _remove_former(self) -> None:
        """Remove copies that were replaced by other ones of their adapters, when no request uses them."""
        for digest in self._sizes.keys() - self.stored.values():
            lock = self.lock_of(digest)
            if lock.locked():  # being loaded
                continue
            async with lock:
                if digest not in self.stored.values() and digest not in self._served.folders():
                    await self._delete(digest)
                    self._counters.removed += 1

    @asynccontextmanager
    async def room(self, size_bytes: int) -> AsyncIterator[None]:
        """Reserve room for a copy, until it is stored; remove other ones if there is not enough.

        An adapter that has a share here, is in use, or is not confirmed by another server, stays. If too few
        can be removed, raise 503.
        """
        if size_bytes > self._free_bytes:
            async with self._making_room:
                await self._make_room(size_bytes)
        self._reserved_bytes += size_bytes
        try:
            yield
        finally:
            self._reserved_bytes -= size_bytes

    @property
    def _free_bytes(self) -> int:
        return self._own.max_bytes - self.stored_bytes - self._reserved_bytes

    async def _make_room(self, size_bytes: int) -> None:
        unresponsive, kept = set[str](), Counter[str]()
        for name in self.by_use() if size_bytes <= self._own.max_bytes else ():
            if size_bytes <= self._free_bytes:
                return
            if (digest := self.stored.get(name)) is not None:
                kept[await self._release(name, digest, unresponsive) or ""] += 1
        if size_bytes > self._free_bytes:
            del kept[""]
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(kept.items())) or "none"
            most, free = self._own.max_bytes / _MIB, max(0, self._free_bytes) / _MIB
            message = (
                f"The adapter has {size_bytes / _MIB:.3f} MiB, and {free:.3f} of the {most:.3f} MiB for "
                f"adapters on this server are free; adapters that stay: {reasons}"
            )
            raise ApiError(503, message, "model", "storage", RETRY)

    async def _release(self, name: str, digest: str, unresponsive: set[str]) -> Kept | None:
        """Remove a copy if another server confirms its own; return why not, or None.

        Servers among `unresponsive` have not responded lately and are not asked; others are added.
        """
        if self._has_share(name):
            return "with a share here"
        if self.lock_of(digest).locked():
            return "being loaded or removed"
        keeper = await self._keeper(name, digest, unresponsive)
        if keeper is None:
            return "without a confirmed other copy"
        return await self._remove(name, digest, keeper)

    async def _keeper(self, name: str, digest: str, unresponsive: set[str]) -> str | None:
        """Return a server that has just confirmed its copy of an adapter; None if there is none."""
        adapter = await self.in_thread(self._registry.find, name)
        if adapter is None:
            return None
        others = [each for each in adapter.holders if each != self._own.name and each not in unresponsive]
        urls = await self.in_thread(self._registry.servers) if others else {}
        random.shuffle(others)
        for holder in others:
            if holder in urls:
                source = peer(holder, urls[holder], digest, self._own.key)
                confirmed = await self._fetcher.confirms(source, self._sizes.get(digest, 0))
                if confirmed:
                    return holder
                if confirmed is None:
                    unresponsive.add(holder)
        return None

    async def _remove(self, name: str, digest: str, keeper: str | None) -> Kept | None:
        """Remove a copy if no request uses it and `keeper` still holds one; return why not, or None.

        Without a keeper the registry does not know the copy any more.
        """
        lock = self.lock_of(digest)
        if lock.locked():  # a load that makes room holds another one
            return "being loaded or removed"
        async with lock:
            if keeper is not None and self._has_share(name):  # since it was asked
                return "with a share here"
            if self.stored.get(name) != digest or not await self._served.withdraw(name):
                return "in use"
            # First the registry: no server is sent here for files that are gone.
            if keeper is not None and not await self.in_thread(
                self._registry.release, name, self._own.name, keeper
            ):
                return "without a confirmed other copy"
            if self.stored.get(name) != digest:  # replaced meanwhile
                return "in use"
            del self.stored[name]
            self._used_s.pop(name, None)
            self._counters.removed += 1
            if digest not in self.stored.values():
                await self._delete(digest)
            return None


_MAX_LOADS: Final = 256
"""Adapters that are fetched, or wait for a transfer, at a time."""
_MAX_NAME: Final = 256
_FORMER_S: Final = 0.05
"""Time between looks for requests that use a former adapter of a name."""
_THREADS: Final = 8
"""For calls of the registry, and for files."""

_log = logging.getLogger(__name__)


class AdapterPool:
    """Adapters of a registry at one server, which listens at a URL; it belongs to the event loop.

    It closes registry and folder at its end.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        store: AdapterStore,
        served: ServedAdapters,
        settings: ServerSettings,
        url: str,
        folder: OwnedFolder,
        params: PoolParams,
    ) -> None:
        self._registry = registry
        self._store = store
        self._served = served
        pool = settings.pool or PoolSettings(registry.location)
        self._base_model = pool.base_model or settings.model_name
        self._timeout_s = settings.limits.lora_timeout_s
        self._params = params
        self._threads = ThreadPoolExecutor(_THREADS, "adapter-pool")
        self._fetcher = Fetcher(params.transfers, served.readers, self._threads, pool.allow_location)
        self._places = asyncio.Semaphore(params.transfers.max_transfers)
        self._own = PoolServer(
            pool.server_name or url.partition("://")[2],
            pool.url_of(url),
            settings.admin_api_key,
            pool.max_stored_bytes,
        )
        own = RegisteredServer(name=self._own.name, url=self._own.url)
        self._claim = ServerClaim(registry, own, folder, params.renew_s)
        self._has_name = True
        self._counters = PoolCounters()
        self._copies = AdapterCopies(
            self._own, registry, store, served, self._fetcher, self._threads, self._counters
        )
        self._unusable: dict[str, str] = {}
        self._broken: set[str] = set()
        self._causes: dict[str, str] = {}
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[object]] = set()
        self._claim.take()
        self._copies.reconcile(self._claim.keep)

    def start(self) -> None:
        """Remove copies, and renew the claim to the name, from now on."""
        self._spawn(self._run_rounds())
        self._spawn(self._keep_name())

    async def close(self) -> None:
        """End transfers, and close all connections."""
        tasks = [*self._loads.values(), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fetcher.close()
        await self._copies.in_thread(self._claim.leave)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._registry.close()

    async def require(self, name: str) -> None:
        """Serve an adapter, which is fetched if this server does not store it.

        Requests of the same adapter share one transfer, which goes on if they are cancelled. Raise 404 if the
        registry does not hold the adapter, 400 if it does not fit the server, 503 if it cannot be fetched.
        """
        if name in self._served:
            self._copies.touch(name)
            return
        if name not in self._loads and len(self._loads) >= _MAX_LOADS:
            raise overloaded("Too many adapters are being fetched")
        task = self._start_load(name)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # the server ends
                raise ApiError(503, "The server shuts down", code="shutting_down", headers=RETRY) from None
            raise

    def _start_load(self, name: str) -> asyncio.Task[None]:
        """Return the load of an adapter, which others may have started."""
        if name not in self._loads:
            task = self._loads[name] = asyncio.ensure_future(self._load(name))
            task.add_done_callback(lambda done: self._on_loaded(name, done))
        return self._loads[name]

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Run work until it ends, or the pool is closed."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _on_loaded(self, name: str, done: asyncio.Task[None]) -> None:
        del self._loads[name]
        # The exception is retrieved, or asyncio logs it if no request waits.
        error = None if done.cancelled() else done.exception()
        if isinstance(error, ApiError) and error.status_code < 500:  # no later load succeeds
            self._copies.missing.discard(name)

    async def _load(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                adapter, digest = await self._known(name)
                async with self._copies.lock_of(digest):
                    if not await self._copies.has(digest):
                        async with self._copies.room(adapter.size_bytes or 0):
                            size_bytes = await self._fetch(adapter, digest)
                        self._copies.add_bytes(digest, size_bytes)
                    await self._copies.hold(name, digest)
                    await self._serve(name, digest)
                    self._copies.touch(name)
        except RegistryUnavailableError as error:
            raise _unavailable(error) from None
        except InputError as error:  # the registry has changed meanwhile
            message = f"The adapter has changed in the registry: {error.rule}"
            raise ApiError(503, message, "model", "adapter_changed", RETRY) from None
        except TimeoutError:
            if self._served.is_outdated(name):
                message = "Requests still use the former version of the adapter"
                raise ApiError(503, message, "model", "adapter_changed", RETRY) from None
            message = f"The adapter could not be fetched within {self._timeout_s:g} s"
            raise ApiError(503, message, "model", "timeout", RETRY) from None
        except OSError as error:
            message = f"The adapter cannot be stored: {error.strerror}"
            raise ApiError(503, message, "model", "storage", RETRY) from None

    async def _serve(self, name: str, digest: str) -> None:
        """Serve a stored adapter, after the requests that use a former one of its name have ended."""
        folder = self._store.folder(digest)
        while not await self._served.serve(name, folder, self._copies.by_use()):
            await asyncio.sleep(_FORMER_S)

    async def _known(self, name: str) -> tuple[RegisteredAdapter, str]:
        """Return an adapter of the registry that this server can serve, and its digest."""
        if not self._has_name:
            message = "Another server has the name of this one, which fetches no adapters any more"
            raise ApiError(503, message, "model", "server_name_taken", RETRY)
        adapter = await self._copies.in_thread(self._registry.find, name) if len(name) <= _MAX_NAME else None
        if adapter is None:
            raise unknown_model(name)
        if adapter.base_model != self._base_model:
            message = f"The adapter is for {adapter.base_model}, and this server serves {self._base_model}"
            raise ApiError(400, message, "model", "other_base_model")
        if adapter.digest is None:
            message = "The registry has no digest of the adapter, so that it cannot be fetched"
            raise ApiError(503, message, "model", "no_digest")
        if adapter.digest in self._unusable:
            raise self._refusal(name, adapter.digest)
        return adapter, adapter.digest

    def _refusal(self, name: str, digest: str) -> ApiError:
        message = self._unusable[digest].replace(digest, name)  # its folder, unknown to clients
        return ApiError(400, message, "model", "unusable_adapter")

    async def _fetch(self, adapter: RegisteredAdapter, digest: str) -> int:
        """Store an adapter from the first source that delivers its bytes; return their number."""
        sources = await self._sources(adapter, digest)
        until_s = time.monotonic() + self._timeout_s
        causes: dict[str, list[str]] = {}
        for at, source in enumerate(sources):
            async with self._places:
                timeout_s = (until_s - time.monotonic()) / (len(sources) - at)
                found = await self._fetch_from(source, adapter, digest, timeout_s)
            if isinstance(found, int):
                self._log_causes(adapter.name, causes)
                return found
            causes.setdefault(found, []).append(str(source))
            if source.kind == "server":  # its copy may be broken
                self._spawn(self._fetcher.confirms(source, adapter.size_bytes or 0))
        self._log_causes(adapter.name, causes)
        message = f"None of {len(sources)} sources delivers the adapter {adapter.name!r}"
        raise ApiError(503, message, "model", "adapter_unavailable", RETRY)

    def _log_causes(self, name: str, causes: Mapping[str, Sequence[str]]) -> None:
        """Log which sources do not deliver an adapter, unless the last line was the same."""
        line = "; ".join(f"{', '.join(sorted(names))}: {cause}" for cause, names in sorted(causes.items()))
        if line not in ("", self._causes.pop(name, "")):
            _log.warning("adapter %s is not delivered by %s", name, line)
        if line:
            self._causes[name] = line

    async def _fetch_from(
        self, source: Source, adapter: RegisteredAdapter, digest: str, timeout_s: float
    ) -> int | str:
        """Store an adapter from a source; return its bytes, or why the source has not delivered it.

        If the bytes are those that the registry knows, and cannot be served or stored, raise `ApiError`.
        """
        begin_s = time.monotonic()
        async with self._receiving(digest, adapter.size_bytes) as incoming:
            try:
                await self._fetcher.fetch(source, incoming, timeout_s)
                incoming.require_digest()
            except (TransferError, InputError) as error:
                self._counters.transfers[source.kind, "failed"] += 1
                return str(error)
            try:
                await self._served.readers.run(lambda: self._served.check(incoming.peft))
            except InputError as error:
                self._counters.transfers[source.kind, "unusable"] += 1
                self._unusable[digest] = str(error)
                raise self._refusal(adapter.name, digest) from None
            async with self._copies.room(incoming.size_bytes if adapter.size_bytes is None else 0):
                await self._served.readers.run(incoming.store)
        self._counters.on_transfer(source.kind, incoming.size_bytes, time.monotonic() - begin_s)
        return incoming.size_bytes

    @contextlib.asynccontextmanager
    async def _receiving(self, digest: str, size_bytes: int | None) -> AsyncIterator[IncomingAdapter]:
        """Yield a new adapter to write; unless it is stored within the context, nothing is left of it."""
        incoming = self._store.receive(digest, size_bytes)
        try:
            yield incoming
        finally:
            if not incoming.is_stored:
                await self._copies.in_thread(incoming.discard)

    async def _sources(self, adapter: RegisteredAdapter, digest: str) -> list[Source]:
        """Return the servers that store an adapter, in random order, and its location."""
        urls = await self._copies.in_thread(self._registry.servers)
        holders = [name for name in adapter.holders if name != self._own.name and name in urls]
        random.shuffle(holders)
        return [
            *(peer(name, urls[name], digest, self._own.key) for name in holders),
            location(adapter.location),
        ]

    async def open_file(self, digest: str, name: str) -> BinaryIO:
        """Open a file of a stored adapter for another server; 404 if registry or server do not have it."""
        missing = ApiError(404, "This server stores no such file", code="not_found")
        if name not in ADAPTER_FILES:
            raise missing
        try:
            known = await self._copies.in_thread(self._registry.with_digest, digest)
            if not known:
                raise missing
            return await self._copies.in_thread(self._store.open, digest, name)
        except RegistryUnavailableError as error:
            raise _unavailable(error) from None
        except InputError:  # removed meanwhile
            raise missing from None

    async def check(self, digest: str) -> dict[str, object]:
        """Return whether the copy of an adapter is intact, by reading it, and the name of this server.

        A broken copy is removed, and fetched again unless the share of its adapter is zero. If the copy
        cannot be read, raise 503.
        """
        try:
            known = await self._copies.in_thread(self._registry.with_digest, digest)
            is_intact = bool(known) and await self._copies.check(digest)
        except RegistryUnavailableError as error:
            raise _unavailable(error) from None
        except OSError as error:
            raise ApiError(503, f"The copy cannot be read: {error.strerror}", code="storage") from None
        if known and not is_intact:
            self._spawn(self._repair(digest))
        return {"server": self._own.name, "intact": is_intact}

    async def _repair(self, digest: str) -> None:
        """Remove a broken copy, and fetch it again for the adapters that have a share or requests here.

        Without the name nothing is removed: the record in the registry is that of the server that has it.
        """
        try:
            async with self._copies.lock_of(digest):
                is_intact = await self._copies.check(digest)  # another load may have replaced it
                if not is_intact and self._has_name:
                    await self._copies.discard(digest)
        except (ApiError, InputError, OSError) as error:
            self._broken.add(digest)
            _log.warning("a broken copy is not removed: %s", error)
            return
        self._broken.discard(digest)
        self._fetch_missing()

    def _fetch_missing(self) -> None:
        """Fetch the adapters whose broken copy was removed, and that have a share or requests here."""
        for name in sorted(self._copies.missing):
            if name in self._served or not self._copies.has_no_share(name):
                self._start_load(name)
            else:
                self._copies.missing.discard(name)

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Set shares of the requests of adapters; copies of those with a share of zero are removed."""
        self._copies.set_shares(shares)

    async def _run_rounds(self) -> None:
        while True:
            await asyncio.sleep(self._params.round_s)
            try:
                await self.remove_copies()
                await self.record_copies()
            except (ApiError, InputError, OSError) as error:  # the next round tries again
                _log.warning("copies of adapters are not removed or recorded: %s", error)
            await self.repair_copies()

    async def _keep_name(self) -> None:
        """Renew the claim to the name until another server has it, which came while this one did not run."""
        while self._has_name:
            await asyncio.sleep(self._params.renew_s)
            try:
                self._has_name = await self._copies.in_thread(self._claim.renew)
            except RegistryUnavailableError as error:  # the next renewal tries again
                _log.warning("the server name is not renewed: %s", error)
        _log.error("another server has the name %s in the registry; --server-name sets one", self._own.name)

    async def remove_copies(self) -> None:
        """Remove copies whose share is zero, or whose bytes the registry does not know any more."""
        if self._has_name:
            await self._copies.remove_unwanted(self._params.idle_s)

    async def record_copies(self) -> None:
        """Record copies whose records were removed with the server, which was entered again."""
        if self._has_name:
            await self._copies.record_again()

    async def repair_copies(self) -> None:
        """Try again what has failed for broken copies: to remove them, and to fetch them again."""
        if not self._has_name:
            return
        for digest in sorted(self._broken):
            await self._repair(digest)
        self._fetch_missing()

    def collect(self) -> Iterator[Metric]:
        copies = self._copies
        return self._counters.collect(len(copies.stored), copies.stored_bytes, self._own.max_bytes)


def _unavailable(error: RegistryUnavailableError) -> ApiError:
    """Return the error of a request that needs the registry; its address is no concern of clients."""
    _log.warning("%s", error)
    message = "The adapter registry cannot be used at the moment"
    return ApiError(503, message, code="registry_unavailable", headers=RETRY)


def open_pool(
    settings: ServerSettings, served: ServedAdapters, url: str, params: PoolParams | None = None
) -> AdapterPool:
    """Return the pool of a server that listens at a URL.

    If registry or `lora_root` cannot be used, or another server has the folder or the name, raise
    `InputError`.
    """
    pool, root = settings.pool, settings.lora_root
    if pool is None or root is None:
        raise ValueError("the server has no registry")
    params = params or PoolParams()
    with contextlib.ExitStack() as opened:
        try:
            folder = OwnedFolder(root.resolve())
            opened.callback(folder.close)
            registry = AdapterRegistry(pool.registry, timeout_s=params.registry_timeout_s)
            opened.callback(registry.close)
            store = AdapterStore(root.resolve())
            made = AdapterPool(registry, store, served, settings, url, folder, params)
        except OSError as error:
            raise InputError(f"cannot be used: {error.strerror}", str(root), "lora_root") from None
        opened.pop_all()
        return made
