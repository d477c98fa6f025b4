"""Adapter slots and the host's adapter cache as one would tell them: two lists, least recently used first."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class _Lru:
    """Adapters from the least to the most recently used."""

    capacity: int
    order: list[int] = field(default_factory=list)

    def touch(self, adapter: int) -> None:
        self.order.remove(adapter)
        self.order.append(adapter)

    def insert(self, adapter: int, in_use: Collection[int]) -> int | None:
        """Add an adapter and return the idle one that had to go, if any."""
        victim = None
        if len(self.order) == self.capacity:
            victim = next(a for a in self.order if a not in in_use)
            self.order.remove(victim)
        self.order.append(adapter)
        return victim


class ReadableAdapters:
    """GPU slots, empty at first, and the host, which holds the last `max_cpu_loras` of all adapters."""

    def __init__(self, adapters: int, max_loras: int, max_cpu_loras: int) -> None:
        first_on_host = max(1, adapters - max_cpu_loras + 1)
        self.slots = _Lru(max_loras)
        self.host = _Lru(max_cpu_loras, list(range(first_on_host, adapters + 1)))
        # Loaded beside the batch: on their way, and there but not used yet. Both keep their slots.
        self.coming: set[int] = set()
        self.kept: set[int] = set()

    def is_resident(self, adapter: int) -> bool:
        """Tell whether an adapter is in a slot, or on its way into one."""
        return adapter in self.slots.order

    def load(self, adapter: int, in_use: Collection[int]) -> list[tuple[int, bool]]:
        """Bring an adapter into a slot; returns [(adapter, from disk)], or nothing when it was there."""
        from_disk = adapter not in self.host.order
        if from_disk:
            victim = self.host.insert(adapter, in_use)
            if victim in self.slots.order:
                self.slots.order.remove(victim)
        else:
            self.host.touch(adapter)
        if adapter in self.slots.order:
            self.slots.touch(adapter)
            return []
        self.slots.insert(adapter, in_use)
        return [(adapter, from_disk)]

    def rest(self, adapter: int) -> None:
        """Make an adapter that nobody uses any more the most recently used of the idle ones."""
        self.slots.touch(adapter)
        self.host.touch(adapter)

    def claimed(self) -> set[int]:
        """Return the adapters that keep a slot although nobody who runs uses them yet."""
        return self.coming | self.kept

    def claim(self, adapter: int, in_use: Collection[int]) -> list[tuple[int, bool]]:
        """Begin to load an adapter beside the batch; returns what `load` does."""
        self.coming.add(adapter)
        return self.load(adapter, in_use)

    def arrive(self, adapter: int, wanted: bool) -> None:
        """Note that an adapter is there; it keeps its slot for those who wait for it, if any are left."""
        self.coming.remove(adapter)
        if wanted:
            self.kept.add(adapter)
        else:
            self.rest(adapter)

    def unclaim(self, adapter: int) -> None:
        """Note that a request of this adapter runs, so that the slot needs no keeping any more."""
        self.kept.discard(adapter)
