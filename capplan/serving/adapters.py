"""Adapter slots on the GPU and the cache on the host: two nested least-recently-used lists, as in vLLM.

An adapter is *active* while requests that run use it, and every step touches all active adapters. So only
idle ones can be victims, and their order of last use is the order in which they became idle.
"""

from __future__ import annotations

from capplan.serving.compile import jit
from capplan.serving.links import links_append, links_first, links_remove
from capplan.serving.queue import set_hot
from capplan.serving.state import N_ACTIVE, N_LOADS, N_ON_HOST, N_RESIDENT, Limits, State


@jit
def acquire_adapter(state: State, limits: Limits, adapter: int) -> None:
    """Count one more running request of `adapter`, loading it first where it is not resident.

    A slot must be free or hold an idle adapter: the scheduler admits a new adapter only then.
    """
    if adapter == 0:
        return
    if state.users[adapter] == 0:
        set_hot(state, adapter, True)
        state.counters[N_ACTIVE] += 1
        from_disk = _bring_to_host(state, limits, adapter)
        _bring_to_gpu(state, limits, adapter, from_disk)
    state.users[adapter] += 1


@jit
def release_adapter(state: State, adapter: int) -> None:
    """Count one running request of `adapter` less; after the last it is the most recently used idle one."""
    if adapter == 0:
        return
    state.users[adapter] -= 1
    if state.users[adapter] == 0:
        set_hot(state, adapter, False)
        state.counters[N_ACTIVE] -= 1
        links_append(state.gpu_idle, adapter)
        links_append(state.host_idle, adapter)


@jit
def _bring_to_host(state: State, limits: Limits, adapter: int) -> bool:
    """Make `adapter` active in the host cache; return whether it had to come from disk."""
    if state.on_host[adapter]:
        links_remove(state.host_idle, adapter)
        return False
    if state.counters[N_ON_HOST] < limits.max_cpu_loras:
        state.counters[N_ON_HOST] += 1
    else:
        victim = links_first(state.host_idle)
        links_remove(state.host_idle, victim)
        state.on_host[victim] = 0
        if state.resident[victim]:  # an adapter that leaves the host loses its slot, too
            links_remove(state.gpu_idle, victim)
            state.resident[victim] = 0
            state.counters[N_RESIDENT] -= 1
    state.on_host[adapter] = 1
    return True


@jit
def _bring_to_gpu(state: State, limits: Limits, adapter: int, from_disk: bool) -> None:
    """Make `adapter` active in a GPU slot and list the copy that this takes."""
    if state.resident[adapter]:
        links_remove(state.gpu_idle, adapter)
        return
    if state.counters[N_RESIDENT] < limits.max_loras:
        state.counters[N_RESIDENT] += 1
    else:
        victim = links_first(state.gpu_idle)
        links_remove(state.gpu_idle, victim)
        state.resident[victim] = 0
    state.resident[adapter] = 1
    at = state.counters[N_LOADS]
    state.loads[at] = adapter
    state.load_from_disk[at] = from_disk
    state.counters[N_LOADS] = at + 1
