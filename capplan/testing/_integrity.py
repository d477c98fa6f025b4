"""`check_integrity`: recompute every counter of a scheduler state, and check its lists, heaps and links."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capplan.serving import NONE, Heap, Limits, State
from capplan.serving import state as s
from capplan.serving.pooled import NO_CACHE, QUEUES, RESIDENT, SJF, PooledState
from capplan.serving.state import EMPTY


def snapshot(state: State) -> State:
    """Return a view of a state for reading from Python: records look their fields up once."""
    pooled = state.pooled
    if isinstance(pooled, PooledState):
        pooled = pooled._replace(
            counts=_fields(pooled.counts),
            rows=_fields(pooled.rows),
            queues=_fields(pooled.queues),
            adapters=_fields(pooled.adapters),
        )
    return state._replace(
        counters=_fields(state.counters),
        rows=_fields(state.rows),
        adapters=_fields(state.adapters),
        pooled=pooled,
    )


def _fields(records: Any) -> Any:
    plain = np.asarray(records)
    names = records.dtype.names
    if plain.ndim == 0:
        return SimpleNamespace(**dict(zip(names, plain.item(), strict=True)))
    return SimpleNamespace(size=plain.size, **{name: plain[name] for name in names})


def same(what: str, found: Any, expected: Any) -> None:
    """Assert that a stored value is the one recomputed from the rows."""
    assert found == expected, f"{what}: {found}, expected {expected}"


def follow(state: State, row: int) -> list[int]:
    """Return the rows of a linked list from `row` on."""
    rows = []
    while row != NONE:
        rows.append(row)
        assert len(rows) <= state.rows.following.size, "a list of rows runs in a circle"
        row = int(state.rows.following[row])
    return rows


def check_heap(name: str, heap: Heap, members: dict[int, int]) -> None:
    """Assert that a heap holds exactly these members with these keys, in heap order."""
    ids = [int(i) for i in heap.items.ids[: heap.size[0]]]
    same(f"members of heap {name}", sorted(ids), sorted(members))
    same(f"keys of heap {name}", {i: int(heap.items.key[i]) for i in ids}, members)
    positions = [int(heap.items.position[i]) for i in ids]
    same(f"positions in heap {name}", positions, list(range(1, len(ids) + 1)))
    same(f"number of positions in heap {name}", int((heap.items.position > 0).sum()), len(ids))
    for at, member in enumerate(ids[1:], start=1):
        assert members[ids[(at - 1) // 2]] < members[member], f"heap {name} is out of order"


def links_members(links: NDArray[np.int64]) -> list[int]:
    """Return the members of a linked list in order, after checking every link."""
    before, after = links
    sentinel = before.size - 1
    members: list[int] = []
    at = int(after[sentinel])
    same("link back to the sentinel", before[at], sentinel)
    while at != sentinel:
        members.append(at)
        assert len(members) < before.size, "links run in a circle"
        same(f"link back to {at}", before[after[at]], at)
        at = int(after[at])
    unlisted = np.setdiff1d(np.arange(sentinel), members)
    assert np.all(links[:, unlisted] == -1), "an unlisted member has links"
    return members


def check_pool_state(state: State, limits: Limits, running: list[int], waiting: list[int]) -> None:
    """Assert that the state of one pool follows from its rows, and that no limit is exceeded.

    Queues, books, reservations, reference counts and counters are checked; no row holds more than it
    reserved, and no more tokens are outstanding than the queues have.
    """
    _check_pool_queues(state, limits, waiting)
    _check_quotas(state, limits, running)
    _check_reservations(state, limits, running)
    _check_growth(state, running)
    _check_cache(state, limits, running)


def _check_pool_queues(state: State, limits: Limits, waiting: list[int]) -> None:
    pooled = state.pooled
    listed: list[int] = []
    for queue in range(pooled.queues.size):
        rows = []
        before, row = NONE, int(pooled.queues.head[queue])
        while row != NONE:
            rows.append(row)
            assert len(rows) <= len(waiting), f"size queue {queue} runs in a circle"
            same(f"row before {row}", pooled.rows.earlier[row], before)
            same(f"queue of row {row}", pooled.rows.queue[row], queue)
            before, row = row, int(pooled.rows.later[row])
        same(f"tail of size queue {queue}", pooled.queues.tail[queue], before)
        same(f"length of size queue {queue}", pooled.queues.n[queue], len(rows))
        predicted = pooled.rows.predicted if limits.order == SJF else np.zeros_like(pooled.rows.arrival)
        order = [(int(predicted[row]), int(pooled.rows.arrival[row])) for row in rows]
        same(f"order of size queue {queue}", order, sorted(set(order)))
        listed += rows
    assert not listed or int(pooled.rows.queue[listed].max()) < pooled.counts.n_queues, "an unused queue"
    same("rows in size queues", sorted(listed), sorted(waiting))


def _check_quotas(state: State, limits: Limits, running: list[int]) -> None:
    pooled = state.pooled
    idle = np.setdiff1d(np.arange(state.rows.size), running)
    assert not pooled.book[idle].any(), "a row that does not run holds quota"
    held = pooled.book[running].sum(axis=0) + pooled.adapter_book.sum(axis=0)
    same("outstanding", pooled.queues.outstanding.tolist(), held.tolist())
    members = np.bincount(pooled.rows.queue[running], minlength=pooled.queues.size)
    same("running rows by queue", pooled.queues.running.tolist(), members.tolist())
    assert np.all(pooled.book >= 0), "a queue owes tokens to a row"
    assert np.all(pooled.adapter_book >= 0), "a queue owes tokens to an adapter"
    if limits.order == QUEUES:
        charges = pooled.rows.charge[running].tolist()
        same("charges on the quotas", pooled.book[running].sum(axis=1).tolist(), charges)
        in_use = pooled.adapters.tokens * (state.adapters.users > 0) * pooled.counts.shares_charge
        same("shared charges", pooled.adapter_book.sum(axis=1).tolist(), in_use.tolist())
        if pooled.counts.overruns == 0:
            total = int(pooled.queues.quota[: pooled.counts.n_queues].sum())
            assert pooled.queues.outstanding.sum() <= total, "more tokens outstanding than the queues have"
    bypassers = int((pooled.rows.bypassed[running] != NONE).sum())
    same("requests that bypassed another", pooled.counts.n_bypassers, bypassers)


def _check_reservations(state: State, limits: Limits, running: list[int]) -> None:
    pooled = state.pooled
    same("reserved blocks", pooled.counts.reserved, int(pooled.rows.reserved[running].sum()))
    for row in running:
        computed = int(state.rows.computed[row])
        if state.rows.since[row] >= 0:
            computed += int(state.counters.tick - state.rows.since[row])
        held, reserved = -(-computed // limits.block_size), int(pooled.rows.reserved[row])
        assert limits.order != QUEUES or held <= reserved, f"row {row} holds {held} blocks of {reserved}"


def _check_growth(state: State, running: list[int]) -> None:
    pooled = state.pooled
    due = {}
    for row in running:
        predicted = int(pooled.rows.predicted[row])
        if state.rows.since[row] >= 0 and predicted < state.rows.target[row]:
            tick = int(state.rows.since[row]) + predicted - int(state.rows.output[row])
            due[row] = (max(tick, 0) << 32) | int(state.rows.sequence[row])
    check_heap("outgrow", pooled.outgrow, due)


def _check_cache(state: State, limits: Limits, running: list[int]) -> None:
    c, pooled, adapters = state.counters, state.pooled, state.adapters
    users = np.bincount(state.rows.adapter[running], minlength=adapters.users.size)[1:]
    same("users of adapters", adapters.users[1:].tolist(), users.tolist())
    used, loading, resident = users > 0, adapters.claim[1:] == s.LOADING, adapters.resident[1:] == 1
    for name, count, members in (
        ("used", c.n_active, used),
        ("used while loading", c.n_claimed, used & loading),
        ("loading", pooled.counts.n_loading, loading),
        ("resident", c.n_resident, resident),
    ):
        same(f"number of adapters {name}", int(count), int(members.sum()))
    assert np.all(resident[used | loading]), "an adapter is used or loading, and not in memory"
    pinned_pages = int(adapters.pages[1:][used | loading].sum())
    same("pages of pinned adapters", pooled.counts.pinned_pages, pinned_pages)
    prefetched = pooled.adapters.prefetched[1:] == 1
    assert not np.any(prefetched & (used | ~resident)), "a prefetched adapter is in use or gone"
    if limits.cache == NO_CACHE and limits.loading != RESIDENT:
        assert not np.any(resident & ~used & ~loading & ~prefetched), "an idle adapter stays without a cache"


def check_integrity(state: State, limits: Limits, num_blocks: int) -> None:
    """Assert that `state` holds together between two steps, after `commit` or before the first `schedule`.

    Parameters
    ----------
    state
        The instance.
    limits
        The limits of its last step.
    num_blocks
        Usable KV blocks it was made with.

    Raises
    ------
    AssertionError
        When a counter differs from what the rows say, a row is in two places or in none, a list or heap is
        broken, or a limit is exceeded.
    """
    state = snapshot(state)
    running = running_rows(state)
    waiting = waiting_rows(state)
    _check_rows(state, running, waiting)
    _check_blocks(state, limits, num_blocks, running)
    if limits.prefix_caching:
        check_pool(state, limits, running)
    _check_decoding(state, limits, running)
    if limits.policy == s.POOLED:
        check_pool_state(state, limits, running, waiting)
    else:
        _check_queues(state, waiting)
        _check_adapters(state, limits, running)
    _check_last_step(state, limits, running)


def running_rows(state: State) -> list[int]:
    """Return the running rows in order of admission."""
    rows = follow(state, int(state.counters.run_head))
    before = NONE
    for row in rows:
        same("previous running row", state.rows.previous[row], before)
        before = row
    same("last running row", state.counters.run_tail, before)
    return rows


def waiting_rows(state: State) -> list[int]:
    """Return the waiting rows in queue order."""
    rows = []
    for adapter, head in enumerate(state.adapters.queue_head):
        queue = follow(state, int(head))
        same(f"tail of queue {adapter}", state.adapters.queue_tail[adapter], queue[-1] if queue else NONE)
        same(f"adapters in queue {adapter}", {int(state.rows.adapter[r]) for r in queue} - {adapter}, set())
        rows += queue
    is_reversed = bool(state.counters.queue_reversed)
    return sorted(rows, key=lambda row: int(state.rows.waiting_key[row]), reverse=is_reversed)


def computed(state: State, row: int) -> int:
    """Return the tokens of `row` with valid KV."""
    return int(state.rows.computed[row]) + _decoded(state, row)


def _decoded(state: State, row: int) -> int:
    since = int(state.rows.since[row])
    return 0 if since < 0 else int(state.counters.tick) - since


def _ending(state: State) -> list[int]:
    return [int(row) for row in state.lists.ending[: state.counters.n_ending]]


def _check_rows(state: State, running: list[int], waiting: list[int]) -> None:
    c = state.counters
    fresh = list(range(int(c.fresh_row), state.rows.size))
    free = fresh + [int(row) for row in state.rows.free_rows[: c.n_free_rows - len(fresh)]]
    everyone = sorted(running + waiting + free)
    same("rows running, waiting and free", everyone, list(range(state.rows.size)))
    ending = [row for row in running if state.rows.since[row] == s.ENDING]
    same("ending rows", sorted(_ending(state)), sorted(ending))
    same("number of running rows", c.n_running, len(running))
    same("number of waiting rows", c.n_waiting, len(waiting))
    ages = [int(state.rows.sequence[row]) for row in running]
    same("ages of running rows", ages, sorted(set(ages)))
    for row in waiting:
        same(f"computed tokens of waiting row {row}", computed(state, row), 0)


def _check_blocks(state: State, limits: Limits, num_blocks: int, running: list[int]) -> None:
    c = state.counters
    held = {row: computed(state, row) for row in running}
    resident_pages = sum(
        int(state.adapters.pages[a]) for a in range(state.adapters.pages.size) if state.adapters.resident[a]
    )
    same("pages of adapters", c.adapter_pages, resident_pages)
    if not limits.prefix_caching:
        blocks = sum(-(-tokens // limits.block_size) for tokens in held.values())
        same("free and held blocks", c.free_blocks + blocks + resident_pages, num_blocks)
    assert c.free_blocks >= 0, "more blocks held than there are"
    reading = [tokens for row, tokens in held.items() if state.rows.since[row] != s.ENDING]
    same("KV tokens", c.kv_tokens, sum(reading))
    for row, tokens in held.items():
        assert tokens < limits.max_model_len, f"row {row} outgrew max_model_len"


def _check_decoding(state: State, limits: Limits, running: list[int]) -> None:
    c = state.counters
    decoding = [row for row in running if state.rows.since[row] >= 0]
    partial = [row for row in running if state.rows.since[row] == NONE]
    same("partial rows", [int(row) for row in state.lists.partial[: c.n_partial]], partial)
    same("number of decoding rows", c.n_decoding, len(decoding))
    phase = np.zeros(limits.block_size, np.int64)
    for row in decoding:
        phase[(state.rows.computed[row] - state.rows.since[row]) % limits.block_size] += 1
        known = int(state.rows.prompt[row] + state.rows.output[row]) + _decoded(state, row)
        same(f"tokens that decoding row {row} lacks", known - computed(state, row), 1)
    same("phases", state.phase.tolist(), phase.tolist())
    due = {row: _due(state, row) for row in decoding}
    check_heap("finish", state.finish, due)
    assert all(key >> 32 > c.tick for key in due.values()), "a request that is over still runs"


def _due(state: State, row: int) -> int:
    last_tick = int(state.rows.since[row]) + int(state.rows.target[row]) - int(state.rows.output[row])
    return (last_tick << 32) | int(state.rows.sequence[row])


def _check_queues(state: State, waiting: list[int]) -> None:
    heads: dict[int, int] = {}
    for row in waiting:
        adapter, key = int(state.rows.adapter[row]), int(state.rows.waiting_key[row])
        heads[adapter] = min(key, heads.get(adapter, key))
    listed = {a: key for a, key in heads.items() if state.adapters.claim[a] != s.LOADING}
    hot = {a: key for a, key in listed.items() if a == 0 or state.adapters.users[a] > 0}
    check_heap("hot", state.hot, hot)
    check_heap("cold", state.cold, {a: key for a, key in listed.items() if a not in hot})


def _check_adapters(state: State, limits: Limits, running: list[int]) -> None:
    c = state.counters
    adapters = range(1, state.adapters.users.size)
    using = [int(state.rows.adapter[row]) for row in running if state.rows.since[row] != s.ENDING]
    claims = state.adapters.claim != s.NO_CLAIM
    users = np.bincount(using, minlength=state.adapters.users.size) + claims
    same("users of adapters", state.adapters.users[1:].tolist(), users[1:].tolist())
    same("claims on slots", c.n_claimed, int(claims.sum()))
    active = {a for a in adapters if users[a] > 0}
    resident = {a for a in adapters if state.adapters.resident[a]}
    on_host = {a for a in adapters if state.adapters.on_host[a]}
    for name, count, members in (
        ("active", c.n_active, active),
        ("resident", c.n_resident, resident),
        ("on host", c.n_on_host, on_host),
    ):
        same(f"number of adapters {name}", count, len(members))
    assert active <= resident <= on_host, (
        "an adapter runs without a slot, or has one without being on the host"
    )
    assert len(resident) <= limits.max_loras, "more adapters resident than slots"
    assert len(on_host) <= max(limits.max_cpu_loras, 0), "more adapters on the host than max_cpu_loras"
    same("idle residents", set(links_members(state.gpu_idle)), resident - active)
    same("idle on host", set(links_members(state.host_idle)), on_host - active)


def _check_last_step(state: State, limits: Limits, running: list[int]) -> None:
    c = state.counters
    budget = limits.max_num_batched_tokens
    if limits.policy != s.VLLM:  # whose token budget alone bounds decodes
        budget = max(budget, c.step_decodes)
    assert 0 <= c.step_tokens <= budget, "the step exceeded its token budget"
    assert len(running) <= limits.max_num_seqs, "more requests run than max_num_seqs"
    if limits.policy != s.POOLED:
        assert c.n_preempted == 0 or c.n_admitted == 0, "a step preempted and admitted"


def check_pool(state: State, limits: Limits, running: list[int]) -> None:
    """Assert that every block is free or held, each by those whose tables name it, and indexed once."""
    pool = state.pool
    free = links_members(pool.free)
    same("free blocks", state.counters.free_blocks, len(free))
    held: Counter[int] = Counter()
    for row in running:
        place = int(state.rows.place[row])
        assert place != NONE, f"row {row} runs without a place"
        blocks = pool.table[place, : -(-computed(state, row) // limits.block_size)].tolist()
        assert len(set(blocks)) == len(blocks), f"row {row} holds a block twice"
        held.update(blocks)
    same(
        "holders of blocks", pool.blocks.holders.tolist(), [held[b] for b in range(pool.blocks.holders.size)]
    )
    same("blocks free or held", sorted([*free, *held]), list(range(pool.blocks.holders.size)))
    places = {int(state.rows.place[row]) for row in running}
    unused = pool.free_places[: state.counters.n_free_places].tolist()
    same("places", sorted([*places, *unused]), list(range(pool.free_places.size)))
    _check_index(state)
    _check_phases(state, limits, running)


def _check_index(state: State) -> None:
    pool = state.pool
    indexed: list[int] = []
    for first, last in zip(pool.buckets.first, pool.buckets.last, strict=True):
        before, block = NONE, int(first)
        while block != NONE:
            indexed.append(block)
            same(f"block before {block}", pool.blocks.before[block], before)
            before, block = block, int(pool.blocks.after[block])
        same("last block of a bucket", last, before)
    same("indexed blocks", sorted(indexed), np.flatnonzero(pool.blocks.content >= 0).tolist())
    assert np.all(pool.blocks.content >= EMPTY - 1), "a block with an unknown kind of content"


def _check_phases(state: State, limits: Limits, running: list[int]) -> None:
    rows = state.rows.request.size
    for phase in range(limits.block_size):
        listed = []
        at = int(state.in_phase[1, rows + phase])
        while at != rows + phase:
            listed.append(at)
            assert len(listed) <= rows, "a list of rows by phase runs in a circle"
            at = int(state.in_phase[1, at])
        expected = [
            row
            for row in running
            if state.rows.since[row] >= 0
            and (state.rows.computed[row] - state.rows.since[row]) % limits.block_size == phase
        ]
        same(f"rows in phase {phase}", sorted(listed), sorted(expected))
