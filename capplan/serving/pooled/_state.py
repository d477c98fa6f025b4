"""State of the rules for one pool of adapters and KV: size queues, reservations, the adapter cache.

It extends `capplan.serving.state` under these rules alone. Terms are those of Chameleon, section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from capplan._jit import by_reference, inner_with
from capplan.serving._structures import ABSENT, Heap, Records, int_fields, new_heap, new_record
from capplan.spec import CHAMELEON_WEIGHTS, MOST_QUEUES, PROMPT_WEIGHT

F = TypeVar("F", bound=Callable[..., object])

WINDOW = 8192
"""Most requests that the window remembers."""
IDLE_BINS = 600
"""Bins of one second in the histograms of idle times."""

# Orders of admission.
FIFO = 0
SJF = 1  # shortest predicted output first
QUEUES = 2  # size queues with quotas

# Caches.
NO_CACHE = 0
LRU = 1
FAIRSHARE = 2
GDSF = 3
SCORE = 4

# Prefetches.
NO_PREFETCH = 0
BY_QUEUE = 1
BY_HISTOGRAM = 2

# Loads of adapters on demand.
ASYNCHRONOUS = 0  # prompts wait for them, and decoding goes on
ON_DEMAND = 1  # a batch of prompts waits for them
ASSISTED = 2  # prompts begin at once: CPU cores compute the layers that are not copied yet
RESIDENT = 3  # none: all adapters are loaded at the start

# Forms of request sizes.
DEGREE_2 = 0
DEGREE_1 = 1
OUTPUT_ONLY = 2

# Kinds of steps.
NO_STEP = 0
DECODES = 1
PROMPTS = 2

_ROW = int_fields(
    "predicted",  # output tokens
    "charge",  # tokens that it takes from quotas while admitted, without an adapter that requests share
    "reserved",  # KV blocks set aside for it while admitted
    "queue",
    "arrival",  # number of the submission
    "arrival_ns",
    "admitted_ns",  # first admission; NONE before
    "later",  # neighbours in its queue
    "earlier",
    "bypassed",  # arrival of the request that it was admitted before; NONE
    "squashed",  # 1: has lost its place to that request, and bypasses no other
    "mark",  # scratch
)
_QUEUE = int_fields(
    "head",
    "tail",
    "n",
    "running",  # admitted rows of this queue
    "quota",  # tokens
    "outstanding",  # tokens of it that admitted rows hold, of this queue or others, and their shared adapters
    "of_adapters",  # of them those of shared adapters
    "spare",  # scratch of an admission
)
_ADAPTER = int_fields(
    "bytes",  # in request sizes; of the base model: those of the smallest adapter
    "tokens",  # KV tokens in the same memory; 0 for the base model
    "cost_ns",  # of a load
    "uses",  # admissions in this window
    "uses_before",  # and in the window before
    "last_used_ns",
    "released_ns",  # when its last user left; NONE
    "prefetched",  # 1: loaded by a prefetch and not used yet
    "protected_ns",  # end of the protection of a prefetched adapter
    "samples",  # idle times seen
    "early_ns",  # 5th percentile of idle times
    "late_ns",  # 99th percentile; NONE where idle times predict nothing
    "users_left",  # scratch
    "requests",  # scratch: those in flight
)
_WINDOW = int_fields("arrival", "prompt", "predicted", "adapter", "arrival_ns", "execution_ns")
_COUNTS = int_fields(
    "begun_ns",  # the last step
    "step_kind",
    "decode_ns",  # of the last step of decoding rows only
    "prefill_ns_per_token",  # of the last step with prompts
    "n_queues",
    "reserved",  # blocks of admitted rows
    "pinned_pages",  # blocks of adapters that cannot be evicted: used, or being loaded
    "n_loading",
    "n_prefetches",  # of this step, 0 or 1: the last of its loads
    "keeps_idle",  # 0: without a cache
    "since_admission",  # decode steps since the last admission that was due
    "room_tokens",  # of the step, for prompts
    "n_late",  # look-ahead: last running rows in `by_end`, which start later
    "held_late",  # tokens that they will hold
    "shares_charge",  # 1: an adapter in use takes its tokens from quotas once
    "window_start_ns",
    "n_window",  # requests recorded so far
    "refreshes",  # designs of queues adopted
    "kept_queues",  # refreshes without enough requests for a design
    "scaled_quotas",  # designs whose minima exceeded the pool
    "n_bypassers",
    "hits",  # first admissions whose adapter was loaded
    "misses",
    "evictions",
    "useful_prefetches",
    "late_prefetches",
    "wasted_prefetches",
    "bypasses",
    "squashes",
    "overruns",  # growths of a reservation
    "recomputes",  # preemptions for lack of blocks
)
_MERGING = np.dtype(
    [
        ("adapter", np.int64),  # the merged one; NONE
        ("switches", np.int64),  # changes of weights before this step: of a merge and of its end
        ("steps", np.int64),  # since the last switch
        ("merged_requests", np.int64),  # that they served, or would have, if the largest adapter was merged
        ("unmerged_requests", np.int64),  # and by order of arrival
        ("candidate", np.int64),  # largest adapter of the last unmerged step
        ("virtual_switches", np.int64),  # its changes
        ("high", np.float64),  # least share of a batch with which an adapter is merged
        ("low", np.float64),  # and with which it stays so
    ],
    align=True,
)
_WRS = np.dtype(
    [(name, np.float64) for name in ("a", "b", "form", "max_prompt", "max_output", "max_bytes")], align=True
)


@by_reference
class PooledState(NamedTuple):
    """What the rules for one pool keep beside the state of an engine."""

    rows: Records
    """Shape (rows,); fields as in `_ROW`."""
    book: NDArray[np.int64]
    """Tokens that each admitted row holds of each queue's quota, shape (rows, 4)."""
    adapter_book: NDArray[np.int64]
    """The same of each adapter in use, shape (adapters + 1, 4); 0 unless requests share its charge."""
    queues: Records
    """Shape (4,), by ascending size; the first `counts.n_queues` are in use. Fields as in `_QUEUE`."""
    cuts: NDArray[np.float64]
    """Upper bound of the sizes in each queue, exclusive, shape (4,); infinite in the last."""
    wrs: np.record
    """Weights, form and maxima of request sizes; fields as in `_WRS`."""
    weights: NDArray[np.float64]
    """Weights of frequency, recency and size in the scores of adapters, shape (3,)."""
    merging: np.record
    """Fields as in `_MERGING`."""
    adapters: Records
    """Shape (adapters + 1,); fields as in `_ADAPTER`."""
    inflation: NDArray[np.float64]
    """GDSF: score of the last victim when each adapter was last used, shape (adapters + 1,); entry 0: the
    score of the last victim."""
    idle_times: NDArray[np.int64]
    """Histograms of idle times in seconds, shape (adapters + 1, 600); empty unless they are used."""
    window: Records
    """Ring of the last arrivals, shape (8192,); fields as in `_WINDOW`. Unknown times are NONE, as are the
    arrivals of requests that do not count any more."""
    outgrow: Heap
    """Decoding rows by (tick at which they have their predicted output, admission)."""
    ends: Heap
    """Scratch: running rows by (predicted tokens left, admission)."""
    counts: np.record
    """Fields as in `_COUNTS`."""


