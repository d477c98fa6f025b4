"""Admission, the second half of a step, and fast-forwarding over steps that admit none.

A step admits waiting requests while tokens, places, slots and blocks last. It is decode-only, and gives each
running request one token without a call of the scheduler, while every running request decodes, none ends,
blocks suffice and no waiting request can be admitted. Four events end such a run: a last token, a lack of
blocks, an arrival, and an adapter that has been loaded. The caller watches for the latter two.
"""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.pooled._schedule import note_decode, pooled_steps_ahead
from capplan.serving.pooled._state import has_pool
from capplan.serving.state import NONE, SLORA, Limits, State
from capplan.serving.vllm._adapter_slots import acquire_adapter, claim_adapter, needs_load
from capplan.serving.vllm._kv_blocks import enter, extend_together, free_among_found, look_up
from capplan.serving.vllm._running import append_running, blocks_for
from capplan.serving.vllm._waiting_queue import (
    END_OF_QUEUE,
    next_adapter,
    order_matters,
    pop_head,
    restore_order,
    reverse_queue,
    reverse_skipped,
)


@inner
def admit_waiting(state: State, limits: Limits, cap: int, budget: int) -> int:
    """Admit waiting requests in order and return their tokens."""
    c = state.counters
    left = budget
    scanned_to = -END_OF_QUEUE
    if c.queue_reversed and order_matters(state, c.n_active < limits.max_loras):
        restore_order(state)
    while left > 0 and c.n_running < limits.max_num_seqs:
        adapter = next_adapter(state, c.n_active < limits.max_loras)
        if adapter == NONE:
            scanned_to = END_OF_QUEUE
            break
        row = state.adapters.queue_head[adapter]
        scanned_to = state.rows.waiting_key[row]
        if limits.load_beside and needs_load(state, adapter):
            claim_adapter(state, limits, adapter)
            continue
        hits = look_up(state, limits, row) if limits.prefix_caching else 0
        if blocks_to_admit(state, limits, row, hits, min(cap, left)) > c.free_blocks:
            break
        pop_head(state, adapter)
        acquire_adapter(state, limits, adapter)
        left -= start_row(state, limits, row, hits, min(cap, left))
    if limits.reverse_skipped:
        reverse_skipped(state, scanned_to)
    return budget - left


@inner
def blocks_to_admit(state: State, limits: Limits, row: int, hits: int, most_tokens: int) -> int:
    """Return the free blocks that the admission of a waiting row requires.

    `hits` are its blocks in the prefix cache, `most_tokens` those that it may compute in this step.
    """
    known = state.rows.prompt[row] + state.rows.output[row]
    computed = hits * limits.block_size
    target = known if limits.reserve_full_sequence else min(known, computed + most_tokens)
    blocks = blocks_for(target, limits.block_size) - hits
    if hits > 0:
        blocks += free_among_found(state, hits)
    if state.counters.n_running > 0:
        blocks += limits.watermark_blocks
    return blocks


@inner
def start_row(state: State, limits: Limits, row: int, hits: int, most_tokens: int) -> int:
    """Append a row that left the queue to the running ones; return the tokens that it computes."""
    c = state.counters
    size = limits.block_size
    tokens = min(state.rows.prompt[row] + state.rows.output[row] - hits * size, most_tokens)
    blocks = blocks_for(hits * size + tokens, size) - hits
    if limits.prefix_caching:
        blocks += free_among_found(state, hits)
        enter(state, limits, row, hits, tokens)
        c.kv_tokens += hits * size
    c.free_blocks -= blocks
    c.sequence += 1
    state.rows.sequence[row] = c.sequence
    append_running(state, row)
    state.rows.tokens[row] = tokens
    state.lists.partial[c.n_partial] = row
    c.n_partial += 1
    state.lists.admitted[c.n_admitted] = row
    c.n_admitted += 1
    return int(tokens)


@inner
def steps_ahead(state: State, limits: Limits) -> int:
    """Return the number of following steps that end and admit no request."""
    c = state.counters
    if c.n_decoding == 0 or c.n_partial > 0 or c.n_ending > 0 or limits.policy == SLORA:
        return 0
    if has_pool(state):
        return pooled_steps_ahead(state, limits)
    if c.n_decoding > limits.max_num_batched_tokens or not _admits_none(state, limits):
        return 0
    first_end = state.finish.items.key[state.finish.items.ids[0]] >> 32
    return int(first_end - c.tick - 1)


@inner
def _admits_none(state: State, limits: Limits) -> bool:
    """Return whether no waiting request can be admitted while all running ones decode."""
    c = state.counters
    if c.n_waiting == 0 or c.n_running >= limits.max_num_seqs:
        return True
    slot_free = c.n_active < limits.max_loras
    hot, cold = state.hot.size[0], state.cold.size[0]
    if limits.reverse_skipped and (cold > 0 or c.queue_reversed) and (hot > 0 or slot_free):
        return False  # every step reverses a part of the queue
    adapter = next_adapter(state, slot_free)
    if adapter == NONE:
        return True
    if limits.load_beside and adapter != 0 and state.adapters.resident[adapter] == 0:
        return False
    left = limits.max_num_batched_tokens - c.n_decoding
    if left == 0:
        return True
    # Decoding only takes blocks and cached content: a request that does not fit now will not fit later.
    row = state.adapters.queue_head[adapter]
    hits = look_up(state, limits, row) if limits.prefix_caching else 0
    if limits.long_prefill_tokens > 0:
        left = min(left, limits.long_prefill_tokens)
    return bool(blocks_to_admit(state, limits, row, hits, left) > c.free_blocks)


@inner
def decode_step(state: State, limits: Limits, needed: int) -> None:
    """Decide one of the steps that `steps_ahead` counted; it takes `needed` of the free blocks."""
    c = state.counters
    if limits.prefix_caching and (needed > 0 or c.same_answers > 0):
        extend_together(state, limits)
    note_decode(state, limits)
    c.n_admitted = c.n_preempted = c.n_stalled = c.n_loads = 0
    c.free_blocks -= needed
    is_scanned = c.n_running < limits.max_num_seqs and c.n_decoding < limits.max_num_batched_tokens
    if limits.reverse_skipped and is_scanned:
        reverse_queue(state)
    c.step_tokens = c.step_decodes = c.n_decoding
