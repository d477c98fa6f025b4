"""Scheduler of one engine, step by step: `submit`, `schedule`, `commit`.

vLLM's V1 rules: a step first serves running requests in the order of their admission, then admits waiting
ones. There is no prefill or decode phase: every request computes its known tokens, under one token budget per
step. If a running request finds no KV block, the request admitted last is preempted; a step with a preemption
admits no request. A waiting request whose adapter finds no slot is skipped; one that finds no blocks stops
the scan. In asynchronous scheduling a step is decided while the previous one runs. The end of a request is
then seen one step later, and its blocks and place are released at that time.

Source: vLLM 0.8.5 to 0.33.0, ``vllm/v1/core/sched/scheduler.py``. S-LoRA's rules are in
`capplan.serving.pooled._slora`. The rules depend on no clock.
"""

from __future__ import annotations

from capplan._jit import inner, jit
from capplan.serving.pooled._pool import end_admitted, watch_growth
from capplan.serving.pooled._schedule import enter_pool, pooled_takes, schedule_pooled
from capplan.serving.pooled._size_queues import leave_queue
from capplan.serving.pooled._slora import drop_unused, schedule_slora, slora_takes
from capplan.serving.pooled._state import has_pool
from capplan.serving.state import ENDING, NO_CLAIM, NONE, READY, SLORA, Limits, State
from capplan.serving.vllm._adapter_slots import hold_adapter, release_adapter, release_held
from capplan.serving.vllm._admission import admit_waiting
from capplan.serving.vllm._kv_blocks import same_answers
from capplan.serving.vllm._running import (
    free_row,
    leave_partial,
    leave_running,
    prefill_cap,
    remove_from_order,
    serve_running,
    start_decoding,
    stop_decoding,
    take_row,
)
from capplan.serving.vllm._waiting_queue import list_queue, push_back, unlist_queue


@jit
def submit(
    state: State,
    limits: Limits,
    request: int,
    adapter: int,
    prompt: int,
    output: int,
    prefix: int = 0,
    shared_tokens: int = 0,
    predicted: int = 0,
    arrival_ns: int = 0,
) -> int:
    """Queue a request and return its row; NONE if no row is free or the request can never run.

    Parameters
    ----------
    request
        The caller's number of the request.
    adapter
        Number of its adapter; 0: the base model.
    prompt, output
        Prompt tokens, and output tokens after which it ends.
    prefix, shared_tokens
        The first `shared_tokens` of the prompt are equal for all requests of this adapter and prefix.
    predicted, arrival_ns
        Predicted output tokens (0: `output`) and time of arrival, for the rules that use them.
    """
    c = state.counters
    if c.n_free_rows == 0 or not can_run(state, limits, adapter, prompt, output):
        return NONE
    row = take_row(state)
    state.rows.request[row] = request
    state.rows.adapter[row] = adapter
    state.rows.prompt[row] = prompt
    state.rows.target[row] = min(output, limits.max_model_len - prompt)
    state.rows.computed[row] = 0
    state.rows.output[row] = 0
    state.rows.since[row] = NONE
    state.rows.emitted[row] = NONE
    state.rows.place[row] = NONE
    state.rows.tokens[row] = 0
    state.rows.content[row] = c.submitted
    state.rows.prefix[row] = prefix * state.adapters.users.size + adapter
    state.rows.shared[row] = min(shared_tokens, prompt)
    c.submitted += 1
    c.same_answers += same_answers(state, row)
    enter_pool(state, limits, row, predicted, arrival_ns)
    push_back(state, row)
    return row


@jit
def can_run(state: State, limits: Limits, adapter: int, prompt: int, output: int) -> bool:
    """Return whether an idle engine can run a request; parameters as for `submit`."""
    target = min(output, limits.max_model_len - prompt)
    if target <= 0:
        return False
    if limits.policy == SLORA:
        return bool(slora_takes(state, limits, adapter, prompt, target))
    return bool(pooled_takes(state, limits, adapter, prompt, target))


@jit
def schedule(state: State, limits: Limits) -> int:
    """Decide one step and return its number of tokens; 0 if nothing can run.

    The state holds the decision: decoding rows get one token each, partial rows `tokens[row]`; `admitted`,
    `preempted`, `stalled` and `loads` list the rest.
    """
    c = state.counters
    c.n_admitted = c.n_preempted = c.n_stalled = c.n_loads = 0
    if limits.policy == SLORA:
        c.step_tokens = schedule_slora(state, limits)
        return int(c.step_tokens)
    if has_pool(state):
        c.step_tokens = schedule_pooled(state, limits)
        return int(c.step_tokens)
    budget = limits.max_num_batched_tokens
    cap = prefill_cap(state, limits)
    budget -= serve_running(state, limits, cap)
    if c.n_preempted == 0:
        budget -= admit_waiting(state, limits, cap, budget)
    c.step_tokens = limits.max_num_batched_tokens - budget
    return int(c.step_tokens)


