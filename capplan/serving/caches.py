"""The adapter cache in a pool shared with KV: uses, evictions by score, prefetches.

The cache is what no request uses: an adapter stays after its last user until its blocks are needed. It is
*pinned* while requests use it or a load of it is in progress. Adapters that no waiting request wants are
evicted first, within each tier by the lowest score.

Source: Chameleon, sections 4.2 and 5.3.
"""

from __future__ import annotations

from capplan.compile import inner, jit
from capplan.serving.pooled_state import (
    BY_HISTOGRAM,
    FAIRSHARE,
    GDSF,
    IDLE_BINS,
    LRU,
    NO_PREFETCH,
    with_pool,
)
from capplan.serving.state import LOADING, NO_CLAIM, NONE, Limits, State

_NS_PER_S = 1_000_000_000
_LEAST_SAMPLES = 10
_LEAST_VARIATION = 2.0
"""Least coefficient of variation of a histogram that predicts idle times."""
_PREFETCH_DEPTH = 64
"""Waiting requests whose adapters are prefetched."""


@inner
def is_pinned(state: State, adapter: int) -> bool:
    """Return whether an adapter cannot be evicted, or is not one."""
    return adapter == 0 or state.adapters.users[adapter] > 0 or state.adapters.claim[adapter] == LOADING


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
        _begin_load(state, adapter)
        c.n_claimed += 1
    elif own.prefetched[adapter]:
        own.prefetched[adapter] = 0
        if adapters.claim[adapter] == LOADING:
            state.pooled.counts.late_prefetches += 1
        else:
            state.pooled.counts.useful_prefetches += 1
    _note_use(state, adapter)


@inner
def _note_use(state: State, adapter: int) -> None:
    state.pooled.adapters.last_used_ns[adapter] = state.counters.now_ns
    state.pooled.inflation[adapter] = state.pooled.inflation[0]


@inner
def _begin_load(state: State, adapter: int) -> None:
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
    _note_use(state, adapter)
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
def _is_wanted(state: State, adapter: int) -> bool:
    """Return whether a waiting request wants an adapter, or a prefetch protects it."""
    protected_ns = state.pooled.adapters.protected_ns[adapter]
    return bool(state.adapters.queue_head[adapter] != NONE or state.counters.now_ns < protected_ns)


@inner
def find_victim(state: State, limits: Limits, also_wanted: bool) -> tuple[int, float]:
    """Return the idle adapter to evict next and its score; NONE without any.

    Parameters
    ----------
    also_wanted
        Whether it may be one that waiting requests want, if there is no other.
    """
    adapters, own = state.adapters, state.pooled.adapters
    uses, age_ns, size = 0.0, 0, 1
    for adapter in range(1, adapters.resident.size):
        if adapters.resident[adapter]:
            uses = max(uses, frequency(state, limits, adapter))
            age_ns = max(age_ns, _age_ns(state, adapter))
            size = max(size, own.bytes[adapter])
    victim, least, unwanted_only = NONE, 0.0, not also_wanted
    for adapter in range(1, adapters.resident.size):
        if not adapters.resident[adapter] or is_pinned(state, adapter):
            continue
        is_wanted = _is_wanted(state, adapter)
        if is_wanted and unwanted_only:
            continue
        score = _score(state, limits, adapter, uses, age_ns, size)
        if victim == NONE or score < least or (not is_wanted and not unwanted_only):
            victim, least = adapter, score
        unwanted_only = unwanted_only or not is_wanted
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


@inner
def make_room(state: State, limits: Limits, blocks: int, also_wanted: bool) -> bool:
    """Evict idle adapters until `blocks` are free; return False if they do not suffice."""
    while state.counters.free_blocks < blocks:
        victim, score = find_victim(state, limits, also_wanted)
        if victim == NONE:
            return False
        if limits.cache == GDSF:
            state.pooled.inflation[0] = score
        evict(state, victim)
    return True


@inner
def adapter_to_prefetch(state: State, limits: Limits) -> int:
    """Return an absent adapter to load ahead of its first request while the link is idle, or NONE."""
    if limits.prefetch == NO_PREFETCH or state.pooled.counts.n_loading > 0:
        return NONE
    if limits.prefetch == BY_HISTOGRAM:
        adapter = _due_by_histogram(state)
        if adapter != NONE:
            return adapter
    return _next_wanted(state)


