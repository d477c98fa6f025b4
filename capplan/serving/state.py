"""The state of one engine as flat arrays: requests, running order, waiting queues, KV blocks, adapters.

A request in flight owns a *row*. Adapters are numbered from 1; adapter 0 is the base model, which needs no
slot.

Running requests come in two kinds. *Decoding* rows get one token in every step and are not touched by it:
what they have computed follows from the number of steps since they started, `counters[TICK] - since[row]`.
*Partial* rows (in prefill, recomputing, or left out of a step by the token budget) are listed in running
order and handled one by one. So a step costs time in proportion to what changes in it, whatever the size of
the batch or the queue.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.serving.heap import Heap, new_heap
from capplan.serving.links import links_append, new_links

# Positions in `State.counters`.
TICK = 0  # steps committed so far
SEQUENCE = 1  # admissions so far: the age of a running request
BACK_KEY = 2  # next key at the back of the waiting queue (grows)
FRONT_KEY = 3  # next key at its front (falls below zero)
N_FREE_ROWS = 4
N_RUNNING = 5
N_WAITING = 6
N_DECODING = 7
N_PARTIAL = 8
FREE_BLOCKS = 9
KV_TOKENS = 10  # tokens whose keys and values are held for running requests
N_ACTIVE = 11  # distinct adapters of running requests
N_RESIDENT = 12  # adapters in GPU slots
N_ON_HOST = 13  # adapters in host memory
RUN_HEAD = 14
RUN_TAIL = 15
# Positions from here on describe the step that `schedule` decided last.
STEP_TOKENS = 16
STEP_DECODES = 17  # decoding rows that get a token
N_ADMITTED = 18
N_PREEMPTED = 19
N_STALLED = 20
N_LOADS = 21
# ... and what `commit` did with it.
N_FIRST = 22
N_RESUMED = 23
N_FINISHED = 24
N_COUNTERS = 25

NONE = -1
"""No row, no adapter."""


class Limits(NamedTuple):
    """What bounds a step; all whole numbers, so that compiled code takes it as it is."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_loras: int
    max_cpu_loras: int
    block_size: int
    watermark_blocks: int
    long_prefill_tokens: int
    reserve_full_sequence: int
    reverse_set_aside: int = 0


class State(NamedTuple):
    """One engine instance. Rows index the per-request arrays, adapter numbers the per-adapter ones."""

    counters: NDArray[np.int64]
    # -- requests in flight, shape (rows,) --
    request: NDArray[np.int64]  # the caller's name for the request
    adapter: NDArray[np.int32]
    prompt: NDArray[np.int32]
    target: NDArray[np.int32]  # output tokens after which the request ends
    computed: NDArray[np.int64]  # tokens with valid KV (decoding rows: at tick `since`)
    output: NDArray[np.int64]  # tokens generated (decoding rows: at tick `since`)
    since: NDArray[np.int64]  # tick at which the row began to decode; NONE while partial or waiting
    sequence: NDArray[np.int64]  # when it was admitted
    tokens: NDArray[np.int32]  # partial rows: tokens in this step
    following: NDArray[np.int32]  # next row in the running list or in the adapter's waiting queue
    previous: NDArray[np.int32]  # previous row in the running list
    waiting_key: NDArray[np.int64]
    free_rows: NDArray[np.int32]
    # -- running --
    partial: NDArray[np.int32]  # partial rows in running order
    phase: NDArray[np.int64]  # (block_size,): decoding rows by (computed - since) mod block_size
    finish: Heap  # decoding rows by (tick of their last token, admission)
    # -- waiting: one queue per adapter, the queues of active and of inactive adapters in two heaps --
    queue_head: NDArray[np.int32]
    queue_tail: NDArray[np.int32]
    hot: Heap
    cold: Heap
    # -- adapters: users, residence, and idle ones from the least to the most recently used --
    users: NDArray[np.int32]
    resident: NDArray[np.int8]
    on_host: NDArray[np.int8]
    gpu_idle: NDArray[np.int32]  # (2, adapters + 2): links of the idle residents, sentinel last
    host_idle: NDArray[np.int32]
    # -- the last step --
    admitted: NDArray[np.int32]
    preempted: NDArray[np.int32]
    stalled: NDArray[np.int32]  # decoding rows that got no token in this step (preempted ones included)
    loads: NDArray[np.int32]  # adapters to copy into a GPU slot
    load_from_disk: NDArray[np.int8]
    first: NDArray[np.int32]  # rows that emitted their first token
    resumed: NDArray[np.int32]  # rows that emitted a later token after having been stalled
    finished: NDArray[np.int32]


def new_state(rows: int, adapters: int, num_blocks: int, limits: Limits) -> State:
    """Return an empty instance.

    Parameters
    ----------
    rows
        Most requests in flight (running and waiting).
    adapters
        Number of adapters that may be asked for.
    num_blocks
        Usable KV blocks.
    limits
        The limits that `schedule` will be called with.

    Notes
    -----
    Every adapter was loaded once at start-up in the order of its number, as ``--lora-modules`` does, so the
    host holds the last `max_cpu_loras` of them; GPU slots start empty.
    """
    running = max(1, min(rows, limits.max_num_seqs))
    counters = np.zeros(N_COUNTERS, np.int64)
    counters[FREE_BLOCKS] = num_blocks
    counters[N_FREE_ROWS] = rows
    counters[FRONT_KEY] = -1
    counters[RUN_HEAD] = counters[RUN_TAIL] = NONE
    on_host = np.zeros(adapters + 1, np.int8)
    host_idle = new_links(adapters + 1)
    first_on_host = max(1, adapters - limits.max_cpu_loras + 1)
    for adapter in range(first_on_host, adapters + 1):
        on_host[adapter] = 1
        links_append(host_idle, adapter)
    counters[N_ON_HOST] = adapters + 1 - first_on_host

    return State(
        counters=counters,
        request=np.zeros(rows, np.int64),
        adapter=np.zeros(rows, np.int32),
        prompt=np.zeros(rows, np.int32),
        target=np.zeros(rows, np.int32),
        computed=np.zeros(rows, np.int64),
        output=np.zeros(rows, np.int64),
        since=np.full(rows, NONE, np.int64),
        sequence=np.zeros(rows, np.int64),
        tokens=np.zeros(rows, np.int32),
        following=np.full(rows, NONE, np.int32),
        previous=np.full(rows, NONE, np.int32),
        waiting_key=np.zeros(rows, np.int64),
        free_rows=np.arange(rows - 1, -1, -1, dtype=np.int32),
        partial=np.zeros(running, np.int32),
        phase=np.zeros(limits.block_size, np.int64),
        finish=new_heap(rows),
        queue_head=np.full(adapters + 1, NONE, np.int32),
        queue_tail=np.full(adapters + 1, NONE, np.int32),
        hot=new_heap(adapters + 1),
        cold=new_heap(adapters + 1),
        users=np.zeros(adapters + 1, np.int32),
        resident=np.zeros(adapters + 1, np.int8),
        on_host=on_host,
        gpu_idle=new_links(adapters + 1),
        host_idle=host_idle,
        admitted=np.zeros(running, np.int32),
        preempted=np.zeros(running, np.int32),
        stalled=np.zeros(running, np.int32),
        loads=np.zeros(adapters + 1, np.int32),
        load_from_disk=np.zeros(adapters + 1, np.int8),
        first=np.zeros(running, np.int32),
        resumed=np.zeros(running, np.int32),
        finished=np.zeros(running, np.int32),
    )
