"""KV blocks and prefix caching: the free list, blocks by content, and the blocks of each running request.

Without prefix caching free blocks are interchangeable and only counted. With it, a free block keeps its
content until it is allocated again, so the order of the free list determines the cached content. As in vLLM,
blocks are taken from the front. The blocks that a request releases are appended, the last one first (least
recently used).

A full block matches requests with the same preceding tokens and adapter. Requests of one prefix share the
blocks within it. Requests whose whole prompt is the same shared prefix have the same output and share its
blocks as well. All other blocks belong to one request, which reads them again only after a preemption. Shared
blocks are registered as soon as the host has their tokens, the others when a request loses them.
"""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving._structures import links_append, links_first, links_prepend, links_remove, ring_next
from capplan.serving.state import ANONYMOUS, EMPTY, NONE, BlockPool, Limits, State


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
    """Register the content of a block."""
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
    """Allocate the first free block and discard its content."""
    block = links_first(pool.free)
    links_remove(pool.free, block)
    _forget(pool, block)
    pool.blocks.holders[block] = 1
    return block


@inner
def share_block(pool: BlockPool, block: int) -> None:
    """Hold a registered block, free or in use."""
    if pool.blocks.holders[block] == 0:
        links_remove(pool.free, block)
    pool.blocks.holders[block] += 1


@inner
def give_back(pool: BlockPool, place: int, count: int, empty_to_front: bool) -> int:
    """Release the first `count` blocks of a table line, last one first; return how many became free."""
    freed = 0
    for i in range(count - 1, -1, -1):
        block = pool.table[place, i]
        pool.blocks.holders[block] -= 1
        if pool.blocks.holders[block] == 0:
            freed += 1
            if not empty_to_front or pool.blocks.content[block] != EMPTY:
                links_append(pool.free, block)
    if empty_to_front:
        # Prepend one by one: the last block is taken first.
        for i in range(count):
            block = pool.table[place, i]
            if pool.blocks.holders[block] == 0 and pool.blocks.content[block] == EMPTY:
                links_prepend(pool.free, block)
    return freed


_BLOCK_BITS = 20  # a request has fewer than 2**20 blocks


@inner
def same_answers(state: State, row: int) -> bool:
    """Return whether a row's whole prompt is shared prefix: requests with it have the same output."""
    return bool(state.rows.shared[row] == state.rows.prompt[row])


@inner
def _content_key(state: State, limits: Limits, row: int, index: int) -> int:
    """Return the key of the content of a row's block number `index`."""
    if (index + 1) * limits.block_size <= state.rows.shared[row]:
        name = 3 * state.rows.prefix[row]
    elif same_answers(state, row):
        name = 3 * (state.rows.prefix[row] * limits.max_model_len + state.rows.prompt[row]) + 1
    else:
        name = 3 * state.rows.content[row] + 2
    return int((name << _BLOCK_BITS) | index)


@inner
def look_up(state: State, limits: Limits, row: int) -> int:
    """Find the first blocks of a waiting row, list them in `pool.found` and return their number.

    At least one token is left to compute, as sampling requires.
    """
    pool = state.pool
    most = (state.rows.prompt[row] + state.rows.output[row] - 1) // limits.block_size
    hits = 0
    while hits < most:
        block = find_block(pool, _content_key(state, limits, row, hits))
        if block == NONE:
            break
        pool.found[hits] = block
        hits += 1
    return hits


@inner
def free_among_found(state: State, hits: int) -> int:
    """Return how many of the blocks found are free; admission counts them as new ones."""
    free = 0
    for i in range(hits):
        free += state.pool.blocks.holders[state.pool.found[i]] == 0
    return free


@inner
def enter(state: State, limits: Limits, row: int, hits: int, tokens: int) -> None:
    """Allocate the blocks of an admitted row: those that `look_up` found, and new ones for `tokens`."""
    pool = state.pool
    free = state.counters.n_free_places - 1
    state.counters.n_free_places = free
    place = pool.free_places[free]
    state.rows.place[row] = place
    for i in range(hits):
        share_block(pool, pool.found[i])
        pool.table[place, i] = pool.found[i]
    state.rows.registered[row] = hits
    state.rows.computed[row] = hits * limits.block_size
    extend(state, limits, row, tokens)


