"""Chameleon's batch: queues by size with quotas, loans, bypass and squash.

Phase 1 admits from every queue, small sizes first, what fits its own quota. Phase 2 lends what empty queues
have left. If the head of a queue fits its quota but not the memory, younger requests that end before it could
start may bypass it; they are squashed once their memory lets it start.

Beyond the paper, no request starves: the head that has waited for longer than the period of refreshes comes
before all others, so that running requests leave it the tokens and the memory. A head that waits for rows of
its own queue, which hold its quota, holds nobody up: a queue that waits lends nothing, so no other takes
those tokens.

Source: Chameleon, sections 4.3.2 and 4.3.3, algorithm 1. The paper leaves open who lends: the queues with the
largest remainder here.
"""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving._structures import heap_push, heap_remove
from capplan.serving.pooled._caches import pages_to_pin
from capplan.serving.pooled._pool import admit, requeue, row_has_memory, step_allows, step_has_tokens
from capplan.serving.pooled._size_queues import book, book_adapter, shared_tokens
from capplan.serving.state import LOADING, NONE, Limits, State
from capplan.serving.vllm._running import output_tokens


@inner
def admit_batch(state: State, limits: Limits) -> None:
    """Admit waiting requests in two phases."""
    if state.pooled.counts.n_bypassers > 0:
        for queue in range(state.pooled.counts.n_queues):
            _squash(state, limits, queue)
    if not _admit_overdue(state, limits):
        return
    queues = state.pooled.queues
    for queue in range(state.pooled.counts.n_queues):
        queues.spare[queue] = 0
        if not _admit_own(state, limits, queue):
            return
        if queues.head[queue] == NONE:
            queues.spare[queue] = max(0, available(state, queue))
    for queue in range(state.pooled.counts.n_queues):
        if not _admit_by_loan(state, limits, queue):
            return


@inner
def _admit_overdue(state: State, limits: Limits) -> bool:
    """Admit the heads of queues that have waited for too long; return False if one does not fit yet."""
    row = _overdue(state, limits)
    while row != NONE:
        fits = _fits_quota(state, row) and step_allows(state, limits, row)
        if not fits or not row_has_memory(state, limits, row):
            return False
        _admit_own_charge(state, limits, row)
        row = _overdue(state, limits)
    return True


@inner
def _overdue(state: State, limits: Limits) -> int:
    """Return the first arrival of the heads that have waited for longer than a refresh period, or NONE.

    Without those that wait for rows of their own queue.
    """
    own, queues = state.pooled.rows, state.pooled.queues
    chosen = NONE
    if limits.refresh_ns == 0:
        return NONE
    for queue in range(state.pooled.counts.n_queues):
        head = queues.head[queue]
        if head == NONE or state.counters.now_ns - own.arrival_ns[head] <= limits.refresh_ns:
            continue
        # Requests of any queue may keep a shared adapter in use.
        own_tokens = queues.quota[queue] - queues.of_adapters[queue]
        if available(state, queue) < _charge(state, head) <= own_tokens:
            continue
        if chosen == NONE or own.arrival[head] < own.arrival[chosen]:
            chosen = head
    return int(chosen)


@inner
def _admit_own_charge(state: State, limits: Limits, row: int) -> None:
    """Admit a row, and book its charge on its own queue."""
    queue, shared = state.pooled.rows.queue[row], shared_tokens(state, row)
    admit(state, limits, row)
    book(state, row, queue, state.pooled.rows.charge[row])
    book_adapter(state, state.rows.adapter[row], queue, shared)


@inner
def available(state: State, queue: int) -> int:
    """Return the tokens of a quota that no admitted request holds; negative after a reduction or a growth."""
    return int(state.pooled.queues.quota[queue] - state.pooled.queues.outstanding[queue])


@inner
def _left(state: State) -> int:
    """Return the tokens of all quotas that no admitted request holds."""
    left = 0
    for queue in range(state.pooled.counts.n_queues):
        left += available(state, queue)
    return left


