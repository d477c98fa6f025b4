"""`check_integrity`: recompute every counter of a scheduler state and compare."""

from __future__ import annotations

from collections import Counter

import numpy as np

from capplan.serving import NONE, Limits, State
from capplan.serving import state as s
from capplan.serving.state import EMPTY
from capplan.testing.pool_integrity import check_pool_state
from capplan.testing.structures import check_heap, follow, links_members, same, snapshot


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
