"""Rules for one pool of adapters and KV: order of admission, adapter cache and kind of steps are switches.

Loads are asynchronous unless `Limits.loading` says otherwise: an admitted request waits for its adapter
among the running ones, and the others go on. On demand, a batch of prompts waits for its adapters. With
assistance of the CPU it begins at once, and the first decode step waits for what is not copied yet. Steps are
either batches of whole prompts, which pause decoding as in S-LoRA, or chunks of prompts beside decoding rows
as in vLLM. The rules depend on no clock: the caller sets ``counters.now_ns``.

Source: Chameleon, section 4; S-LoRA c1ddf48 for arrival order; muServe for shortest predicted output first;
Toppings, sections 2.3 and 4, for loads.

Loads of adapters ahead of their requests: for waiting ones, and by the idle times of adapters.

At most one load is begun ahead in a step, while the link is idle and unreserved memory has room for it beside
the adapters that waiting requests need.

Source: Chameleon, sections 4.2 and 5.3, which cites a keep-alive policy for functions; bins, percentiles and
the least number of samples are assumptions.
"""

from __future__ import annotations

from capplan._jit import inner, inner_once
from capplan.serving.pooled._caches import begin_load, is_needed, is_pinned, make_room, note_use
from capplan.serving.pooled._chameleon import admit_batch
from capplan.serving.pooled._merging import choose_merged, is_served, unmerge
from capplan.serving.pooled._pool import (
    admit,
    append_late,
    grow,
    has_memory,
    make_room_by_recompute,
    may_start,
    pause_unserved,
    requeue,
    row_has_memory,
    starts_late,
    step_allows,
)
from capplan.serving.pooled._size_queues import join_queue, record_arrival, set_prediction
from capplan.serving.pooled._state import (
    ASSISTED,
    BY_HISTOGRAM,
    DECODES,
    IDLE_BINS,
    NO_PREFETCH,
    NO_STEP,
    PROMPTS,
    QUEUES,
    SJF,
    with_pool,
)
from capplan.serving.state import NONE, Limits, State
from capplan.serving.vllm._running import blocks_for, insert_by_end

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


@with_pool(True)
def pooled_takes(state: State, limits: Limits, adapter: int, prompt: int, output: int) -> bool:
    """Return whether a request fits into an otherwise empty pool."""
    tokens = prompt + output + limits.block_size - 1
    room = (state.counters.capacity - state.adapters.pages[adapter]) * limits.block_size
    return bool(tokens < room)


@with_pool(None)
def enter_pool(state: State, limits: Limits, row: int, predicted: int, arrival_ns: int) -> None:
    """Put a submitted row into its queue; `predicted` output tokens, 0: its target."""
    own = state.pooled.rows
    adapter = state.rows.adapter[row]
    if limits.prefetch == BY_HISTOGRAM:
        note_idle_time(state, adapter, arrival_ns)
    own.arrival[row] = state.rows.content[row]
    own.arrival_ns[row] = arrival_ns
    own.admitted_ns[row] = own.bypassed[row] = NONE
    own.squashed[row] = 0
    set_prediction(state, limits, row, predicted if predicted > 0 else state.rows.target[row])
    record_arrival(state, row)
    join_queue(state, limits, row)


