"""The state of one engine as flat arrays: requests, running order, waiting queues, KV blocks, adapters.

A request in flight owns a *row*. Adapters are numbered from 1; adapter 0 is the base model, which needs no
slot.

Running requests are of two kinds. *Decoding* rows get one token in every step, which does not touch them: the
tokens that they have computed follow from the steps since they started, `counters.tick - since[row]`.
*Partial* rows (in prefill, recomputing, or left out of a step by the token budget) are listed in running
order and handled one by one. The time of a step is thus proportional to its changes, whatever the size of the
batch or the queue.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from capplan._jit import by_reference
from capplan.serving._structures import (
    ABSENT,
    Heap,
    Records,
    int_fields,
    new_heap,
    new_links,
    new_record,
    new_rings,
)
from capplan.serving.pooled._state import NoPool, PooledState, new_pooled

_COUNTERS = int_fields(
    "tick",  # steps committed so far in which decoding rows advanced
    "n_running",
    "n_waiting",
    "n_decoding",
    "n_partial",
    "free_blocks",
    "kv_tokens",  # tokens whose keys and values are held for running requests
    "n_active",  # distinct adapters that keep their slots
    "n_claimed",  # of them those that no request in the step uses, but a claim
    "n_ending",  # async: running rows whose last token is in flight
    "step_tokens",
    "step_decodes",  # decoding rows that get a token
    "n_admitted",
    "n_preempted",
    "n_stalled",
    "n_loads",
    "sequence",  # admissions so far: the age of a running request
    "back_key",  # next key at the back of the waiting queue (grows)
    "front_key",  # next key at its front (falls below zero)
    "queue_reversed",  # reverse_skipped: 1 while the waiting queue is read from its back
    "n_free_rows",
    "n_resident",  # adapters in GPU slots
    "n_on_host",  # adapters in host memory
    "run_head",
    "run_tail",
    "n_first",
    "n_resumed",
    "n_finished",
    "submitted",  # requests so far; identifies the content of their blocks
    "since_prefill",  # slora: decode steps since the last batch of prompts
    "capacity",  # usable KV blocks in all
    "adapter_pages",  # slora: KV blocks that adapters take
    "same_answers",  # prefix caching: requests so far whose whole prompt was shared
    "n_free_places",
    "fresh_row",  # the next row that was never used
    "n_gone",  # async: rows preempted in this step whose last token was in flight; they count as waiting
    "now_ns",  # time of the step, set by the caller before `schedule`
    "n_absent",  # pooled: running rows without tokens in the step, such as those that wait for an adapter
    "merged",  # pooled: 1 in a step without LoRA kernels, of an adapter that is merged
)

NONE = ABSENT
"""No row, no adapter."""
ENDING = -2
"""Value of `since` for a row whose last token is in flight (async)."""

NO_CLAIM = 0
LOADING = 1  # an adapter that is loaded asynchronously
READY = 2  # a loaded one, which keeps its slot until its first request runs
HELD = 3  # async: one whose last requests have their last token in flight
VLLM = 0
SLORA = 1
POOLED = 2


@by_reference
class Limits(NamedTuple):
    """Limits of a step, all integers."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_loras: int
    max_cpu_loras: int
    block_size: int
    watermark_blocks: int
    long_prefill_tokens: int
    reserve_full_sequence: int
    reverse_skipped: int = 0
    lone_prefill_exempt: int = 0
    async_scheduling: int = 0
    prefix_caching: int = 0
    unhashed_to_front: int = 0
    hold_ending: int = 0
    load_beside: int = 0
    policy: int = VLLM
    # -- POOLED only; codes of `capplan.serving.pooled._state` --
    order: int = 0
    admit_every: int = 1
    cache: int = 0
    prefetch: int = 0
    loading: int = 0
    chunked: int = 0
    bypass: int = 0
    ageing_ns: int = 0
    refresh_ns: int = 0
    merged_ns: int = 0  # 0: nothing is merged
    unmerged_ns: int = 0
    switch_ns: int = 0


