"""The record of a simulated instance: times per request, token gaps, sums over time, counts.

A plain run records what `SimulationResult` needs. A detailed one (``buckets`` above 0) also records a time
series, and events of each request and each adapter; in a plain run the functions for these return at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import by_reference, inner, jit
from capplan.serving.structures import Records, int_fields, new_record

SMALL_BATCH = 128
"""Requests whose tokens vLLM's API server hands out in one go (``VLLM_V1_OUTPUT_PROC_CHUNK_SIZE``)."""

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
    "load_ns",
    "request_steps",  # sum over steps of the requests that run,
    "small_request_steps",  # and of steps with at most SMALL_BATCH of them
    "bucket",  # of the time series: the one that the last step ended in,
    "bucket_end_ns",  # when it ends,
    "bucket_ns",  # and how long each is
)
# Integrals over simulated time, in units x nanoseconds.
_SUMS = np.dtype(
    [(f"{name}_ns", np.float64) for name in ("busy", "running", "waiting", "kv_token", "adapter")],
    align=True,
)
# Sums over the steps that end in a bucket: integers, so that their order does not matter.
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
    "admissions",
    "hits",  # admissions that found the adapter resident
    "loads",
    "load_ns",
    "loaded_at",  # number of the step of the last load, counted from 1
)

# Values of `Trace.status`.
STATUS_RUNNING = 1
STATUS_REJECTED = 2
NEVER = -1
_GAP_SMALLEST_NS = 1e5
_BINS_PER_OCTAVE = 256  # each at most 0.4 percent wide
_GAP_BINS = 30 * _BINS_PER_OCTAVE  # up to a day


@by_reference
class TwinTrace(NamedTuple):
    """The record of one instance; written by both forms of the twin in the same way."""

    first_ns: NDArray[np.int64]
    """Clock at each request's first token, shape (requests,); NEVER before."""
    finish_ns: NDArray[np.int64]
    """Clock at each request's last token; NEVER before."""
    stalled_ns: NDArray[np.int64]
    """Clock at the last token before a request was preempted or left out of a step."""
    status: NDArray[np.int8]
    """STATUS_RUNNING: in execution when the simulation ended; STATUS_REJECTED: refused; 0: neither."""
    gaps: NDArray[np.int64]
    """Histogram of the gaps between a request's tokens, in logarithmic bins."""
    counts: np.record
    """Fields as in `_COUNTS`."""
    sums: np.record
    """Fields as in `_SUMS`."""
    # -- a detailed run only; otherwise of length 0 --
    series: Records
    """Buckets of time, shape (buckets,); fields as in `_SERIES`."""
    adapters: Records
    """Shape (adapters + 1,); entry 0 is the base model; fields as in `_ADAPTER`."""
    admitted_ns: NDArray[np.int64]
    """Clock at the start of the step that admitted each request first; NEVER before."""
    skipped_ns: NDArray[np.int64]
    """Time that each request, not yet admitted, waited for its adapter to be loaded beside the batch."""
    held_up_ns: NDArray[np.int64]
    """Time of loads inside the steps from each request's first admission to its first token."""


def new_trace(requests: int, adapters: int = 0, buckets: int = 0, horizon_ns: int = 0) -> TwinTrace:
    """Return an empty record.

    Parameters
    ----------
    requests
        Number of requests.
    adapters
        Number of adapters.
    buckets
        Buckets of the time series; 0: no time series, and nothing per adapter or beside the token times.
    horizon_ns
        What the buckets divide evenly; steps that end after it count in the last one.
    """
    counts = new_record(_COUNTS)
    detailed = requests if buckets else 0
    if buckets:
        counts.bucket_ns = counts.bucket_end_ns = max(1, -(-horizon_ns // buckets))
    return TwinTrace(
        first_ns=np.full(requests, NEVER, np.int64),
        finish_ns=np.full(requests, NEVER, np.int64),
        stalled_ns=np.zeros(requests, np.int64),
        status=np.zeros(requests, np.int8),
        gaps=np.zeros(_GAP_BINS, np.int64),
        counts=counts,
        sums=new_record(_SUMS),
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
    """Return percentiles of the token gaps, exact to half a percent; NaN when there is none."""
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
    """Note that the engine refused a request on arrival."""
    trace.counts.rejected += 1
    trace.status[request] = STATUS_REJECTED


@jit
def record_load(trace: TwinTrace, adapter: int, load_ns: int) -> None:
    """Note the load of an adapter into a GPU slot, begun in the step that is not counted in STEPS yet.

    Parameters
    ----------
    adapter
        Its number.
    load_ns
        How long it takes, host to GPU and, if needed, disk to host before.
    """
    if trace.adapters.size == 0:
        return
    trace.adapters.loads[adapter] += 1
    trace.adapters.load_ns[adapter] += load_ns
    trace.adapters.loaded_at[adapter] = trace.counts.steps + 1


@jit
def record_wait_for_load(trace: TwinTrace, request: int, wait_ns: int) -> None:
    """Note that a request could not be admitted for so long because its adapter was on its way.

    Only for rules that load adapters beside the batch; where loads are part of a step, nobody waits this way.
    """
    if trace.skipped_ns.shape[0] == 0:
        return
    trace.skipped_ns[request] += wait_ns


@jit
def record_admission(trace: TwinTrace, request: int, adapter: int, begin_ns: int, load_ns: int) -> None:
    """Note an admission, after the loads of its step have been noted and added to LOAD_NS.

    Parameters
    ----------
    request, adapter
        Who was admitted; again after a preemption.
    begin_ns
        Clock at the start of the step.
    load_ns
        Time of the loads inside the step, which hold up all that is in it.
    """
    if trace.adapters.size == 0:
        return
    trace.adapters.admissions[adapter] += 1
    loaded_now = trace.adapters.loaded_at[adapter] == trace.counts.steps + 1
    if not loaded_now and trace.skipped_ns[request] == 0:
        trace.adapters.hits[adapter] += 1
    if trace.admitted_ns[request] == NEVER:
        trace.admitted_ns[request] = begin_ns
        trace.held_up_ns[request] = load_ns - trace.counts.load_ns  # less all loads before this step


@jit
def record_first_token(trace: TwinTrace, request: int, now_ns: int, loads_ns: int) -> None:
    """Note a request's first token at the end of a step, and what LOAD_NS was then."""
    trace.first_ns[request] = now_ns
    if trace.held_up_ns.shape[0] > 0:
        trace.held_up_ns[request] += loads_ns


@jit
def record_loads(trace: TwinTrace, now_ns: int, loads: int) -> None:
    """Count loads that begin while there is no step that they could be counted with."""
    if trace.series.size == 0:
        return
    trace.series.loads[_bucket_at(trace, now_ns)] += loads


@inner
def _bucket_at(trace: TwinTrace, now_ns: int) -> int:
    """Move on to the bucket that a time lies in, and return it; times only grow."""
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
    """Add a step to the bucket of time in which it ends; a bucket's end belongs to it, its start does not.

    Parameters
    ----------
    begin_ns, duration_ns
        When the step began and how long it took. Steps come in the order of their ends.
    running, waiting, kv_tokens, active, resident
        Requests running and waiting, KV tokens held, adapters of running requests, adapters in GPU slots.
    loads, load_ns
        Loads begun in the step, and the time it spent waiting for loads.
    tokens
        Tokens computed.
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
