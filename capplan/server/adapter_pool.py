"""Distributed adapter pool (LoRAServe, section IV-B), the part of one server.

Each adapter of the registry is stored on at least one server, once a server has fetched it. The first request
of an adapter at a server fetches it from a server that stores it, or else from its location. A server removes
its copy when its share of the adapter's requests is zero, they have ended, and another server has confirmed
that its own copy is intact.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, Final

from prometheus_client.metrics_core import Metric

from capplan.engine.lora.store import AdapterStore, IncomingAdapter
from capplan.errors import InputError
from capplan.registry import AdapterRegistry, RegisteredAdapter, RegistryUnavailableError
from capplan.registry.adapter import ADAPTER_FILES, RegisteredServer
from capplan.server.adapter_copies import AdapterCopies, PoolParams, PoolServer
from capplan.server.adapters import ServedAdapters
from capplan.server.pool_metrics import PoolCounters
from capplan.server.protocol import RETRY, ApiError, overloaded, unknown_model
from capplan.server.server_claim import OwnedFolder, ServerClaim
from capplan.server.settings import PoolSettings, ServerSettings
from capplan.server.transfer import Fetcher, Source, TransferError, location, peer

_MAX_LOADS: Final = 256
"""Adapters that are fetched, or wait for a transfer, at a time."""
_MAX_NAME: Final = 256
_FORMER_S: Final = 0.05
"""Time between looks for requests that use a former adapter of a name."""
_THREADS: Final = 8
"""For calls of the registry, and for files."""

_log = logging.getLogger(__name__)


class AdapterPool:
    """Adapters of a registry at one server; it belongs to the event loop.

    Parameters
    ----------
    registry
        Shared by all servers; closed by `close`.
    store
        Files of this server.
    served
        Adapters that the engine has.
    settings
        Settings of the server, with its name in the registry.
    url
        Where the server listens.
    folder
        Folder of the store, closed by `close`.

    Raises
    ------
    InputError
        If another running server has the name.
    RegistryUnavailableError
        If the registry cannot be used.
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
        self._background: set[asyncio.Task[None]] = set()
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

        Requests of the same adapter share one transfer, which goes on if they are cancelled.

        Raises
        ------
        ApiError
            404 if the registry does not hold the adapter, 400 if it does not fit the server, 503 if it cannot
            be fetched or the registry cannot be used.
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

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
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
                self._spawn(self._ask_to_check(source, adapter.size_bytes or 0))
        self._log_causes(adapter.name, causes)
        message = f"None of {len(sources)} sources delivers the adapter {adapter.name!r}"
        raise ApiError(503, message, "model", "adapter_unavailable", RETRY)

    async def _ask_to_check(self, source: Source, size_bytes: int) -> None:
        await self._fetcher.confirms(source, size_bytes)

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

        Raises
        ------
        ApiError
            If the bytes are those that the registry knows, and cannot be served or stored.
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
        """Open a file of a stored adapter for another server.

        Raises
        ------
        ApiError
            404 if the registry does not know the digest, or this server does not store it.
        """
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

        A broken copy is removed, and fetched again unless the share of its adapter is zero.

        Raises
        ------
        ApiError
            503 if the copy cannot be read, or the registry cannot be used.
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
        """Yield the metrics of the pool."""
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

    Raises
    ------
    InputError
        If the registry or `lora_root` cannot be used, or another running server has the folder or the name.
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