@inner
def _charge(state: State, row: int) -> int:
    """Return the tokens that a waiting row would take from quotas now."""
    return int(state.pooled.rows.charge[row] + shared_tokens(state, row))


@inner
def _fits_own(state: State, row: int) -> bool:
    """Return whether a row fits the quota of its queue, and the tokens that are left of all queues.

    These are fewer if a row larger than its quota runs, or if a refresh has reduced a quota in use.
    """
    charge = _charge(state, row)
    return bool(charge <= available(state, state.pooled.rows.queue[row]) and charge <= _left(state))


@inner
def _fits_quota(state: State, row: int) -> bool:
    """Return whether a row fits the quota of its queue; one larger than the quota runs alone in its queue."""
    pooled = state.pooled
    queue, charge = pooled.rows.queue[row], _charge(state, row)
    if _fits_own(state, row):
        return True
    if charge <= pooled.queues.quota[queue] or pooled.queues.running[queue] > 0:
        return False
    return bool(charge <= _left(state) or pooled.counts.reserved == 0)


@inner
def _admit_own(state: State, limits: Limits, queue: int) -> bool:
    """Admit from a queue what fits its quota; return False if the step is full."""
    pooled = state.pooled
    while pooled.queues.head[queue] != NONE:
        row = pooled.queues.head[queue]
        if not _fits_quota(state, row):
            return True
        if not step_allows(state, limits, row):
            return False
        if not row_has_memory(state, limits, row):
            if limits.bypass:
                _bypass(state, limits, row)
            return True
        _admit_own_charge(state, limits, row)
    return True


@inner
def _admit_by_loan(state: State, limits: Limits, queue: int) -> bool:
    """Admit from a queue what fits the remainders of empty queues; return False if the step is full."""
    pooled = state.pooled
    while pooled.queues.head[queue] != NONE:
        row = pooled.queues.head[queue]
        spare = 0
        for lender in range(pooled.counts.n_queues):
            spare += pooled.queues.spare[lender]
        if _charge(state, row) > min(spare, _left(state)):
            return True
        if not step_allows(state, limits, row):
            return False
        if not row_has_memory(state, limits, row):
            return True
        shared = shared_tokens(state, row)
        admit(state, limits, row)
        _lend(state, row, state.pooled.rows.charge[row], False)
        _lend(state, row, shared, True)
    return True


@inner
def _lend(state: State, row: int, charge: int, is_shared: bool) -> None:
    """Book tokens of a row, or of its shared adapter, on the lenders, the largest remainder first."""
    queues = state.pooled.queues
    while charge > 0:
        lender = 0
        for queue in range(1, state.pooled.counts.n_queues):
            if queues.spare[queue] > queues.spare[lender]:
                lender = queue
        tokens = min(charge, queues.spare[lender])
        queues.spare[lender] -= tokens
        charge -= tokens
        if is_shared:
            book_adapter(state, state.rows.adapter[row], lender, tokens)
        else:
            book(state, row, lender, tokens)


@inner
def _remaining(state: State, row: int) -> int:
    """Return the tokens that a row will still generate, as predicted."""
    return int(max(0, state.pooled.rows.predicted[row] - output_tokens(state, row)))


@inner
def _bypass(state: State, limits: Limits, first: int) -> None:
    """Admit younger rows of a queue that end before its head, which lacks memory, could start."""
    counts, own = state.pooled.counts, state.pooled.rows
    free_ns = _time_to_fit(state, first)
    row = own.later[first]
    while row != NONE and free_ns > 0:
        following = own.later[row]
        known = state.rows.prompt[row] + state.rows.output[row]
        run_ns = counts.prefill_ns_per_token * known + _remaining(state, row) * counts.decode_ns
        if (
            own.squashed[row] == 0
            and free_ns > run_ns
            and _fits_own(state, row)
            and step_allows(state, limits, row)
            and row_has_memory(state, limits, row)
        ):
            _admit_own_charge(state, limits, row)
            own.bypassed[row] = own.arrival[first]
            counts.n_bypassers += 1
            counts.bypasses += 1
        row = following


