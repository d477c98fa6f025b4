"""Adapter slots on the GPU and the cache on the host: two nested least-recently-used lists, as in vLLM.

An adapter is *active* while running requests use it, and every step touches all active adapters. So only idle
ones can be evicted, and their order of last use is the order in which they became idle.
"""

from __future__ import annotations

from capplan._jit import inner, jit
from capplan.serving._structures import links_append, links_first, links_remove
from capplan.serving.pooled._caches import end_load
from capplan.serving.pooled._state import has_pool
from capplan.serving.state import HELD, LOADING, NO_CLAIM, NONE, READY, Limits, State
from capplan.serving.vllm._waiting_queue import list_queue, unlist_queue


@jit
def acquire_adapter(state: State, limits: Limits, adapter: int) -> None:
    """Count one more running request of `adapter`, loading it first where it is not resident.

    A slot must be free or hold an idle adapter: the scheduler admits a new adapter only then.
    """
    if adapter == 0:
        return
    if state.adapters.claim[adapter] in (READY, HELD):  # the claim counts the request's use already
        state.adapters.claim[adapter] = NO_CLAIM
        state.counters.n_claimed -= 1
        return
    if state.adapters.users[adapter] == 0:
        unlist_queue(state, adapter)
        state.counters.n_active += 1
        from_disk = _bring_to_host(state, limits, adapter)
        _bring_to_gpu(state, limits, adapter, from_disk)
        state.adapters.users[adapter] = 1
        list_queue(state, adapter)
    else:
        state.adapters.users[adapter] += 1


@jit
def release_adapter(state: State, adapter: int) -> None:
    """Count one running request of `adapter` less; after the last one it becomes idle."""
    if adapter == 0:
        return
    state.adapters.users[adapter] -= 1
    if state.adapters.users[adapter] == 0:
        unlist_queue(state, adapter)
        list_queue(state, adapter)
        state.counters.n_active -= 1
        links_append(state.gpu_idle, adapter)
        links_append(state.host_idle, adapter)


@inner
def hold_adapter(state: State, adapter: int) -> None:
    """Count one running request of `adapter` less; after the last one a claim keeps the slot."""
    if adapter != 0 and state.adapters.users[adapter] == 1:
        state.adapters.claim[adapter] = HELD
        state.counters.n_claimed += 1
    else:
        release_adapter(state, adapter)


@inner
def release_held(state: State, adapter: int) -> None:
    """End the claim of `hold_adapter`, unless a request that runs has taken it over."""
    if state.adapters.claim[adapter] == HELD:
        state.adapters.claim[adapter] = NO_CLAIM
        state.counters.n_claimed -= 1
        release_adapter(state, adapter)


@inner
def needs_load(state: State, adapter: int) -> bool:
    """Return whether a request of this adapter would wait for a load into a slot."""
    return adapter != 0 and state.adapters.resident[adapter] == 0


@inner
def claim_adapter(state: State, limits: Limits, adapter: int) -> None:
    """Start the asynchronous load of an adapter; its requests are skipped until `adapter_loaded`.

    The claim counts as a use: the adapter keeps the slot until a request of it runs.
    """
    acquire_adapter(state, limits, adapter)
    unlist_queue(state, adapter)
    state.adapters.claim[adapter] = LOADING
    state.counters.n_claimed += 1


@jit
def adapter_loaded(state: State, adapter: int) -> None:
    """Note that the asynchronous load of an adapter is complete."""
    if has_pool(state):
        end_load(state, adapter)
        return
    if state.adapters.queue_head[adapter] == NONE:  # its requests were removed
        state.adapters.claim[adapter] = NO_CLAIM
        state.counters.n_claimed -= 1
        release_adapter(state, adapter)
    else:
        state.adapters.claim[adapter] = READY
        list_queue(state, adapter)


@inner
def _bring_to_host(state: State, limits: Limits, adapter: int) -> bool:
    """Make `adapter` active in the host cache; return whether it had to come from disk."""
    if state.adapters.on_host[adapter]:
        links_remove(state.host_idle, adapter)
        return False
    if state.counters.n_on_host < limits.max_cpu_loras:
        state.counters.n_on_host += 1
    else:
        victim = links_first(state.host_idle)
        links_remove(state.host_idle, victim)
        state.adapters.on_host[victim] = 0
        if state.adapters.resident[victim]:  # leaving the host frees the slot as well
            links_remove(state.gpu_idle, victim)
            state.adapters.resident[victim] = 0
            state.counters.n_resident -= 1
    state.adapters.on_host[adapter] = 1
    return True


@inner
def _bring_to_gpu(state: State, limits: Limits, adapter: int, from_disk: bool) -> None:
    """Make `adapter` active in a GPU slot and list the copy that this takes."""
    if state.adapters.resident[adapter]:
        links_remove(state.gpu_idle, adapter)
        return
    if state.counters.n_resident < limits.max_loras:
        state.counters.n_resident += 1
    else:
        victim = links_first(state.gpu_idle)
        links_remove(state.gpu_idle, victim)
        state.adapters.resident[victim] = 0
    state.adapters.resident[adapter] = 1
    at = state.counters.n_loads
    state.adapters.loads[at] = adapter
    state.adapters.load_from_disk[at] = from_disk
    state.counters.n_loads = at + 1
