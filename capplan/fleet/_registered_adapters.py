"""Adapters of a registry behind a router: added ones become servable, removed ones are retired.

The router reads the registry periodically, if it has changed, and at each re-balancing. A request of an
unknown name causes one look-up, within a rate. A new adapter gets an instance that stores it, or else the
one with the fewest adapters; re-balancing places it by its demand. A removed one leaves the routing table:
its running requests end, further ones are unknown, and the servers of the pool delete its copies. All of it
follows from the registry, so that a router that starts again has the same adapters.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from capplan.errors import InputError
from capplan.registry import AdapterRegistry, RegisteredAdapter

if TYPE_CHECKING:
    from capplan.fleet._instance import InstanceSupervisor
    from capplan.fleet._routing import InstanceRouter, RoutingTable

_MAX_NAME: Final = 256
_MAX_FINDING: Final = 32
"""Names that are looked up at a time."""
_NAMES_OF_A_LINE: Final = 5
T = TypeVar("T")


@dataclass(frozen=True)
class RegistrySettings:
    """Adapter registry of a router.

    Attributes
    ----------
    location
        SQLite file or URL, shared with the instances.
    base_model
        Name of the base model in the registry.
    excluded
        Names of the registry that are not served: names of the base model, and adapters of groups of the plan
        that are served elsewhere.
    everywhere
        Whether every instance that serves the rank of a new adapter is one of its holders, for the router to
        choose.
    refresh_s
        Time between two readings.
    look_ups_per_s
        Rate of look-ups of unknown names. Requests beyond it are answered as of the last reading.
    timeout_s
        Time to wait for a lock of the registry.
    """

    location: str
    base_model: str
    excluded: frozenset[str] = frozenset()
    everywhere: bool = False
    refresh_s: float = 5.0
    look_ups_per_s: float = 20.0
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("refresh_s", "look_ups_per_s", "timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError("must be a finite number > 0", getattr(self, name), name)


class RegistrySnapshot(NamedTuple):
    """Adapters of a registry that a router can serve."""

    version: tuple[int, int]
    """Changes whenever the registry does."""
    ranks: Mapping[str, int]
    size_bytes: Mapping[str, int]
    """Of the adapters whose size the registry has."""
    stored: Sequence[Collection[str]]
    """Adapters that each instance stores."""
    unfit: Mapping[str, str]
    """Adapters of the base model that cannot be served, and why."""


@dataclass
class RateLimit:
    """Number of events per second, as many at once at most, and at least one."""

    per_s: float
    _left: float = field(default=1.0, init=False)
    _at_s: float = field(default=float("-inf"), init=False)

    def admits(self, now_s: float | None = None) -> bool:
        """Return whether an event is within the rate, and count it then."""
        now_s = time.monotonic() if now_s is None else now_s
        self._left = min(max(1.0, self.per_s), self._left + (now_s - self._at_s) * self.per_s)
        self._at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def placed_by_registry(
    shares: Sequence[Mapping[str, float]],
    snapshot: RegistrySnapshot,
    max_ranks: Sequence[int],
    up: Collection[int],
    *,
    everywhere: bool = False,
) -> list[dict[str, float]]:
    """Return the shares of instances with new adapters and without removed ones.

    Shares in force of adapters that stay are kept. New adapters go to instances that are not up only if none
    of the others serves their rank. `everywhere`: the other instances that serve the rank hold a new adapter,
    too, with a share of 0.
    """
    ranks = snapshot.ranks
    placed = [
        {name: share for name, share in own.items() if ranks.get(name, largest + 1) <= largest}
        for own, largest in zip(shares, max_ranks, strict=True)
    ]
    adapters = [sum(share > 0 for share in own.values()) for own in placed]
    for name in sorted(ranks.keys() - {name for own in placed for name in own}):
        able = [i for i, largest in enumerate(max_ranks) if largest >= ranks[name]]
        chosen = min(
            [i for i in able if i in up] or able,
            key=lambda i: (name not in snapshot.stored[i], adapters[i], i),
        )
        for i in able if everywhere else ():
            placed[i][name] = 0.0
        placed[chosen][name] = 1.0
        adapters[chosen] += 1
    return placed


class RegisteredAdapters:
    """Adapters of the registry that a router serves; it belongs to the event loop.

    `changing` is held while the routing table changes. `on_change` is called after its adapters have changed.
    `look_ups` is the number of look-ups of unknown names.
    """

    def __init__(
        self,
        settings: RegistrySettings,
        instances: Sequence[InstanceSupervisor],
        router: InstanceRouter,
        log: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.changing = asyncio.Lock()
        self.on_change: Callable[[], None] = lambda: None
        self.look_ups = 0
        self._instances = instances
        self._index = {each.spec.server_name: i for i, each in enumerate(instances)}
        self._max_ranks = [each.spec.max_lora_rank for each in instances]
        self._router = router
        self._log = log
        self._thread = ThreadPoolExecutor(1, "registry")
        self._look_up_thread = ThreadPoolExecutor(1, "registry-look-up")  # a locked registry delays no round
        self._registry: AdapterRegistry | None = None
        self._opening = threading.Lock()
        self._snapshot: RegistrySnapshot | None = None
        self._limit = RateLimit(settings.look_ups_per_s)
        self._finding: dict[str, asyncio.Task[bool]] = {}
        self._failure = ""

    async def run(self) -> None:
        """Read the registry periodically until cancelled."""
        while True:
            await asyncio.sleep(self.settings.refresh_s)
            await self.refresh()

    async def refresh(self) -> bool:
        """Serve the adapters that the registry has; return False if it cannot be used."""
        async with self.changing:
            try:
                await self.take_in()
            except InputError as error:
                if str(error) != self._failure:
                    self._log(f"the adapters in force stay: {error}")
                self._failure = str(error)
                return False
            self._failure = ""
            return True

    async def take_in(self) -> RegistrySnapshot:
        """Serve the adapters that the registry has; `changing` must be held.

        If the registry cannot be used, raise `InputError`; the adapters in force stay.
        """
        before = self._snapshot
        snapshot = await self.in_thread(self._read)
        await self._use(snapshot)
        known = {} if before is None else before.unfit
        unfit = sorted(name for name, reason in snapshot.unfit.items() if known.get(name) != reason)
        for name in unfit[:_NAMES_OF_A_LINE]:
            self._log(f"registry: adapter {name} is not served: {snapshot.unfit[name]}")
        if more := unfit[_NAMES_OF_A_LINE:]:
            self._log(f"registry: {len(more)} more adapters are not served")
        return snapshot

    async def find(self, name: str) -> bool:
        """Return whether an adapter is served; one that is new in the registry is from now on.

        If the router does not serve it and the registry cannot be used, raise `RegistryUnavailableError`.
        """
        if name in self._router:
            return True
        if name not in self._finding:
            is_refused = len(name) > _MAX_NAME or name in self.settings.excluded
            if is_refused or len(self._finding) >= _MAX_FINDING or not self._limit.admits():
                return False
            task = self._finding[name] = asyncio.ensure_future(self._find(name))
            task.add_done_callback(lambda done: self._on_found(name, done))
        return await asyncio.shield(self._finding[name])

    def _on_found(self, name: str, done: asyncio.Task[bool]) -> None:
        del self._finding[name]
        if not done.cancelled():
            done.exception()  # retrieved, or asyncio logs it if no request waits

    async def _find(self, name: str) -> bool:
        self.look_ups += 1
        loop = asyncio.get_running_loop()
        adapter = await loop.run_in_executor(self._look_up_thread, self._look_up, name)
        if adapter is None:
            return False
        async with self.changing:
            if name not in self._router:
                snapshot = self._snapshot or await self.take_in()
                await self._use(self._with(snapshot, adapter))
        return name in self._router

    def _look_up(self, name: str) -> RegisteredAdapter | None:
        """Return an adapter of the registry that can be served."""
        adapter = self._opened().find(name)
        if adapter is None or adapter.base_model != self.settings.base_model:
            return None
        return None if self._unfitness(adapter) else adapter

    def _opened(self) -> AdapterRegistry:
        with self._opening:
            if self._registry is None:
                self._registry = AdapterRegistry(self.settings.location, timeout_s=self.settings.timeout_s)
            return self._registry

    def _read(self) -> RegistrySnapshot:
        """Return the adapters of the registry; those read last if it has not changed."""
        registry, last = self._opened(), self._snapshot
        version = registry.version()
        if last is not None and last.version == version:
            return last
        ranks, size_bytes, unfit = dict[str, int](), dict[str, int](), dict[str, str]()
        stored: list[set[str]] = [set() for _ in self._instances]
        for adapter in registry.adapters(base_model=self.settings.base_model):
            if adapter.name in self.settings.excluded:
                continue
            if reason := self._unfitness(adapter):
                unfit[adapter.name] = reason
                continue
            ranks[adapter.name] = adapter.rank
            if adapter.size_bytes is not None:
                size_bytes[adapter.name] = adapter.size_bytes
            for instance in self._holders(adapter):
                stored[instance].add(adapter.name)
        return RegistrySnapshot(version, ranks, size_bytes, stored, unfit)

    def _holders(self, adapter: RegisteredAdapter) -> Iterator[int]:
        """Yield the instances that store an adapter."""
        return (self._index[holder] for holder in adapter.holders if holder in self._index)

    def _unfitness(self, adapter: RegisteredAdapter) -> str | None:
        """Return why an adapter of the base model cannot be served; None: it can."""
        if adapter.digest is None:
            return "digest: is required: servers fetch adapters by it"
        largest = max(self._max_ranks)
        if adapter.rank > largest:
            return f"rank: must be at most max_lora_rank, {largest}, not {adapter.rank}"
        return None

    def _with(self, snapshot: RegistrySnapshot, adapter: RegisteredAdapter) -> RegistrySnapshot:
        """Return a snapshot with one more adapter."""
        size_bytes = {} if adapter.size_bytes is None else {adapter.name: adapter.size_bytes}
        holders = set(self._holders(adapter))
        stored = [{*own, adapter.name} if i in holders else own for i, own in enumerate(snapshot.stored)]
        return snapshot._replace(
            ranks={**snapshot.ranks, adapter.name: adapter.rank},
            size_bytes={**snapshot.size_bytes, **size_bytes},
            stored=stored,
        )

    async def _use(self, snapshot: RegistrySnapshot) -> None:
        """Route by the adapters of a snapshot."""
        self._snapshot, before = snapshot, self._router.ranks
        if snapshot.ranks == before:
            return
        shares, base = self._router.shares()
        up = {i for i, each in enumerate(self._instances) if each.is_up}
        everywhere = self.settings.everywhere

        def table() -> RoutingTable:
            placed = placed_by_registry(shares, snapshot, self._max_ranks, up, everywhere=everywhere)
            return self._router.table(placed, base, snapshot.ranks)

        self._router.swap(await self.in_thread(table))
        self.on_change()
        for change, names in (
            ("served from now on", snapshot.ranks.keys() - before.keys()),
            (
                "removed, and not served any more",
                before.keys() - snapshot.ranks.keys() - snapshot.unfit.keys(),
            ),
        ):
            if names:
                self._log(f"registry: {change}: {_listed(names)}")

    async def in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        """Return what a function returns, in a thread: a locked registry delays no request."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def close(self) -> None:
        """Close the registry; nothing is read from it any more."""
        for task in self._finding.values():
            task.cancel()
        for thread in (self._thread, self._look_up_thread):
            thread.shutdown(wait=False, cancel_futures=True)
        if self._registry is not None:
            self._registry.close()


def _listed(names: Collection[str]) -> str:
    """Return names for a line of the log."""
    shown = ", ".join(sorted(names)[:_NAMES_OF_A_LINE])
    return shown if len(names) <= _NAMES_OF_A_LINE else f"{shown} and {len(names) - _NAMES_OF_A_LINE} more"
