"""Admission: the second half of a step, while tokens, places, slots and blocks last."""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.state import NONE, Limits, State
from capplan.serving.vllm._adapter_slots import acquire_adapter, claim_adapter, needs_load
from capplan.serving.vllm._kv_blocks import enter, free_among_found, look_up
from capplan.serving.vllm._running import append_running, blocks_for
from capplan.serving.vllm._waiting_queue import (
    END_OF_QUEUE,
    next_adapter,
    order_matters,
    pop_head,
    restore_order,
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
