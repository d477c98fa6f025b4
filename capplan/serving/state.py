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

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import by_reference
from capplan.serving.structures import Heap, new_heap, new_links, new_rings

# Positions in `State.counters`.
TICK = 0  # steps committed so far in which decoding rows advanced
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
# Kept by some of the rules only.
SUBMITTED = 25  # requests so far, which names the content of their blocks
N_ENDING = 26  # async: running rows whose last token is not back yet
N_CLAIMED = 27  # loads beside the batch: adapters under way, or there but not used yet
SINCE_PREFILL = 28  # slora: decode steps since the last batch of prompts
CAPACITY = 29  # usable KV blocks in all
ADAPTER_PAGES = 30  # slora: KV blocks that adapters take
SAME_ANSWERS = 31  # prefix caching: requests so far whose whole prompt was shared
N_FREE_PLACES = 32
FRESH_ROW = 33  # the next row that no request ever had
N_GONE = 34  # async: rows preempted in this step whose last token was in flight; they count as waiting
N_COUNTERS = 35

NONE = -1
"""No row, no adapter."""
ENDING = -2
"""Stands in `since` for a row whose last token is in flight (async)."""

NO_CLAIM = 0
LOADING = 1  # an adapter on its way into a slot, beside the batch
READY = 2  # ... and one that is there and keeps its slot until the request that asked for it runs
VLLM = 0
SLORA = 1


@by_reference
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
    reverse_skipped: int = 0
    lone_prefill_exempt: int = 0
    async_scheduling: int = 0
    prefix_caching: int = 0
    unhashed_to_front: int = 0
    load_beside: int = 0
    policy: int = VLLM


EMPTY = -1
"""Content of a block that nobody can find: not full, or never registered."""
ANONYMOUS = -2
"""Content that counts as found again in the order of the free list, but that no request can ask for."""

_BLOCK = np.dtype([(name, np.int64) for name in ("content", "holders", "before", "after")], align=True)
_BUCKET = np.dtype([("first", np.int64), ("last", np.int64)], align=True)


@by_reference
class BlockPool(NamedTuple):
    """The blocks of one instance. Without prefix caching all arrays are empty."""

    blocks: np.recarray[Any, Any]
    """Shape (blocks,). ``content``: the key of what a block contains, EMPTY or ANONYMOUS. ``holders``:
    running requests that hold it. ``before``, ``after``: neighbours in its bucket, in order of registration.
    """
    free: NDArray[np.int64]
    """Links of the free blocks, shape (2, blocks + 1); the first one is taken first."""
    buckets: np.recarray[Any, Any]
    """Shape (buckets,). ``first`` and ``last`` block of the contents that share a hash."""
    table: NDArray[np.int64]
    """Shape (places, blocks per request): the blocks of each running request in order."""
    free_places: NDArray[np.int64]
    """Lines of `table` that nobody uses."""
    found: NDArray[np.int64]
    """Shape (blocks per request,): what the last look-up found."""


def new_pool(blocks: int, places: int, blocks_per_request: int) -> BlockPool:
    """Return a pool whose blocks are all free and empty; with 0 blocks, a placeholder."""
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


def _fields(*names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names], align=True)


_ROW = _fields(
    "request",  # the caller's name for the request
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
    "streak",  # whether that row had a token in the step before, too
    "content",  # names what only this request's blocks contain
    "prefix",  # names the prefix that it shares with others
    "shared",  # length of that prefix in tokens
    "registered",  # its first blocks that are in the pool's index
    "place",  # its line in the pool's table while it runs
    "free_rows",  # not of this row: the stack of rows that no request has
)
_ADAPTER = _fields(
    "queue_head",  # first and last waiting row
    "queue_tail",
    "users",  # rows that run, and claims
    "resident",  # 1: in a GPU slot
    "on_host",  # 1: in host memory
    "claim",  # NO_CLAIM, LOADING or READY
    "pages",  # slora: KV blocks that it takes
    "loads",  # not of this adapter: those to copy into a slot in the last step
    "load_from_disk",
)
_LISTS = _fields(
    "partial",  # partial rows in running order
    "ending",  # async: rows whose last token is not back yet
    "due",  # prefix caching: rows that need a block in this step
    "by_end",  # slora: running rows, those that end last first
    # -- the last step --
    "admitted",
    "preempted",
    "stalled",  # decoding rows that got no token in this step (preempted ones included)
    "first",  # rows that emitted their first token
    "resumed",  # rows that emitted a later token after having been stalled
    "finished",
)

Records = np.recarray[Any, Any]


@by_reference
class State(NamedTuple):
    """One engine instance.

    Numbers that belong together stand in one array of records: compiled code hands all arrays of a state from
    function to function one by one, so few arrays are many times faster to compile and to call.
    """

    counters: NDArray[np.int64]
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
    """Adapters with waiting requests that may be admitted without a new slot, by their first request ..."""
    cold: Heap
    """... and those that need one."""
    gpu_idle: NDArray[np.int64]
    """Links of the residents that nobody uses, least recently used first, shape (2, adapters + 2)."""
    host_idle: NDArray[np.int64]
    pool: BlockPool
    in_phase: NDArray[np.int64]
    """Prefix caching: decoding rows listed by phase, shape (2, rows + block_size)."""


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
    counters[FREE_BLOCKS] = counters[CAPACITY] = num_blocks
    counters[N_FREE_ROWS] = rows
    counters[FRONT_KEY] = -1
    counters[RUN_HEAD] = counters[RUN_TAIL] = NONE
    first_on_host = max(1, adapters - limits.max_cpu_loras + 1)
    counters[N_ON_HOST] = adapters + 1 - first_on_host
    records = np.zeros(adapters + 1, _ADAPTER).view(np.recarray)
    records.queue_head = records.queue_tail = NONE
    records.on_host[first_on_host:] = 1
    cached = limits.prefix_caching
    counters[N_FREE_PLACES] = running if cached else 0
    return State(
        counters=counters,
        rows=np.zeros(rows, _ROW).view(np.recarray),
        adapters=records,
        lists=np.zeros(running, _LISTS).view(np.recarray),
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
    )
