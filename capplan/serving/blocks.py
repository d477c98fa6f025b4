"""KV blocks one by one, for prefix caching: who holds which, in what order free ones go, what they contain.

Without prefix caching one free block is as good as another, and a count will do. With it, a free block keeps
its content until it is taken again, so the order of the free list decides what can still be found. The order
is vLLM's: blocks are taken from the front; of the blocks that a request gives back, last ones first, those
that can be found again go to the end (least recently used).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import inner
from capplan.serving.links import links_append, links_first, links_prepend, links_remove, new_links

EMPTY = -1
"""Content of a block that nobody can find: not full, or never registered."""
ANONYMOUS = -2
"""Content that counts as found again in the order of the free list, but that no request can ask for."""

_NONE = -1
_BLOCK = np.dtype([(name, np.int64) for name in ("content", "holders", "before", "after")], align=True)
_BUCKET = np.dtype([("first", np.int64), ("last", np.int64)], align=True)


class BlockPool(NamedTuple):
    """The blocks of one instance. Without prefix caching all arrays are empty."""

    blocks: np.recarray[Any, Any]
    """Shape (blocks,). ``content``: the key of what a block contains, EMPTY or ANONYMOUS. ``holders``:
    running requests that hold it. ``before``, ``after``: neighbours in its bucket, in order of registration.
    """
    free: NDArray[np.int64]
    """Links of the free blocks, shape (2, blocks + 1); the first one is taken first."""
    buckets: np.recarray[Any, Any]
    """Shape (buckets,). ``first`` and ``last`` block of the contents that share a hash."""
    table: NDArray[np.int64]
    """Shape (places, blocks per request): the blocks of each running request in order."""
    free_places: NDArray[np.int64]
    """Lines of `table` that nobody uses."""
    found: NDArray[np.int64]
    """Shape (blocks per request,): what the last look-up found."""


def new_pool(blocks: int, places: int, blocks_per_request: int) -> BlockPool:
    """Return a pool whose blocks are all free and empty; with 0 blocks, a placeholder."""
    records = np.full(blocks, _NONE, np.int64).repeat(4).view(_BLOCK).view(np.recarray)
    records.content = EMPTY
    records.holders = 0
    buckets = 1 << max(0, blocks - 1).bit_length()
    return BlockPool(
        blocks=records,
        free=new_links(blocks, 0),
        buckets=np.full(2 * buckets, _NONE, np.int64).view(_BUCKET).view(np.recarray),
        table=np.zeros((places, blocks_per_request), np.int64),
        free_places=np.arange(places - 1, -1, -1, dtype=np.int64),
        found=np.zeros(blocks_per_request, np.int64),
    )


@inner
def _bucket_of(pool: BlockPool, key: int) -> int:
    mixed = key ^ (key >> 24)
    return (mixed ^ (mixed >> 9)) & (pool.buckets.size - 1)


@inner
def find_block(pool: BlockPool, key: int) -> int:
    """Return the block with this content that was registered first, or -1."""
    block = pool.buckets.first[_bucket_of(pool, key)]
    while block != _NONE and pool.blocks.content[block] != key:
        block = pool.blocks.after[block]
    return int(block)


@inner
def register_block(pool: BlockPool, block: int, key: int) -> None:
    """Say what a block contains, so that it can be found."""
    bucket = _bucket_of(pool, key)
    last = pool.buckets.last[bucket]
    pool.blocks.content[block] = key
    pool.blocks.before[block] = last
    pool.blocks.after[block] = _NONE
    if last == _NONE:
        pool.buckets.first[bucket] = block
    else:
        pool.blocks.after[last] = block
    pool.buckets.last[bucket] = block


@inner
def _forget(pool: BlockPool, block: int) -> None:
    key = pool.blocks.content[block]
    pool.blocks.content[block] = EMPTY
    if key < 0:
        return
    before, after = pool.blocks.before[block], pool.blocks.after[block]
    bucket = _bucket_of(pool, key)
    if before == _NONE:
        pool.buckets.first[bucket] = after
    else:
        pool.blocks.after[before] = after
    if after == _NONE:
        pool.buckets.last[bucket] = before
    else:
        pool.blocks.before[after] = before


@inner
def take_block(pool: BlockPool) -> int:
    """Take the first free block; what it contained is lost."""
    block = links_first(pool.free)
    links_remove(pool.free, block)
    _forget(pool, block)
    pool.blocks.holders[block] = 1
    return block


@inner
def share_block(pool: BlockPool, block: int) -> None:
    """Hold a block that was found, be it free or in use."""
    if pool.blocks.holders[block] == 0:
        links_remove(pool.free, block)
    pool.blocks.holders[block] += 1


@inner
def give_back(pool: BlockPool, place: int, count: int, empty_to_front: bool) -> int:
    """Let go of the first `count` blocks of a table line, last one first; return how many became free."""
    freed = 0
    for i in range(count - 1, -1, -1):
        block = pool.table[place, i]
        pool.blocks.holders[block] -= 1
        if pool.blocks.holders[block] == 0:
            freed += 1
            if not empty_to_front or pool.blocks.content[block] != EMPTY:
                links_append(pool.free, block)
    if empty_to_front:
        # One after the other to the front, so that the last one is taken first.
        for i in range(count):
            block = pool.table[place, i]
            if pool.blocks.holders[block] == 0 and pool.blocks.content[block] == EMPTY:
                links_prepend(pool.free, block)
    return freed
