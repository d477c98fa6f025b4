"""Scheduler output of one step, and edits of the scheduler's state between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.serving import NONE, Limits, State
from capplan.serving import state as s
from capplan.serving.adapters import release_adapter
from capplan.serving.links import links_append, links_remove, new_links
from capplan.serving.queue import list_queue, unlist_queue
from capplan.serving.running import free_row
from capplan.serving.slora import drop_unused
from capplan.serving.state import (
    N_CLAIMED,
    N_LOADS,
    N_PREEMPTED,
    N_WAITING,
    NO_CLAIM,
    READY,
    RUN_HEAD,
    SLORA,
    STEP_DECODES,
    TICK,
)

if TYPE_CHECKING:
    from capplan.engine.engine_core import EngineCore

_SCHEDULED = np.dtype(
    [
        (name, np.int64)
        for name in (
            "request",
            "row",
            "place",  # line of the pool's block table; NONE without prefix caching
            "adapter",
            "tokens",  # to compute in this step
            "computed",  # tokens with valid KV before it
            "emits",  # whether the step ends with a new token of this request
        )
    ],
    align=True,
)

ScheduledRequests = np.ndarray[Any, Any]
"""Requests with tokens in a step, in running order; fields as in `_SCHEDULED`."""


class StepCounts(NamedTuple):
    """Counts of a step, requests by whether they compute one token after others that they have generated."""

    parts: int
    decodes: int
    prefill_tokens: int
    rank_sum: int
    max_rank: int


def new_scheduled(max_num_seqs: int) -> ScheduledRequests:
    """Return room for the parts of one step."""
    return np.zeros(max_num_seqs, _SCHEDULED)


def read_step(
    state: State, rank_of: NDArray[np.int64], parts: ScheduledRequests
) -> tuple[ScheduledRequests, StepCounts]:
    """Return the requests with tokens in the step that `schedule` decided last, listed in `parts`.

    Call it between `schedule` and `commit`. `rank_of` are the adapters' ranks.
    """
    tally = _list_scheduled(state.counters, state.rows, rank_of, parts)
    return parts[: tally.parts], tally


@jit
def _list_scheduled(
    c: NDArray[np.int64], rows: np.recarray[Any, Any], rank_of: NDArray[np.int64], parts: ScheduledRequests
) -> StepCounts:
    row = c[RUN_HEAD]
    n = decodes = prefill_tokens = rank_sum = max_rank = 0
    while row != NONE:
        tokens = 0
        computed = rows.computed[row]
        emits = True
        if rows.since[row] >= 0:
            tokens = 1 if c[STEP_DECODES] > 0 else 0
            computed += c[TICK] - rows.since[row]
        elif rows.since[row] == NONE:
            tokens = rows.tokens[row]
            emits = computed + tokens == rows.prompt[row] + rows.output[row]
        if tokens > 0:
            part = parts[n]
            part.request = rows.request[row]
            part.row = row
            part.place = rows.place[row]
            part.adapter = rows.adapter[row]
            part.tokens = tokens
            part.computed = computed
            part.emits = emits
            n += 1
            if tokens == 1 and rows.output[row] > 0:
                decodes += 1
            else:
                prefill_tokens += tokens
            rank = rank_of[rows.adapter[row]]
            rank_sum += rank
            max_rank = max(max_rank, rank)
        row = rows.following[row]
    return StepCounts(n, decodes, prefill_tokens, rank_sum, max_rank)


class Decision(NamedTuple):
    """What was decided for one step, requests by their number."""

    begin_ns: int
    tokens: list[tuple[int, int]]
    """(request, tokens) in running order."""
    preempted: list[int]
    loads: list[tuple[int, bool]]
    """(adapter, from disk)"""


def decision_of(state: State, parts: ScheduledRequests, begin_ns: int) -> Decision:
    """Return the decision that `schedule` left in a state; call it before `commit`."""
    c, adapters = state.counters, state.adapters
    n = c[N_LOADS]
    preempted = state.rows.request[state.lists.preempted[: c[N_PREEMPTED]]]
    from_disk = adapters.load_from_disk[:n].astype(bool)
    return Decision(
        begin_ns,
        list(zip(parts["request"].tolist(), parts["tokens"].tolist(), strict=True)),
        preempted.tolist(),
        list(zip(adapters.loads[:n].tolist(), from_disk.tolist(), strict=True)),
    )


@jit
def cancel_waiting(state: State, limits: Limits, row: int) -> None:
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


def check_core(loop: EngineCore) -> None:
    """Check requests, KV pages and adapters of a loop between two steps.

    Raises
    ------
    RuntimeError
        When a request is lost, a page belongs to nobody or to two, or an adapter is in no slot or in two.
    """
    _check_requests(loop)
    _check_pages(loop)
    _check_adapters(loop)


def _check_requests(loop: EngineCore) -> None:
    state, requests = loop.state, loop.requests
    running = _linked(state, int(state.counters[s.RUN_HEAD]))
    waiting = [row for head in state.adapters.queue_head for row in _linked(state, int(head))]
    rows = {number: request.row for number, request in requests.items()}
    _same("rows of requests", sorted(rows.values()), sorted(running + waiting))
    _same(
        "owners of rows", {n: int(state.rows.request[row]) for n, row in rows.items()}, {n: n for n in rows}
    )
    _same("running requests", sorted(r.row for r in requests.values() if r.running), sorted(running))
    _same("rows free and taken", int(state.counters[s.N_FREE_ROWS]) + len(rows), state.rows.size)
    _same("requests that are over", [n for n, r in requests.items() if r.finish_reason is not None], [])


def _check_pages(loop: EngineCore) -> None:
    c, pool = loop.state.counters, loop.blocks.pool
    used = int(c[s.CAPACITY] - c[s.FREE_BLOCKS] - c[s.ADAPTER_PAGES])
    _same("KV blocks in use", loop.blocks.in_use(), used)
    owned = [
        *pool.free_pages.tolist(),
        *loop.blocks.owned().tolist(),
        *loop.residency.memory.owned().tolist(),
    ]
    _same("pages free and owned", sorted(owned), list(range(1, pool.capacity + 1)))


def _check_adapters(loop: EngineCore) -> None:
    adapters, residency = loop.state.adapters, loop.residency
    resident = {number for number in range(1, adapters.size) if adapters.resident[number]}
    _same("residents without a place", resident - residency.in_memory, set())
    _same("adapters with a slot or pages", residency.memory.holders(), residency.in_memory)


def _linked(state: State, row: int) -> list[int]:
    rows: list[int] = []
    while row != NONE:
        rows.append(row)
        row = int(state.rows.following[row])
    return rows


def _same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise RuntimeError(f"{what}: {found}, expected {expected}")
