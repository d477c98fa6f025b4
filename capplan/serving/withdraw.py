"""Taking requests that wait back out of an instance, for a router that sends them elsewhere."""

from __future__ import annotations

from capplan.compile import inner
from capplan.serving.adapters import release_adapter
from capplan.serving.queue import list_queue, unlist_queue
from capplan.serving.running import free_row
from capplan.serving.state import N_CLAIMED, N_WAITING, NO_CLAIM, NONE, READY, State


@inner
def is_movable(state: State, row: int) -> bool:
    """Tell whether a waiting row has not generated anything yet, so that nothing would be lost."""
    return bool(state.rows.output[row] == 0)


@inner
def withdraw(state: State, adapter: int, first_request: int) -> int:
    """Take the movable requests of an adapter that are numbered `first_request` or higher out of its queue.

    Returns
    -------
    int
        How many.
    """
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
            free_row(state, row)
            taken += 1
        else:
            before = row
        row = after
    state.adapters.queue_tail[adapter] = before
    state.counters[N_WAITING] -= taken
    if before != NONE:
        list_queue(state, adapter)
    elif state.adapters.claim[adapter] == READY:  # its slot was kept for a request that is gone
        state.adapters.claim[adapter] = NO_CLAIM
        state.counters[N_CLAIMED] -= 1
        release_adapter(state, adapter)
    return taken
