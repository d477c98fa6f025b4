"""Integrity of the state under the rules for one pool: queues, quotas, reservations, the adapter cache."""

from __future__ import annotations

import numpy as np

from capplan.serving import NONE, Limits, State
from capplan.serving import state as s
from capplan.serving.pooled.state import NO_CACHE, QUEUES, SJF
from capplan.testing.structures import check_heap, same


def check_pool_state(state: State, limits: Limits, running: list[int], waiting: list[int]) -> None:
    """Assert that the state of one pool follows from its rows, and that no limit is exceeded.

    Parameters
    ----------
    state, limits
        As of `capplan.testing.check_integrity`.
    running, waiting
        Its rows.

    Raises
    ------
    AssertionError
        When a queue, a book, a reservation, a reference count or a counter is wrong, a row holds more than
        it reserved, or more tokens are outstanding than the queues have.
    """
    _check_queues(state, limits, waiting)
    _check_quotas(state, limits, running)
    _check_reservations(state, limits, running)
    _check_growth(state, running)
    _check_cache(state, limits, running)


def _check_queues(state: State, limits: Limits, waiting: list[int]) -> None:
    pooled = state.pooled
    listed: list[int] = []
    for queue in range(pooled.queues.size):
        rows = []
        before, row = NONE, int(pooled.queues.head[queue])
        while row != NONE:
            rows.append(row)
            assert len(rows) <= len(waiting), f"size queue {queue} runs in a circle"
            same(f"row before {row}", pooled.rows.earlier[row], before)
            same(f"queue of row {row}", pooled.rows.queue[row], queue)
            before, row = row, int(pooled.rows.later[row])
        same(f"tail of size queue {queue}", pooled.queues.tail[queue], before)
        same(f"length of size queue {queue}", pooled.queues.n[queue], len(rows))
        predicted = pooled.rows.predicted if limits.order == SJF else np.zeros_like(pooled.rows.arrival)
        order = [(int(predicted[row]), int(pooled.rows.arrival[row])) for row in rows]
        same(f"order of size queue {queue}", order, sorted(set(order)))
        listed += rows
    assert not listed or int(pooled.rows.queue[listed].max()) < pooled.counts.n_queues, "an unused queue"
    same("rows in size queues", sorted(listed), sorted(waiting))


def _check_quotas(state: State, limits: Limits, running: list[int]) -> None:
    pooled = state.pooled
    idle = np.setdiff1d(np.arange(state.rows.size), running)
    assert not pooled.book[idle].any(), "a row that does not run holds quota"
    same("outstanding", pooled.queues.outstanding.tolist(), pooled.book[running].sum(axis=0).tolist())
    members = np.bincount(pooled.rows.queue[running], minlength=pooled.queues.size)
    same("running rows by queue", pooled.queues.running.tolist(), members.tolist())
    assert np.all(pooled.book >= 0), "a queue owes tokens to a row"
    if limits.order == QUEUES:
        charges = pooled.rows.charge[running].tolist()
        same("charges on the quotas", pooled.book[running].sum(axis=1).tolist(), charges)
        if pooled.counts.overruns == 0:
            total = int(pooled.queues.quota[: pooled.counts.n_queues].sum())
            assert pooled.queues.outstanding.sum() <= total, "more tokens outstanding than the queues have"
    bypassers = int((pooled.rows.bypassed[running] != NONE).sum())
    same("requests that bypassed another", pooled.counts.n_bypassers, bypassers)


def _check_reservations(state: State, limits: Limits, running: list[int]) -> None:
    pooled = state.pooled
    same("reserved blocks", pooled.counts.reserved, int(pooled.rows.reserved[running].sum()))
    for row in running:
        computed = int(state.rows.computed[row])
        if state.rows.since[row] >= 0:
            computed += int(state.counters.tick - state.rows.since[row])
        held, reserved = -(-computed // limits.block_size), int(pooled.rows.reserved[row])
        assert limits.order != QUEUES or held <= reserved, f"row {row} holds {held} blocks of {reserved}"


def _check_growth(state: State, running: list[int]) -> None:
    pooled = state.pooled
    due = {}
    for row in running:
        predicted = int(pooled.rows.predicted[row])
        if state.rows.since[row] >= 0 and predicted < state.rows.target[row]:
            tick = int(state.rows.since[row]) + predicted - int(state.rows.output[row])
            due[row] = (max(tick, 0) << 32) | int(state.rows.sequence[row])
    check_heap("outgrow", pooled.outgrow, due)


def _check_cache(state: State, limits: Limits, running: list[int]) -> None:
    c, pooled, adapters = state.counters, state.pooled, state.adapters
    users = np.bincount(state.rows.adapter[running], minlength=adapters.users.size)[1:]
    same("users of adapters", adapters.users[1:].tolist(), users.tolist())
    used, loading, resident = users > 0, adapters.claim[1:] == s.LOADING, adapters.resident[1:] == 1
    for name, count, members in (
        ("used", c.n_active, used),
        ("used while loading", c.n_claimed, used & loading),
        ("loading", pooled.counts.n_loading, loading),
        ("resident", c.n_resident, resident),
    ):
        same(f"number of adapters {name}", int(count), int(members.sum()))
    assert np.all(resident[used | loading]), "an adapter is used or loading, and not in memory"
    pinned_pages = int(adapters.pages[1:][used | loading].sum())
    same("pages of pinned adapters", pooled.counts.pinned_pages, pinned_pages)
    prefetched = pooled.adapters.prefetched[1:] == 1
    assert not np.any(prefetched & (used | ~resident)), "a prefetched adapter is in use or gone"
    if limits.cache == NO_CACHE:
        assert not np.any(resident & ~used & ~loading & ~prefetched), "an idle adapter stays without a cache"
