"""Loads of adapters ahead of their requests: for waiting ones, and by the idle times of adapters.

At most one load is begun ahead in a step, while the link is idle and unreserved memory has room for it beside
the adapters that waiting requests need.

Source: Chameleon, sections 4.2 and 5.3, which cites a keep-alive policy for functions; bins, percentiles and
the least number of samples are assumptions.
"""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.pooled.caches import begin_load, is_needed, is_pinned, make_room, note_use
from capplan.serving.pooled.pool import has_memory
from capplan.serving.pooled.state import BY_HISTOGRAM, IDLE_BINS, NO_PREFETCH
from capplan.serving.state import NONE, Limits, State

_NS_PER_S = 1_000_000_000
_LEAST_SAMPLES = 10
_LEAST_VARIATION = 2.0
"""Least coefficient of variation of a histogram that predicts idle times."""
_DEPTH = 64
"""Waiting requests whose adapters are prefetched."""


@inner
def prefetch(state: State, limits: Limits) -> None:
    """Begin at most one load ahead: of an adapter that is due by its idle times, else of a needed one."""
    if limits.prefetch == NO_PREFETCH or state.pooled.counts.n_loading > 0:
        return
    if limits.prefetch == BY_HISTOGRAM:
        adapter = _due_by_idle_time(state)
        if adapter != NONE and _load_ahead(state, limits, adapter):
            own = state.pooled.adapters
            own.protected_ns[adapter] = own.released_ns[adapter] + own.late_ns[adapter]
            return
    adapter = _next_needed(state)
    if adapter != NONE:
        _load_ahead(state, limits, adapter)


@inner
def _load_ahead(state: State, limits: Limits, adapter: int) -> bool:
    """Begin the load of an absent adapter if memory permits."""
    pages = state.adapters.pages[adapter]
    if not has_memory(state, limits, NONE, pages):
        return False
    evictable = 0
    for other in range(1, state.adapters.resident.size):
        if state.adapters.resident[other] and not is_pinned(state, other) and not is_needed(state, other):
            evictable += state.adapters.pages[other]
    if state.counters.free_blocks + evictable < pages:
        return False
    make_room(state, limits, pages, False)
    begin_load(state, adapter)
    state.pooled.counts.pinned_pages += pages
    state.pooled.counts.n_prefetches = 1
    state.pooled.adapters.prefetched[adapter] = 1
    note_use(state, adapter)
    return True


@inner
def _next_needed(state: State) -> int:
    """Return the absent adapter of the first waiting request that has one, or NONE."""
    pooled = state.pooled
    seen = 0
    for queue in range(pooled.counts.n_queues):
        row = pooled.queues.head[queue]
        while row != NONE and seen < _DEPTH:
            adapter = state.rows.adapter[row]
            if adapter != 0 and not state.adapters.resident[adapter]:
                return int(adapter)
            seen += 1
            row = pooled.rows.later[row]
    return NONE


@inner
def _due_by_idle_time(state: State) -> int:
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
