"""Running requests: their order, their tokens in a step, preemption.

A decoding row needs a new block in the steps at which its computed tokens are a multiple of the block size,
so counting rows by `(computed - since) mod block_size` gives the blocks of a whole step at once.

S-LoRA's look-ahead: whether a batch fits into memory until its last declared output token.

Rows that start at an unknown time, such as those that wait for their adapters, count in full from the start.

Source: S-LoRA c1ddf48, ``router/req_queue.py``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capplan._jit import inner
from capplan.serving._structures import heap_push, heap_remove, links_remove, ring_append
from capplan.serving.state import ENDING, NONE, Limits, State
from capplan.serving.vllm._adapter_slots import release_adapter, release_held
from capplan.serving.vllm._kv_blocks import extend, extend_together, leave_blocks
from capplan.serving.vllm._waiting_queue import push_front


@inner
def _left(state: State, row: int) -> int:
    """Return the tokens that a row may still generate after the next one."""
    return int(state.rows.target[row] - output_tokens(state, row) - 1)


@inner
def insert_by_end(state: State, row: int, ordered: int) -> None:
    """Insert a row into the descending order of ends, the first `ordered` entries of a list."""
    at = ordered
    left = _left(state, row)
    while at > 0 and _left(state, state.lists.by_end[at - 1]) < left:
        state.lists.by_end[at] = state.lists.by_end[at - 1]
        at -= 1
    state.lists.by_end[at] = row


@inner
def remove_from_order(state: State, row: int) -> int:
    """Remove an ending row, which still runs, from the order of ends; return its place."""
    last = state.counters.n_running - 1
    at = last
    while state.lists.by_end[at] != row:
        at -= 1
    for i in range(at, last):
        state.lists.by_end[i] = state.lists.by_end[i + 1]
    return int(at)


@inner
def held_to_end(state: State, limits: Limits, row: int) -> int:
    """Return the most tokens that a row will hold; its last block may be partly unused."""
    return int(state.rows.prompt[row] + state.rows.target[row] + limits.block_size - 1)


@inner
def fits_to_end(
    state: State, limits: Limits, new: int, adapter_pages: int, ordered: int, held_late: int
) -> bool:
    """Return whether the batch with the row `new` can run to its end beside so many blocks of adapters.

    When the i-th request in the descending order of ends ends, each of the first i has grown by the tokens
    left of the i-th: ``need = max_i(left_i * i + sum of what the first i hold now)``.

    `new` starts now and belongs into the order of ends, which has `ordered` rows; NONE: no further row. The
    other rows, which start later, will hold `held_late` tokens at their end.
    """
    waste = limits.block_size - 1
    room = (state.counters.capacity - adapter_pages) * limits.block_size
    held, n = held_late, 0
    if held > 0 and held >= room:
        return False
    pending = new != NONE
    at = 0
    while at < ordered or pending:
        if pending and (at == ordered or _left(state, state.lists.by_end[at]) < _left(state, new)):
            row = new
            pending = False
        else:
            row = state.lists.by_end[at]
            at += 1
        left = _left(state, row)
        held += state.rows.prompt[row] + max(1, output_tokens(state, row)) + waste
        n += 1
        if left * n + held >= room:
            return False
    return True


@inner
def blocks_for(tokens: int, block_size: int) -> int:
    """Return the number of KV blocks that hold `tokens`."""
    return (tokens + block_size - 1) // block_size


@inner
def output_tokens(state: State, row: int) -> int:
    """Return the tokens that `row` has generated."""
    if state.rows.since[row] < 0:
        return state.rows.output[row]
    return state.rows.output[row] + state.counters.tick - state.rows.since[row]


@inner
def start_decoding(state: State, row: int) -> None:
    """Make a row that lacks one token of its known sequence a decoding one from this tick on."""
    c = state.counters
    tick = c.tick
    state.rows.since[row] = tick
    phase = (state.rows.computed[row] - tick) % state.phase.size
    state.phase[phase] += 1
    if state.pool.blocks.content.size > 0:
        ring_append(state.in_phase, state.rows.request.size + phase, row)
    last_tick = tick + state.rows.target[row] - state.rows.output[row]
    heap_push(state.finish, row, (last_tick << 32) | state.rows.sequence[row])
    c.n_decoding += 1


@inner
def stop_decoding(state: State, row: int) -> None:
    """Store the computed and generated tokens of a decoding row, which becomes partial."""
    c = state.counters
    state.phase[(state.rows.computed[row] - state.rows.since[row]) % state.phase.size] -= 1
    if state.pool.blocks.content.size > 0:
        links_remove(state.in_phase, row)
    steps = c.tick - state.rows.since[row]
    state.rows.streak[row] = steps > 0 or state.rows.emitted[row] == c.tick - 1
    state.rows.emitted[row] = c.tick
    state.rows.computed[row] += steps
    state.rows.output[row] += steps
    state.rows.since[row] = NONE
    heap_remove(state.finish, row)
    c.n_decoding -= 1


@inner
def append_running(state: State, row: int) -> None:
    """Put `row` at the end of the running order."""
    c = state.counters
    tail = c.run_tail
    state.rows.previous[row] = tail
    state.rows.following[row] = NONE
    if tail == NONE:
        c.run_head = row
    else:
        state.rows.following[tail] = row
    c.run_tail = row
    c.n_running += 1


@inner
def _remove_running(state: State, row: int) -> None:
    c = state.counters
    before, after = state.rows.previous[row], state.rows.following[row]
    if before == NONE:
        c.run_head = after
    else:
        state.rows.following[before] = after
    if after == NONE:
        c.run_tail = before
    else:
        state.rows.previous[after] = before
    c.n_running -= 1


@inner
def leave_running(state: State, limits: Limits, row: int, ended: bool) -> None:
    """Remove a row that does not decode from the running order and free its blocks."""
    c = state.counters
    if limits.prefix_caching:
        c.free_blocks += leave_blocks(state, limits, row, _known_blocks(state, limits, row, ended), ended)
    else:
        c.free_blocks += blocks_for(state.rows.computed[row], limits.block_size)
    _remove_running(state, row)


@inner
def leave_partial(state: State, row: int) -> None:
    """Remove a row from the partial ones."""
    c = state.counters
    c.n_partial = drop_row(state.lists.partial, c.n_partial, row)


@inner
def drop_row(rows: NDArray[np.int64], n: int, row: int) -> int:
    """Remove a row from the first `n` of a list, which keep their order; return the number left."""
    kept = 0
    for i in range(n):
        if rows[i] != row:
            rows[kept] = rows[i]
            kept += 1
    return kept


@inner
def _known_blocks(state: State, limits: Limits, row: int, ended: bool) -> int:
    """Return the number of full blocks of a row that are registered when the row leaves.

    A block is registered once the host has all its tokens. In async scheduling the token of the previous step
    is in flight when the next one is decided, and the block that it completes is not registered yet.
    """
    tokens = state.rows.computed[row]
    if limits.async_scheduling and not ended and state.rows.streak[row]:
        tokens -= state.rows.emitted[row] == state.counters.tick
    return tokens // limits.block_size


@inner
def preempt_last(state: State, limits: Limits) -> int:
    """Preempt the request admitted last, which loses its KV and heads the queue; return its row."""
    c = state.counters
    row = c.run_tail
    state.lists.preempted[c.n_preempted] = row
    c.n_preempted += 1
    if state.rows.since[row] == ENDING:
        _preempt_ending(state, limits, row)
        return int(row)
    if state.rows.since[row] != NONE:
        stop_decoding(state, row)
        state.lists.stalled[c.n_stalled] = row
        c.n_stalled += 1
    leave_running(state, limits, row, False)
    release_adapter(state, state.rows.adapter[row])
    c.kv_tokens -= state.rows.computed[row]
    state.rows.computed[row] = 0
    state.rows.tokens[row] = 0
    push_front(state, row)
    return row


@inner
def _preempt_ending(state: State, limits: Limits, row: int) -> None:
    """Preempt a row whose last token is in flight: it waits until that token ends it in this step."""
    c = state.counters
    leave_running(state, limits, row, False)
    c.n_ending = drop_row(state.lists.ending, c.n_ending, row)
    if limits.hold_ending:
        adapter, others = state.rows.adapter[row], 0
        for i in range(c.n_ending):
            others += state.rows.adapter[state.lists.ending[i]] == adapter
        if others == 0:
            release_held(state, adapter)
    free_row(state, row)
    c.n_waiting += 1
    c.n_gone += 1


@inner
def free_row(state: State, row: int) -> None:
    """Release the row of a finished request for reuse."""
    c = state.counters
    returned = c.n_free_rows - (state.rows.size - c.fresh_row)
    state.rows.free_rows[returned] = row
    c.n_free_rows += 1


@inner
def take_row(state: State) -> int:
    """Return a released row, or allocate a fresh one."""
    c = state.counters
    returned = c.n_free_rows - (state.rows.size - c.fresh_row)
    c.n_free_rows -= 1
    if returned > 0:
        return int(state.rows.free_rows[returned - 1])
    row = c.fresh_row
    c.fresh_row = row + 1
    # `submit` sets the other fields.
    state.rows.sequence[row] = state.rows.following[row] = state.rows.previous[row] = 0
    state.rows.waiting_key[row] = state.rows.streak[row] = state.rows.registered[row] = 0
    return int(row)


@inner
def prefill_cap(state: State, limits: Limits) -> int:
    """Return the maximum of prompt tokens of one request in this step.

    Since vLLM 0.32 a request that is alone may use the whole budget, as it can starve no other.
    """
    c = state.counters
    alone = c.n_running + c.n_waiting <= 1
    if limits.long_prefill_tokens == 0 or (limits.lone_prefill_exempt and alone):
        return limits.max_num_batched_tokens
    return limits.long_prefill_tokens


@inner
def serve_running(state: State, limits: Limits, cap: int) -> int:
    """Schedule the running requests and return their tokens."""
    if _order_matters(state, limits, cap):
        return _serve_one_by_one(state, limits, cap)
    return _serve_together(state, limits, cap)


@inner
def _wanted(state: State, row: int, cap: int) -> int:
    """Return the tokens that a partial row could take in this step without the budget."""
    return int(min(cap, state.rows.prompt[row] + state.rows.output[row] - state.rows.computed[row]))


@inner
def _order_matters(state: State, limits: Limits, cap: int) -> bool:
    """Return whether the order of the running requests changes the decision."""
    c = state.counters
    partial = c.n_partial
    if c.n_decoding > limits.max_num_batched_tokens:
        return True
    if partial == 0 or (partial == 1 and state.lists.partial[0] == c.run_tail):
        # The order of preemptions determines the cached content that is lost.
        return limits.prefix_caching != 0 and not _blocks_suffice(state, limits, cap)
    wanted = c.n_decoding
    for i in range(partial):
        wanted += _wanted(state, state.lists.partial[i], cap)
    return wanted > limits.max_num_batched_tokens or not _blocks_suffice(state, limits, cap)


@inner
def _blocks_suffice(state: State, limits: Limits, cap: int) -> bool:
    """Return whether blocks suffice for every running request; the last one may lack tokens."""
    c = state.counters
    budget = limits.max_num_batched_tokens - c.n_decoding
    needed = state.phase[(-c.tick) % limits.block_size]
    for i in range(c.n_partial):
        row = state.lists.partial[i]
        tokens = min(_wanted(state, row, cap), budget)
        needed += _new_blocks(state, limits, row, tokens)
        budget -= tokens
    return bool(needed <= c.free_blocks)


@inner
def _new_blocks(state: State, limits: Limits, row: int, tokens: int) -> int:
    held = blocks_for(state.rows.computed[row], limits.block_size)
    return blocks_for(state.rows.computed[row] + tokens, limits.block_size) - held


@inner
def _serve_together(state: State, limits: Limits, cap: int) -> int:
    """Serve decoding rows with one token each, then partial rows; return the tokens.

    If blocks lack, preempting from the end until the rest fits is equivalent to the scan in running order: a
    victim is never before the request that needs the block, so it has taken nothing in this step.
    """
    c = state.counters
    while True:
        budget = limits.max_num_batched_tokens - c.n_decoding
        needed = state.phase[(-c.tick) % limits.block_size]
        for i in range(c.n_partial):
            row = state.lists.partial[i]
            tokens = min(_wanted(state, row, cap), budget)
            state.rows.tokens[row] = tokens
            budget -= tokens
            needed += _new_blocks(state, limits, row, tokens)
        if needed <= c.free_blocks:
            break
        _preempt(state, limits)
    if limits.prefix_caching:
        extend_together(state, limits)
    c.free_blocks -= needed
    c.step_decodes = c.n_decoding
    return int(limits.max_num_batched_tokens - budget)


@inner
def _preempt(state: State, limits: Limits) -> None:
    """Preempt the last running request and remove it from the partial rows."""
    c = state.counters
    victim = preempt_last(state, limits)
    if c.n_partial > 0 and state.lists.partial[c.n_partial - 1] == victim:
        c.n_partial -= 1


@inner
def _serve_one_by_one(state: State, limits: Limits, cap: int) -> int:
    """Serve running requests one by one as vLLM's loop does; return the tokens."""
    c = state.counters
    _list_all(state)
    budget = limits.max_num_batched_tokens
    at = 0
    while at < c.n_partial and budget > 0:
        row = state.lists.partial[at]
        tokens = min(_wanted(state, row, cap), budget)
        needed = _new_blocks(state, limits, row, tokens)
        while needed > c.free_blocks and c.n_partial > at:
            _preempt(state, limits)
        if c.n_partial == at:
            break
        if limits.prefix_caching:
            extend(state, limits, row, tokens)
        c.free_blocks -= needed
        state.rows.tokens[row] = tokens
        budget -= tokens
        at += 1
    return int(limits.max_num_batched_tokens - budget)


@inner
def _list_all(state: State) -> None:
    """Make every running row that is not ending a partial one without tokens."""
    c = state.counters
    row = c.run_head
    c.n_partial = 0
    while row != NONE:
        if state.rows.since[row] >= 0:
            stop_decoding(state, row)
            state.lists.stalled[c.n_stalled] = row
            c.n_stalled += 1
        if state.rows.since[row] == NONE:
            state.rows.tokens[row] = 0
            state.lists.partial[c.n_partial] = row
            c.n_partial += 1
        row = state.rows.following[row]
    c.step_decodes = 0
