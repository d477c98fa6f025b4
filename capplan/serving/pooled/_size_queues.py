"""Queues by request size: sizes, the order of waiting requests, tokens booked on quotas.

Every admitted request holds its charge, ``prompt + predicted output + adapter`` in tokens, of the quotas
until it ends. A loan is booked on the queues that lend it, so the sum over all queues never exceeds the pool.

If requests share the charge of their adapter, the adapter itself holds its tokens: from the first admission
of a request for it, on the quotas that this one took them of, until no admitted request uses it.

Source: Chameleon, sections 4.3.1 to 4.3.3.
"""

from __future__ import annotations

from capplan._jit import inner, jit
from capplan.serving.pooled._state import DEGREE_1, DEGREE_2, SJF, WINDOW, with_pool
from capplan.serving.state import NONE, Limits, State
from capplan.serving.vllm._running import blocks_for, output_tokens


@inner
def request_size(state: State, prompt: int, predicted: int, adapter: int) -> float:
    """Return the weighted size of a request, from 0 to 1."""
    wrs = state.pooled.wrs
    lengths = wrs.a * min(prompt / wrs.max_prompt, 1.0) + wrs.b * min(predicted / wrs.max_output, 1.0)
    weight = min(state.pooled.adapters.bytes[adapter] / wrs.max_bytes, 1.0)
    if wrs.form == DEGREE_2:
        return float(lengths * weight)
    if wrs.form == DEGREE_1:
        return float((lengths + weight) / 2.0)
    return float(lengths)


@inner
def _queue_of(state: State, row: int) -> int:
    """Return the queue of a row; a size equal to a cut-off goes up."""
    pooled = state.pooled
    size = request_size(state, state.rows.prompt[row], pooled.rows.predicted[row], state.rows.adapter[row])
    queue = 0
    while queue < pooled.counts.n_queues - 1 and pooled.cuts[queue] <= size:
        queue += 1
    return queue


@inner
def largest_prediction(state: State, limits: Limits, row: int) -> int:
    """Return the most output tokens that a row can reserve in an otherwise empty pool."""
    pages = state.adapters.pages[state.rows.adapter[row]]
    room = (state.counters.capacity - pages - 1) * limits.block_size
    return int(room - state.rows.prompt[row])


@inner
def set_prediction(state: State, limits: Limits, row: int, predicted: int) -> None:
    """Set the predicted output of a row, which its charge and its reservation follow."""
    own = state.pooled.rows
    prompt, adapter = state.rows.prompt[row], state.rows.adapter[row]
    own.predicted[row] = max(1, min(predicted, largest_prediction(state, limits, row)))
    own.charge[row] = prompt + own.predicted[row]
    if not state.pooled.counts.shares_charge:
        own.charge[row] += state.pooled.adapters.tokens[adapter]
    tokens = max(own.predicted[row], output_tokens(state, row) + 1)
    own.reserved[row] = blocks_for(prompt + tokens, limits.block_size)


@inner
def record_arrival(state: State, row: int) -> None:
    """Add a submitted row to the window."""
    pooled = state.pooled
    at = pooled.counts.n_window % WINDOW
    pooled.counts.n_window += 1
    pooled.window.arrival[at] = pooled.rows.arrival[row]
    pooled.window.prompt[at] = state.rows.prompt[row]
    pooled.window.predicted[at] = pooled.rows.predicted[row]
    pooled.window.adapter[at] = state.rows.adapter[row]
    pooled.window.arrival_ns[at] = pooled.rows.arrival_ns[row]
    pooled.window.execution_ns[at] = NONE


@inner
def record_execution(state: State, row: int) -> None:
    """Note the time in execution of a complete row in the window, if it is still there."""
    pooled = state.pooled
    at = pooled.rows.arrival[row] % WINDOW
    if pooled.window.arrival[at] == pooled.rows.arrival[row]:
        pooled.window.execution_ns[at] = state.counters.now_ns - pooled.rows.admitted_ns[row]


@jit
def forget_execution(state: State, row: int) -> None:
    """Remove the time in execution of a row that ended by an error from the window."""
    _forget_execution(state, row)


@with_pool(None)
def _forget_execution(state: State, row: int) -> None:
    pooled = state.pooled
    at = pooled.rows.arrival[row] % WINDOW
    if pooled.window.arrival[at] == pooled.rows.arrival[row]:
        pooled.window.execution_ns[at] = NONE


@inner
def _is_before(state: State, limits: Limits, one: int, other: int) -> bool:
    """Return whether a row is served before another one of its queue."""
    own = state.pooled.rows
    if limits.order == SJF and own.predicted[one] != own.predicted[other]:
        return bool(own.predicted[one] < own.predicted[other])
    return bool(own.arrival[one] < own.arrival[other])


