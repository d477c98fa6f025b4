"""Merging: while one adapter is added to the weights of the base model, it alone is served (dLoRA).

Steps of a merged adapter have no LoRA kernels, and all other rows wait. An adapter is merged if its share of
a batch in order of arrival reaches one threshold, and stays so down to a lower one. Each switch moves the
threshold that it ends by the requests that both kinds of batches would have served, in the times that dLoRA
assumes for them.

Source: dLoRA-artifact 75f1c43, ``vllm/core/scheduler.py``. Its credits against starvation are left out: one
batch of 64 moves at most one credit, and an adapter is due after 10,000.
"""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.pooled._state import with_pool
from capplan.serving.state import NONE, Limits, State

_DECREASE = 0.05
_INCREASE = 1.1


@inner
def is_served(state: State, limits: Limits, adapter: int) -> bool:
    """Return whether the next step may serve an adapter beside the merged one."""
    return bool(limits.merged_ns == 0 or state.pooled.merging.adapter in (NONE, adapter))


@inner
def choose_merged(state: State, limits: Limits) -> bool:
    """Decide which adapter is merged in the next step; return whether the rows of others are to pause."""
    own = state.pooled.merging
    own.switches = 0
    if limits.merged_ns == 0:
        return False
    batch = min(state.counters.n_running + state.counters.n_waiting, limits.max_num_seqs)
    if batch == 0:
        return False
    largest = _count_requests(state)
    requests = state.pooled.adapters.requests
    before, chosen = own.adapter, NONE
    if before != NONE and requests[before] >= own.low * batch:
        chosen = before
    elif requests[largest] >= own.high * batch:
        chosen = largest
    if chosen == before:
        own.steps += 1
    elif chosen != NONE:
        _move_thresholds(state, limits)
        _switch(state, chosen)
    if own.adapter == NONE and own.candidate != largest:
        own.candidate = largest
        own.virtual_switches += 1
    own.merged_requests += min(requests[largest if chosen == NONE else chosen], limits.max_num_seqs)
    own.unmerged_requests += batch
    if chosen == NONE and before != NONE:
        _move_thresholds(state, limits)
        _switch(state, NONE)
    return bool(chosen not in (NONE, before))


@inner
def unmerge(state: State, limits: Limits) -> bool:
    """Serve all adapters again, because no request of the merged one finds memory; return whether one was."""
    if state.pooled.merging.adapter == NONE:
        return False
    _move_thresholds(state, limits)
    _switch(state, NONE)
    return True


@with_pool(0)
def switches_ns(state: State, limits: Limits) -> int:
    """Return the time of the changes of weights before the step."""
    return int(state.pooled.merging.switches * limits.switch_ns)


@inner
def _count_requests(state: State) -> int:
    """Count the requests in flight by adapter; return the first adapter with the most."""
    requests = state.pooled.adapters.requests
    requests[:] = 0
    row = state.counters.run_head
    while row != NONE:
        requests[state.rows.adapter[row]] += 1
        row = state.rows.following[row]
    row = state.pooled.queues.head[0]
    while row != NONE:
        requests[state.rows.adapter[row]] += 1
        row = state.pooled.rows.later[row]
    return int(requests.argmax())


@inner
def _switch(state: State, adapter: int) -> None:
    """Merge an adapter, or none, instead of the one before."""
    own = state.pooled.merging
    own.switches += (own.adapter != NONE) + (adapter != NONE)
    own.adapter = adapter
    own.steps = 1


@inner
def _move_thresholds(state: State, limits: Limits) -> None:
    """Compare both kinds of batches over the steps since the last switch, which ends."""
    own = state.pooled.merging
    if own.steps == 0:
        return
    is_merged = own.adapter != NONE
    merged_ns = limits.merged_ns * own.steps + limits.switch_ns * (1 if is_merged else own.virtual_switches)
    unmerged_ns = limits.unmerged_ns * own.steps + limits.switch_ns * (not is_merged)
    gain = own.merged_requests / merged_ns - own.unmerged_requests / unmerged_ns
    if is_merged:
        if gain > 0.0 and own.high - _DECREASE > own.low:
            own.high -= _DECREASE
        elif gain < 0.0:
            own.high *= _INCREASE
    elif gain < 0.0 and own.low + _DECREASE < own.high:
        own.low += _DECREASE
    elif gain > 0.0:
        own.low /= _INCREASE
    own.merged_requests = own.unmerged_requests = own.virtual_switches = 0
    own.candidate = NONE
