"""One pool for KV and adapters: admission into it, reservations and their growth, release.

A row is admitted when memory for its whole predicted sequence and its adapter can be set aside, and waits for
its adapter among the running rows, without tokens. KV blocks are taken when tokens are computed; idle
adapters are evicted only then.

Source: Chameleon, sections 4.2 and 4.3; S-LoRA for arrival order.
"""

from __future__ import annotations

from capplan._jit import inner, inner_once
from capplan.serving._structures import heap_push, heap_remove
from capplan.serving.pooled._caches import leave_adapter, make_room, pages_to_pin, use_adapter
from capplan.serving.pooled._merging import is_served
from capplan.serving.pooled._size_queues import (
    book,
    join_queue,
    leave_queue,
    record_execution,
    set_prediction,
    unbook,
    unbook_adapter,
)
from capplan.serving.pooled._state import ASYNCHRONOUS, QUEUES, with_pool
from capplan.serving.state import NONE, Limits, State
from capplan.serving.vllm._running import (
    append_running,
    drop_row,
    fits_to_end,
    held_to_end,
    insert_by_end,
    leave_partial,
    leave_running,
    output_tokens,
    remove_from_order,
    stop_decoding,
)
from capplan.serving.vllm._waiting_queue import leave_waiting, push_front


@inner
def has_memory(state: State, limits: Limits, row: int, pages: int) -> bool:
    """Return whether memory for a row and more blocks of adapters can be set aside.

    `pages` are blocks of adapters that are not pinned yet. Row NONE: for the blocks alone.
    """
    counts = state.pooled.counts
    if limits.order != QUEUES:
        held_late, new = counts.held_late, row
        if row != NONE and starts_late(state, limits, row):
            held_late, new = held_late + held_to_end(state, limits, row), NONE
        ordered = state.counters.n_running - counts.n_late
        return fits_to_end(state, limits, new, counts.pinned_pages + pages, ordered, held_late)
    reserved = counts.reserved if row == NONE else counts.reserved + state.pooled.rows.reserved[row]
    return bool(reserved + counts.pinned_pages + pages <= state.counters.capacity)


@inner
def starts_late(state: State, limits: Limits, row: int) -> bool:
    """Return whether decoding rows go on before a row without tokens has its first one.

    It waits for its adapter, or its prompt is computed beside them.
    """
    return bool(limits.chunked or not may_start(state, limits, state.rows.adapter[row]))


@inner
def may_start(state: State, limits: Limits, adapter: int) -> bool:
    """Return whether a step may have prompts of an adapter, which waits for its load if need be."""
    if not is_served(state, limits, adapter):
        return False
    return bool(limits.loading != ASYNCHRONOUS or is_loaded(state, adapter))


@inner
def row_has_memory(state: State, limits: Limits, row: int) -> bool:
    """Return whether memory for a waiting row and its adapter can be set aside."""
    return has_memory(state, limits, row, pages_to_pin(state, state.rows.adapter[row]))


@inner
def step_allows(state: State, limits: Limits, row: int) -> bool:
    """Return whether the batch has a place and tokens for a waiting row."""
    return state.counters.n_running < limits.max_num_seqs and step_has_tokens(state, limits, row)


@inner
def step_has_tokens(state: State, limits: Limits, row: int) -> bool:
    """Return whether the budget of the step holds a waiting row; the first may exceed it."""
    known = state.rows.prompt[row] + state.rows.output[row]
    alone = state.counters.n_admitted == 0 and known > limits.max_num_batched_tokens
    return bool(alone or known <= state.pooled.counts.room_tokens)


@inner_once
def admit(state: State, limits: Limits, row: int) -> None:
    """Admit a waiting row that has memory; its charge is booked by the caller."""
    c, pooled = state.counters, state.pooled
    adapter = state.rows.adapter[row]
    leave_queue(state, row)
    leave_waiting(state, row)
    c.sequence += 1
    state.rows.sequence[row] = c.sequence
    append_running(state, row)
    state.rows.tokens[row] = 0
    state.lists.partial[c.n_partial] = row
    c.n_partial += 1
    state.lists.admitted[c.n_admitted] = row
    c.n_admitted += 1
    pooled.queues.running[pooled.rows.queue[row]] += 1
    pooled.counts.reserved += pooled.rows.reserved[row]
    pooled.counts.room_tokens -= state.rows.prompt[row] + state.rows.output[row]
    if limits.order != QUEUES:
        _join_order(state, limits, row)
    if pooled.rows.admitted_ns[row] == NONE:
        pooled.rows.admitted_ns[row] = c.now_ns
        if is_loaded(state, adapter):
            pooled.counts.hits += adapter != 0
        else:
            pooled.counts.misses += 1
    use_adapter(state, limits, adapter)


@inner
def _join_order(state: State, limits: Limits, row: int) -> None:
    """Insert an admitted row into the order of ends, or behind it if it starts late."""
    last = state.counters.n_running - 1
    if starts_late(state, limits, row):
        append_late(state, limits, row, last)
        return
    ordered = last - state.pooled.counts.n_late
    state.lists.by_end[last] = state.lists.by_end[ordered]
    insert_by_end(state, row, ordered)


@inner
def append_late(state: State, limits: Limits, row: int, at: int) -> None:
    """Put a row that starts late behind the order of ends."""
    state.lists.by_end[at] = row
    state.pooled.counts.n_late += 1
    state.pooled.counts.held_late += held_to_end(state, limits, row)


