"""vLLM's V1 scheduling rules: `submit`, `schedule`, `commit`.

A step first serves running requests in the order of their admission, then admits waiting ones. There is no
prefill or decode phase: every request just catches up with the tokens it knows, under one token budget per
step. A running request that finds no KV block preempts the one admitted last; in a step with a preemption
nobody is admitted. A waiting request whose adapter finds no slot is set aside and overtaken; one that finds
no blocks stops the scan.

Read off vLLM 0.8.5 to 0.32.0, ``vllm/v1/core/sched/scheduler.py``. Nothing here knows a clock.
"""

from __future__ import annotations

from capplan.serving.adapters import acquire_adapter
from capplan.serving.compile import jit
from capplan.serving.queue import END_OF_QUEUE, next_adapter, pop_head, push_back, reverse_set_aside
from capplan.serving.running import (
    append_running,
    blocks_for,
    free_row,
    leave_running,
    preempt_last,
    start_decoding,
    stop_decoding,
)
from capplan.serving.state import (
    FREE_BLOCKS,
    KV_TOKENS,
    N_ACTIVE,
    N_ADMITTED,
    N_DECODING,
    N_FINISHED,
    N_FIRST,
    N_FREE_ROWS,
    N_LOADS,
    N_PARTIAL,
    N_PREEMPTED,
    N_RESUMED,
    N_RUNNING,
    N_STALLED,
    NONE,
    RUN_HEAD,
    RUN_TAIL,
    SEQUENCE,
    STEP_DECODES,
    STEP_TOKENS,
    TICK,
    Limits,
    State,
)


@jit
def submit(state: State, limits: Limits, request: int, adapter: int, prompt: int, output: int) -> int:
    """Queue a request and return its row; NONE when no row is free or the prompt leaves no room."""
    c = state.counters
    if c[N_FREE_ROWS] == 0 or prompt >= limits.max_model_len:
        return NONE
    c[N_FREE_ROWS] -= 1
    row = state.free_rows[c[N_FREE_ROWS]]
    state.request[row] = request
    state.adapter[row] = adapter
    state.prompt[row] = prompt
    state.target[row] = min(output, limits.max_model_len - prompt)
    state.computed[row] = 0
    state.output[row] = 0
    state.since[row] = NONE
    state.tokens[row] = 0
    push_back(state, row)
    return row


@jit
def schedule(state: State, limits: Limits) -> int:
    """Decide one step and return its number of tokens; 0 means that nothing can run.

    What the step does stands in the state: decoding rows get one token each, partial rows `tokens[row]`;
    `admitted`, `preempted`, `stalled` and `loads` list the rest.
    """
    c = state.counters
    c[N_ADMITTED] = c[N_PREEMPTED] = c[N_STALLED] = c[N_LOADS] = 0
    budget = limits.max_num_batched_tokens
    if _order_matters(state, limits):
        budget -= _serve_one_by_one(state, limits)
    else:
        budget -= _serve_together(state, limits)
    if c[N_PREEMPTED] == 0:
        budget -= _admit(state, limits, budget)
    c[STEP_TOKENS] = limits.max_num_batched_tokens - budget
    return c[STEP_TOKENS]


@jit
def _wanted(state: State, limits: Limits, row: int) -> int:
    """Return the tokens that a partial row could take in this step, budget aside."""
    missing = state.prompt[row] + state.output[row] - state.computed[row]
    if limits.long_prefill_tokens > 0:
        missing = min(missing, limits.long_prefill_tokens)
    return missing


@jit
def _order_matters(state: State, limits: Limits) -> bool:
    """Tell whether running requests compete for tokens other than by "all decodes, then the last row"."""
    c = state.counters
    partial = c[N_PARTIAL]
    if c[N_DECODING] > limits.max_num_batched_tokens:
        return True
    if partial == 0 or (partial == 1 and state.partial[0] == c[RUN_TAIL]):
        return False
    wanted = c[N_DECODING]
    for i in range(partial):
        wanted += _wanted(state, limits, state.partial[i])
    return wanted > limits.max_num_batched_tokens or not _blocks_suffice(state, limits)


@jit
def _blocks_suffice(state: State, limits: Limits) -> bool:
    """Tell whether every running request gets the blocks it wants, when the budget is no limit."""
    c = state.counters
    needed = state.phase[(-c[TICK]) % limits.block_size]
    for i in range(c[N_PARTIAL]):
        row = state.partial[i]
        needed += _new_blocks(state, limits, row, _wanted(state, limits, row))
    return needed <= c[FREE_BLOCKS]


@jit
def _new_blocks(state: State, limits: Limits, row: int, tokens: int) -> int:
    held = blocks_for(state.computed[row], limits.block_size)
    return blocks_for(state.computed[row] + tokens, limits.block_size) - held


@jit
def _serve_together(state: State, limits: Limits) -> int:
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
            row = state.partial[i]
            tokens = min(_wanted(state, limits, row), budget)
            state.tokens[row] = tokens
            budget -= tokens
            needed += _new_blocks(state, limits, row, tokens)
        if needed <= c[FREE_BLOCKS]:
            break
        victim = preempt_last(state, limits)
        if c[N_PARTIAL] > 0 and state.partial[c[N_PARTIAL] - 1] == victim:
            c[N_PARTIAL] -= 1
    c[FREE_BLOCKS] -= needed
    c[STEP_DECODES] = c[N_DECODING]
    return limits.max_num_batched_tokens - budget


