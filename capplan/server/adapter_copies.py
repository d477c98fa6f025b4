"""Copies of adapters that one server of a pool stores: checks of their bytes, removal, and room for new ones.

A copy is removed only if another server keeps one. A record in the registry is no proof of that: files may be
broken, or their machine gone. The other server therefore reads its copy and compares the digest, on demand.
Then the registry removes this server from the holders, in a transaction that finds the other one among them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar
from weakref import WeakValueDictionary

from capplan.engine.lora.store import AdapterStore
from capplan.errors import InputError
from capplan.registry import AdapterRegistry, RegistryUnavailableError
from capplan.server.adapters import ServedAdapters
from capplan.server.pool_metrics import PoolCounters
from capplan.server.protocol import RETRY, ApiError
from capplan.server.transfer import Fetcher, TransferParams, peer

_MIB: Final = 2**20
_MAX_CHECKS: Final = 2
"""Copies read at a time for other servers; loads of adapters need threads, too."""
_MAX_LOAD_CHECKS: Final = 4
"""Copies read at a time for loads; further loads wait. Transfers and checks need threads, too."""

Kept = Literal["with a share here", "in use", "without a confirmed other copy", "being loaded or removed"]
"""Why a copy stays."""
T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolParams:
    """Times of a pool.

    Attributes
    ----------
    round_s
        Interval of rounds, which remove copies.
    idle_s
        Time without a request after which an adapter whose share is zero may be removed.
    registry_timeout_s
        Time to wait for a lock of the registry.
    transfers
        Times of transfers.
    renew_s
        Interval at which a server renews the claim to its name.
    """

    round_s: float = 5.0
    idle_s: float = 5.0
    registry_timeout_s: float = 5.0
    transfers: TransferParams = field(default_factory=TransferParams)
    renew_s: float = 5.0


@dataclass(frozen=True)
class PoolServer:
    """One server of a pool.

    Attributes
    ----------
    name
        In the registry.
    url
        Where other servers reach it.
    key
        Admin key of all servers.
    max_bytes
        Limit of the bytes of its copies.
    """

    name: str
    url: str
    key: str | None
    max_bytes: int


class AdapterCopies:
    """Copies of a server; it belongs to the event loop.

    Attributes
    ----------
    stored
        Digest of each adapter that the server stores, by name.
    missing
        Adapters whose broken copy was removed, and that have not been stored again.
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

        Parameters
        ----------
        keep_name
            Called between adapters, whose number is not bounded, to renew the claim to the name.
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
        """Bytes of all copies."""
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

        Raises
        ------
        RegistryUnavailableError, OSError
            If a broken copy cannot be discarded, or a copy cannot be read.
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
        """Return whether an intact copy is stored, by reading it.

        Raises
        ------
        OSError
            If it cannot be read.
        """
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
        """Record a copy that is stored and intact.

        Raises
        ------
        InputError
            If the registry has changed or cannot be used.
        """
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

        Raises
        ------
        RegistryUnavailableError
            If the registry cannot be used; the copy is still there then.
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
        """Record the copies of which the registry has no record any more.

        Raises
        ------
        InputError
            If the registry has changed or cannot be used.
        """
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

        Parameters
        ----------
        idle_s
            Time without a request after which a copy whose share is zero may be removed. Bytes that the
            registry does not know are served to no further requests, however recent the last one is.
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

        Raises
        ------
        ApiError
            503 if too few copies can be removed: an adapter that has a share here, is in use, or is not
            confirmed by another server, stays.
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

        Parameters
        ----------
        unresponsive
            Servers that have not responded lately and are not asked; others are added.
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

        Parameters
        ----------
        keeper
            None: the registry does not know the copy any more.
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
