"""The waiting queue: first come, first served; a request whose adapter finds no slot is overtaken.

vLLM scans one deque and sets blocked requests aside in their order. The same choice without a scan: every
adapter has a queue of its own, and the request to look at next is the head with the smallest key among the
adapters that may run. Keys grow at the back (arrivals) and fall at the front (preempted requests), so the
order of the deque is the order of keys.
"""

from __future__ import annotations

from capplan.serving.compile import jit
from capplan.serving.heap import Heap, heap_push, heap_remove
from capplan.serving.state import BACK_KEY, FRONT_KEY, N_WAITING, NONE, State

END_OF_QUEUE = 2**62
"""A key behind every waiting request."""


@jit
def queue_heap(state: State, adapter: int) -> Heap:
    """Return the heap that lists this adapter's queue: `hot` when the adapter may run without a new slot."""
    if adapter == 0 or state.users[adapter] > 0:
        return state.hot
    return state.cold


@jit
def push_back(state: State, row: int) -> None:
    """Queue a new request behind all others."""
    c = state.counters
    adapter = state.adapter[row]
    state.waiting_key[row] = c[BACK_KEY]
    c[BACK_KEY] += 1
    state.following[row] = NONE
    tail = state.queue_tail[adapter]
    state.queue_tail[adapter] = row
    if tail == NONE:
        state.queue_head[adapter] = row
        heap_push(queue_heap(state, adapter), adapter, state.waiting_key[row])
    else:
        state.following[tail] = row
    c[N_WAITING] += 1


@jit
def push_front(state: State, row: int) -> None:
    """Queue a preempted request before all others."""
    c = state.counters
    adapter = state.adapter[row]
    state.waiting_key[row] = c[FRONT_KEY]
    c[FRONT_KEY] -= 1
    head = state.queue_head[adapter]
    heap = queue_heap(state, adapter)
    state.following[row] = head
    state.queue_head[adapter] = row
    if head == NONE:
        state.queue_tail[adapter] = row
    else:
        heap_remove(heap, adapter)
    heap_push(heap, adapter, state.waiting_key[row])
    c[N_WAITING] += 1


@jit
def next_adapter(state: State, slot_free: bool) -> int:
    """Return the adapter whose head is next in line, or NONE.

    Parameters
    ----------
    state
        The instance.
    slot_free
        Whether an adapter without running requests may join the batch.
    """
    hot = state.hot
    cold = state.cold
    chosen = NONE
    if hot.size[0] > 0:
        chosen = hot.ids[0]
    if slot_free and cold.size[0] > 0:
        other = cold.ids[0]
        if chosen == NONE or cold.key[other] < hot.key[chosen]:
            chosen = other
    return chosen


@jit
def pop_head(state: State, adapter: int) -> int:
    """Take the head out of this adapter's queue and return its row."""
    row = state.queue_head[adapter]
    after = state.following[row]
    heap = queue_heap(state, adapter)
    heap_remove(heap, adapter)
    state.queue_head[adapter] = after
    if after == NONE:
        state.queue_tail[adapter] = NONE
    else:
        heap_push(heap, adapter, state.waiting_key[after])
    state.counters[N_WAITING] -= 1
    return row


@jit
def set_hot(state: State, adapter: int, hot: bool) -> None:
    """List this adapter's queue among those of active (`hot`) or inactive adapters; base is always hot."""
    if adapter == 0 or state.queue_head[adapter] == NONE:
        return
    old, new = (state.cold, state.hot) if hot else (state.hot, state.cold)
    heap_remove(old, adapter)
    heap_push(new, adapter, old.key[adapter])


@jit
def reverse_set_aside(state: State, scanned_to: int) -> None:
    """Reverse the order of the requests that a scan set aside: those of inactive adapters before a key.

    Their keys are mirrored within their own range, so nobody else's place changes.
    """
    cold = state.cold
    low, high = END_OF_QUEUE, -END_OF_QUEUE
    for adapter in range(1, state.queue_head.size):
        if cold.position[adapter] >= 0:
            row = state.queue_head[adapter]
            while row != NONE and state.waiting_key[row] < scanned_to:
                low = min(low, state.waiting_key[row])
                high = max(high, state.waiting_key[row])
                row = state.following[row]
    if low >= high:
        return
    for adapter in range(1, state.queue_head.size):
        if cold.position[adapter] >= 0 and state.waiting_key[state.queue_head[adapter]] < scanned_to:
            heap_remove(cold, adapter)
            _mirror_queue(state, adapter, scanned_to, low + high)
            heap_push(cold, adapter, state.waiting_key[state.queue_head[adapter]])


@jit
def _mirror_queue(state: State, adapter: int, scanned_to: int, ends: int) -> None:
    """Turn round the part of an adapter's queue before a key, and mirror its keys between two ends."""
    first = state.queue_head[adapter]
    row = first
    before = NONE
    while row != NONE and state.waiting_key[row] < scanned_to:
        after = state.following[row]
        state.waiting_key[row] = ends - state.waiting_key[row]
        state.following[row] = before
        before = row
        row = after
    state.following[first] = row
    state.queue_head[adapter] = before
    if row == NONE:
        state.queue_tail[adapter] = first