@jit
def commit(state: State, limits: Limits) -> None:
    """Apply the step that `schedule` decided: append tokens, remove finished requests, free their blocks.

    `first`, `resumed` and `finished` list the rows that emitted their first token, emitted a token after a
    stall, or ended. The row of a finished request is readable until `submit` reuses it.
    """
    c = state.counters
    _release_ended(state, limits)
    if c.step_decodes > 0 or c.n_decoding == 0:  # S-LoRA's decoding rows pause while others prefill
        c.tick += 1
    c.kv_tokens += c.step_tokens
    c.n_first = c.n_resumed = c.n_finished = 0
    kept = 0
    for i in range(c.n_partial):
        row = state.lists.partial[i]
        state.rows.computed[row] += state.rows.tokens[row]
        known = state.rows.prompt[row] + state.rows.output[row]
        if state.rows.tokens[row] == 0 or state.rows.computed[row] < known:
            state.lists.partial[kept] = row
            kept += 1
            continue
        if state.rows.output[row] == 0:
            state.lists.first[c.n_first] = row
            c.n_first += 1
        else:
            state.lists.resumed[c.n_resumed] = row
            c.n_resumed += 1
        state.rows.output[row] += 1
        start_decoding(state, row)
        watch_growth(state, row)
    c.n_partial = kept
    _end_due(state, limits)


@inner
def _release_ended(state: State, limits: Limits) -> None:
    """Remove the requests whose last token arrived while the next step was decided."""
    c = state.counters
    for i in range(c.n_ending):
        row = state.lists.ending[i]
        leave_running(state, limits, row, True)
        if limits.hold_ending:
            release_held(state, state.rows.adapter[row])
        free_row(state, row)
    c.n_waiting -= c.n_gone
    c.n_ending = c.n_gone = 0


@inner
def _end_due(state: State, limits: Limits) -> None:
    """End the requests whose last token is of this step, oldest admission first."""
    c = state.counters
    heap = state.finish
    while heap.size[0] > 0 and heap.items.key[heap.items.ids[0]] >> 32 == c.tick:
        if limits.async_scheduling:
            _await_end(state, limits, heap.items.ids[0])
        else:
            finish(state, limits, heap.items.ids[0], True)


@inner
def _await_end(state: State, limits: Limits, row: int) -> None:
    """Stop scheduling a row whose last token is in flight; it keeps blocks and place for one step.

    Since vLLM 0.33 it keeps the slot of its adapter as well.
    """
    c = state.counters
    stop_decoding(state, row)
    state.rows.since[row] = ENDING
    if limits.hold_ending:
        hold_adapter(state, state.rows.adapter[row])
    else:
        release_adapter(state, state.rows.adapter[row])
    c.kv_tokens -= state.rows.computed[row]
    state.lists.ending[c.n_ending] = row
    c.n_ending += 1
    state.lists.finished[c.n_finished] = row
    c.n_finished += 1


@jit
def finish(state: State, limits: Limits, row: int, is_complete: bool = True) -> None:
    """End a running request between two steps: last token, stop token, or disconnect.

    Parameters
    ----------
    is_complete
        Whether it ends by a token; the time in execution of any other does not count.
    """
    c = state.counters
    if state.rows.since[row] != NONE:
        stop_decoding(state, row)
    else:
        leave_partial(state, row)
    if limits.policy == SLORA:
        remove_from_order(state, row)
    if has_pool(state):
        end_admitted(state, limits, row, is_complete)
    else:
        release_adapter(state, state.rows.adapter[row])
    leave_running(state, limits, row, True)
    c.kv_tokens -= state.rows.computed[row]
    free_row(state, row)
    state.lists.finished[c.n_finished] = row
    c.n_finished += 1
    if limits.policy == SLORA:
        drop_unused(state)  # free the pages of its adapter now, not after the next step


@inner
def is_movable(state: State, row: int) -> bool:
    """Return whether a waiting row has generated no tokens, which a move would lose."""
    return bool(state.rows.output[row] == 0)


@inner
def withdraw(state: State, adapter: int, first_request: int) -> int:
    """Remove the movable requests numbered `first_request` or higher from an adapter's queue."""
    taken = 0
    before = NONE
    row = state.adapters.queue_head[adapter]
    unlist_queue(state, adapter)
    while row != NONE:
        after = state.rows.following[row]
        if is_movable(state, row) and state.rows.request[row] >= first_request:
            if before == NONE:
                state.adapters.queue_head[adapter] = after
            else:
                state.rows.following[before] = after
            leave_queue(state, row)
            free_row(state, row)
            taken += 1
        else:
            before = row
        row = after
    state.adapters.queue_tail[adapter] = before
    state.counters.n_waiting -= taken
    if before != NONE:
        list_queue(state, adapter)
    elif state.adapters.claim[adapter] == READY:  # the slot was kept for a removed request
        state.adapters.claim[adapter] = NO_CLAIM
        state.counters.n_claimed -= 1
        release_adapter(state, adapter)
    return taken