@inner
def _leave_order(state: State, limits: Limits, row: int) -> None:
    """Remove a row that still runs from the order of ends, or from behind it."""
    counts = state.pooled.counts
    if remove_from_order(state, row) >= state.counters.n_running - counts.n_late:
        counts.n_late -= 1
        counts.held_late -= held_to_end(state, limits, row)


@inner
def is_loaded(state: State, adapter: int) -> bool:
    """Return whether an adapter is in memory and its load is complete."""
    return adapter == 0 or (state.adapters.resident[adapter] == 1 and state.adapters.claim[adapter] == 0)


@inner
def release(state: State, limits: Limits, row: int) -> None:
    """Return what an admitted row holds but its KV: charge, reservation, order, adapter.

    The row still runs; it does not decode any more.
    """
    pooled = state.pooled
    if limits.order != QUEUES:
        _leave_order(state, limits, row)
    unwatch_growth(state, row)
    unbook(state, row)
    pooled.counts.reserved -= pooled.rows.reserved[row]
    pooled.queues.running[pooled.rows.queue[row]] -= 1
    if pooled.rows.bypassed[row] != NONE:
        pooled.rows.bypassed[row] = NONE
        pooled.counts.n_bypassers -= 1
    adapter = state.rows.adapter[row]
    leave_adapter(state, adapter)
    if pooled.counts.shares_charge and state.adapters.users[adapter] == 0:
        unbook_adapter(state, adapter)


@with_pool(None)
def end_admitted(state: State, limits: Limits, row: int, is_complete: bool) -> None:
    """Release a row that ends, and record the time in execution of a complete one."""
    if is_complete:
        record_execution(state, row)
    release(state, limits, row)


@inner_once
def requeue(state: State, limits: Limits, row: int) -> None:
    """Preempt an admitted row: it loses its KV and returns to its queue at its place by arrival."""
    c = state.counters
    if not _withdraw_admission(state, row):
        state.lists.preempted[c.n_preempted] = row
        c.n_preempted += 1
    if state.rows.since[row] != NONE:
        stop_decoding(state, row)
        state.lists.stalled[c.n_stalled] = row
        c.n_stalled += 1
    else:
        leave_partial(state, row)
    release(state, limits, row)
    leave_running(state, limits, row, False)
    c.kv_tokens -= state.rows.computed[row]
    state.rows.computed[row] = 0
    state.rows.tokens[row] = 0
    set_prediction(state, limits, row, state.pooled.rows.predicted[row])
    push_front(state, row)
    join_queue(state, limits, row)


@inner
def _withdraw_admission(state: State, row: int) -> bool:
    """Remove a row from the admissions of this step; return False if it was admitted before."""
    c = state.counters
    before = c.n_admitted
    c.n_admitted = drop_row(state.lists.admitted, before, row)
    return bool(c.n_admitted < before)


@with_pool(None)
def watch_growth(state: State, row: int) -> None:
    """Note when a row that begins to decode will have its predicted output, if it goes on after that."""
    predicted = state.pooled.rows.predicted[row]
    if predicted < state.rows.target[row]:
        tick = state.rows.since[row] + predicted - state.rows.output[row]
        heap_push(state.pooled.outgrow, row, (max(tick, 0) << 32) | state.rows.sequence[row])


@inner
def unwatch_growth(state: State, row: int) -> None:
    """Forget a row that stops decoding."""
    if state.pooled.outgrow.items.position[row] > 0:
        heap_remove(state.pooled.outgrow, row)


@inner
def pause_unserved(state: State, limits: Limits) -> None:
    """Make decoding rows that the step may not serve partial ones, which keep their KV and lack one token."""
    c = state.counters
    row = c.run_head
    c.n_partial = 0
    while row != NONE:
        if state.rows.since[row] >= 0 and not is_served(state, limits, state.rows.adapter[row]):
            stop_decoding(state, row)
            unwatch_growth(state, row)
            state.rows.tokens[row] = 0
            state.lists.stalled[c.n_stalled] = row
            c.n_stalled += 1
        if state.rows.since[row] == NONE:
            state.lists.partial[c.n_partial] = row
            c.n_partial += 1
        row = state.rows.following[row]


@inner
def grow(state: State, limits: Limits) -> None:
    """Raise the charge of rows that generate more than predicted by a quarter, and their reservation."""
    pooled = state.pooled
    due = pooled.outgrow
    while due.size[0] > 0 and due.items.key[due.items.ids[0]] >> 32 <= state.counters.tick:
        row = due.items.ids[0]
        heap_remove(due, row)
        charge, reserved = pooled.rows.charge[row], pooled.rows.reserved[row]
        set_prediction(state, limits, row, pooled.rows.predicted[row] + (charge + 3) // 4)
        book(state, row, pooled.rows.queue[row], pooled.rows.charge[row] - charge)
        pooled.counts.reserved += pooled.rows.reserved[row] - reserved
        pooled.counts.overruns += 1
        if pooled.rows.predicted[row] < state.rows.target[row]:
            tick = state.counters.tick + pooled.rows.predicted[row] - output_tokens(state, row)
            heap_push(due, row, (tick << 32) | state.rows.sequence[row])


@inner
def make_room_by_recompute(state: State, limits: Limits, blocks: int, kept: int) -> bool:
    """Free blocks by evicting idle adapters, then by preempting the row admitted last, but not `kept`."""
    while not make_room(state, limits, blocks, True):
        if state.counters.run_tail == kept or state.counters.run_tail == NONE:
            return False
        requeue(state, limits, state.counters.run_tail)
        state.pooled.counts.recomputes += 1
    return True
