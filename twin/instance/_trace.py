"""The record of a simulated instance: times per request, token gaps, sums over time, counts.

A plain run records the input of `SimulationResult`. A detailed one (``buckets`` above 0) also records a time
series, and events of each request and adapter.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import by_reference, inner, jit
from capplan.serving import Records, int_fields, new_record

SMALL_BATCH = 128
"""Requests per chunk of vLLM's API server (``VLLM_V1_OUTPUT_PROC_CHUNK_SIZE``)."""

_COUNTS = int_fields(
    "steps",
    "adapter_loads",
    "disk_loads",
    "preemptions",
    "rejected",
    "now_ns",
    "next_request",
    "max_running",
    "max_waiting",
    "max_kv_tokens",
    "max_step_tokens",
    "load_ns",
    "interruptions",  # steps in which decoding pauses: batches of prompts, and steps that wait for loads
    "interrupted_ns",  # the time of those pauses
    "request_steps",  # sum over steps of the running requests
    "small_request_steps",  # the same over steps with at most SMALL_BATCH of them
    "bucket",  # bucket of the time series in which the last step ended
    "bucket_end_ns",
    "bucket_ns",  # length of a bucket
)
# Integrals over simulated time, in units x nanoseconds.
_SUMS = np.dtype(
    [(f"{name}_ns", np.float64) for name in ("busy", "running", "waiting", "kv_token", "adapter")],
    align=True,
)
# Sums over the steps that end in a bucket: integers, so their order does not matter.
_SERIES = int_fields(
    "busy_ns",  # the first six are integrals over time, in units x nanoseconds
    "running_ns",
    "waiting_ns",
    "kv_token_ns",
    "active_ns",
    "resident_ns",
    "steps",
    "tokens",
    "loads",
    "load_ns",
)
_ADAPTER = int_fields(
    "admissions",  # under the rules for one pool, first admissions
    "hits",  # admissions that found the adapter resident
    "loads",
    "load_ns",
    "loaded_at",  # number of the step of the last load, counted from 1
)
POOL_COUNTS = (
    "hits",  # first admissions whose adapter was loaded
    "misses",
    "evictions",
    "useful_prefetches",
    "late_prefetches",
    "wasted_prefetches",
    "bypasses",
    "squashes",
    "overruns",
    "recomputes",
    "refreshes",
    "kept_queues",
    "scaled_quotas",
)
"""Counts of the rules for one pool, as in `capplan.serving.pooled._state`."""
_POOL = int_fields(*POOL_COUNTS, "link_ns")

# Values of `Trace.status`.
STATUS_RUNNING = 1
STATUS_REJECTED = 2
STATUS_LOST = 3
NEVER = -1
_GAP_SMALLEST_NS = 1e5
_BINS_PER_OCTAVE = 256  # each at most 0.4 percent wide
_GAP_BINS = 30 * _BINS_PER_OCTAVE  # up to a day


@by_reference
class TwinTrace(NamedTuple):
    """The record of one instance, equal in the compiled and the reference twin."""

    first_ns: NDArray[np.int64]
    """Clock at each request's first token, shape (requests,); NEVER before."""
    finish_ns: NDArray[np.int64]
    """Clock at each request's last token; NEVER before."""
    stalled_ns: NDArray[np.int64]
    """Clock at the last token before a request was preempted or left out of a step; under the rules for one
    pool also when it began to decode."""
    interruptions: NDArray[np.int64]
    """Pauses of decoding between each request's first token and its last (Toppings, section 2.3); until its
    last one, those before its first, negative."""
    interrupted_ns: NDArray[np.int64]
    """Their time, likewise."""
    status: NDArray[np.int8]
    """STATUS_RUNNING: in execution at the end; STATUS_REJECTED: rejected; STATUS_LOST: ended by a crash of
    its instance; 0: none of these."""
    gaps: NDArray[np.int64]
    """Histogram of the gaps between a request's tokens, in logarithmic bins."""
    counts: np.record
    """Fields as in `_COUNTS`."""
    sums: np.record
    """Fields as in `_SUMS`."""
    pool: np.record
    """POOL_COUNTS, and ``link_ns``, the time of copies on the link from host memory."""
    # -- a detailed run only; otherwise of length 0 --
    series: Records
    """Buckets of time, shape (buckets,); fields as in `_SERIES`."""
    adapters: Records
    """Shape (adapters + 1,); entry 0 is the base model; fields as in `_ADAPTER`."""
    # -- a detailed run, or one under a scheduler and a cache --
    admitted_ns: NDArray[np.int64]
    """Clock at the start of the step that first admitted each request; NEVER before."""
    skipped_ns: NDArray[np.int64]
    """Time that each request waited before its first admission for the load of its adapter."""
    held_up_ns: NDArray[np.int64]
    """Time of loads inside the steps from each request's first admission to its first token; under the rules
    for one pool, the time from the first admission until its adapter is loaded."""