@jit
def _serve_one_by_one(state: State, limits: Limits) -> int:
    """Serve running requests one after the other, as vLLM's loop is written. Return the tokens."""
    c = state.counters
    row = c[RUN_HEAD]
    c[N_PARTIAL] = 0
    while row != NONE:
        if state.since[row] != NONE:
            stop_decoding(state, row)
            state.stalled[c[N_STALLED]] = row
            c[N_STALLED] += 1
        state.tokens[row] = 0
        state.partial[c[N_PARTIAL]] = row
        c[N_PARTIAL] += 1
        row = state.following[row]
    c[STEP_DECODES] = 0
    budget = limits.max_num_batched_tokens
    at = 0
    while at < c[N_PARTIAL] and budget > 0:
        row = state.partial[at]
        tokens = min(_wanted(state, limits, row), budget)
        needed = _new_blocks(state, limits, row, tokens)
        while needed > c[FREE_BLOCKS] and c[N_PARTIAL] > at:
            preempt_last(state, limits)
            c[N_PARTIAL] -= 1
        if c[N_PARTIAL] == at:
            break
        c[FREE_BLOCKS] -= needed
        state.tokens[row] = tokens
        budget -= tokens
        at += 1
    return limits.max_num_batched_tokens - budget


@jit
def _admit(state: State, limits: Limits, budget: int) -> int:
    """Admit waiting requests while tokens, places, slots and blocks last. Return the tokens given out."""
    c = state.counters
    left = budget
    scanned_to = -END_OF_QUEUE
    while left > 0 and c[N_RUNNING] < limits.max_num_seqs:
        adapter = next_adapter(state, c[N_ACTIVE] < limits.max_loras)
        if adapter == NONE:
            scanned_to = END_OF_QUEUE
            break
        row = state.queue_head[adapter]
        scanned_to = state.waiting_key[row]
        tokens = min(_wanted(state, limits, row), left)
        blocks = blocks_for(tokens, limits.block_size)
        must_fit = blocks
        if limits.reserve_full_sequence:
            must_fit = blocks_for(state.prompt[row] + state.output[row], limits.block_size)
        reserve = limits.watermark_blocks if c[N_RUNNING] > 0 else 0
        if must_fit + reserve > c[FREE_BLOCKS]:
            break
        pop_head(state, adapter)
        acquire_adapter(state, limits, adapter)
        c[SEQUENCE] += 1
        state.sequence[row] = c[SEQUENCE]
        append_running(state, row)
        c[FREE_BLOCKS] -= blocks
        state.tokens[row] = tokens
        state.partial[c[N_PARTIAL]] = row
        c[N_PARTIAL] += 1
        state.admitted[c[N_ADMITTED]] = row
        c[N_ADMITTED] += 1
        left -= tokens
    if limits.reverse_set_aside:
        reverse_set_aside(state, scanned_to)
    return budget - left


@jit
def commit(state: State, limits: Limits) -> None:
    """Apply the step that `schedule` decided: tokens appended, finished requests out, their blocks free.

    `first`, `resumed` and `finished` list the rows that emitted their first token, emitted again after having
    been stalled, and ended. The row of a finished request stays readable until `submit` gives it to another
    one.
    """
    c = state.counters
    c[TICK] += 1
    c[KV_TOKENS] += c[STEP_TOKENS]
    c[N_FIRST] = c[N_RESUMED] = c[N_FINISHED] = 0
    kept = 0
    for i in range(c[N_PARTIAL]):
        row = state.partial[i]
        state.computed[row] += state.tokens[row]
        if state.tokens[row] == 0 or state.computed[row] < state.prompt[row] + state.output[row]:
            state.partial[kept] = row
            kept += 1
            continue
        if state.output[row] == 0:
            state.first[c[N_FIRST]] = row
            c[N_FIRST] += 1
        else:
            state.resumed[c[N_RESUMED]] = row
            c[N_RESUMED] += 1
        state.output[row] += 1
        start_decoding(state, row)
    c[N_PARTIAL] = kept
    _finish_due(state, limits)


@jit
def _finish_due(state: State, limits: Limits) -> None:
    """End the requests whose last token came in this step, oldest admission first."""
    c = state.counters
    heap = state.finish
    while heap.size[0] > 0 and heap.key[heap.ids[0]] >> 32 == c[TICK]:
        finish(state, limits, heap.ids[0])


@jit
def finish(state: State, limits: Limits, row: int) -> None:
    """End a running request between two steps: last token, stop token, or its client left."""
    c = state.counters
    if state.since[row] != NONE:
        stop_decoding(state, row)
    else:
        kept = 0
        for i in range(c[N_PARTIAL]):
            if state.partial[i] != row:
                state.partial[kept] = state.partial[i]
                kept += 1
        c[N_PARTIAL] = kept
    leave_running(state, limits, row)
    free_row(state, row)
    state.finished[c[N_FINISHED]] = row
    c[N_FINISHED] += 1