@with_pool(0)
def schedule_pooled(state: State, limits: Limits) -> int:
    """Decide one step and return its tokens."""
    c, counts = state.counters, state.pooled.counts
    _note_duration(state)
    counts.n_prefetches = 0
    if choose_merged(state, limits):
        pause_unserved(state, limits)
    if limits.order == QUEUES:
        grow(state, limits)
    elif c.n_partial > 0 or counts.n_late > 0:
        _order_by_end(state, limits)
    _admit(state, limits)
    c.step_decodes = 0
    if limits.chunked:
        tokens = _decode(state, limits)
        tokens += _start_prompts(state, limits, limits.max_num_batched_tokens - tokens)
    else:
        tokens = _start_prompts(state, limits, limits.max_num_batched_tokens)
        if tokens == 0:
            tokens = _decode(state, limits)
        if tokens == 0:  # if all decoding rows were preempted, prompts have their blocks
            tokens = _start_prompts(state, limits, limits.max_num_batched_tokens)
    if tokens == 0 and unmerge(state, limits):
        tokens = _start_prompts(state, limits, limits.max_num_batched_tokens)
    c.merged = state.pooled.merging.adapter != NONE
    counts.step_kind = NO_STEP if tokens == 0 else DECODES if tokens == c.step_decodes else PROMPTS
    prefetch(state, limits)
    return tokens


@with_pool(0)
def pooled_steps_ahead(state: State, limits: Limits) -> int:
    """Return the number of following steps that only decode: none waits, ends or outgrows its prediction."""
    c, outgrow = state.counters, state.pooled.outgrow
    if c.n_waiting > 0 or limits.prefetch == BY_HISTOGRAM or limits.merged_ns > 0:
        return 0
    if limits.loading == ASSISTED and state.pooled.counts.n_loading > 0:  # a step may wait for them
        return 0
    first_end = state.finish.items.key[state.finish.items.ids[0]] >> 32
    steps = first_end - c.tick - 1
    if outgrow.size[0] > 0:
        steps = min(steps, (outgrow.items.key[outgrow.items.ids[0]] >> 32) - c.tick)
    return int(steps)


@with_pool(None)
def note_decode(state: State, limits: Limits) -> None:
    """Note a decode step that is decided without a call of the scheduler."""
    counts = state.pooled.counts
    _note_duration(state)
    counts.step_kind = DECODES
    if _is_due(state, limits):
        counts.since_admission = 0
    counts.since_admission += 1
    state.counters.n_absent = 0


@inner
def _note_duration(state: State) -> None:
    """Note the duration of the step before."""
    c, counts = state.counters, state.pooled.counts
    if counts.step_kind == DECODES:
        counts.decode_ns = c.now_ns - counts.begun_ns
    elif counts.step_kind == PROMPTS:
        counts.prefill_ns_per_token = (c.now_ns - counts.begun_ns) // c.step_tokens
    counts.begun_ns = c.now_ns


@inner
def _is_due(state: State, limits: Limits) -> bool:
    """Return whether waiting rows may be admitted in this step."""
    every = limits.admit_every
    return bool(every <= 1 or state.counters.n_decoding == 0 or state.pooled.counts.since_admission >= every)


@inner
def _admit(state: State, limits: Limits) -> None:
    """Admit waiting rows if that is due."""
    c, counts = state.counters, state.pooled.counts
    if not _is_due(state, limits):
        return
    counts.since_admission = 0
    if c.n_waiting == 0:
        return
    counts.room_tokens = limits.max_num_batched_tokens
    if limits.chunked:
        counts.room_tokens -= c.n_decoding
        for i in range(c.n_partial):
            row = state.lists.partial[i]
            counts.room_tokens -= state.rows.prompt[row] + state.rows.output[row] - state.rows.computed[row]
    if limits.order == QUEUES:
        admit_batch(state, limits)
    else:
        _admit_in_order(state, limits)


@inner
def _admit_in_order(state: State, limits: Limits) -> None:
    """Admit by arrival or by predicted output, up to the first row that does not fit."""
    oldest = NONE
    while True:
        if oldest == NONE:
            oldest = _oldest(state, limits)
        row = _next_in_order(state, limits, oldest)
        if row == NONE or not step_allows(state, limits, row) or not row_has_memory(state, limits, row):
            return
        admit(state, limits, row)
        if row == oldest:
            oldest = NONE


