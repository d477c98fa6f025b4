"""KV blocks with prefix caching as one would tell them: a free list in eviction order, and blocks by content.

After vLLM 0.32.0, ``vllm/v1/core/block_pool.py`` and ``single_type_kv_cache_manager.py``. A full block is
registered under a key that stands for everything up to its last token, and under its adapter. It keeps that
key while it is used, and in the free list until it is handed out again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence


class ReadableBlocks:
    """The pool of KV blocks.

    Parameters
    ----------
    num_blocks
        Usable blocks.
    unhashed_to_front
        Blocks without a key are handed out again first (vLLM 0.32), instead of standing in line with the
        others (to 0.14 at least).
    """

    def __init__(self, num_blocks: int, unhashed_to_front: bool) -> None:
        self.unhashed_to_front = unhashed_to_front
        self.free: list[int] = list(range(num_blocks))  # the next block to hand out comes first
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
        """Return how many of `blocks` stand in the free list."""
        return sum(self.users[block] == 0 for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Use registered blocks once more; those in the free list leave it."""
        for block in blocks:
            if self.users[block] == 0:
                self.free.remove(block)
            self.users[block] += 1

    def take(self, count: int) -> list[int]:
        """Hand out blocks from the head of the free list; they forget what they held."""
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
        """Make a full block findable. Another block with the same content stays what it is."""
        self.keys[block] = key
        self.holders.setdefault(key, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Give up the blocks of one request; the end of the sequence goes before its beginning."""
        first: list[int] = []
        last: list[int] = []
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                lost = self.keys[block] is None and self.unhashed_to_front
                (first if lost else last).append(block)
        self.free = first + self.free + last
