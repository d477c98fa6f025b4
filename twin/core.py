"""The compiled twin: the serving rules under a clock that the step-latency model moves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capplan.compile import inner, jit
from capplan.serving import Limits, State, commit, new_state, schedule, submit
from capplan.serving.fast_forward import decode_step, steps_ahead
from capplan.serving.state import (
    FREE_BLOCKS,
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
    NONE,
    RUN_HEAD,
    SLORA,
    STEP_DECODES,
    TICK,
)
from capplan.twin.clock import (
    PAUSED_NS,
    PAUSED_ROWS,
    VISIBLE_NS,
    TwinClock,
    compute_ns,
    count_finished,
    count_present,
    count_queued,
    count_step,
    keeps_stats,
    loads_ns,
    new_clock,
    next_copy_ns,
    ranks_ms,
    take_copies,
)
from capplan.twin.scenario import Costs, Scenario
from capplan.twin.trace import (
    ADAPTER_NS,
    BUSY_NS,
    KV_TOKEN_NS,
    LOAD_NS,
    MAX_RUNNING,
    MAX_WAITING,
    NEVER,
    NEXT_REQUEST,
    NOW_NS,
    PREEMPTIONS,
    REQUEST_STEPS,
    RUNNING_NS,
    SMALL_BATCH,
    SMALL_REQUEST_STEPS,
    STATUS_RUNNING,
    STEPS,
    WAITING_NS,
    TwinTrace,
    gap_bin,
    new_trace,
    record_admission,
    record_first_token,
    record_loads,
    record_rejection,
    record_step,
    record_wait_for_load,
)
from capplan.workload import Requests


def run(scenario: Scenario, fast_forward: bool = True) -> TwinTrace:
    """Simulate `scenario` to its horizon; without `fast_forward` the scheduler decides every single step."""
    requests = scenario.requests.arrival_ns.size
    rows = max(1, min(requests, scenario.max_in_flight))
    state = new_state(rows, scenario.adapters, scenario.num_blocks, scenario.limits)
    state.adapters.pages[:] = scenario.costs.pages
    trace = new_trace(requests, scenario.adapters, scenario.buckets, scenario.horizon_ns)
    advance(
        state,
        scenario.limits,
        scenario.requests,
        scenario.shared_prefix_tokens,
        scenario.costs,
        new_clock(scenario.adapters),
        trace,
        scenario.max_in_flight,
        scenario.horizon_ns,
        fast_forward,
    )
    return trace


@jit
def advance(
    state: State,
    limits: Limits,
    requests: Requests,
    shared_prefix_tokens: int,
    costs: Costs,
    clock: TwinClock,
    trace: TwinTrace,
    max_in_flight: int,
    until_ns: int,
    fast_forward: bool,
) -> None:
    """Run steps until the clock reaches `until_ns` or nothing is left to do before it."""
    counts = trace.counts
    while counts[NOW_NS] < until_ns:
        _take_arrivals(state, limits, requests, shared_prefix_tokens, costs, clock, trace, max_in_flight)
        take_copies(state, clock)
        if fast_forward and _fast_forward(state, limits, requests, costs, clock, trace, until_ns):
            continue
        tokens = schedule(state, limits)
        if tokens == 0:
            if state.counters[N_LOADS] > 0:  # loads beside the batch begin whether or not there is one
                loads_ns(state, limits, costs, clock, trace, counts[NOW_NS])
                record_loads(trace, counts[NOW_NS], state.counters[N_LOADS])
            if not _wait(state, limits, requests, costs, clock, trace, until_ns):
                break
            continue
        _charge(state, limits, requests, costs, clock, trace, tokens)
        commit(state, limits)
        record_tokens(state, trace)
        if keeps_stats(clock):
            count_finished(state, costs, clock)
    if clock.following.size == 0:  # a cluster goes on, and marks them once it has ended
        mark_running(state, trace)


@inner
def mark_running(state: State, trace: TwinTrace) -> None:
    """Note which requests are in execution when a simulation ends."""
    row = state.counters[RUN_HEAD]
    while row != NONE:
        if trace.finish_ns[state.rows.request[row]] == NEVER:
            trace.status[state.rows.request[row]] = STATUS_RUNNING
        row = state.rows.following[row]


@inner
def _take_arrivals(
    state: State,
    limits: Limits,
    requests: Requests,
    shared: int,
    costs: Costs,
    clock: TwinClock,
    trace: TwinTrace,
    max_in_flight: int,
) -> None:
    """Queue what has arrived by now; what the engine cannot take is rejected."""
    counts = trace.counts
    c = state.counters
    i = counts[NEXT_REQUEST]
    while i < requests.arrival_ns.size and requests.arrival_ns[i] <= clock.at[VISIBLE_NS]:
        row = NONE
        if c[N_RUNNING] + c[N_WAITING] < max_in_flight:
            adapter = requests.adapter[i]
            row = submit(
                state, limits, i, adapter, requests.prompt_tokens[i], requests.output_tokens[i], 0, shared
            )
        if row == NONE:
            record_rejection(trace, i)
            if keeps_stats(clock):
                rank = costs.rank[requests.adapter[i]]
                count_present(clock, rank, -1)
                count_queued(clock, rank, -1, -requests.prompt_tokens[i])
        i = clock.following[i] if clock.following.size > 0 else i + 1
    counts[NEXT_REQUEST] = i


@inner
def _wait(
    state: State,
    limits: Limits,
    requests: Requests,
    costs: Costs,
    clock: TwinClock,
    trace: TwinTrace,
    until_ns: int,
) -> bool:
    """Move the clock on when nothing can run; False when nothing will before `until_ns`."""
    counts = trace.counts
    at = clock.at
    if state.counters[N_ENDING] > 0 or at[VISIBLE_NS] < counts[NOW_NS]:
        # In async scheduling a step is still running; once it has ended there may be more to do.
        note_stalls(state, trace)
        counts[PREEMPTIONS] += state.counters[N_PREEMPTED]
        if keeps_stats(clock):
            count_step(state, costs, clock)
        commit(state, limits)
        at[VISIBLE_NS] = counts[NOW_NS]
        return True
    upcoming = next_event_ns(requests, clock, trace)
    if upcoming >= until_ns:
        return False
    counts[NOW_NS] = at[VISIBLE_NS] = upcoming
    return True


@inner
def next_event_ns(requests: Requests, clock: TwinClock, trace: TwinTrace) -> int:
    """Return when the next request or adapter arrives; NEVER_NS when none will."""
    event_ns = next_copy_ns(clock)
    upcoming = trace.counts[NEXT_REQUEST]
    if upcoming < requests.arrival_ns.size:
        event_ns = min(event_ns, requests.arrival_ns[upcoming])
    return event_ns


@inner
def _fast_forward(
    state: State,
    limits: Limits,
    requests: Requests,
    costs: Costs,
    clock: TwinClock,
    trace: TwinTrace,
    until_ns: int,
) -> bool:
    """Take the steps in which nothing can be decided, up to the next event; False when there is none."""
    counts = trace.counts
    c = state.counters
    steps = left = steps_ahead(state, limits)
    if steps <= 0:
        return False
    event_ns = next_event_ns(requests, clock, trace)
    constant_ms = 0.0
    while left > 0 and counts[NOW_NS] < until_ns and clock.at[VISIBLE_NS] < event_ns:
        needed = state.phase[(-c[TICK]) % limits.block_size]
        if needed > c[FREE_BLOCKS]:
            break
        decode_step(state, limits, needed)
        if left == steps:
            constant_ms = ranks_ms(state, costs)  # the ranks of those who decode stay the same
        duration_ns = compute_ns(c, costs, c[N_DECODING], constant_ms)
        _elapse(state, limits, requests, clock, trace, duration_ns, 0, c[N_DECODING])
        c[TICK] += 1
        c[KV_TOKENS] += c[N_DECODING]
        left -= 1
    return left < steps


@inner
def _charge(
    state: State,
    limits: Limits,
    requests: Requests,
    costs: Costs,
    clock: TwinClock,
    trace: TwinTrace,
    tokens: int,
) -> None:
    """Work out how long the step that was decided takes, and let that time pass."""
    c = state.counters
    counts = trace.counts
    note_stalls(state, trace)
    if keeps_stats(clock):
        count_step(state, costs, clock)
    load_ns = 0
    if c[N_LOADS] > 0 or limits.policy == SLORA:
        load_ns = loads_ns(state, limits, costs, clock, trace, counts[NOW_NS])
        counts[LOAD_NS] += load_ns
    duration_ns = load_ns + compute_ns(c, costs, tokens, ranks_ms(state, costs))
    _elapse(state, limits, requests, clock, trace, duration_ns, load_ns, tokens)


@inner
def _elapse(
    state: State,
    limits: Limits,
    requests: Requests,
    clock: TwinClock,
    trace: TwinTrace,
    duration_ns: int,
    load_ns: int,
    tokens: int,
) -> None:
    """Move the clock over a step, of whose time `load_ns` went to loads, and write down what ran in it."""
    c = state.counters
    counts = trace.counts
    begin_ns = counts[NOW_NS]
    if trace.series.shape[0] > 0:
        record_details(state, limits, requests, clock, trace, begin_ns, duration_ns, load_ns, tokens)
    counts[NOW_NS] += duration_ns
    clock.at[VISIBLE_NS] = begin_ns if limits.async_scheduling else counts[NOW_NS]
    sum_up(c, counts, trace.sums, duration_ns)
    record_gaps(c, clock.at, trace.gaps, duration_ns)


@inner
def note_stalls(state: State, trace: TwinTrace) -> None:
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
    clock: TwinClock,
    trace: TwinTrace,
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
def record_tokens(state: State, trace: TwinTrace) -> None:
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
