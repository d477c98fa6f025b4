"""Running requests: their order, their tokens in a step, preemption.

A decoding row needs a new block in the steps at which its computed tokens are a multiple of the block size,
so counting rows by `(computed - since) mod block_size` gives the blocks of a whole step at once.
"""

from __future__ import annotations

from capplan.compile import inner
from capplan.serving.adapter_slots import release_adapter
from capplan.serving.kv_blocks import extend, extend_together, leave_blocks
from capplan.serving.state import (
    ENDING,
    NONE,
    Limits,
    State,
)
from capplan.serving.structures import heap_push, heap_remove, links_remove, ring_append
from capplan.serving.waiting_queue import push_front


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
    """Make a row that lacks exactly one token of its known sequence a decoding one, from this tick on."""
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
    """Write down what a decoding row has computed and generated; it is partial from now on."""
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
    """Take a row that does not decode out of the running order; its blocks become free."""
    c = state.counters
    if limits.prefix_caching:
        c.free_blocks += leave_blocks(state, limits, row, _known_blocks(state, limits, row, ended), ended)
    else:
        c.free_blocks += blocks_for(state.rows.computed[row], limits.block_size)
    _remove_running(state, row)


@inner
def _known_blocks(state: State, limits: Limits, row: int, ended: bool) -> int:
    """Return how many full blocks of a row the host has registered when the row leaves.

    A block is registered once all its tokens are known to the host. In async scheduling the token of the step
    before is still in flight when the next one is decided, so the block that it completed is not, yet.
    """
    tokens = state.rows.computed[row]
    if limits.async_scheduling and not ended and state.rows.streak[row]:
        tokens -= state.rows.emitted[row] == state.counters.tick
    return tokens // limits.block_size


@inner
def preempt_last(state: State, limits: Limits) -> int:
    """Preempt the request admitted last: it loses its KV and waits before all others. Return its row."""
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
    """Preempt a row whose last token is in flight: it waits until that token ends it, in this very step."""
    c = state.counters
    leave_running(state, limits, row, False)
    kept = 0
    for i in range(c.n_ending):
        if state.lists.ending[i] != row:
            state.lists.ending[kept] = state.lists.ending[i]
            kept += 1
    c.n_ending = kept
    free_row(state, row)
    c.n_waiting += 1
    c.n_gone += 1


@inner
def free_row(state: State, row: int) -> None:
    """Hand the row of a finished request back for reuse."""
    c = state.counters
    returned = c.n_free_rows - (state.rows.size - c.fresh_row)
    state.rows.free_rows[returned] = row
    c.n_free_rows += 1


@inner
def take_row(state: State) -> int:
    """Return a row that no request has: one that was handed back, or the next that nobody ever had."""
    c = state.counters
    returned = c.n_free_rows - (state.rows.size - c.fresh_row)
    c.n_free_rows -= 1
    if returned > 0:
        return int(state.rows.free_rows[returned - 1])
    row = c.fresh_row
    c.fresh_row = row + 1
    return int(row)


@inner
def prefill_cap(state: State, limits: Limits) -> int:
    """Return the most prompt tokens of one request in this step.

    Since vLLM 0.32 a request that is alone may use the whole budget: there is nobody to starve.
    """
    c = state.counters
    alone = c.n_running + c.n_waiting <= 1
    if limits.long_prefill_tokens == 0 or (limits.lone_prefill_exempt and alone):
        return limits.max_num_batched_tokens
    return limits.long_prefill_tokens


@inner
def serve_running(state: State, limits: Limits, cap: int) -> int:
    """Give running requests their tokens of this step and return how many these are."""
    if _order_matters(state, limits, cap):
        return _serve_one_by_one(state, limits, cap)
    return _serve_together(state, limits, cap)


@inner
def _wanted(state: State, row: int, cap: int) -> int:
    """Return the tokens that a partial row could take in this step, budget aside."""
    return int(min(cap, state.rows.prompt[row] + state.rows.output[row] - state.rows.computed[row]))


@inner
def _order_matters(state: State, limits: Limits, cap: int) -> bool:
    """Tell whether running requests compete other than by "all decodes, then the last row"."""
    c = state.counters
    partial = c.n_partial
    if c.n_decoding > limits.max_num_batched_tokens:
        return True
    if partial == 0 or (partial == 1 and state.lists.partial[0] == c.run_tail):
        # Who loses his blocks first decides what can be found in them.
        return limits.prefix_caching != 0 and not _blocks_suffice(state, limits, cap)
    wanted = c.n_decoding
    for i in range(partial):
        wanted += _wanted(state, state.lists.partial[i], cap)
    return wanted > limits.max_num_batched_tokens or not _blocks_suffice(state, limits, cap)


@inner
def _blocks_suffice(state: State, limits: Limits, cap: int) -> bool:
    """Tell whether every running request gets the blocks it wants; the last one may lack tokens."""
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
    """Serve running requests together, decoding rows one token each, then partial rows. Return the tokens.

    Where blocks lack, preempting from the end until the rest fits is what the scan in running order comes to:
    a victim always stands at or behind the request that needs the block, so it has taken nothing in this step
    yet.
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
    """Preempt the last running request, out of the partial rows, too, where it is one."""
    c = state.counters
    victim = preempt_last(state, limits)
    if c.n_partial > 0 and state.lists.partial[c.n_partial - 1] == victim:
        c.n_partial -= 1


@inner
def _serve_one_by_one(state: State, limits: Limits, cap: int) -> int:
    """Serve running requests one after the other, as vLLM's loop is written. Return the tokens."""
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
    """Make every running row that is not at its end a partial one, without tokens yet."""
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
