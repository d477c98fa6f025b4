"""Reference implementation of adapter slots and KV blocks.

Source: vLLM 0.32.0, ``vllm/v1/core/block_pool.py`` and ``single_type_kv_cache_manager.py``. The key of a full
block identifies its adapter and all tokens up to its last one. A block keeps its key until it is allocated
again.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
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
        """Insert an adapter and return the evicted idle one, if any."""
        victim = None
        if len(self.order) == self.capacity:
            victim = next(a for a in self.order if a not in in_use)
            self.order.remove(victim)
        self.order.append(adapter)
        return victim


class ReferenceAdapters:
    """GPU slots, empty at first, and the host, which holds the last `max_cpu_loras` of all adapters."""

    def __init__(self, adapters: int, max_loras: int, max_cpu_loras: int) -> None:
        first_on_host = max(1, adapters - max_cpu_loras + 1)
        self.slots = _Lru(max_loras)
        self.host = _Lru(max_cpu_loras, list(range(first_on_host, adapters + 1)))
        # Asynchronous loads: in progress, and complete but not used yet. Both keep their slots.
        self.coming: set[int] = set()
        self.kept: set[int] = set()

    def is_resident(self, adapter: int) -> bool:
        """Return whether an adapter has a slot, possibly while it is loaded."""
        return adapter in self.slots.order

    def load(self, adapter: int, in_use: Collection[int]) -> list[tuple[int, bool]]:
        """Load an adapter into a slot; return [(adapter, from disk)], empty if it is resident."""
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
        """Make an unused adapter the most recently used idle one."""
        self.slots.touch(adapter)
        self.host.touch(adapter)

    def claimed(self) -> set[int]:
        """Return the adapters that keep a slot before their first running request."""
        return self.coming | self.kept

    def claim(self, adapter: int, in_use: Collection[int]) -> list[tuple[int, bool]]:
        """Start an asynchronous load; result as of `load`."""
        self.coming.add(adapter)
        return self.load(adapter, in_use)

    def arrive(self, adapter: int, wanted: bool) -> None:
        """Note that a load is complete; the adapter keeps its slot if requests wait for it."""
        self.coming.remove(adapter)
        if wanted:
            self.kept.add(adapter)
        else:
            self.rest(adapter)

    def unclaim(self, adapter: int) -> None:
        """Note that a request of this adapter runs."""
        self.kept.discard(adapter)


class ReferenceBlocks:
    """The pool of KV blocks.

    Parameters
    ----------
    num_blocks
        Usable blocks.
    unhashed_to_front
        Blocks without a key are allocated first (vLLM 0.32), not in the order of release (at least to 0.14).
    """

    def __init__(self, num_blocks: int, unhashed_to_front: bool) -> None:
        self.unhashed_to_front = unhashed_to_front
        self.free: list[int] = list(range(num_blocks))  # in order of allocation
        self.users = [0] * num_blocks
        self.keys: list[Hashable | None] = [None] * num_blocks
        self.holders: dict[Hashable, list[int]] = {}  # blocks of a key, in order of registration

    def find(self, keys: Iterable[Hashable]) -> list[int]:
        """Return the registered blocks of the longest run of `keys`; of duplicates, the first one."""
        found: list[int] = []
        for key in keys:
            if key not in self.holders:
                break
            found.append(self.holders[key][0])
        return found

    def unused(self, blocks: Sequence[int]) -> int:
        """Return how many of `blocks` are in the free list."""
        return sum(self.users[block] == 0 for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more use of registered blocks, and remove them from the free list."""
        for block in blocks:
            if self.users[block] == 0:
                self.free.remove(block)
            self.users[block] += 1

    def take(self, count: int) -> list[int]:
        """Allocate blocks from the head of the free list; they lose their keys."""
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.users[block] = 1
            self._forget(block)
        return taken

    def _forget(self, block: int) -> None:
        key, self.keys[block] = self.keys[block], None
        if key is not None:
            self.holders[key].remove(block)
            if not self.holders[key]:
                del self.holders[key]

    def register(self, block: int, key: Hashable) -> None:
        """Register a full block; other blocks of the key stay registered."""
        self.keys[block] = key
        self.holders.setdefault(key, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Release the blocks of one request, the last one first."""
        first: list[int] = []
        last: list[int] = []
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                lost = self.keys[block] is None and self.unhashed_to_front
                (first if lost else last).append(block)
        self.free = first + self.free + last