@inner
def _oldest(state: State, limits: Limits) -> int:
    """Return the waiting row that arrived first under an order with ageing, else NONE."""
    own = state.pooled.rows
    oldest = row = state.pooled.queues.head[0] if limits.order == SJF and limits.ageing_ns > 0 else NONE
    while row != NONE:
        if own.arrival[row] < own.arrival[oldest]:
            oldest = row
        row = own.later[row]
    return int(oldest)


@inner
def _next_in_order(state: State, limits: Limits, oldest: int) -> int:
    """Return the next waiting row, or NONE; the oldest if its wait exceeds the bound."""
    if oldest != NONE:
        waited_ns = state.counters.now_ns - state.pooled.rows.arrival_ns[oldest]
        if waited_ns > limits.ageing_ns:
            return oldest
    row = state.pooled.queues.head[0]
    while row != NONE and not is_served(state, limits, state.rows.adapter[row]):
        row = state.pooled.rows.later[row]
    return int(row)


@inner
def _order_by_end(state: State, limits: Limits) -> None:
    """Restore the order of ends: rows without tokens leave it while they start late, and join it then."""
    c, counts, by_end = state.counters, state.pooled.counts, state.lists.by_end
    was_ordered = c.n_running - counts.n_late
    ordered = 0
    for i in range(was_ordered):
        if state.rows.since[by_end[i]] != NONE:
            by_end[ordered] = by_end[i]
            ordered += 1
    for i in range(was_ordered, c.n_running):  # an insertion overwrites no entry from i + 1 on
        if state.rows.since[by_end[i]] != NONE:
            insert_by_end(state, by_end[i], ordered)
            ordered += 1
    for i in range(c.n_partial):
        row = state.lists.partial[i]
        if not starts_late(state, limits, row):
            insert_by_end(state, row, ordered)
            ordered += 1
    counts.n_late = counts.held_late = 0
    for i in range(c.n_partial):
        row = state.lists.partial[i]
        if starts_late(state, limits, row):
            append_late(state, limits, row, ordered + counts.n_late)


@inner
def _decode(state: State, limits: Limits) -> int:
    """Give every decoding row a token; return their number."""
    c = state.counters
    needed = state.phase[(-c.tick) % limits.block_size]
    while not make_room(state, limits, needed, True):
        requeue(state, limits, c.run_tail)
        state.pooled.counts.recomputes += 1
        needed = state.phase[(-c.tick) % limits.block_size]
    c.n_absent = c.n_partial  # some of them may have been preempted
    if c.n_decoding == 0:
        return 0
    c.free_blocks -= needed
    c.step_decodes = c.n_decoding
    state.pooled.counts.since_admission += 1
    return int(c.n_decoding)


@inner_once
def _start_prompts(state: State, limits: Limits, budget: int) -> int:
    """Give tokens to rows in order of admission, unless they wait for their adapter; return the tokens.

    Prompts are whole unless steps are mixed; only one longer than the budget is computed in parts.
    """
    c = state.counters
    left = budget
    c.n_absent = at = 0
    stopped = False
    while at < c.n_partial:
        row = state.lists.partial[at]
        at += 1
        state.rows.tokens[row] = 0
        wanted = state.rows.prompt[row] + state.rows.output[row] - state.rows.computed[row]
        tokens = min(wanted, left)
        if stopped or tokens <= 0 or not may_start(state, limits, state.rows.adapter[row]):
            c.n_absent += 1
            continue
        if not limits.chunked and wanted > left and left < budget:
            stopped = True
            c.n_absent += 1
            continue
        held = blocks_for(state.rows.computed[row], limits.block_size)
        blocks = blocks_for(state.rows.computed[row] + tokens, limits.block_size) - held
        if not make_room(state, limits, blocks, True):
            idle = c.n_decoding == 0 and left == budget
            if not idle or not make_room_by_recompute(state, limits, blocks, row):
                stopped = True
                c.n_absent += 1
                continue
        c.free_blocks -= blocks
        state.rows.tokens[row] = tokens
        left -= tokens
    return budget - left