@inner
def join_queue(state: State, limits: Limits, row: int) -> None:
    """Insert a waiting row at its place in the queue of its size."""
    own, queues = state.pooled.rows, state.pooled.queues
    queue = _queue_of(state, row)
    own.queue[row] = queue
    before = queues.tail[queue]
    while before != NONE and _is_before(state, limits, row, before):
        before = own.earlier[before]
    after = queues.head[queue] if before == NONE else own.later[before]
    own.earlier[row], own.later[row] = before, after
    if before == NONE:
        queues.head[queue] = row
    else:
        own.later[before] = row
    if after == NONE:
        queues.tail[queue] = row
    else:
        own.earlier[after] = row
    queues.n[queue] += 1


@with_pool(None)
def leave_queue(state: State, row: int) -> None:
    """Remove a waiting row from its queue."""
    own, queues = state.pooled.rows, state.pooled.queues
    queue = own.queue[row]
    before, after = own.earlier[row], own.later[row]
    if before == NONE:
        queues.head[queue] = after
    else:
        own.later[before] = after
    if after == NONE:
        queues.tail[queue] = before
    else:
        own.earlier[after] = before
    queues.n[queue] -= 1


@inner
def book(state: State, row: int, queue: int, tokens: int) -> None:
    """Take tokens of a queue's quota for an admitted row."""
    state.pooled.book[row, queue] += tokens
    state.pooled.queues.outstanding[queue] += tokens


@inner
def shared_tokens(state: State, row: int) -> int:
    """Return the tokens beside its charge that a row would take now, for a shared adapter not in use."""
    adapter = state.rows.adapter[row]
    if not state.pooled.counts.shares_charge or state.adapters.users[adapter] > 0:
        return 0
    return int(state.pooled.adapters.tokens[adapter])


@inner
def book_adapter(state: State, adapter: int, queue: int, tokens: int) -> None:
    """Take tokens of a queue's quota for an adapter that requests share."""
    state.pooled.adapter_book[adapter, queue] += tokens
    state.pooled.queues.outstanding[queue] += tokens
    state.pooled.queues.of_adapters[queue] += tokens


@inner
def unbook(state: State, row: int) -> None:
    """Return all tokens of an admitted row to the queues that it holds them of."""
    pooled = state.pooled
    for queue in range(pooled.counts.n_queues):
        pooled.queues.outstanding[queue] -= pooled.book[row, queue]
        pooled.book[row, queue] = 0


@inner
def unbook_adapter(state: State, adapter: int) -> None:
    """Return all tokens of an adapter to the queues that it holds them of."""
    pooled = state.pooled
    for queue in range(pooled.counts.n_queues):
        pooled.queues.outstanding[queue] -= pooled.adapter_book[adapter, queue]
        pooled.queues.of_adapters[queue] -= pooled.adapter_book[adapter, queue]
        pooled.adapter_book[adapter, queue] = 0


@jit
def rebin(state: State, limits: Limits, queues: int) -> None:
    """Apply new sizes and cut-offs for so many queues: re-bin waiting rows, re-book running ones.

    Waiting rows keep their order of arrival. The whole charge of a running row is booked on the queue that it
    now belongs to, without loans, and that of a shared adapter on the queue of its first running row.
    """
    pooled = state.pooled
    row = state.counters.run_head
    while row != NONE:
        unbook(state, row)
        unbook_adapter(state, state.rows.adapter[row])
        row = state.rows.following[row]
    first = last = NONE
    for _ in range(state.counters.n_waiting):
        row = earliest_head(state)
        leave_queue(state, row)
        pooled.rows.mark[row] = NONE
        if last == NONE:
            first = row
        else:
            pooled.rows.mark[last] = row
        last = row
    pooled.counts.n_queues = queues
    for queue in range(pooled.queues.size):
        pooled.queues.running[queue] = 0
    row = first
    while row != NONE:
        following = pooled.rows.mark[row]
        join_queue(state, limits, row)
        row = following
    row = state.counters.run_head
    while row != NONE:
        queue = _queue_of(state, row)
        pooled.rows.queue[row] = queue
        pooled.queues.running[queue] += 1
        book(state, row, queue, pooled.rows.charge[row])
        adapter = state.rows.adapter[row]
        if pooled.counts.shares_charge and not pooled.adapter_book[adapter].any():
            book_adapter(state, adapter, queue, pooled.adapters.tokens[adapter])
        row = state.rows.following[row]


@inner
def earliest_head(state: State) -> int:
    """Return the head of a queue that arrived first, or NONE."""
    pooled = state.pooled
    chosen = NONE
    for queue in range(pooled.counts.n_queues):
        head = pooled.queues.head[queue]
        if head != NONE and (chosen == NONE or pooled.rows.arrival[head] < pooled.rows.arrival[chosen]):
            chosen = head
    return int(chosen)