@inner
def extend(state: State, limits: Limits, row: int, tokens: int) -> None:
    """Allocate the blocks for the next tokens of a partial row; register the full shared ones."""
    pool = state.pool
    place = state.rows.place[row]
    size = limits.block_size
    computed = state.rows.computed[row] + tokens
    for i in range((state.rows.computed[row] + size - 1) // size, (computed + size - 1) // size):
        pool.table[place, i] = take_block(pool)
    known = state.rows.shared[row]
    if same_answers(state, row):
        # In async scheduling, the token of the previous step is in flight.
        in_flight = limits.async_scheduling != 0 and state.rows.emitted[row] == state.counters.tick
        known = state.rows.prompt[row] + state.rows.output[row] - in_flight
    _register(state, limits, row, min(computed, known) // size)


@inner
def _register(state: State, limits: Limits, row: int, full: int) -> None:
    pool = state.pool
    for i in range(state.rows.registered[row], full):
        register_block(pool, pool.table[state.rows.place[row], i], _content_key(state, limits, row, i))
    state.rows.registered[row] = max(state.rows.registered[row], full)


@inner
def extend_together(state: State, limits: Limits) -> None:
    """Allocate the blocks of a whole step in running order."""
    due = _due_rows(state, limits)
    partial = state.counters.n_partial
    at_due = at_partial = 0
    while at_due < due or at_partial < partial:
        if at_partial == partial or (at_due < due and _is_first(state, at_due, at_partial)):
            _extend_decoding(state, limits, state.lists.due[at_due])
            at_due += 1
        else:
            row = state.lists.partial[at_partial]
            at_partial += 1
            extend(state, limits, row, state.rows.tokens[row])


@inner
def _is_first(state: State, at_due: int, at_partial: int) -> bool:
    due, partial = state.lists.due[at_due], state.lists.partial[at_partial]
    return bool(state.rows.sequence[due] < state.rows.sequence[partial])


@inner
def _extend_decoding(state: State, limits: Limits, row: int) -> None:
    """Allocate a block if the row's last one is full; register the block that its next token completes."""
    size = limits.block_size
    computed = state.rows.computed[row] + state.counters.tick - state.rows.since[row]
    if computed % size == 0:
        state.pool.table[state.rows.place[row], computed // size] = take_block(state.pool)
    if same_answers(state, row):
        _register(state, limits, row, (computed + (limits.async_scheduling == 0)) // size)


@inner
def _due_rows(state: State, limits: Limits) -> int:
    """List the decoding rows with changed blocks, oldest admission first; return their number."""
    c = state.counters
    full = (-c.tick) % limits.block_size
    n = _list_phase(state, full, 0)
    about_to_be_full = (full - 1) % limits.block_size
    if c.same_answers > 0 and about_to_be_full != full:
        n = _list_phase(state, about_to_be_full, n)
    return n


@inner
def _list_phase(state: State, phase: int, listed: int) -> int:
    """Add the decoding rows of a phase to `due`, which is sorted by admission; return its new length."""
    sentinel = state.rows.request.size + phase
    row = ring_next(state.in_phase, sentinel)
    while row != sentinel:
        at = listed
        while at > 0 and state.rows.sequence[state.lists.due[at - 1]] > state.rows.sequence[row]:
            state.lists.due[at] = state.lists.due[at - 1]
            at -= 1
        state.lists.due[at] = row
        listed += 1
        row = ring_next(state.in_phase, row)
    return listed


@inner
def leave_blocks(state: State, limits: Limits, row: int, full: int, ended: bool) -> int:
    """Release the blocks of a partial row and return how many became free.

    `full` of its blocks are full and registered. Of a request that has `ended`, content of its own is not
    needed again.
    """
    pool = state.pool
    place = state.rows.place[row]
    if ended and not same_answers(state, row):
        for i in range(state.rows.registered[row], full):
            pool.blocks.content[pool.table[place, i]] = ANONYMOUS
    else:
        _register(state, limits, row, full)
    held = (state.rows.computed[row] + limits.block_size - 1) // limits.block_size
    state.rows.place[row] = NONE
    pool.free_places[state.counters.n_free_places] = place
    state.counters.n_free_places += 1
    return give_back(pool, place, held, limits.unhashed_to_front != 0)
