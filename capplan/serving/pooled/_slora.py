"""S-LoRA's rules: separate batches of whole prompts, memory reserved in advance, adapters in the KV pool.

KV and adapter weights share one pool of pages (KV blocks here). A request is admitted only if its declared
output fits together with all running ones, so no request is ever preempted. New requests are admitted every
ten decode steps (`Limits.admit_every`); their prompts form a separate batch while decoding pauses. Adapters
of queued requests are fetched asynchronously. When a request ends, all unused adapters are dropped.

Source: S-LoRA c1ddf48, ``router/manager.py`` and ``router/req_queue.py``.
"""

from __future__ import annotations

from capplan._jit import inner, inner_once
from capplan.serving._structures import Heap, links_first, links_remove
from capplan.serving.state import NO_CLAIM, NONE, READY, Limits, State
from capplan.serving.vllm._adapter_slots import acquire_adapter, release_adapter
from capplan.serving.vllm._admission import start_row
from capplan.serving.vllm._running import fits_to_end, insert_by_end
from capplan.serving.vllm._waiting_queue import next_adapter, pop_head


@inner_once
def slora_takes(state: State, limits: Limits, adapter: int, prompt: int, output: int) -> bool:
    """Return whether a request can ever run: the prompt fits into one batch, the whole into memory."""
    tokens = prompt + output + limits.block_size - 1
    room = (state.counters.capacity - state.adapters.pages[adapter]) * limits.block_size
    return prompt <= limits.max_num_batched_tokens and tokens < room


@inner_once
def schedule_slora(state: State, limits: Limits) -> int:
    """Decide one step, either a batch of prompts or one token for each decoding row; return its tokens."""
    c = state.counters
    c.step_decodes = 0
    if c.n_running == 0 or c.since_prefill >= limits.admit_every:
        tokens = _admit_batch(state, limits)
        if tokens > 0:
            c.since_prefill = 0
            return tokens
    if c.n_decoding == 0:
        return 0
    if c.since_prefill == limits.admit_every // 2 or c.since_prefill == limits.admit_every - 3:
        _fetch_ahead(state, limits)
    c.since_prefill += 1
    c.free_blocks -= state.phase[(-c.tick) % limits.block_size]
    c.step_decodes = c.n_decoding
    return int(c.n_decoding)


@inner
def _admit_batch(state: State, limits: Limits) -> int:
    """Admit waiting requests in order up to the first that does not fit; return their tokens."""
    c = state.counters
    tokens = 0
    while c.n_running < limits.max_num_seqs:
        adapter = next_adapter(state, True)
        if adapter == NONE:
            break
        row = state.adapters.queue_head[adapter]
        if tokens + state.rows.prompt[row] > limits.max_num_batched_tokens:
            break
        if not _fits(state, limits, row, _new_pages(state, adapter)):
            _drop_fetched(state, adapter)
            if not _fits(state, limits, row, _new_pages(state, adapter)):
                break
        pop_head(state, adapter)
        _use(state, limits, adapter)
        tokens += start_row(state, limits, row, 0, limits.max_num_batched_tokens)
        insert_by_end(state, row, state.counters.n_running - 1)
    return tokens


@inner
def _fits(state: State, limits: Limits, new: int, new_pages: int) -> bool:
    c = state.counters
    return fits_to_end(state, limits, new, c.adapter_pages + new_pages, c.n_running, 0)


@inner
def _new_pages(state: State, adapter: int) -> int:
    return 0 if state.adapters.resident[adapter] else state.adapters.pages[adapter]


@inner
def _drop_fetched(state: State, kept: int) -> None:
    """Drop the prefetched adapters except one to free their pages for a due request."""
    c = state.counters
    if c.n_claimed == 0:
        return
    for adapter in range(1, state.adapters.claim.size):
        if adapter != kept and state.adapters.claim[adapter] == READY:
            state.adapters.claim[adapter] = NO_CLAIM
            c.n_claimed -= 1
            release_adapter(state, adapter)
    drop_unused(state)


@inner
def _use(state: State, limits: Limits, adapter: int) -> None:
    """Count one more use of an adapter, and take its pages if it is not resident."""
    c = state.counters
    if adapter != 0 and not state.adapters.resident[adapter]:
        c.free_blocks -= state.adapters.pages[adapter]
        c.adapter_pages += state.adapters.pages[adapter]
    acquire_adapter(state, limits, adapter)


@inner
def _fetch_ahead(state: State, limits: Limits) -> None:
    """Prefetch the adapters of the requests of a possible next batch, as memory permits."""
    row = _first_waiting(state)
    tokens = 0
    while row != NONE:
        tokens += state.rows.prompt[row]
        adapter = state.rows.adapter[row]
        if tokens > limits.max_num_batched_tokens or not _fits(
            state, limits, NONE, _new_pages(state, adapter)
        ):
            break
        if adapter != 0 and not state.adapters.resident[adapter]:
            _use(state, limits, adapter)
            state.adapters.claim[adapter] = READY
            state.counters.n_claimed += 1
        row = _next_waiting(state, row)


@inner
def _first_waiting(state: State) -> int:
    adapter = next_adapter(state, True)
    return NONE if adapter == NONE else state.adapters.queue_head[adapter]


@inner
def _next_waiting(state: State, row: int) -> int:
    """Return the waiting row after `row` over all queues."""
    hot = _next_in_heap(state, state.hot, row)
    cold = _next_in_heap(state, state.cold, row)
    if hot == NONE or cold == NONE:
        return max(hot, cold)
    return hot if state.rows.waiting_key[hot] < state.rows.waiting_key[cold] else cold


@inner
def _next_in_heap(state: State, heap: Heap, row: int) -> int:
    """Return the waiting row after `row` over the queues of a heap."""
    chosen = NONE
    key = state.rows.waiting_key[row]
    for i in range(heap.size[0]):
        other = state.adapters.queue_head[heap.items.ids[i]]
        while other != NONE and state.rows.waiting_key[other] <= key:
            other = state.rows.following[other]
        if other != NONE and (
            chosen == NONE or state.rows.waiting_key[other] < state.rows.waiting_key[chosen]
        ):
            chosen = other
    return chosen


@inner
def drop_unused(state: State) -> None:
    """Drop every adapter that is neither used nor prefetched, and free its pages."""
    c = state.counters
    adapter = links_first(state.gpu_idle)
    while adapter != NONE:
        links_remove(state.gpu_idle, adapter)
        state.adapters.resident[adapter] = 0
        c.n_resident -= 1
        c.free_blocks += state.adapters.pages[adapter]
        c.adapter_pages -= state.adapters.pages[adapter]
        adapter = links_first(state.gpu_idle)