EMPTY = -1
"""Content of a block that is not full or not registered."""
ANONYMOUS = -2
"""Content that orders the free list like registered content, but that no request can match."""

_BLOCK = int_fields("content", "holders", "before", "after")
_BUCKET = int_fields("first", "last")


@by_reference
class BlockPool(NamedTuple):
    """The blocks of one instance. Without prefix caching all arrays are empty."""

    blocks: Records
    """Shape (blocks,). ``content``: key of the block's content, EMPTY or ANONYMOUS. ``holders``: running
    requests that hold it. ``before``, ``after``: neighbours in its bucket, in order of registration.
    """
    free: NDArray[np.int64]
    """Links of the free blocks, shape (2, blocks + 1); the first one is taken first."""
    buckets: Records
    """Shape (buckets,). ``first`` and ``last`` block of the contents that share a hash."""
    table: NDArray[np.int64]
    """Shape (places, blocks per request): the blocks of each running request in order."""
    free_places: NDArray[np.int64]
    """Unused lines of `table`."""
    found: NDArray[np.int64]
    """Shape (blocks per request,): result of the last look-up."""


def new_pool(blocks: int, places: int, blocks_per_request: int) -> BlockPool:
    """Return a pool of free and empty blocks; a placeholder if there are none."""
    records = np.full(blocks, NONE, np.int64).repeat(4).view(_BLOCK).view(np.recarray)
    records.content = EMPTY
    records.holders = 0
    buckets = 1 << max(0, blocks - 1).bit_length()
    return BlockPool(
        blocks=records,
        free=new_links(blocks, 0),
        buckets=np.full(2 * buckets, NONE, np.int64).view(_BUCKET).view(np.recarray),
        table=np.zeros((places, blocks_per_request), np.int64),
        free_places=np.arange(places - 1, -1, -1, dtype=np.int64),
        found=np.zeros(blocks_per_request, np.int64),
    )


_ROW = int_fields(
    "request",  # the caller's number of the request
    "adapter",
    "prompt",
    "target",  # output tokens after which the request ends
    "computed",  # tokens with valid KV (decoding rows: at tick `since`)
    "output",  # tokens generated (decoding rows: at tick `since`)
    "since",  # tick at which the row began to decode; NONE while partial or waiting
    "sequence",  # when it was admitted
    "tokens",  # partial rows: tokens in this step
    "following",  # next row in the running list or in the adapter's waiting queue
    "previous",  # previous row in the running list
    "waiting_key",
    "emitted",  # tick of the last token of a row that was interrupted
    "streak",  # whether that row had a token in the step before as well
    "content",  # identifies the content of blocks that only this request has
    "prefix",  # identifies the prefix shared with other requests
    "shared",  # length of that prefix in tokens
    "registered",  # number of its first blocks that are in the pool's index
    "place",  # its line in the pool's table while it runs
    "free_rows",  # not of this row: stack of free rows
)
_ADAPTER = int_fields(
    "queue_head",  # first and last waiting row
    "queue_tail",
    "users",  # rows that run, and claims
    "resident",  # 1: in a GPU slot
    "on_host",  # 1: in host memory
    "claim",  # NO_CLAIM, LOADING, READY or HELD
    "pages",  # slora: KV blocks that it takes
    "loads",  # not of this adapter: those to copy into a slot in the last step
    "load_from_disk",
)
_LISTS = int_fields(
    "partial",  # partial rows in running order
    "ending",  # async: rows whose last token is in flight
    "due",  # prefix caching: rows that need a block in this step
    "by_end",  # slora: running rows in descending order of their end
    # -- the last step --
    "admitted",
    "preempted",
    "stalled",  # decoding rows that got no token in this step (preempted ones included)
    "first",  # rows that emitted their first token
    "resumed",  # rows that emitted a later token after having been stalled
    "finished",
)


