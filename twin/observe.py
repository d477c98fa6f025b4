"""What the compiled twin writes down of each step: sums over time, token gaps, details of a detailed run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capplan.compile import inner
from capplan.serving import Limits, State
from capplan.serving.state import (
    KV_TOKENS,
    N_ACTIVE,
    N_ADMITTED,
    N_CLAIMED,
    N_DECODING,
    N_ENDING,
    N_FINISHED,
    N_FIRST,
    N_LOADS,
    N_PREEMPTED,
    N_RESIDENT,
    N_RESUMED,
    N_RUNNING,
    N_STALLED,
    N_WAITING,
    STEP_DECODES,
)
from capplan.twin.clock import (
    PAUSED_NS,
    PAUSED_ROWS,
    Clock,
)
from capplan.twin.recording import (
    record_admission,
    record_first_token,
    record_step,
    record_wait_for_load,
)
from capplan.twin.trace import (
    ADAPTER_NS,
    BUSY_NS,
    KV_TOKEN_NS,
    LOAD_NS,
    MAX_RUNNING,
    MAX_WAITING,
    NEVER,
    NOW_NS,
    PREEMPTIONS,
    REQUEST_STEPS,
    RUNNING_NS,
    SMALL_BATCH,
    SMALL_REQUEST_STEPS,
    STEPS,
    WAITING_NS,
    Trace,
    gap_bin,
)
from capplan.workload import Requests


@inner
def note_stalls(state: State, trace: Trace) -> None:
    """Remember when the rows that this step leaves out, or preempts, had their last token."""
    for i in range(state.counters[N_STALLED]):
        trace.stalled_ns[state.rows.request[state.lists.stalled[i]]] = trace.counts[NOW_NS]


@inner
def sum_up(
    c: NDArray[np.int64], counts: NDArray[np.int64], sums: NDArray[np.float64], duration_ns: int
) -> None:
    """Add a step to the counts and sums of the trace; `c` are the state's counters."""
    running = c[N_RUNNING] - c[N_ENDING]
    counts[STEPS] += 1
    counts[REQUEST_STEPS] += running
    if running <= SMALL_BATCH:
        counts[SMALL_REQUEST_STEPS] += running
    counts[PREEMPTIONS] += c[N_PREEMPTED]
    counts[MAX_RUNNING] = max(counts[MAX_RUNNING], running)
    counts[MAX_WAITING] = max(counts[MAX_WAITING], c[N_WAITING])
    sums[BUSY_NS] += duration_ns
    sums[RUNNING_NS] += float(running) * duration_ns
    sums[WAITING_NS] += float(c[N_WAITING]) * duration_ns
    sums[KV_TOKEN_NS] += float(c[KV_TOKENS]) * duration_ns
    sums[ADAPTER_NS] += float(c[N_ACTIVE] - c[N_CLAIMED]) * duration_ns


@inner
def record_gaps(
    c: NDArray[np.int64], at: NDArray[np.int64], gaps: NDArray[np.int64], duration_ns: int
) -> None:
    """Count the gaps that the step ends; rows that paused while others had their prefill saw longer ones."""
    decodes = c[STEP_DECODES]
    if decodes == 0:
        if c[N_DECODING] > 0:
            at[PAUSED_ROWS] = c[N_DECODING]
            at[PAUSED_NS] += duration_ns
        return
    if at[PAUSED_ROWS] > 0:
        gaps[gap_bin(duration_ns + at[PAUSED_NS])] += at[PAUSED_ROWS]
        decodes -= at[PAUSED_ROWS]
        at[PAUSED_ROWS] = at[PAUSED_NS] = 0
    if decodes > 0:
        gaps[gap_bin(duration_ns)] += decodes


@inner
def record_details(
    state: State,
    limits: Limits,
    requests: Requests,
    clock: Clock,
    trace: Trace,
    begin_ns: int,
    duration_ns: int,
    load_ns: int,
    tokens: int,
) -> None:
    """Write down the admissions of a step and add it to the time series; for detailed runs."""
    c = state.counters
    for i in range(c[N_ADMITTED]):
        row = state.lists.admitted[i]
        request, adapter = state.rows.request[row], state.rows.adapter[row]
        if limits.load_beside and trace.admitted_ns[request] == NEVER:
            since_ns = max(requests.arrival_ns[request], clock.begun_ns[adapter])
            if clock.ready_ns[adapter] > since_ns:
                record_wait_for_load(trace, request, clock.ready_ns[adapter] - since_ns)
        record_admission(trace, request, adapter, begin_ns, load_ns)
    record_step(
        trace,
        begin_ns,
        duration_ns,
        c[N_RUNNING] - c[N_ENDING],
        c[N_WAITING],
        c[KV_TOKENS],
        c[N_ACTIVE] - c[N_CLAIMED],
        c[N_RESIDENT],
        c[N_LOADS],
        load_ns,
        tokens,
    )


@inner
def record_tokens(state: State, trace: Trace) -> None:
    """Write down the tokens that ended the step, where they begin, resume or end a request."""
    c = state.counters
    now = trace.counts[NOW_NS]
    for i in range(c[N_FIRST]):
        record_first_token(trace, state.rows.request[state.lists.first[i]], now, trace.counts[LOAD_NS])
    for i in range(c[N_RESUMED]):
        request = state.rows.request[state.lists.resumed[i]]
        trace.gaps[gap_bin(now - trace.stalled_ns[request])] += 1
    for i in range(c[N_FINISHED]):
        trace.finish_ns[state.rows.request[state.lists.finished[i]]] = now
