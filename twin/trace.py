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

# Positions in `Trace.counts`.
STEPS = 0
ADAPTER_LOADS = 1
DISK_LOADS = 2
PREEMPTIONS = 3
REJECTED = 4
NOW_NS = 5
NEXT_REQUEST = 6
MAX_RUNNING = 7
MAX_WAITING = 8
LOAD_NS = 9
BUCKET = 10  # of the time series: the one that the last step ended in,
BUCKET_END_NS = 11  # when it ends,
BUCKET_NS = 12  # and how long each is
REQUEST_STEPS = 13  # sum over steps of the requests that run,
SMALL_REQUEST_STEPS = 14  # and of steps with at most SMALL_BATCH of them
N_COUNTS = 15

SMALL_BATCH = 128
"""Requests whose tokens vLLM's API server hands out in one go (``VLLM_V1_OUTPUT_PROC_CHUNK_SIZE``)."""

# Positions in `Trace.sums`: integrals over simulated time, in units x nanoseconds.
BUSY_NS = 0
RUNNING_NS = 1
WAITING_NS = 2
KV_TOKEN_NS = 3
ADAPTER_NS = 4
N_SUMS = 5

# Columns of `Trace.series`: sums over the steps that end in a bucket. Whole numbers, so that their order does
# not matter; the first six are integrals over time, in units x nanoseconds.
SERIES_BUSY_NS = 0
SERIES_RUNNING_NS = 1
SERIES_WAITING_NS = 2
SERIES_KV_TOKEN_NS = 3
SERIES_ACTIVE_NS = 4
SERIES_RESIDENT_NS = 5
SERIES_STEPS = 6
SERIES_TOKENS = 7
SERIES_LOADS = 8
SERIES_LOAD_NS = 9
N_SERIES = 10

# Columns of `Trace.adapters`.
ADMISSIONS = 0
HITS = 1  # admissions that found the adapter resident
LOADS = 2
ADAPTER_LOAD_NS = 3
LOADED_AT = 4  # number of the step of the last load, counted from 1
N_ADAPTER = 5

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
    counts: NDArray[np.int64]
    sums: NDArray[np.float64]
    # -- a detailed run only; otherwise of length 0 --
    series: NDArray[np.int64]
    """Sums over the steps that end in each bucket of time, shape (buckets, N_SERIES)."""
    adapters: NDArray[np.int64]
    """What each adapter saw, shape (adapters + 1, N_ADAPTER); row 0 is the base model."""
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
    counts = np.zeros(N_COUNTS, np.int64)
    detailed = requests if buckets else 0
    if buckets:
        counts[BUCKET_NS] = counts[BUCKET_END_NS] = max(1, -(-horizon_ns // buckets))
    return TwinTrace(
        first_ns=np.full(requests, NEVER, np.int64),
        finish_ns=np.full(requests, NEVER, np.int64),
        stalled_ns=np.zeros(requests, np.int64),
        status=np.zeros(requests, np.int8),
        gaps=np.zeros(_GAP_BINS, np.int64),
        counts=counts,
        sums=np.zeros(N_SUMS),
        series=np.zeros((buckets, N_SERIES), np.int64),
        adapters=np.zeros((adapters + 1 if buckets else 0, N_ADAPTER), np.int64),
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
    trace.counts[REJECTED] += 1
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
    if trace.adapters.shape[0] == 0:
        return
    trace.adapters[adapter, LOADS] += 1
    trace.adapters[adapter, ADAPTER_LOAD_NS] += load_ns
    trace.adapters[adapter, LOADED_AT] = trace.counts[STEPS] + 1


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
    if trace.adapters.shape[0] == 0:
        return
    trace.adapters[adapter, ADMISSIONS] += 1
    loaded_now = trace.adapters[adapter, LOADED_AT] == trace.counts[STEPS] + 1
    if not loaded_now and trace.skipped_ns[request] == 0:
        trace.adapters[adapter, HITS] += 1
    if trace.admitted_ns[request] == NEVER:
        trace.admitted_ns[request] = begin_ns
        trace.held_up_ns[request] = load_ns - trace.counts[LOAD_NS]  # less all loads before this step


@jit
def record_first_token(trace: TwinTrace, request: int, now_ns: int, loads_ns: int) -> None:
    """Note a request's first token at the end of a step, and what LOAD_NS was then."""
    trace.first_ns[request] = now_ns
    if trace.held_up_ns.shape[0] > 0:
        trace.held_up_ns[request] += loads_ns


@jit
def record_loads(trace: TwinTrace, now_ns: int, loads: int) -> None:
    """Count loads that begin while there is no step that they could be counted with."""
    if trace.series.shape[0] == 0:
        return
    trace.series[_bucket_at(trace, now_ns), SERIES_LOADS] += loads


@inner
def _bucket_at(trace: TwinTrace, now_ns: int) -> int:
    """Move on to the bucket that a time lies in, and return it; times only grow."""
    counts = trace.counts
    while counts[BUCKET_END_NS] < now_ns and counts[BUCKET] < trace.series.shape[0] - 1:
        counts[BUCKET] += 1
        counts[BUCKET_END_NS] += counts[BUCKET_NS]
    return int(counts[BUCKET])


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
    if trace.series.shape[0] == 0:
        return
    bucket = _bucket_at(trace, begin_ns + duration_ns)
    series = trace.series
    series[bucket, SERIES_BUSY_NS] += duration_ns
    series[bucket, SERIES_RUNNING_NS] += running * duration_ns
    series[bucket, SERIES_WAITING_NS] += waiting * duration_ns
    series[bucket, SERIES_KV_TOKEN_NS] += kv_tokens * duration_ns
    series[bucket, SERIES_ACTIVE_NS] += active * duration_ns
    series[bucket, SERIES_RESIDENT_NS] += resident * duration_ns
    series[bucket, SERIES_STEPS] += 1
    series[bucket, SERIES_TOKENS] += tokens
    series[bucket, SERIES_LOADS] += loads
    series[bucket, SERIES_LOAD_NS] += load_ns
