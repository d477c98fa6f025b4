"""The first half of a step: running requests get tokens and KV blocks, or are preempted."""

from __future__ import annotations

from capplan.compile import inner
from capplan.serving.prefix import extend, extend_together
from capplan.serving.running import blocks_for, preempt_last, stop_decoding
from capplan.serving.state import (
    FREE_BLOCKS,
    N_DECODING,
    N_PARTIAL,
    N_RUNNING,
    N_STALLED,
    N_WAITING,
    NONE,
    RUN_HEAD,
    RUN_TAIL,
    STEP_DECODES,
    TICK,
    Limits,
    State,
)


@inner
def prefill_cap(state: State, limits: Limits) -> int:
    """Return the most prompt tokens of one request in this step.

    Since vLLM 0.32 a request that is alone may use the whole budget: there is nobody to starve.
    """
    c = state.counters
    alone = c[N_RUNNING] + c[N_WAITING] <= 1
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
    partial = c[N_PARTIAL]
    if c[N_DECODING] > limits.max_num_batched_tokens:
        return True
    if partial == 0 or (partial == 1 and state.lists.partial[0] == c[RUN_TAIL]):
        # Who loses his blocks first decides what can be found in them.
        return limits.prefix_caching != 0 and not _blocks_suffice(state, limits, cap)
    wanted = c[N_DECODING]
    for i in range(partial):
        wanted += _wanted(state, state.lists.partial[i], cap)
    return wanted > limits.max_num_batched_tokens or not _blocks_suffice(state, limits, cap)


@inner
def _blocks_suffice(state: State, limits: Limits, cap: int) -> bool:
    """Tell whether every running request gets the blocks it wants; the last one may lack tokens."""
    c = state.counters
    budget = limits.max_num_batched_tokens - c[N_DECODING]
    needed = state.phase[(-c[TICK]) % limits.block_size]
    for i in range(c[N_PARTIAL]):
        row = state.lists.partial[i]
        tokens = min(_wanted(state, row, cap), budget)
        needed += _new_blocks(state, limits, row, tokens)
        budget -= tokens
    return bool(needed <= c[FREE_BLOCKS])


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
        budget = limits.max_num_batched_tokens - c[N_DECODING]
        needed = state.phase[(-c[TICK]) % limits.block_size]
        for i in range(c[N_PARTIAL]):
            row = state.lists.partial[i]
            tokens = min(_wanted(state, row, cap), budget)
            state.rows.tokens[row] = tokens
            budget -= tokens
            needed += _new_blocks(state, limits, row, tokens)
        if needed <= c[FREE_BLOCKS]:
            break
        _preempt(state, limits)
    if limits.prefix_caching:
        extend_together(state, limits)
    c[FREE_BLOCKS] -= needed
    c[STEP_DECODES] = c[N_DECODING]
    return int(limits.max_num_batched_tokens - budget)


@inner
def _preempt(state: State, limits: Limits) -> None:
    """Preempt the last running request, out of the partial rows, too, where it is one."""
    c = state.counters
    victim = preempt_last(state, limits)
    if c[N_PARTIAL] > 0 and state.lists.partial[c[N_PARTIAL] - 1] == victim:
        c[N_PARTIAL] -= 1


@inner
def _serve_one_by_one(state: State, limits: Limits, cap: int) -> int:
    """Serve running requests one after the other, as vLLM's loop is written. Return the tokens."""
    c = state.counters
    _list_all(state)
    budget = limits.max_num_batched_tokens
    at = 0
    while at < c[N_PARTIAL] and budget > 0:
        row = state.lists.partial[at]
        tokens = min(_wanted(state, row, cap), budget)
        needed = _new_blocks(state, limits, row, tokens)
        while needed > c[FREE_BLOCKS] and c[N_PARTIAL] > at:
            _preempt(state, limits)
        if c[N_PARTIAL] == at:
            break
        if limits.prefix_caching:
            extend(state, limits, row, tokens)
        c[FREE_BLOCKS] -= needed
        state.rows.tokens[row] = tokens
        budget -= tokens
        at += 1
    return int(limits.max_num_batched_tokens - budget)


@inner
def _list_all(state: State) -> None:
    """Make every running row that is not at its end a partial one, without tokens yet."""
    c = state.counters
    row = c[RUN_HEAD]
    c[N_PARTIAL] = 0
    while row != NONE:
        if state.rows.since[row] >= 0:
            stop_decoding(state, row)
            state.lists.stalled[c[N_STALLED]] = row
            c[N_STALLED] += 1
        if state.rows.since[row] == NONE:
            state.rows.tokens[row] = 0
            state.lists.partial[c[N_PARTIAL]] = row
            c[N_PARTIAL] += 1
        row = state.rows.following[row]
    c[STEP_DECODES] = 0