@by_reference
class NoPool(NamedTuple):
    """Takes the place of `PooledState` under other rules."""

    unused: int = 0


def with_pool(otherwise: object) -> Callable[[F], F]:
    """Compile a function of a state that does something for one pool alone; else it is a constant."""
    return inner_with(PooledState, otherwise)


@with_pool(False)
def has_pool(_state: Any) -> bool:
    """Return whether the rules are those for one pool."""
    return True


def new_pooled(
    rows: int, adapters: int, quota_tokens: int, cache: int, prefetch: int, least_share: float
) -> PooledState:
    """Return the state of an idle engine with one queue, which has all tokens of the pool.

    `rows` is the maximum of requests in flight; `cache` and `prefetch` are codes of the adapter cache;
    `least_share` is the share of a batch with which an adapter stays merged at first.
    """
    queues = np.zeros(MOST_QUEUES, _QUEUE).view(np.recarray)
    queues.head = queues.tail = ABSENT
    queues.quota[0] = quota_tokens
    records = np.zeros(adapters + 1, _ADAPTER).view(np.recarray)
    records.released_ns = records.late_ns = ABSENT
    wrs: np.record = np.zeros(1, _WRS).view(np.recarray)[0]
    wrs.a, wrs.b = PROMPT_WEIGHT, 1.0 - PROMPT_WEIGHT
    wrs.max_prompt = wrs.max_output = wrs.max_bytes = 1.0
    merging: np.record = np.zeros(1, _MERGING).view(np.recarray)[0]
    merging.adapter = merging.candidate = ABSENT
    merging.high, merging.low = 1.0, least_share
    counts = new_record(_COUNTS)
    counts.n_queues = 1
    counts.keeps_idle = cache != NO_CACHE
    return PooledState(
        rows=np.zeros(rows, _ROW).view(np.recarray),
        book=np.zeros((rows, MOST_QUEUES), np.int64),
        adapter_book=np.zeros((adapters + 1, MOST_QUEUES), np.int64),
        queues=queues,
        cuts=np.full(MOST_QUEUES, np.inf),
        wrs=wrs,
        weights=np.array([*CHAMELEON_WEIGHTS.values()]),
        merging=merging,
        adapters=records,
        inflation=np.zeros(records.size),
        idle_times=np.zeros(
            (records.size, IDLE_BINS) if prefetch == BY_HISTOGRAM else (0, IDLE_BINS), np.int64
        ),
        window=np.zeros(WINDOW, _WINDOW).view(np.recarray),
        outgrow=new_heap(rows),
        ends=new_heap(rows),
        counts=counts,
    )