@inner
def _time_to_fit(state: State, first: int) -> int:
    """Return the nanoseconds until running rows that end as predicted leave memory for a row; 0: never."""
    ends, lacking = state.pooled.ends, _lacking_blocks(state, first)
    _begin_release(state)
    row = state.counters.run_head
    while row != NONE:
        heap_push(ends, row, (_remaining(state, row) << 32) | state.rows.sequence[row])
        row = state.rows.following[row]
    tokens = 0
    while lacking > 0 and ends.size[0] > 0:
        row = ends.items.ids[0]
        heap_remove(ends, row)
        lacking -= _released_blocks(state, row, first)
        tokens = _remaining(state, row)
    for i in range(ends.size[0]):
        ends.items.position[ends.items.ids[i]] = 0
    ends.size[0] = 0
    return 0 if lacking > 0 else int(tokens * state.pooled.counts.decode_ns)


@inner
def _begin_release(state: State) -> None:
    """Count the users of the adapters of running rows."""
    row = state.counters.run_head
    while row != NONE:
        adapter = state.rows.adapter[row]
        state.pooled.adapters.users_left[adapter] = state.adapters.users[adapter]
        row = state.rows.following[row]


@inner
def _lacking_blocks(state: State, row: int) -> int:
    """Return the blocks that a waiting row and its adapter lack now."""
    pooled = state.pooled
    pages = pages_to_pin(state, state.rows.adapter[row])
    return int(
        pooled.rows.reserved[row]
        + pages
        + pooled.counts.reserved
        + pooled.counts.pinned_pages
        - state.counters.capacity
    )


@inner
def _released_blocks(state: State, row: int, first: int) -> int:
    """Return the blocks that `first` lacks less without a running row, which counts as released from now on.

    The last user of an adapter frees its blocks, unless `first` would use it.
    """
    pooled = state.pooled
    adapter = state.rows.adapter[row]
    pooled.adapters.users_left[adapter] -= 1
    blocks = pooled.rows.reserved[row]
    if (
        adapter != 0
        and pooled.adapters.users_left[adapter] == 0
        and state.adapters.claim[adapter] != LOADING
        and adapter != state.rows.adapter[first]
    ):
        blocks += state.adapters.pages[adapter]
    return int(blocks)


@inner
def _squash(state: State, limits: Limits, queue: int) -> None:
    """Admit the head of a queue in place of the youngest rows that bypassed it, as few as possible."""
    pooled = state.pooled
    first = pooled.queues.head[queue]
    if first == NONE or not step_has_tokens(state, limits, first):
        return
    _begin_release(state)
    charge, lacking = _charge(state, first), _lacking_blocks(state, first)
    own, left = available(state, queue), _left(state)
    last, row = NONE, state.counters.run_tail
    while row != NONE and (lacking > 0 or min(own, left) < charge):
        if pooled.rows.bypassed[row] == pooled.rows.arrival[first]:
            lacking -= _released_blocks(state, row, first)
            own += pooled.book[row, queue]
            left += pooled.rows.charge[row]
            adapter = state.rows.adapter[row]
            if pooled.adapters.users_left[adapter] == 0:
                shared = pooled.adapter_book[adapter].sum()
                own += pooled.adapter_book[adapter, queue]
                left += shared
                charge += shared * (adapter == state.rows.adapter[first])
            last = row
        row = state.rows.previous[row]
    if last == NONE or lacking > 0 or min(own, left) < charge:
        return
    row = state.counters.run_tail
    while last != NONE:
        before = state.rows.previous[row]
        if row == last:
            last = NONE
        if pooled.rows.bypassed[row] == pooled.rows.arrival[first]:
            requeue(state, limits, row)
            pooled.rows.squashed[row] = 1
            pooled.counts.squashes += 1
        row = before
    _admit_own_charge(state, limits, first)
