"""Which pages hold the KV of which request.

With prefix caching the scheduler names blocks, because it has to know what they contain; its block b is page
b + 1. Without, it only counts them, and any free page will do. The count is the scheduler's in both cases, so
a page is always there.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from capplan.engine.decisions import Parts
from capplan.engine.pages import PagePool
from capplan.serving import State


class BlockTables(Protocol):
    """The pages of running requests, out of a pool.

    Attributes
    ----------
    table
        Block i of a request is page ``table[line, i] + shift``, ...
    line
        ... where the line is this field of the request's part of a step.
    """

    pool: PagePool
    table: NDArray[np.int64]
    shift: int
    line: str

    def take(self, parts: Parts) -> None:
        """Take the pages that the parts of a step need."""
        ...

    def release(self, rows: NDArray[np.int64]) -> None:
        """Note that rows have left the running requests."""
        ...

    def owned(self) -> NDArray[np.int64]:
        """Return the pages taken out of the pool."""
        ...

    def in_use(self) -> int:
        """Return the number of pages that running requests hold."""
        ...


class NamedBlocks:
    """Blocks as the scheduler names them; pages 1 to `num_blocks` of the pool are taken for good."""

    shift = 1
    line = "place"

    def __init__(self, state: State, pool: PagePool, num_blocks: int) -> None:
        self.pool = pool
        self.table = state.pool.table
        self._holders = state.pool.blocks.holders
        self._reserved = pool.take(num_blocks)
        if self._reserved.min(initial=1) != 1 or self._reserved.max(initial=num_blocks) != num_blocks:
            raise RuntimeError("the pool has handed out pages before the KV cache was set up")

    def take(self, parts: Parts) -> None:
        """The scheduler has done it."""

    def release(self, rows: NDArray[np.int64]) -> None:
        """The scheduler has done it."""

    def owned(self) -> NDArray[np.int64]:
        """See `BlockTables`."""
        return self._reserved

    def in_use(self) -> int:
        """See `BlockTables`."""
        return int(np.count_nonzero(self._holders))


class CountedBlocks:
    """Pages from the pool's free list, taken and handed back here."""

    shift = 0
    line = "row"

    def __init__(self, pool: PagePool, rows: int, blocks_per_request: int, block_size: int) -> None:
        self.pool = pool
        self.table = np.zeros((rows, blocks_per_request), np.int64)
        self._held = np.zeros(rows, np.int64)
        self._block_size = block_size

    def take(self, parts: Parts) -> None:
        """See `BlockTables`."""
        rows = parts["row"]
        needed = -(-(parts["computed"] + parts["tokens"]) // self._block_size)
        more = needed - self._held[rows]
        total = int(more.sum())
        if total:
            ends = np.cumsum(more)
            within = np.arange(total) - np.repeat(ends - more, more)
            self.table[np.repeat(rows, more), np.repeat(needed - more, more) + within] = self.pool.take(total)
            self._held[rows] = needed

    def release(self, rows: NDArray[np.int64]) -> None:
        """Hand the pages of rows back."""
        for row in rows:
            self.pool.give(self.table[row, : self._held[row]])
            self._held[row] = 0

    def owned(self) -> NDArray[np.int64]:
        """See `BlockTables`."""
        return np.concatenate(
            [np.zeros(0, np.int64), *(self.table[r, : self._held[r]] for r in np.flatnonzero(self._held))]
        )

    def in_use(self) -> int:
        """See `BlockTables`."""
        return int(self._held.sum())
