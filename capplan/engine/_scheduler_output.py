"""Scheduler output of one step, and edits of the scheduler's state between steps.

The scheduler updates only what changes, so its state holds no list of the step's requests. The list follows
from the running order and the decoding and partial rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import jit
from capplan.serving import NONE, Limits, State, links_append, links_remove, new_links
from capplan.serving.pooled import PooledState, base_model_bytes, drop_unused, evict, leave_queue
from capplan.serving.state import NO_CLAIM, READY, SLORA
from capplan.serving.vllm import free_row, leave_waiting, release_adapter

_SCHEDULED = np.dtype(
    [
        (name, np.int64)
        for name in (
            "request",
            "row",
            "place",  # line of the pool's block table; NONE without prefix caching
            "adapter",
            "tokens",  # to compute in this step
            "computed",  # tokens with valid KV before it
            "emits",  # whether the step ends with a new token of this request
        )
    ],
    align=True,
)

ScheduledRequests = np.ndarray[Any, Any]
"""Requests with tokens in a step, in running order; fields as in `_SCHEDULED`."""


class SchedulerOutput(NamedTuple):
    """Requests of a step and its counts; a decode computes one token after its first output token."""

    requests: ScheduledRequests
    decodes: int
    prefill_tokens: int
    prefill_pairs: int
    """Pairs of a query and a key token in the attention of prefills."""
    rank_sum: int
    max_rank: int


class Decision(NamedTuple):
    """Scheduling decision of one step, with requests by number."""

    begin_ns: int
    tokens: list[tuple[int, int]]
    """(request, tokens) in running order."""
    preempted: list[int]
    loads: list[tuple[int, bool]]
    """(adapter, from disk)"""


def new_scheduled(max_num_seqs: int) -> ScheduledRequests:
    """Return a buffer for the requests of one step."""
    return np.zeros(max_num_seqs, _SCHEDULED)


def scheduler_output(state: State, rank_of: NDArray[np.int64], buffer: ScheduledRequests) -> SchedulerOutput:
    """Return the output of the last `schedule`, valid until `commit`; its requests are listed in `buffer`.

    `rank_of` is the rank of each adapter, shape (adapters + 1,).
    """
    size, *counts = _list_scheduled(state.counters, state.rows, rank_of, buffer)
    return SchedulerOutput(buffer[:size], *counts)


@jit
def _list_scheduled(
    c: np.record,
    rows: np.recarray[Any, Any],
    rank_of: NDArray[np.int64],
    scheduled: ScheduledRequests,
) -> tuple[int, int, int, int, int, int]:
    row = c.run_head
    n = decodes = prefill_tokens = prefill_pairs = rank_sum = max_rank = 0
    while row != NONE:
        tokens = 0
        computed = rows.computed[row]
        emits = True
        if rows.since[row] >= 0:
            tokens = 1 if c.step_decodes > 0 else 0
            computed += c.tick - rows.since[row]
        elif rows.since[row] == NONE:
            tokens = rows.tokens[row]
            emits = computed + tokens == rows.prompt[row] + rows.output[row]
        if tokens > 0:
            request = scheduled[n]
            request.request = rows.request[row]
            request.row = row
            request.place = rows.place[row]
            request.adapter = rows.adapter[row]
            request.tokens = tokens
            request.computed = computed
            request.emits = emits
            n += 1
            if tokens == 1 and rows.output[row] > 0:
                decodes += 1
            else:
                prefill_tokens += tokens
                prefill_pairs += tokens * (2 * computed + tokens + 1) // 2
            rank = rank_of[rows.adapter[row]]
            rank_sum += rank
            max_rank = max(max_rank, rank)
        row = rows.following[row]
    return n, decodes, prefill_tokens, prefill_pairs, rank_sum, max_rank


def decision_of(state: State, scheduled: ScheduledRequests, begin_ns: int) -> Decision:
    """Return the decision of the last `schedule`, before its `commit`."""
    c, adapters = state.counters, state.adapters
    n = c.n_loads
    preempted = state.rows.request[state.lists.preempted[: c.n_preempted]]
    from_disk = adapters.load_from_disk[:n].astype(bool)
    return Decision(
        begin_ns,
        list(zip(scheduled["request"].tolist(), scheduled["tokens"].tolist(), strict=True)),
        preempted.tolist(),
        list(zip(adapters.loads[:n].tolist(), from_disk.tolist(), strict=True)),
    )


@jit
def cancel_waiting(state: State, limits: Limits, row: int) -> None:
    """Remove a waiting row from its queue and free it."""
    adapter = state.rows.adapter[row]
    leave_waiting(state, row)
    leave_queue(state, row)
    free_row(state, row)
    if state.adapters.queue_head[adapter] == NONE and state.adapters.claim[adapter] == READY:
        # The slot was claimed for this request; `adapter_loaded` releases a claim that is still LOADING.
        state.adapters.claim[adapter] = NO_CLAIM
        state.counters.n_claimed -= 1
        release_adapter(state, adapter)
        if limits.policy == SLORA:
            drop_unused(state)


def evict_unused(state: State, adapter: int) -> None:
    """Remove an adapter without requests from slots and host; its next request loads it again."""
    c, adapters = state.counters, state.adapters
    if isinstance(state.pooled, PooledState):  # the host keeps every adapter
        if adapters.resident[adapter]:
            evict(state, adapter)
        return
    if adapters.resident[adapter]:
        links_remove(state.gpu_idle, adapter)
        adapters.resident[adapter] = 0
        c.n_resident -= 1
        c.free_blocks += adapters.pages[adapter]
        c.adapter_pages -= adapters.pages[adapter]
    if adapters.on_host[adapter]:
        links_remove(state.host_idle, adapter)
        adapters.on_host[adapter] = 0
        c.n_on_host -= 1


def describe_adapter(state: State, adapter: int, size_bytes: int, tokens: int, load_ns: int) -> None:
    """Enter an adapter that has not been used yet in the adapter cache; without bytes, a number is free.

    The requests that used its number before leave the window of the next refresh. Requests of the base model
    count as requests of the smallest adapter.
    """
    pooled = state.pooled
    own = pooled.adapters
    own[adapter] = np.zeros(1, own.dtype)[0]
    own.bytes[adapter] = size_bytes
    own.cost_ns[adapter] = load_ns
    own.tokens[adapter] = tokens
    own.released_ns[adapter] = own.late_ns[adapter] = NONE
    pooled.inflation[adapter] = 0.0
    pooled.idle_times[adapter : adapter + 1] = 0
    pooled.window.arrival_ns[pooled.window.adapter == adapter] = NONE
    own.bytes[0] = base_model_bytes(own.bytes[1:])


def with_host_adapters(state: State, first: int, end: int) -> State:
    """Return a new state whose host holds exactly the adapters in [first, end)."""
    state.adapters.on_host[:] = 0
    host_idle = new_links(state.adapters.size)
    for adapter in range(first, end):
        state.adapters.on_host[adapter] = 1
        links_append(host_idle, adapter)
    state.counters.n_on_host = end - first
    return state._replace(host_idle=host_idle)
