"""Distributed adapter pool (LoRAServe, section IV-B), the part of one server.

Each adapter of the registry is stored on at least one server, once a server has fetched it. The first request
of an adapter at a server fetches it from a server that stores it, or else from its location. A server removes
its copy when its share of the adapter's requests is zero and they have ended, unless it is the last one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import BinaryIO, Final, TypeVar
from weakref import WeakValueDictionary

from prometheus_client.core import CounterMetricFamily
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.metrics_core import Metric

from capplan.engine.lora.store import AdapterStore
from capplan.engine.server.adapters import ServedAdapters
from capplan.engine.server.limiter import ServerSettings
from capplan.engine.server.metrics import metric_family
from capplan.engine.server.protocol import RETRY, ApiError, overloaded, unknown_model
from capplan.engine.server.transfer import Fetcher, Source, TransferError, TransferParams, location, peer
from capplan.errors import InputError
from capplan.spec.registry import AdapterRegistry, RegisteredAdapter, RegistryUnavailableError
from capplan.spec.registry.adapter import ADAPTER_FILES

_MAX_LOADS: Final = 256
"""Adapters that are fetched, or wait for a transfer, at a time."""
_MAX_NAME: Final = 256
_THREADS: Final = 8
"""For calls of the registry, and for files."""

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
    """

    round_s: float = 5.0
    idle_s: float = 5.0
    registry_timeout_s: float = 5.0
    transfers: TransferParams = field(default_factory=TransferParams)


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

    Raises
    ------
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
        params: PoolParams = PoolParams(),
    ) -> None:
        self._registry = registry
        self._store = store
        self._served = served
        own = settings.pool
        self._base_model = (own and own.base_model) or settings.model_name
        self._key = settings.admin_api_key
        self._timeout_s = settings.limits.lora_timeout_s
        self._params = params
        self._threads = ThreadPoolExecutor(_THREADS, "adapter-pool")
        self._fetcher = Fetcher(params.transfers, served.readers, self._threads)
        self._places = asyncio.Semaphore(params.transfers.max_transfers)
        self._name = (own and own.server_name) or url.partition("://")[2]
        self._stored: dict[str, str] = {}
        self._unusable: dict[str, str] = {}
        self._causes: dict[str, str] = {}
        self._shares: dict[str, float] = {}
        self._used_s: OrderedDict[str, float] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._rounds: asyncio.Task[None] | None = None
        self._transfers: Counter[tuple[str, str]] = Counter()
        self._moved_bytes: Counter[str] = Counter()
        self._moved_s: dict[str, float] = {}
        self._removed = 0
        self._reconcile((own and own.server_url) or url)

    def _reconcile(self, url: str) -> None:
        """Let registry and files agree: either may be ahead after a crash."""
        self._registry.announce(self._name, url)
        stored = self._store.digests()
        for adapter in self._registry.adapters(server=self._name):
            if adapter.digest not in stored:
                self._registry.lose(adapter.name, self._name)
        for digest in stored:
            adapters = self._registry.with_digest(digest)
            for adapter in adapters:
                self._registry.hold(adapter.name, digest, self._name)
                self._stored[adapter.name] = digest
            if not adapters:
                self._store.delete(digest)

    def start(self) -> None:
        """Remove copies from now on."""
        self._rounds = asyncio.ensure_future(self._run_rounds())

    async def close(self) -> None:
        """End transfers, and close all connections."""
        tasks = [*self._loads.values(), *([] if self._rounds is None else [self._rounds])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fetcher.close()
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
            self._touch(name)
            return
        task = self._loads.get(name)
        if task is None:
            if len(self._loads) >= _MAX_LOADS:
                raise overloaded("Too many adapters are being fetched")
            task = self._loads[name] = asyncio.ensure_future(self._load(name))
            task.add_done_callback(lambda done: self._on_loaded(name, done))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # the server ends
                raise ApiError(503, "The server shuts down", code="shutting_down", headers=RETRY) from None
            raise

    def _touch(self, name: str) -> None:
        self._used_s[name] = time.monotonic()
        self._used_s.move_to_end(name)

    def _on_loaded(self, name: str, done: asyncio.Task[None]) -> None:
        del self._loads[name]
        if not done.cancelled():
            done.exception()  # retrieved, or asyncio logs it if no request waits

    async def _load(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                adapter, digest = await self._known(name)
                async with self._lock_of(digest):
                    if digest not in self._store:
                        await self._fetch(adapter, digest)
                    await self._in_thread(self._registry.hold, name, digest, self._name)
                    self._stored[name] = digest
                    removable = [each for each in self._used_s if each in self._stored]
                    await self._served.serve(name, self._store.folder(digest), removable)
                    self._touch(name)
        except RegistryUnavailableError as error:
            raise _unavailable(error) from None
        except InputError as error:  # the registry has changed meanwhile
            message = f"The adapter has changed in the registry: {error.rule}"
            raise ApiError(503, message, "model", "adapter_changed", RETRY) from None
        except TimeoutError:
            message = f"The adapter could not be fetched within {self._timeout_s:g} s"
            raise ApiError(503, message, "model", "timeout", RETRY) from None
        except OSError as error:
            message = f"The adapter cannot be stored: {error.strerror}"
            raise ApiError(503, message, "model", "storage", RETRY) from None

    async def _known(self, name: str) -> tuple[RegisteredAdapter, str]:
        """Return an adapter of the registry that this server can serve, and its digest."""
        adapter = await self._in_thread(self._registry.find, name) if len(name) <= _MAX_NAME else None
        if adapter is None:
            raise unknown_model(name)
        if adapter.base_model != self._base_model:
            message = f"The adapter is for {adapter.base_model}, and this server serves {self._base_model}"
            raise ApiError(400, message, "model", "other_base_model")
        if adapter.digest is None:
            message = "The registry has no digest of the adapter, so that it cannot be fetched"
            raise ApiError(503, message, "model", "no_digest")
        if adapter.digest in self._unusable:
            raise self._refusal(adapter.digest)
        return adapter, adapter.digest

    def _refusal(self, digest: str) -> ApiError:
        return ApiError(400, self._unusable[digest], "model", "unusable_adapter")

    async def _fetch(self, adapter: RegisteredAdapter, digest: str) -> None:
        """Store an adapter from the first source that delivers its bytes."""
        sources = await self._sources(adapter, digest)
        until_s = time.monotonic() + self._timeout_s
        causes: dict[str, list[str]] = {}
        for at, source in enumerate(sources):
            async with self._places:
                timeout_s = (until_s - time.monotonic()) / (len(sources) - at)
                cause = await self._fetch_from(source, adapter, digest, timeout_s)
            if cause is None:
                self._log_causes(adapter.name, causes)
                return
            causes.setdefault(cause, []).append(source.name)
        self._log_causes(adapter.name, causes)
        message = f"None of {len(sources)} sources delivers the adapter {adapter.name!r}"
        raise ApiError(503, message, "model", "adapter_unavailable", RETRY)

    def _log_causes(self, name: str, causes: Mapping[str, Sequence[str]]) -> None:
        """Log which sources do not deliver an adapter, unless the last line was the same."""
        line = "; ".join(f"{', '.join(sorted(names))}: {cause}" for cause, names in sorted(causes.items()))
        if line != self._causes.pop(name, ""):
            _log.warning("adapter %s is not delivered by %s", name, line)
        if line:
            self._causes[name] = line

    async def _fetch_from(
        self, source: Source, adapter: RegisteredAdapter, digest: str, timeout_s: float
    ) -> str | None:
        """Store an adapter from a source; return why it has not delivered it, None if it has.

        Raises
        ------
        ApiError
            If the bytes are those that the registry knows, and cannot be served.
        """
        readers, begin_s = self._served.readers, time.monotonic()
        with self._store.receiving(digest, adapter.size_bytes) as incoming:
            try:
                await self._fetcher.fetch(source, incoming, timeout_s)
                incoming.require_digest()
            except (TransferError, InputError) as error:
                self._transfers[source.kind, "failed"] += 1
                return str(error)
            try:
                await readers.run(lambda: self._served.check(incoming.peft))
            except InputError as error:
                self._transfers[source.kind, "unusable"] += 1
                self._unusable[digest] = str(error)
                raise self._refusal(digest) from None
            await readers.run(incoming.store)
        self._transfers[source.kind, "done"] += 1
        self._moved_bytes[source.kind] += incoming.size_bytes
        took_s = time.monotonic() - begin_s
        self._moved_s[source.kind] = self._moved_s.get(source.kind, 0.0) + took_s
        return None

    async def _sources(self, adapter: RegisteredAdapter, digest: str) -> list[Source]:
        """Return the servers that store an adapter, in random order, and its location."""
        urls = await self._in_thread(self._registry.servers)
        holders = [name for name in adapter.holders if name != self._name and name in urls]
        random.shuffle(holders)
        return [
            *(peer(name, urls[name], digest, self._key) for name in holders),
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
            known = await self._in_thread(self._registry.with_digest, digest)
            if not known or digest not in self._store:
                raise missing
            return await self._in_thread(self._store.open, digest, name)
        except RegistryUnavailableError as error:
            raise _unavailable(error) from None
        except InputError:  # removed meanwhile
            raise missing from None

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Set shares of the requests of adapters; copies of those with a share of zero are removed."""
        self._shares |= shares

    async def _run_rounds(self) -> None:
        while True:
            await asyncio.sleep(self._params.round_s)
            try:
                await self.remove_copies()
            except (ApiError, InputError, OSError) as error:  # the next round tries again
                _log.warning("copies of adapters are not removed: %s", error)

    async def remove_copies(self) -> None:
        """Remove copies whose share is zero, or whose bytes the registry does not know any more."""
        stored = dict(self._stored)

        def outdated() -> set[str]:
            known = {name: self._registry.find(name) for name in stored}
            return {name for name, each in known.items() if each is None or each.digest != stored[name]}

        unknown = await self._in_thread(outdated)
        for name, digest in stored.items():
            if name in unknown or self._shares.get(name) == 0:
                await self._remove(name, digest, last_too=name in unknown)

    async def _remove(self, name: str, digest: str, last_too: bool) -> None:
        """Remove a copy if no request uses it and, unless `last_too`, another server has one."""
        async with self._lock_of(digest):
            if self._stored.get(name) != digest:
                return
            if time.monotonic() - self._used_s.get(name, -math.inf) < self._params.idle_s:
                return
            if not await self._served.withdraw(name):
                return
            # First the registry: no server is sent here for files that are gone.
            if not last_too and not await self._in_thread(self._registry.release, name, self._name):
                return
            del self._stored[name]
            self._removed += 1
            self._used_s.pop(name, None)
            if digest not in self._stored.values():
                await self._in_thread(self._store.delete, digest)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the pool."""
        stored = [((), float(len(self._stored)))]
        yield metric_family(Gauge, "capplan:adapters_stored", "Adapters stored by this server", (), stored)
        outcomes = [(labels, float(count)) for labels, count in sorted(self._transfers.items())]
        help_text = "Transfers of adapters to this server"
        labels = ("source", "outcome")
        yield metric_family(CounterMetricFamily, "capplan:adapter_transfers", help_text, labels, outcomes)
        for counts, name, help_text in (
            (self._moved_bytes, "bytes", "Bytes of adapters transferred to this server"),
            (self._moved_s, "seconds", "Time of these transfers, with checks and writing"),
        ):
            rows = [((source,), float(count)) for source, count in sorted(counts.items())]
            name = f"capplan:adapter_transfer_{name}"
            yield metric_family(CounterMetricFamily, name, help_text, ("source",), rows)
        removed = [((), float(self._removed))]
        help_text = "Copies of adapters removed from this server"
        yield metric_family(CounterMetricFamily, "capplan:adapter_copies_removed", help_text, (), removed)

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        """Return what a function returns, in threads of the pool: a locked registry delays nothing else."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _lock_of(self, digest: str) -> asyncio.Lock:
        """Return the lock of those who load or remove an adapter; it exists as long as one of them does."""
        return self._locks.setdefault(digest, asyncio.Lock())


def _unavailable(error: RegistryUnavailableError) -> ApiError:
    """Return the error of a request that needs the registry; its address is no concern of clients."""
    _log.warning("%s", error)
    message = "The adapter registry cannot be used at the moment"
    return ApiError(503, message, code="registry_unavailable", headers=RETRY)


def open_pool(
    settings: ServerSettings, served: ServedAdapters, url: str, params: PoolParams = PoolParams()
) -> AdapterPool:
    """Return the pool of a server that listens at a URL.

    Raises
    ------
    InputError
        If the registry or `lora_root` cannot be used.
    """
    pool, root = settings.pool, settings.lora_root
    if pool is None or root is None:
        raise ValueError("the server has no registry")
    registry = AdapterRegistry(pool.registry, timeout_s=params.registry_timeout_s)
    try:
        store = AdapterStore(root.resolve())
        return AdapterPool(registry, store, served, settings, url, params)
    except OSError as error:
        raise InputError(f"cannot be used: {error.strerror}", str(root), "lora_root") from None
