"""Chameleon's algorithm 1 as printed, and its comparison with the core without memory pressure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from capplan.serving import State, adapter_loaded, commit, schedule, submit
from capplan.serving.pooled import QUEUES
from capplan.serving.state import LOADING
from capplan.testing import check_integrity
from tests.serving.pooled_worlds import PooledWorld, make_pooled_world, queue_rows, without_pressure
from tests.serving.worlds import seeded


@dataclass
class Queue:
    """Waiting requests as (number, charge), and the tokens that the queue has left."""

    requests: list[tuple[int, int]]
    tokens: int


def generate_batch(queues: list[Queue]) -> tuple[list[int], int]:
    """Algorithm 1 as printed; return the batch and the tokens that were lent."""
    batch: list[int] = []
    leftover = lent = 0
    for queue in queues:  # phase 1
        consumed = put_batch(queue, queue.tokens, batch)
        if not queue.requests:
            leftover = leftover + (queue.tokens - consumed)
    for queue in queues:  # phase 2
        if leftover == 0:
            break
        consumed = put_batch(queue, leftover, batch)
        leftover = leftover - consumed
        lent += consumed
    return batch, lent


def put_batch(queue: Queue, tokens: int, batch: list[int]) -> int:
    """Move requests from the head of a queue into the batch; return the tokens consumed."""
    resources = tokens
    consumed = 0
    for request, needed in queue.requests:
        if resources < needed:
            break
        resources = resources - needed
        consumed = consumed + needed
        batch.append(request)
    queue.requests = [each for each in queue.requests if each[0] not in batch]
    return consumed


def make_ample_world(seed: int, queues: int | None = None) -> PooledWorld:
    """Return a world with memory and places for everything, whose quotas hold the largest request."""
    world = make_pooled_world(seeded(seed), max_requests=40, order=QUEUES, admit_every=1)
    limits = world.limits._replace(max_num_seqs=100, max_num_batched_tokens=1000, max_model_len=64)
    rng = np.random.default_rng(seed)
    largest = 24 + 28 + max(world.tokens)
    n = queues or len(world.queues.quotas)
    quotas = [largest + int(rng.integers(0, 60)) for _ in range(n)]
    sizes = replace(world.queues, quotas=quotas, cuts=sorted(rng.random(n - 1).tolist()))
    exact = tuple(arrival._replace(predicted=0) for arrival in world.arrivals)
    return replace(
        without_pressure(world),
        limits=limits,
        queues=sizes,
        arrivals=exact,
        refreshes=(),
        aborts=(),
        shares_charge=False,
    )


def waiting_queues(state: State) -> list[Queue]:
    """Return the size queues of a state."""
    pooled = state.pooled
    queues = []
    for number, record in enumerate(pooled.queues[: pooled.counts.n_queues]):
        rows = queue_rows(state, number)
        requests = [(int(state.rows.request[row]), int(pooled.rows.charge[row])) for row in rows]
        queues.append(Queue(requests, int(record.quota - record.outstanding)))
    return queues


def compare_batches(world: PooledWorld) -> tuple[int, int]:
    """Run a world, asserting that every batch is that of the algorithm; return the batches and the loans."""
    batches = loans = upcoming = 0
    state, limits = world.new_state(), world.limits
    c = state.counters
    while upcoming < len(world.arrivals) or c.n_running + c.n_waiting > 0:
        for arrival in world.arrivals[upcoming : upcoming + 3]:
            submit(state, limits, upcoming, *arrival[1:4], 0, 0, 0, arrival.at_ns)
            upcoming += 1
        for adapter in np.flatnonzero(state.adapters.claim == LOADING):
            adapter_loaded(state, adapter)
        expected, lent = generate_batch(waiting_queues(state))
        schedule(state, limits)
        admitted = state.lists.admitted[: c.n_admitted]
        assert state.rows.request[admitted].tolist() == expected
        own = state.pooled.book[admitted, state.pooled.rows.queue[admitted]]
        assert state.pooled.book[admitted].sum() - own.sum() == lent
        batches += len(expected) > 0
        loans += lent > 0
        commit(state, limits)
        check_integrity(state, limits, world.num_blocks)
    return batches, loans
