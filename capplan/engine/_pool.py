"""Page pool shared by the KV cache and, in unified memory, by adapters.

A page has the bytes of one KV block over all layers. Page 0 is the null page: it holds zeros, and padding of
tables points to it. The last page receives the writes of padded tokens and is never read.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine._scheduler_output import ScheduledRequests
from capplan.engine.models._config import ModelConfig
from capplan.serving import State

NULL_PAGE: Final = 0


class PagePool:
    """Pages of memory, `tensor`, shape (pages, page elements), and a stack of the free ones.

    `free` is the number of free pages; padded writes go to `dump_page`.
    """

    def __init__(self, pages: int, page_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros((pages + 2, page_elements), dtype=dtype, device=device)
        self.capacity = pages
        self.dump_page = pages + 1
        self.free = pages
        self._stack = np.arange(pages, 0, -1, dtype=np.int64)

    @property
    def free_pages(self) -> NDArray[np.int64]:
        """Free pages, the next ones last."""
        return self._stack[: self.free]

    def allocate(self, count: int) -> NDArray[np.int64]:
        """Take pages with arbitrary contents; the scheduler's count rules out that fewer are free."""
        if count > self.free:
            raise RuntimeError(f"{count} pages wanted, {self.free} free: the scheduler's count is broken")
        self.free -= count
        return self._stack[self.free : self.free + count][::-1].copy()

    def release(self, pages: NDArray[np.int64]) -> None:
        """Return pages to the pool."""
        self._stack[self.free : self.free + pages.size] = pages
        self.free += pages.size

    def clear(self, pages: torch.Tensor) -> None:
        """Fill pages with zeros.

        Attention reads whole blocks and weights the part behind the last token with zero. Zero times NaN is
        NaN, so nothing of an earlier request may remain there.
        """
        self.tensor.index_fill_(0, pages, 0.0)


def kv_page_elements(config: ModelConfig, block_size: int) -> int:
    """Return the elements of one KV block: keys and values of all layers."""
    return config.layers * 2 * block_size * config.kv_size


class KvCache:
    """View of the pool's pages as keys and values.

    `pages` has the shape (pages, layers, keys or values, block size, heads, head_dim).
    """

    def __init__(self, config: ModelConfig, pool: PagePool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.layers = config.layers
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_dim
        self.pages = pool.tensor.view(-1, config.layers, 2, block_size, config.kv_heads, config.head_dim)
        self._blocks = pool.tensor.view(-1, block_size * config.kv_size)
        self._tokens = pool.tensor.view(-1, config.kv_size)

    def write(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor
    ) -> None:
        """Store keys and values, shape (tokens, heads, head_dim), at offsets in pages, shape (tokens,)."""
        first = ((pages * self.layers + layer) * 2) * self.block_size + offsets
        self._tokens.index_copy_(0, first, k.reshape(k.shape[0], -1))
        self._tokens.index_copy_(0, first + self.block_size, v.reshape(v.shape[0], -1))

    def read(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of pages, shape (..., blocks), as (..., heads, tokens, head_dim)."""
        first = (pages.reshape(-1) * self.layers + layer) * 2
        shape = (*pages.shape[:-1], pages.shape[-1] * self.block_size, self.kv_heads, self.head_dim)
        k = self._blocks.index_select(0, first).view(shape)
        v = self._blocks.index_select(0, first + 1).view(shape)
        return k.transpose(-3, -2), v.transpose(-3, -2)


class NamedBlocks:
    """Block tables with prefix caching: the scheduler assigns blocks, because it tracks their contents.

    Block b is page b + 1; pages 1 to `num_blocks` of the pool are reserved. Block i of a request is page
    ``table[scheduled[line], i] + shift``.
    """

    shift = 1
    line = "place"

    def __init__(self, state: State, pool: PagePool, num_blocks: int) -> None:
        self.pool = pool
        self.table: NDArray[np.int64] = state.pool.table
        self._holders = state.pool.blocks.holders
        self._reserved = pool.allocate(num_blocks)
        if self._reserved.min(initial=1) != 1 or self._reserved.max(initial=num_blocks) != num_blocks:
            raise RuntimeError("the pool has handed out pages before the KV cache was set up")

    def allocate(self, scheduled: ScheduledRequests) -> None:
        """Do nothing: the scheduler has assigned the blocks."""

    def release(self, rows: NDArray[np.int64]) -> None:
        """Do nothing: the scheduler has freed the blocks."""

    def owned(self) -> NDArray[np.int64]:
        """Return the pages taken out of the pool."""
        return self._reserved

    def in_use(self) -> int:
        """Return the number of pages of running requests."""
        return int(np.count_nonzero(self._holders))


class CountedBlocks:
    """Block tables without prefix caching: the scheduler counts blocks, and any free page serves.

    `table`, `shift` and `line` are as in `NamedBlocks`.
    """

    shift = 0
    line = "row"

    def __init__(self, pool: PagePool, rows: int, blocks_per_request: int, block_size: int) -> None:
        self.pool = pool
        self.table = np.zeros((rows, blocks_per_request), np.int64)
        self._held = np.zeros(rows, np.int64)
        self._block_size = block_size

    def allocate(self, scheduled: ScheduledRequests) -> None:
        """Take the pages that the scheduled tokens need."""
        rows = scheduled["row"]
        needed = -(-(scheduled["computed"] + scheduled["tokens"]) // self._block_size)
        more = needed - self._held[rows]
        total = int(more.sum())
        if total:
            ends = np.cumsum(more)
            within = np.arange(total) - np.repeat(ends - more, more)
            pages = self.pool.allocate(total)
            self.table[np.repeat(rows, more), np.repeat(needed - more, more) + within] = pages
            self._held[rows] = needed

    def release(self, rows: NDArray[np.int64]) -> None:
        """Return the pages of rows to the pool."""
        for row in rows:
            self.pool.release(self.table[row, : self._held[row]])
            self._held[row] = 0

    def owned(self) -> NDArray[np.int64]:
        """Return the pages taken out of the pool."""
        return np.concatenate(
            [np.zeros(0, np.int64), *(self.table[r, : self._held[r]] for r in np.flatnonzero(self._held))]
        )

    def in_use(self) -> int:
        """Return the number of pages of running requests."""
        return int(self._held.sum())


BlockTables = NamedBlocks | CountedBlocks
