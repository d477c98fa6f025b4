"""The waiting queue: first come, first served; a request whose adapter finds no slot is skipped.

vLLM scans one deque and skips blocked requests. The same choice without a scan: every adapter has a queue,
and the next request is the head with the smallest key among the adapters that may run. Keys grow at the back
(arrivals) and fall at the front (preempted requests), so the order of the deque is the order of keys.

Rules with `reverse_skipped` reverse the requests that a step skipped. If these are all that wait,
only the end from which the queue is read changes: `queue_reversed`.
"""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving._structures import heap_push, heap_remove
from capplan.serving.pooled._state import has_pool
from capplan.serving.state import LOADING, NONE, State

END_OF_QUEUE = 2**62
"""A key behind every waiting request."""


@inner
def _may_run(state: State, adapter: int) -> bool:
    """Return whether an adapter needs no new slot: the base model, and adapters in use."""
    return adapter == 0 or state.adapters.users[adapter] > 0


@inner
def list_queue(state: State, adapter: int) -> None:
    """Insert an adapter's queue into `hot` if it needs no new slot, else into `cold`.

    The queue of an adapter that is being loaded is in neither heap.
    """
    head = state.adapters.queue_head[adapter]
    if has_pool(state):  # which has queues by size instead
        return
    if head != NONE and state.adapters.claim[adapter] != LOADING:
        if _may_run(state, adapter):
            heap_push(state.hot, adapter, state.rows.waiting_key[head])
        else:
            heap_push(state.cold, adapter, state.rows.waiting_key[head])


@inner
def unlist_queue(state: State, adapter: int) -> None:
    """Remove an adapter's queue from its heap."""
    if state.hot.items.position[adapter] > 0:
        heap_remove(state.hot, adapter)
    elif state.cold.items.position[adapter] > 0:
        heap_remove(state.cold, adapter)


@inner
def push_back(state: State, row: int) -> None:
    """Append a new request to the queue."""
    if state.counters.queue_reversed:
        _insert_at_smallest_key(state, row)
    else:
        _insert_at_largest_key(state, row)


@inner
def push_front(state: State, row: int) -> None:
    """Prepend a preempted request to the queue."""
    if state.counters.queue_reversed:
        _insert_at_largest_key(state, row)
    else:
        _insert_at_smallest_key(state, row)


@inner
def _insert_at_largest_key(state: State, row: int) -> None:
    c = state.counters
    adapter = state.rows.adapter[row]
    state.rows.waiting_key[row] = c.back_key
    c.back_key += 1
    state.rows.following[row] = NONE
    tail = state.adapters.queue_tail[adapter]
    state.adapters.queue_tail[adapter] = row
    if tail == NONE:
        state.adapters.queue_head[adapter] = row
        list_queue(state, adapter)
    else:
        state.rows.following[tail] = row
    c.n_waiting += 1


@inner
def _insert_at_smallest_key(state: State, row: int) -> None:
    c = state.counters
    adapter = state.rows.adapter[row]
    state.rows.waiting_key[row] = c.front_key
    c.front_key -= 1
    head = state.adapters.queue_head[adapter]
    unlist_queue(state, adapter)
    state.rows.following[row] = head
    state.adapters.queue_head[adapter] = row
    if head == NONE:
        state.adapters.queue_tail[adapter] = row
    list_queue(state, adapter)
    c.n_waiting += 1


@inner
def next_adapter(state: State, slot_free: bool) -> int:
    """Return the adapter of the next request, or NONE.

    `slot_free`: an adapter without running requests may join the batch.
    """
    hot = state.hot
    cold = state.cold
    chosen = NONE
    if hot.size[0] > 0:
        chosen = hot.items.ids[0]
    if slot_free and cold.size[0] > 0:
        other = cold.items.ids[0]
        if chosen == NONE or cold.items.key[other] < hot.items.key[chosen]:
            chosen = other
    return chosen


