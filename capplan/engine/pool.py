"""Page pool shared by the KV cache and, in unified memory, by adapters.

A page has the bytes of one KV block over all layers. Page 0 is the null page: it holds zeros, and padding of
tables points to it. The last page receives the writes of padded tokens and is never read.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.models.config import ModelConfig
from capplan.engine.scheduler_output import ScheduledRequests
from capplan.serving import State

NULL_PAGE = 0


class PagePool:
    """Pages of memory and the list of those that nobody holds.

    Attributes
    ----------
    tensor
        Shape (pages, page elements), in the dtype of the model.
    dump_page
        Where padding of a step is written.
    """

    def __init__(self, pages: int, page_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros((pages + 2, page_elements), dtype=dtype, device=device)
        self.capacity = pages
        self.dump_page = pages + 1
        self.free = pages
        """Pages that nobody holds."""
        self._stack = np.arange(pages, 0, -1, dtype=np.int64)

    @property
    def free_pages(self) -> NDArray[np.int64]:
        """The pages that nobody holds, the next ones last."""
        return self._stack[: self.free]

    def take(self, count: int) -> NDArray[np.int64]:
        """Take pages; what they hold is of no use.

        Raises
        ------
        RuntimeError
            When fewer are free, which the scheduler's count rules out.
        """
        if count > self.free:
            raise RuntimeError(f"{count} pages wanted, {self.free} free: the scheduler's count is broken")
        self.free -= count
        return self._stack[self.free : self.free + count][::-1].copy()

    def give(self, pages: NDArray[np.int64]) -> None:
        """Hand pages back."""
        self._stack[self.free : self.free + pages.size] = pages
        self.free += pages.size

    def clear(self, pages: torch.Tensor) -> None:
        """Fill pages with zeros.

        Attention reads whole blocks and gives the part behind the last token no weight; but no weight times
        what is not a number is not a number, so nothing of an earlier request may stand there.
        """
        self.tensor.index_fill_(0, pages, 0.0)


def kv_page_elements(config: ModelConfig, block_size: int) -> int:
    """Return the numbers in one KV block: keys and values of all layers."""
    return config.layers * 2 * block_size * config.kv_size


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

    def take(self, parts: ScheduledRequests) -> None:
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

    def take(self, parts: ScheduledRequests) -> None:
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

    def take(self, parts: ScheduledRequests) -> None:
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