@inner
def load_ahead(state: State, limits: Limits, adapter: int) -> None:
    """Prefetch an adapter if it finds room beside the adapters that waiting requests want."""
    c, own = state.counters, state.pooled.adapters
    pages = state.adapters.pages[adapter]
    evictable = 0
    for other in range(1, state.adapters.resident.size):
        if state.adapters.resident[other] and not is_pinned(state, other) and not _is_wanted(state, other):
            evictable += state.adapters.pages[other]
    if c.free_blocks + evictable < pages:
        return
    make_room(state, limits, pages, False)
    _begin_load(state, adapter)
    state.pooled.counts.pinned_pages += pages
    state.pooled.counts.n_prefetches = 1
    own.prefetched[adapter] = 1
    _note_use(state, adapter)
    if limits.prefetch == BY_HISTOGRAM and own.late_ns[adapter] != NONE and own.released_ns[adapter] != NONE:
        own.protected_ns[adapter] = own.released_ns[adapter] + own.late_ns[adapter]


@inner
def _next_wanted(state: State) -> int:
    """Return the absent adapter of the first waiting request that has one, or NONE."""
    pooled = state.pooled
    seen = 0
    for queue in range(pooled.counts.n_queues):
        row = pooled.queues.head[queue]
        while row != NONE and seen < _PREFETCH_DEPTH:
            adapter = state.rows.adapter[row]
            if adapter != 0 and not state.adapters.resident[adapter]:
                return int(adapter)
            seen += 1
            row = pooled.rows.later[row]
    return NONE


@inner
def _due_by_histogram(state: State) -> int:
    """Return the absent adapter whose next use is due first, or NONE."""
    own = state.pooled.adapters
    now_ns = state.counters.now_ns
    chosen, first_ns = NONE, 0
    for adapter in range(1, state.adapters.resident.size):
        released_ns, late_ns = own.released_ns[adapter], own.late_ns[adapter]
        if state.adapters.resident[adapter] or released_ns == NONE or late_ns == NONE:
            continue
        due_ns = released_ns + own.early_ns[adapter]
        is_due = due_ns <= now_ns < released_ns + late_ns
        if is_due and (chosen == NONE or due_ns < first_ns):
            chosen, first_ns = adapter, due_ns
    return chosen


@inner
def note_idle_time(state: State, adapter: int, arrival_ns: int) -> None:
    """Add the idle time that an arrival ends to the histogram of its adapter."""
    own = state.pooled.adapters
    released_ns = own.released_ns[adapter]
    if adapter == 0 or released_ns == NONE or state.adapters.users[adapter] > 0:
        return
    if state.adapters.queue_head[adapter] != NONE:  # another request has ended it
        return
    bins = state.pooled.idle_times[adapter]
    bins[min(IDLE_BINS - 1, max(0, arrival_ns - released_ns) // _NS_PER_S)] += 1
    own.samples[adapter] += 1
    _summarize(state, adapter)


@inner
def _summarize(state: State, adapter: int) -> None:
    """Update the percentiles of an adapter's idle times; NONE if they are few or spread evenly."""
    own = state.pooled.adapters
    bins = state.pooled.idle_times[adapter]
    samples = own.samples[adapter]
    squares = 0
    for i in range(IDLE_BINS):
        squares += bins[i] * bins[i]
    mean = samples / IDLE_BINS
    variance = squares / IDLE_BINS - mean * mean
    own.late_ns[adapter] = NONE
    if samples < _LEAST_SAMPLES or variance < (_LEAST_VARIATION * mean) ** 2:
        return
    total, early, late = 0, NONE, NONE
    for i in range(IDLE_BINS):
        total += bins[i]
        if early == NONE and total * 100 >= samples * 5:
            early = i
        if late == NONE and total * 100 >= samples * 99:
            late = i
    own.early_ns[adapter] = early * _NS_PER_S
    own.late_ns[adapter] = (late + 1) * _NS_PER_S