@inner
def pop_head(state: State, adapter: int) -> int:
    """Remove the head of an adapter's queue and return its row."""
    row = state.adapters.queue_head[adapter]
    after = state.rows.following[row]
    unlist_queue(state, adapter)
    state.adapters.queue_head[adapter] = after
    if after == NONE:
        state.adapters.queue_tail[adapter] = NONE
    list_queue(state, adapter)
    state.counters.n_waiting -= 1
    return row


@inner
def leave_waiting(state: State, row: int) -> None:
    """Remove a waiting row from anywhere in its adapter's queue."""
    adapter = state.rows.adapter[row]
    before = NONE
    at = state.adapters.queue_head[adapter]
    while at != row:
        before, at = at, state.rows.following[at]
    after = state.rows.following[row]
    unlist_queue(state, adapter)
    if before == NONE:
        state.adapters.queue_head[adapter] = after
    else:
        state.rows.following[before] = after
    if after == NONE:
        state.adapters.queue_tail[adapter] = before
    list_queue(state, adapter)
    state.counters.n_waiting -= 1


@inner
def reverse_queue(state: State) -> None:
    """Reverse the order of all waiting requests, from which on the queue is read from its other end."""
    if state.cold.size[0] > 0:
        state.counters.queue_reversed ^= 1


@inner
def order_matters(state: State, slot_free: bool) -> bool:
    """Return whether the next request depends on the order of the queue: several could run."""
    if slot_free or state.hot.size[0] > 1:
        return True
    if state.hot.size[0] == 0:
        return False
    row = state.adapters.queue_head[state.hot.items.ids[0]]
    return bool(state.rows.following[row] != NONE)


@inner
def restore_order(state: State) -> None:
    """Mirror the keys of a queue that is read from its back; it is read from its front again."""
    c = state.counters
    if not c.queue_reversed:
        return
    c.queue_reversed = 0
    c.back_key, c.front_key = -int(c.front_key), -int(c.back_key)
    for adapter in range(state.adapters.queue_head.size):
        if state.adapters.queue_head[adapter] != NONE:
            unlist_queue(state, adapter)
            _mirror_queue(state, adapter, END_OF_QUEUE, 0)
            list_queue(state, adapter)


@inner
def reverse_skipped(state: State, scanned_to: int) -> None:
    """Reverse the order of the requests that a scan skipped: those of inactive adapters before a key.

    A scan of the whole queue has skipped all that wait. Otherwise their keys are mirrored within their own
    range, so all other requests keep their places.
    """
    if scanned_to == END_OF_QUEUE:
        reverse_queue(state)
        return
    if state.counters.queue_reversed and scanned_to != -END_OF_QUEUE:
        restore_order(state)
        scanned_to = -scanned_to
    cold = state.cold
    low, high = END_OF_QUEUE, -END_OF_QUEUE
    for adapter in range(1, state.adapters.queue_head.size):
        if cold.items.position[adapter] > 0:
            row = state.adapters.queue_head[adapter]
            while row != NONE and state.rows.waiting_key[row] < scanned_to:
                low = min(low, state.rows.waiting_key[row])
                high = max(high, state.rows.waiting_key[row])
                row = state.rows.following[row]
    if low >= high:
        return
    for adapter in range(1, state.adapters.queue_head.size):
        if (
            cold.items.position[adapter] > 0
            and state.rows.waiting_key[state.adapters.queue_head[adapter]] < scanned_to
        ):
            heap_remove(cold, adapter)
            _mirror_queue(state, adapter, scanned_to, low + high)
            heap_push(cold, adapter, state.rows.waiting_key[state.adapters.queue_head[adapter]])


@inner
def _mirror_queue(state: State, adapter: int, scanned_to: int, ends: int) -> None:
    """Reverse the part of an adapter's queue before a key, and mirror its keys between two ends."""
    first = state.adapters.queue_head[adapter]
    row = first
    before = NONE
    while row != NONE and state.rows.waiting_key[row] < scanned_to:
        after = state.rows.following[row]
        state.rows.waiting_key[row] = ends - state.rows.waiting_key[row]
        state.rows.following[row] = before
        before = row
        row = after
    state.rows.following[first] = row
    state.adapters.queue_head[adapter] = before
    if row == NONE:
        state.adapters.queue_tail[adapter] = first
