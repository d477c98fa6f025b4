"""Writes the details of a run into its trace: time series, adapters, waits. Compiled, shared by both twins.

In a plain run every function here but `record_rejection` and `record_first_token` returns at its first line.
"""

from __future__ import annotations

from capplan.compile import inner, jit
from capplan.twin.trace import (
    ADAPTER_LOAD_NS,
    ADMISSIONS,
    BUCKET,
    BUCKET_END_NS,
    BUCKET_NS,
    HITS,
    LOAD_NS,
    LOADED_AT,
    LOADS,
    NEVER,
    REJECTED,
    SERIES_ACTIVE_NS,
    SERIES_BUSY_NS,
    SERIES_KV_TOKEN_NS,
    SERIES_LOAD_NS,
    SERIES_LOADS,
    SERIES_RESIDENT_NS,
    SERIES_RUNNING_NS,
    SERIES_STEPS,
    SERIES_TOKENS,
    SERIES_WAITING_NS,
    STATUS_REJECTED,
    STEPS,
    Trace,
)


@jit
def record_rejection(trace: Trace, request: int) -> None:
    """Note that the engine refused a request on arrival."""
    trace.counts[REJECTED] += 1
    trace.status[request] = STATUS_REJECTED


@jit
def record_load(trace: Trace, adapter: int, load_ns: int) -> None:
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
def record_wait_for_load(trace: Trace, request: int, wait_ns: int) -> None:
    """Note that a request could not be admitted for so long because its adapter was on its way.

    Only for rules that load adapters beside the batch; where loads are part of a step, nobody waits this way.
    """
    if trace.set_aside_ns.shape[0] == 0:
        return
    trace.set_aside_ns[request] += wait_ns


@jit
def record_admission(trace: Trace, request: int, adapter: int, begin_ns: int, load_ns: int) -> None:
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
    if not loaded_now and trace.set_aside_ns[request] == 0:
        trace.adapters[adapter, HITS] += 1
    if trace.admitted_ns[request] == NEVER:
        trace.admitted_ns[request] = begin_ns
        trace.held_up_ns[request] = load_ns - trace.counts[LOAD_NS]  # less all loads before this step


@jit
def record_first_token(trace: Trace, request: int, now_ns: int, loads_ns: int) -> None:
    """Note a request's first token at the end of a step, and what LOAD_NS was then."""
    trace.first_ns[request] = now_ns
    if trace.held_up_ns.shape[0] > 0:
        trace.held_up_ns[request] += loads_ns


@jit
def record_loads(trace: Trace, now_ns: int, loads: int) -> None:
    """Count loads that begin while there is no step that they could be counted with."""
    if trace.series.shape[0] == 0:
        return
    trace.series[_bucket_at(trace, now_ns), SERIES_LOADS] += loads


@inner
def _bucket_at(trace: Trace, now_ns: int) -> int:
    """Move on to the bucket that a time lies in, and return it; times only grow."""
    counts = trace.counts
    while counts[BUCKET_END_NS] < now_ns and counts[BUCKET] < trace.series.shape[0] - 1:
        counts[BUCKET] += 1
        counts[BUCKET_END_NS] += counts[BUCKET_NS]
    return int(counts[BUCKET])


@jit
def record_step(
    trace: Trace,
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