def new_trace(
    requests: int, adapters: int = 0, buckets: int = 0, horizon_ns: int = 0, waits: bool = False
) -> TwinTrace:
    """Return an empty record of a plain run, or of one with `buckets` of a time series.

    The last bucket ends at the horizon, and includes steps that end later. `waits`: a plain run, too, records
    admissions and waits.
    """
    counts = new_record(_COUNTS)
    detailed = requests if buckets or waits else 0
    if buckets:
        counts.bucket_ns = counts.bucket_end_ns = max(1, -(-horizon_ns // buckets))
    return TwinTrace(
        first_ns=np.full(requests, NEVER, np.int64),
        finish_ns=np.full(requests, NEVER, np.int64),
        stalled_ns=np.zeros(requests, np.int64),
        interruptions=np.zeros(requests, np.int64),
        interrupted_ns=np.zeros(requests, np.int64),
        status=np.zeros(requests, np.int8),
        gaps=np.zeros(_GAP_BINS, np.int64),
        counts=counts,
        sums=new_record(_SUMS),
        pool=new_record(_POOL),
        series=np.zeros(buckets, _SERIES).view(np.recarray),
        adapters=np.zeros(adapters + 1 if buckets else 0, _ADAPTER).view(np.recarray),
        admitted_ns=np.full(detailed, NEVER, np.int64),
        skipped_ns=np.zeros(detailed, np.int64),
        held_up_ns=np.zeros(detailed, np.int64),
    )


@jit
def gap_bin(gap_ns: int) -> int:
    """Return the bin of a gap between tokens."""
    if gap_ns <= _GAP_SMALLEST_NS:
        return 0
    fraction, octave = math.frexp(gap_ns / _GAP_SMALLEST_NS)  # cheaper than a logarithm
    return min(
        _GAP_BINS - 1, (octave - 1) * _BINS_PER_OCTAVE + int((2.0 * fraction - 1.0) * _BINS_PER_OCTAVE)
    )


def gap_percentiles_ms(gaps: NDArray[np.int64], percentiles: tuple[float, ...]) -> tuple[float, ...]:
    """Return percentiles of the token gaps, exact to half a percent; NaN without any."""
    up_to = np.cumsum(gaps)
    total = int(up_to[-1])
    if total == 0:
        return (math.nan,) * len(percentiles)
    bins = np.searchsorted(up_to, np.array(percentiles) / 100 * total)
    octave, within = np.divmod(np.minimum(bins, _GAP_BINS - 1), _BINS_PER_OCTAVE)
    middles = 2.0**octave * (1.0 + (within + 0.5) / _BINS_PER_OCTAVE)
    return tuple((_GAP_SMALLEST_NS / 1e6 * middles).tolist())


@jit
def record_rejection(trace: TwinTrace, request: int) -> None:
    """Record that a request was rejected on arrival."""
    trace.counts.rejected += 1
    trace.status[request] = STATUS_REJECTED


@jit
def record_load(trace: TwinTrace, adapter: int, load_ns: int) -> None:
    """Record the load of an adapter into a GPU slot, before its step is counted; from disk if needed."""
    if trace.adapters.size == 0:
        return
    trace.adapters.loads[adapter] += 1
    trace.adapters.load_ns[adapter] += load_ns
    trace.adapters.loaded_at[adapter] = trace.counts.steps + 1


@jit
def record_wait_for_load(trace: TwinTrace, request: int, wait_ns: int) -> None:
    """Record the time that a request was skipped during the asynchronous load of its adapter."""
    if trace.skipped_ns.shape[0] == 0:
        return
    trace.skipped_ns[request] += wait_ns


@jit
def record_admission(trace: TwinTrace, request: int, adapter: int, begin_ns: int, load_ns: int) -> None:
    """Record an admission, after the loads of its step were recorded and added to ``counts.load_ns``.

    It is repeated after a preemption. The step starts at `begin_ns`; `load_ns` is the time of the loads
    inside it, which delay all of its requests.
    """
    if trace.adapters.size > 0:
        trace.adapters.admissions[adapter] += 1
        loaded_now = trace.adapters.loaded_at[adapter] == trace.counts.steps + 1
        if not loaded_now and trace.skipped_ns[request] == 0:
            trace.adapters.hits[adapter] += 1
    if trace.admitted_ns.size > 0 and trace.admitted_ns[request] == NEVER:
        trace.admitted_ns[request] = begin_ns
        trace.held_up_ns[request] = load_ns - trace.counts.load_ns  # without loads before this step


@jit
def record_first_admission(
    trace: TwinTrace, request: int, adapter: int, begin_ns: int, held_ns: int, hit: bool
) -> None:
    """Record the first admission of a request under the rules for one pool; further ones are ignored.

    The step starts at `begin_ns`. `held_ns` is the wait for the adapter; if steps wait for it, without the
    waits of steps before this one. `hit`: the adapter is loaded.
    """
    if trace.admitted_ns.size == 0 or trace.admitted_ns[request] != NEVER:
        return
    trace.admitted_ns[request] = begin_ns
    trace.held_up_ns[request] = held_ns
    if trace.adapters.size > 0:
        trace.adapters.admissions[adapter] += 1
        trace.adapters.hits[adapter] += hit


@jit
def record_first_token(trace: TwinTrace, request: int, now_ns: int, loads_ns: int) -> None:
    """Record a request's first token at the end of a step, and ``counts.load_ns`` at that time."""
    trace.first_ns[request] = now_ns
    trace.interruptions[request] = -trace.counts.interruptions
    trace.interrupted_ns[request] = -trace.counts.interrupted_ns
    if trace.held_up_ns.shape[0] > 0:
        trace.held_up_ns[request] += loads_ns


@jit
def record_finish(trace: TwinTrace, request: int, now_ns: int) -> None:
    """Record a request's last token at the end of a step, after its first one."""
    trace.finish_ns[request] = now_ns
    trace.interruptions[request] += trace.counts.interruptions
    trace.interrupted_ns[request] += trace.counts.interrupted_ns


@jit
def record_loads(trace: TwinTrace, now_ns: int, loads: int) -> None:
    """Count loads that start without a step."""
    if trace.series.size == 0:
        return
    trace.series.loads[_bucket_at(trace, now_ns)] += loads


@inner
def _bucket_at(trace: TwinTrace, now_ns: int) -> int:
    """Advance to the bucket of a time, and return it; times do not decrease."""
    counts = trace.counts
    while counts.bucket_end_ns < now_ns and counts.bucket < trace.series.size - 1:
        counts.bucket += 1
        counts.bucket_end_ns += counts.bucket_ns
    return int(counts.bucket)


@jit
def record_step(
    trace: TwinTrace,
    begin_ns: int,
    duration_ns: int,
    running: int,
    waiting: int,
    kv_tokens: int,
    active: int,
    resident: int,
    loads: int,
    load_ns: int,
    tokens: int,
) -> None:
    """Add a step to the bucket in which it ends, including the bucket's end; steps come in order of ends.

    `kv_tokens` are held, `active` adapters are those of running requests, `resident` ones are in GPU slots,
    `loads` start in the step, and `load_ns` is its wait for loads.
    """
    if trace.series.size == 0:
        return
    bucket = _bucket_at(trace, begin_ns + duration_ns)
    record = trace.series[bucket]
    record.busy_ns += duration_ns
    record.running_ns += running * duration_ns
    record.waiting_ns += waiting * duration_ns
    record.kv_token_ns += kv_tokens * duration_ns
    record.active_ns += active * duration_ns
    record.resident_ns += resident * duration_ns
    record.steps += 1
    record.tokens += tokens
    record.loads += loads
    record.load_ns += load_ns
