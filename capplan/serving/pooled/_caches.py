"""The adapter cache in a pool shared with KV: uses, loads, evictions by score.

The cache is what no request uses: an adapter stays after its last user until its blocks are needed. It is
*pinned* while requests use it or a load of it is in progress. Adapters that no waiting request needs are
evicted first, within each tier by the lowest score.

Source: Chameleon, sections 4.2 and 5.3.
"""

from __future__ import annotations

from capplan._jit import inner, inner_once, jit
from capplan.serving.pooled._state import FAIRSHARE, GDSF, LRU, with_pool
from capplan.serving.state import LOADING, NO_CLAIM, NONE, Limits, State


@inner
def is_pinned(state: State, adapter: int) -> bool:
    """Return whether an adapter cannot be evicted, or takes none of the pool, as the base model."""
    adapters = state.adapters
    return bool(
        adapters.pages[adapter] == 0 or adapters.users[adapter] > 0 or adapters.claim[adapter] == LOADING
    )


def make_resident(state: State, adapter: int) -> None:
    """Load an adapter for good, into memory that is not of the pool."""
    state.adapters.pages[adapter] = 0
    state.pooled.adapters.tokens[adapter] = 0
    state.adapters.resident[adapter] = 1
    state.counters.n_resident += 1
    state.pooled.counts.keeps_idle = 1


@inner
def pages_to_pin(state: State, adapter: int) -> int:
    """Return the blocks that one more use of an adapter makes unavailable."""
    return 0 if is_pinned(state, adapter) else int(state.adapters.pages[adapter])


@inner
def use_adapter(state: State, limits: Limits, adapter: int) -> None:
    """Count one more admitted request of an adapter, and begin its load if it is absent.

    The blocks of a load are free or those of idle adapters: the caller has made sure of it.
    """
    if adapter == 0:
        return
    c, own = state.counters, state.pooled.adapters
    adapters = state.adapters
    state.pooled.counts.pinned_pages += pages_to_pin(state, adapter)
    if adapters.users[adapter] == 0:
        c.n_active += 1
        c.n_claimed += adapters.claim[adapter] == LOADING
    adapters.users[adapter] += 1
    own.uses[adapter] += 1
    if not adapters.resident[adapter]:
        make_room(state, limits, adapters.pages[adapter], True)
        begin_load(state, adapter)
        c.n_claimed += 1
    elif own.prefetched[adapter]:
        own.prefetched[adapter] = 0
        if adapters.claim[adapter] == LOADING:
            state.pooled.counts.late_prefetches += 1
        else:
            state.pooled.counts.useful_prefetches += 1
    own.protected_ns[adapter] = 0
    note_use(state, adapter)


@inner
def note_use(state: State, adapter: int) -> None:
    """Note the time of a use, and the score of the last victim until then."""
    state.pooled.adapters.last_used_ns[adapter] = state.counters.now_ns
    state.pooled.inflation[adapter] = state.pooled.inflation[0]


@inner
def begin_load(state: State, adapter: int) -> None:
    """Take the blocks of an absent adapter, and list its load; the blocks are free."""
    c, adapters = state.counters, state.adapters
    pages = adapters.pages[adapter]
    c.free_blocks -= pages
    c.adapter_pages += pages
    adapters.resident[adapter] = 1
    c.n_resident += 1
    adapters.claim[adapter] = LOADING
    state.pooled.counts.n_loading += 1
    adapters.loads[c.n_loads] = adapter
    adapters.load_from_disk[c.n_loads] = 0
    c.n_loads += 1


@with_pool(None)
def end_load(state: State, adapter: int) -> None:
    """Note that the load of an adapter is complete."""
    counts = state.pooled.counts
    state.adapters.claim[adapter] = NO_CLAIM
    counts.n_loading -= 1
    if state.adapters.users[adapter] > 0:
        state.counters.n_claimed -= 1
        return
    counts.pinned_pages -= state.adapters.pages[adapter]
    if not counts.keeps_idle and not state.pooled.adapters.prefetched[adapter]:
        evict(state, adapter)


@inner
def leave_adapter(state: State, adapter: int) -> None:
    """Count one admitted request of an adapter less; after the last one it is idle, without a cache gone."""
    if adapter == 0:
        return
    own, counts = state.pooled.adapters, state.pooled.counts
    note_use(state, adapter)
    state.adapters.users[adapter] -= 1
    if state.adapters.users[adapter] > 0:
        return
    state.counters.n_active -= 1
    own.released_ns[adapter] = state.counters.now_ns
    if state.adapters.claim[adapter] == LOADING:
        state.counters.n_claimed -= 1
        return
    counts.pinned_pages -= state.adapters.pages[adapter]
    if not counts.keeps_idle:
        evict(state, adapter)


