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
from capplan.engine.pages import NULL_PAGE, PagePool
from capplan.serving import State


class BlockTables(Protocol):
    """The pages of running requests, out of a pool."""

    pool: PagePool

    def tables(self, parts: Parts, held: NDArray[np.int64], needed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the pages of each part of a step, shape (parts, most needed), padded with the null page.

        `held` and `needed` count the blocks of each part before and after the step.
        """
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

    def __init__(self, state: State, pool: PagePool, num_blocks: int) -> None:
        self.pool = pool
        self._table = state.pool.table
        self._holders = state.pool.blocks.holders
        self._reserved = pool.take(num_blocks)
        if self._reserved.min(initial=1) != 1 or self._reserved.max(initial=num_blocks) != num_blocks:
            raise RuntimeError("the pool has handed out pages before the KV cache was set up")

    def tables(self, parts: Parts, held: NDArray[np.int64], needed: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `BlockTables`."""
        width = int(needed.max(initial=0))
        pages = self._table[parts.place, :width] + 1
        return np.where(np.arange(width) < needed[:, None], pages, NULL_PAGE)

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

    def __init__(self, pool: PagePool, rows: int, blocks_per_request: int) -> None:
        self.pool = pool
        self._table = np.zeros((rows, blocks_per_request), np.int64)
        self._held = np.zeros(rows, np.int64)

    def tables(self, parts: Parts, held: NDArray[np.int64], needed: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `BlockTables`; takes the pages that the step needs."""
        for i in np.flatnonzero(needed > held):
            row = parts.row[i]
            self._table[row, held[i] : needed[i]] = self.pool.take(int(needed[i] - held[i]))
            self._held[row] = needed[i]
        width = int(needed.max(initial=0))
        return np.where(np.arange(width) < needed[:, None], self._table[parts.row, :width], NULL_PAGE)

    def release(self, rows: NDArray[np.int64]) -> None:
        """Hand the pages of rows back."""
        for row in rows:
            self.pool.give(self._table[row, : self._held[row]])
            self._held[row] = 0

    def owned(self) -> NDArray[np.int64]:
        """See `BlockTables`."""
        return np.concatenate(
            [np.zeros(0, np.int64), *(self._table[r, : self._held[r]] for r in np.flatnonzero(self._held))]
        )

    def in_use(self) -> int:
        """See `BlockTables`."""
        return int(self._held.sum())
