"""KV blocks one by one, for prefix caching: who holds which, in what order free ones go, what they contain.

Without prefix caching one free block is as good as another, and a count will do. With it, a free block keeps
its content until it is taken again, so the order of the free list decides what can still be found. The order
is vLLM's: blocks are taken from the front; of the blocks that a request gives back, last ones first, those
that can be found again go to the end (least recently used).
"""

from __future__ import annotations

from capplan.compile import inner
from capplan.serving.links import links_append, links_first, links_prepend, links_remove
from capplan.serving.state import EMPTY, NONE, BlockPool


@inner
def _bucket_of(pool: BlockPool, key: int) -> int:
    mixed = key ^ (key >> 24)
    return (mixed ^ (mixed >> 9)) & (pool.buckets.size - 1)


@inner
def find_block(pool: BlockPool, key: int) -> int:
    """Return the block with this content that was registered first, or -1."""
    block = pool.buckets.first[_bucket_of(pool, key)]
    while block != NONE and pool.blocks.content[block] != key:
        block = pool.blocks.after[block]
    return int(block)


@inner
def register_block(pool: BlockPool, block: int, key: int) -> None:
    """Say what a block contains, so that it can be found."""
    bucket = _bucket_of(pool, key)
    last = pool.buckets.last[bucket]
    pool.blocks.content[block] = key
    pool.blocks.before[block] = last
    pool.blocks.after[block] = NONE
    if last == NONE:
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
    if before == NONE:
        pool.buckets.first[bucket] = after
    else:
        pool.blocks.after[before] = after
    if after == NONE:
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