@jit
def evict(state: State, adapter: int) -> None:
    """Remove a resident adapter that is not pinned."""
    c = state.counters
    state.adapters.resident[adapter] = 0
    c.n_resident -= 1
    c.free_blocks += state.adapters.pages[adapter]
    c.adapter_pages -= state.adapters.pages[adapter]
    state.pooled.counts.evictions += 1
    if state.pooled.adapters.prefetched[adapter]:
        state.pooled.adapters.prefetched[adapter] = 0
        state.pooled.counts.wasted_prefetches += 1


@inner
def frequency(state: State, limits: Limits, adapter: int) -> float:
    """Return the uses of an adapter in the last window, whose older part is estimated by the one before."""
    own, counts = state.pooled.adapters, state.pooled.counts
    share = 0.0
    if limits.refresh_ns > 0:
        share = max(0.0, 1.0 - (state.counters.now_ns - counts.window_start_ns) / limits.refresh_ns)
    return float(own.uses[adapter] + own.uses_before[adapter] * share)


@inner
def _age_ns(state: State, adapter: int) -> int:
    if is_pinned(state, adapter):
        return 0
    return int(state.counters.now_ns - state.pooled.adapters.last_used_ns[adapter])


@inner
def is_needed(state: State, adapter: int) -> bool:
    """Return whether waiting requests need an adapter, or a prefetch protects it."""
    protected_ns = state.pooled.adapters.protected_ns[adapter]
    return bool(state.adapters.queue_head[adapter] != NONE or state.counters.now_ns < protected_ns)


@inner
def find_victim(state: State, limits: Limits, also_needed: bool) -> tuple[int, float]:
    """Return the idle adapter to evict next and its score; NONE without any.

    It may be one that waiting requests need if `also_needed` and there is no other.
    """
    adapters, own = state.adapters, state.pooled.adapters
    uses, age_ns, size = 0.0, 0, 1
    for adapter in range(1, adapters.resident.size):
        if adapters.resident[adapter]:
            uses = max(uses, frequency(state, limits, adapter))
            age_ns = max(age_ns, _age_ns(state, adapter))
            size = max(size, own.bytes[adapter])
    victim, least, unneeded_only = NONE, 0.0, not also_needed
    for adapter in range(1, adapters.resident.size):
        if not adapters.resident[adapter] or is_pinned(state, adapter):
            continue
        needed = is_needed(state, adapter)
        if needed and unneeded_only:
            continue
        score = _score(state, limits, adapter, uses, age_ns, size)
        if victim == NONE or score < least or (not needed and not unneeded_only):
            victim, least = adapter, score
        unneeded_only = unneeded_only or not needed
    return victim, least


@inner
def _score(state: State, limits: Limits, adapter: int, uses: float, age_ns: int, size: int) -> float:
    """Return the score of an adapter; the others are the largest uses, age and size of all residents."""
    own = state.pooled.adapters
    if limits.cache <= LRU:  # without a cache only prefetched adapters are idle
        return float(own.last_used_ns[adapter])
    frequent = frequency(state, limits, adapter)
    if limits.cache == GDSF:
        per_byte = own.cost_ns[adapter] / max(1, own.bytes[adapter])
        return float(frequent * per_byte + state.pooled.inflation[adapter])
    frequent = frequent / uses if uses > 0.0 else 0.0
    recent = 1.0 - _age_ns(state, adapter) / age_ns if age_ns > 0 else 1.0
    large = own.bytes[adapter] / size
    if limits.cache == FAIRSHARE:
        return float((frequent + recent + large) / 3.0)
    weights = state.pooled.weights
    return float(weights[0] * frequent + weights[1] * recent + weights[2] * large)


@inner_once
def make_room(state: State, limits: Limits, blocks: int, also_needed: bool) -> bool:
    """Evict idle adapters until `blocks` are free; return False if they do not suffice."""
    while state.counters.free_blocks < blocks:
        victim, score = find_victim(state, limits, also_needed)
        if victim == NONE:
            return False
        if limits.cache == GDSF:
            state.pooled.inflation[0] = score
        evict(state, victim)
    return True