@by_reference
class State(NamedTuple):
    """One engine instance.

    Related numbers are fields of one array of records: compiled code passes the arrays of a state one by one,
    so few arrays are much faster to compile and to call.
    """

    counters: np.record
    """Fields as in `_COUNTERS`."""
    rows: Records
    """Requests in flight, shape (rows,); fields as in `_ROW`."""
    adapters: Records
    """Shape (adapters + 1,); fields as in `_ADAPTER`."""
    lists: Records
    """Lists of rows, each in a field of its own, as long as its counter says; fields as in `_LISTS`."""
    phase: NDArray[np.int64]
    """Shape (block_size,): decoding rows by (computed - since) mod block_size."""
    finish: Heap
    """Decoding rows by (tick of their last token, admission)."""
    hot: Heap
    """Adapters with waiting requests that need no new slot, by their first request."""
    cold: Heap
    """Adapters with waiting requests that need one."""
    gpu_idle: NDArray[np.int64]
    """Links of the unused residents, least recently used first, shape (2, adapters + 2)."""
    host_idle: NDArray[np.int64]
    pool: BlockPool
    in_phase: NDArray[np.int64]
    """Prefix caching: decoding rows listed by phase, shape (2, rows + block_size)."""
    pooled: PooledState
    """Under other rules a placeholder without these fields."""

    def counter_values(self) -> dict[str, int]:
        """Return a copy of the counters, cheaper to read from Python than the record."""
        return dict(zip(_COUNTERS.names or (), self.counters.tolist(), strict=True))


def new_state(rows: int, adapters: int, num_blocks: int, limits: Limits) -> State:
    """Return an empty instance.

    Parameters
    ----------
    rows
        Maximum of requests in flight (running and waiting).
    adapters
        Number of adapters.
    num_blocks
        Usable KV blocks.
    limits
        The limits of all calls of `schedule`.

    Notes
    -----
    As with ``--lora-modules``, every adapter was loaded once at start-up in the order of its number: the host
    holds the last `max_cpu_loras` of them. GPU slots start empty.
    """
    running = max(1, min(rows, limits.max_num_seqs))
    counters = new_record(_COUNTERS)
    counters.free_blocks = counters.capacity = num_blocks
    counters.n_free_rows = rows
    counters.front_key = -1
    counters.run_head = counters.run_tail = NONE
    first_on_host = max(1, adapters - limits.max_cpu_loras + 1)
    counters.n_on_host = adapters + 1 - first_on_host
    records = np.zeros(adapters + 1, _ADAPTER).view(np.recarray)
    records.queue_head = records.queue_tail = NONE
    records.on_host[first_on_host:] = 1
    cached = limits.prefix_caching
    pooled = limits.policy == POOLED
    counters.n_free_places = running if cached else 0
    return State(
        counters=counters,
        # `take_row` clears a row: most of them are never used, and clearing all takes time.
        rows=np.empty(rows, _ROW).view(np.recarray),
        adapters=records,
        # Rows that are squashed leave their places to others, which may be preempted as well.
        lists=np.zeros(2 * running if pooled else running, _LISTS).view(np.recarray),
        phase=np.zeros(limits.block_size, np.int64),
        finish=new_heap(rows),
        hot=new_heap(adapters + 1),
        cold=new_heap(adapters + 1),
        gpu_idle=new_links(adapters + 1),
        host_idle=new_links(adapters + 1, first_on_host),
        pool=new_pool(
            blocks=num_blocks if cached else 0,
            places=running if cached else 0,
            blocks_per_request=-(-limits.max_model_len // limits.block_size) if cached else 0,
        ),
        in_phase=new_rings(rows if cached else 0, limits.block_size),
        pooled=new_pooled(
            rows,
            adapters,
            num_blocks * limits.block_size,
            limits.cache,
            limits.prefetch,
            limits.merged_ns / max(1, limits.unmerged_ns),
        )
        if pooled
        else cast("PooledState", NoPool()),
    )
