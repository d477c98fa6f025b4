"""Requests and adapters that leave between two steps, before the scheduler's own rules let them go."""

from __future__ import annotations

from capplan.compile import jit
from capplan.serving import NONE, Limits, State
from capplan.serving import state as s
from capplan.serving.adapters import release_adapter
from capplan.serving.links import links_append, links_remove, new_links
from capplan.serving.queue import list_queue, unlist_queue
from capplan.serving.running import free_row
from capplan.serving.slora import drop_unused
from capplan.serving.state import N_CLAIMED, N_WAITING, NO_CLAIM, READY, SLORA


@jit
def withdraw(state: State, limits: Limits, row: int) -> None:
    """Take one waiting row out of its queue and hand it back."""
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
    state.counters[N_WAITING] -= 1
    free_row(state, row)
    if state.adapters.queue_head[adapter] == NONE and state.adapters.claim[adapter] == READY:
        # Its slot was kept for a request that is gone; while it is LOADING, `adapter_loaded` sees to that.
        state.adapters.claim[adapter] = NO_CLAIM
        state.counters[N_CLAIMED] -= 1
        release_adapter(state, adapter)
        if limits.policy == SLORA:
            drop_unused(state)


def forget_adapter(state: State, adapter: int) -> None:
    """Take an adapter that no request uses out of slots and host; the next request of it loads it anew."""
    c, adapters = state.counters, state.adapters
    if adapters.resident[adapter]:
        links_remove(state.gpu_idle, adapter)
        adapters.resident[adapter] = 0
        c[s.N_RESIDENT] -= 1
        c[s.FREE_BLOCKS] += adapters.pages[adapter]
        c[s.ADAPTER_PAGES] -= adapters.pages[adapter]
    if adapters.on_host[adapter]:
        links_remove(state.host_idle, adapter)
        adapters.on_host[adapter] = 0
        c[s.N_ON_HOST] -= 1


def with_host_adapters(state: State, first: int, end: int) -> State:
    """Return a new state whose host holds the adapters from `first` to before `end`, and no others."""
    state.adapters.on_host[:] = 0
    host_idle = new_links(state.adapters.size)
    for adapter in range(first, end):
        state.adapters.on_host[adapter] = 1
        links_append(host_idle, adapter)
    state.counters[s.N_ON_HOST] = end - first
    return state._replace(host_idle=host_idle)
