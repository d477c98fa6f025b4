"""The compiled twin: the serving rules under the clock of the step-latency model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import by_reference, inner, jit
from capplan.models import no_line
from capplan.serving import NONE, Limits, State, commit, schedule, submit
from capplan.serving.pooled import (
    ASSISTED,
    ASYNCHRONOUS,
    PooledState,
    has_pool,
    refresh,
    switches_ns,
    with_pool,
)
from capplan.serving.state import SLORA, VLLM
from capplan.serving.vllm import decode_step, steps_ahead
from capplan.twin.instance._clock import (
    NEVER_NS,
    TwinClock,
    assisted_prompts_ns,
    compute_ns,
    count_finished,
    count_present,
    count_queued,
    count_step,
    keeps_stats,
    loads_ns,
    new_clock,
    next_copy_ns,
    prompts_ns,
    ranks_ms,
    tables_line,
    take_copies,
    wait_for_load_ns,
    waits_in_step,
)
from capplan.twin.instance._scenario import Costs, Scenario, new_engine
from capplan.twin.instance._trace import (
    NEVER,
    POOL_COUNTS,
    SMALL_BATCH,
    STATUS_RUNNING,
    TwinTrace,
    gap_bin,
    new_trace,
    record_admission,
    record_finish,
    record_first_admission,
    record_first_token,
    record_loads,
    record_rejection,
    record_step,
    record_wait_for_load,
)
from capplan.workload import Requests

MAX_PAUSE_NS: Final = 60 * 10**9
"""Largest simulated time between two calls."""
_FIRST_PAUSE_NS: Final = 10**9
_TARGET_S: Final = 0.1
"""Time of computing between two calls, above which the next one comes sooner."""


class Pauses:
    """Times at which a simulation calls its interrupt; an exception that it raises ends the simulation.

    A simulated minute takes milliseconds or, with a long queue, seconds: the distance of the calls adapts to
    the time of computing. What is simulated does not depend on it.
    """

    def __init__(self, interrupt: Callable[[], None] | None) -> None:
        self.next_ns = NEVER_NS if interrupt is None else _FIRST_PAUSE_NS
        """Simulated time of the next call; NEVER_NS without an interrupt."""
        self._interrupt = interrupt
        self._length_ns = _FIRST_PAUSE_NS
        self._called_s = time.monotonic()

    def call(self) -> None:
        """Call the interrupt at `next_ns`, and choose the time of the next call."""
        if self._interrupt is None:
            return
        self._interrupt()
        now_s = time.monotonic()
        growth = min(2.0, _TARGET_S / max(now_s - self._called_s, 1e-9))
        self._called_s = now_s
        self._length_ns = max(1, min(MAX_PAUSE_NS, int(growth * self._length_ns)))
        self.next_ns += self._length_ns


@by_reference
class SimulatedEngine(NamedTuple):
    """One engine of the twin: all that its loop reads and writes beside the requests."""

    state: State
    limits: Limits
    costs: Costs
    clock: TwinClock
    trace: TwinTrace
    max_in_flight: int
    shared_prefix_tokens: int


def run(
    scenario: Scenario, fast_forward: bool = True, interrupt: Callable[[], None] | None = None
) -> TwinTrace:
    """Simulate `scenario` to its horizon; without `fast_forward` the scheduler decides every step.

    An `interrupt` is called every simulated minute or sooner (see `Pauses`), and may end it by an exception.
    """
    engine = idle_engine(scenario)
    refreshes_ns, until_ns = scenario.refreshes_ns, 0
    pauses = Pauses(interrupt)
    while until_ns < scenario.horizon_ns:
        refresh_ns = (until_ns // refreshes_ns.step + 1) * refreshes_ns.step if refreshes_ns else NEVER_NS
        until_ns = min(pauses.next_ns, refresh_ns, scenario.horizon_ns)
        advance(engine, scenario.requests, until_ns, fast_forward)
        if until_ns in refreshes_ns:
            refresh_queues(scenario, engine, until_ns)
        if until_ns == pauses.next_ns:
            pauses.call()
    mark_running(engine.state, engine.trace)
    record_pool(engine)
    return engine.trace


def idle_engine(scenario: Scenario) -> SimulatedEngine:
    """Return the engine of a scenario before its first request."""
    count, most = scenario.requests.arrival_ns.size, scenario.max_in_flight
    waits = scenario.pool is not None
    return SimulatedEngine(
        state=new_engine(scenario, max(1, min(count, most))),
        limits=scenario.limits,
        costs=scenario.costs,
        clock=new_clock(scenario.adapters),
        trace=new_trace(count, scenario.adapters, scenario.buckets, scenario.horizon_ns, waits),
        max_in_flight=most,
        shared_prefix_tokens=scenario.shared_prefix_tokens,
    )


def refresh_queues(scenario: Scenario, engine: SimulatedEngine, at_ns: int) -> None:
    """Replace the queues by those of the last window's requests, and begin the next window."""
    if scenario.scheduler is None:
        return
    take_arrivals_before(engine, scenario.requests, at_ns)
    refresh(engine.state, engine.limits, scenario.scheduler, at_ns)


def record_pool(engine: SimulatedEngine) -> None:
    """Record the counts of the pool and its link at the end of a simulation."""
    pooled, pool, link = engine.state.pooled, engine.trace.pool, engine.clock.link
    if isinstance(pooled, PooledState):
        for name in POOL_COUNTS:
            pool[name] = pooled.counts[name]
    waiting = link.prefetches.asked_ns != NEVER_NS
    pool.link_ns = link.at.busy_ns + int(link.prefetches.copy_ns[waiting].sum())


@jit
def advance(engine: SimulatedEngine, requests: Requests, until_ns: int, fast_forward: bool) -> None:
    """Run steps until the clock reaches `until_ns` or no event is left before it."""
    state, limits, costs, clock, trace = engine.state, engine.limits, engine.costs, engine.clock, engine.trace
    counts = trace.counts
    if clock.at.idle and not _resume(engine, requests, until_ns):
        return
    while counts.now_ns < until_ns:
        visible_ns = clock.at.visible_ns
        _take_arrivals(engine, requests, visible_ns)
        take_copies(state, clock)
        state.counters.now_ns = counts.now_ns
        if fast_forward and _fast_forward(engine, requests, until_ns):
            continue
        tokens = schedule(state, limits)
        if tokens > 0:
            _charge(engine, requests, tokens)
        else:
            if state.counters.n_loads > 0:  # asynchronous loads start without a batch as well
                loads_ns(state, limits, costs, clock, trace, counts.now_ns)
                record_loads(trace, counts.now_ns, state.counters.n_loads)
            _note_admissions_only(engine)
            # Async scheduling: a step may still be running, and its end may allow another one.
            if state.counters.n_ending == 0 and clock.at.visible_ns >= counts.now_ns:
                if not _resume(engine, requests, until_ns):
                    break
                continue
            _note_no_step(engine)
        commit(state, limits)  # once: it is as long as the rest, and a copy for each place
        if tokens == 0:
            clock.at.visible_ns = counts.now_ns
            continue
        record_tokens(engine)
        if keeps_stats(clock):
            count_finished(state, costs, clock)


@jit
def mark_running(state: State, trace: TwinTrace) -> None:
    """Mark the requests that run at the end of the simulation."""
    row = state.counters.run_head
    while row != NONE:
        if trace.finish_ns[state.rows.request[row]] == NEVER:
            trace.status[state.rows.request[row]] = STATUS_RUNNING
        row = state.rows.following[row]


@jit
def take_arrivals_before(engine: SimulatedEngine, requests: Requests, at_ns: int) -> None:
    """Submit the requests that arrived before a refresh, also those during the step that goes on then."""
    _take_arrivals(engine, requests, at_ns - 1)


@inner
def _take_arrivals(engine: SimulatedEngine, requests: Requests, until_ns: int) -> None:
    """Submit the requests that have arrived; those beyond the engine's `max_in_flight` are rejected."""
    state, limits, clock, trace = engine.state, engine.limits, engine.clock, engine.trace
    shared = engine.shared_prefix_tokens
    counts = trace.counts
    c = state.counters
    i = counts.next_request
    while i < requests.arrival_ns.size and requests.arrival_ns[i] <= until_ns:
        row = NONE
        if c.n_running + c.n_waiting < engine.max_in_flight:
            adapter = requests.adapter[i]
            prompt, output = requests.prompt_tokens[i], requests.output_tokens[i]
            predicted = requests.predicted_tokens[i] if requests.predicted_tokens.size > 0 else 0
            arrival_ns = requests.arrival_ns[i]
            row = submit(state, limits, i, adapter, prompt, output, 0, shared, predicted, arrival_ns)
        if row == NONE:
            record_rejection(trace, i)
            if keeps_stats(clock):
                rank = engine.costs.rank[requests.adapter[i]]
                count_present(clock, rank, -1)
                count_queued(clock, rank, -1, -requests.prompt_tokens[i])
        i = clock.following[i] if clock.following.size > 0 else i + 1
    counts.next_request = i


@inner
def _resume(engine: SimulatedEngine, requests: Requests, until_ns: int) -> bool:
    """Advance an idle clock to the next event; return False without one before `until_ns`."""
    clock, trace = engine.clock, engine.trace
    upcoming = next_event_ns(engine, requests)
    clock.at.idle = upcoming >= until_ns
    if upcoming >= until_ns:
        return False
    trace.counts.now_ns = clock.at.visible_ns = upcoming
    return True


@with_pool(None)
def _note_admissions_only(engine: SimulatedEngine) -> None:
    """Note what a schedule without tokens did: requests that now wait for their adapters, and preemptions."""
    _note_no_step(engine)
    record_admissions(engine, engine.trace.counts.now_ns, 0)


@inner
def _note_no_step(engine: SimulatedEngine) -> None:
    """Note the preemptions of a schedule without tokens."""
    state, costs, clock, trace = engine.state, engine.costs, engine.clock, engine.trace
    note_stalls(engine)
    trace.counts.preemptions += state.counters.n_preempted
    if keeps_stats(clock):
        count_step(state, costs, clock)


@inner
def next_event_ns(engine: SimulatedEngine, requests: Requests) -> int:
    """Return the time of the next arrival of a request or adapter; NEVER_NS without any."""
    clock, trace = engine.clock, engine.trace
    event_ns = next_copy_ns(clock)
    upcoming = trace.counts.next_request
    if upcoming < requests.arrival_ns.size:
        event_ns = min(event_ns, requests.arrival_ns[upcoming])
    return event_ns


@inner
def _fast_forward(engine: SimulatedEngine, requests: Requests, until_ns: int) -> bool:
    """Run the decode-only steps up to the next event; return whether there was one."""
    state, limits, costs, clock, trace = engine.state, engine.limits, engine.costs, engine.clock, engine.trace
    counts = trace.counts
    c = state.counters
    steps = left = steps_ahead(state, limits)
    if steps <= 0:
        return False
    event_ns = next_event_ns(engine, requests)
    constant_ms, line = 0.0, no_line(-1.0)
    while left > 0 and counts.now_ns < until_ns and clock.at.visible_ns < event_ns:
        needed = state.phase[(-c.tick) % limits.block_size]
        if needed > c.free_blocks:
            break
        c.now_ns = counts.now_ns
        decode_step(state, limits, needed)
        if left == steps:
            constant_ms = ranks_ms(state, costs)  # the decoding rows stay the same
        if c.kv_tokens >= line.end:
            line = tables_line(c, costs, c.n_decoding)
        duration_ns = compute_ns(c, costs, c.n_decoding, line, constant_ms)
        _elapse(engine, requests, duration_ns, 0, c.n_decoding)
        c.tick += 1
        c.kv_tokens += c.n_decoding
        left -= 1
    if left == steps:
        return False
    count_steps(c, counts, steps - left, c.n_decoding, c.kv_tokens - c.n_decoding)
    return True


@inner
def _charge(engine: SimulatedEngine, requests: Requests, tokens: int) -> None:
    """Compute the duration of the decided step, and advance the clock by it."""
    state, limits, costs, clock, trace = engine.state, engine.limits, engine.costs, engine.clock, engine.trace
    c = state.counters
    counts = trace.counts
    note_stalls(engine)
    if keeps_stats(clock):
        count_step(state, costs, clock)
    load_ns = 0
    if waits_in_step(limits, c):
        load_ns = loads_ns(state, limits, costs, clock, trace, counts.now_ns)
    constant_ms = ranks_ms(state, costs)
    if limits.policy != VLLM and c.step_decodes == 0:
        step_ns = prompts_ns(state, costs, tokens, constant_ms)
        if limits.loading == ASSISTED:
            load_ns += assisted_prompts_ns(state, costs, clock, counts.now_ns, step_ns) - step_ns
    else:
        step_ns = compute_ns(c, costs, tokens, tables_line(c, costs, tokens), constant_ms)
    counts.load_ns += load_ns
    duration_ns = load_ns + switches_ns(state, limits) + step_ns
    # vLLM's rules never pause decoding for prompts alone.
    paused_ns = duration_ns if limits.policy != VLLM and c.step_decodes == 0 else load_ns
    if paused_ns > 0:
        counts.interruptions += 1
        counts.interrupted_ns += paused_ns
    _elapse(engine, requests, duration_ns, load_ns, tokens)
    count_steps(c, counts, 1, tokens, c.kv_tokens)


@inner
def _elapse(engine: SimulatedEngine, requests: Requests, duration_ns: int, load_ns: int, tokens: int) -> None:
    """Advance the clock by a step with `load_ns` of loads, and record the step."""
    state, limits, clock, trace = engine.state, engine.limits, engine.clock, engine.trace
    c = state.counters
    counts = trace.counts
    begin_ns = counts.now_ns
    record_admissions(engine, begin_ns, load_ns)
    if trace.admitted_ns.size > 0:
        record_details(engine, requests, begin_ns, duration_ns, load_ns, tokens)
    counts.now_ns += duration_ns
    clock.at.visible_ns = begin_ns if limits.async_scheduling else counts.now_ns
    sum_up(c, trace.sums, duration_ns)
    if has_pool(state):
        record_pool_gaps(engine, duration_ns)
    else:
        record_gaps(c, clock.at, trace.gaps, duration_ns)


@inner
def note_stalls(engine: SimulatedEngine) -> None:
    """Record the time of the last token of rows that this step stalls or preempts."""
    state, clock, trace = engine.state, engine.clock, engine.trace
    for i in range(state.counters.n_stalled):
        request = state.rows.request[state.lists.stalled[i]]
        last_ns = trace.counts.now_ns
        if has_pool(state):  # decoding rows may have paused
            last_ns = max(trace.stalled_ns[request], clock.at.decoded_ns)
        trace.stalled_ns[request] = last_ns


@inner
def count_steps(c: np.record, counts: np.record, steps: int, tokens: int, kv_tokens: int) -> None:
    """Add steps of the same requests to the counts of the trace; `c` are the state's counters.

    `kv_tokens` are held in the last of them, the most. Fast-forwarded steps are counted at once.
    """
    running = c.n_running - c.n_ending
    counts.steps += steps
    counts.request_steps += running * steps
    if running <= SMALL_BATCH:
        counts.small_request_steps += running * steps
    counts.preemptions += c.n_preempted
    counts.max_running = max(counts.max_running, running)
    counts.max_waiting = max(counts.max_waiting, c.n_waiting)
    counts.max_kv_tokens = max(counts.max_kv_tokens, kv_tokens)
    counts.max_step_tokens = max(counts.max_step_tokens, tokens)


@inner
def sum_up(c: np.record, sums: np.record, duration_ns: int) -> None:
    """Add a step to the sums of the trace, whose roundings follow the order of steps."""
    running = c.n_running - c.n_ending
    sums.busy_ns += duration_ns
    sums.running_ns += float(running) * duration_ns
    sums.waiting_ns += float(c.n_waiting) * duration_ns
    sums.kv_token_ns += float(c.kv_tokens) * duration_ns
    sums.adapter_ns += float(c.n_active - c.n_claimed) * duration_ns


@inner
def record_gaps(c: np.record, at: np.record, gaps: NDArray[np.int64], duration_ns: int) -> None:
    """Count the token gaps that the step ends; they include pauses during prefills of other requests."""
    decodes = c.step_decodes
    if decodes == 0:
        if c.n_decoding > 0:
            at.paused_rows = c.n_decoding
            at.paused_ns += duration_ns
        return
    if at.paused_rows > 0:
        gaps[gap_bin(duration_ns + at.paused_ns)] += at.paused_rows
        decodes -= at.paused_rows
        at.paused_rows = at.paused_ns = 0
    if decodes > 0:
        gaps[gap_bin(duration_ns)] += decodes


@with_pool(None)
def record_pool_gaps(engine: SimulatedEngine, duration_ns: int) -> None:
    """Count the token gaps that the step ends, under the rules for one pool.

    Decoding rows pause in any number of steps of prompts, which other rows join meanwhile. Of a row that
    joined, the last token is in ``stalled_ns``; others had it at the end of the last step with decodes.
    """
    state, trace, at = engine.state, engine.trace, engine.clock.at
    c = state.counters
    if c.step_decodes == 0:
        at.paused_rows = max(at.paused_rows, c.n_decoding)
        return
    end_ns = trace.counts.now_ns
    if at.paused_rows == 0:
        trace.gaps[gap_bin(duration_ns)] += c.step_decodes
    else:
        row = c.run_head
        while row != NONE:
            if state.rows.since[row] >= 0:
                last_ns = max(trace.stalled_ns[state.rows.request[row]], at.decoded_ns)
                trace.gaps[gap_bin(end_ns - last_ns)] += 1
            row = state.rows.following[row]
    at.paused_rows = 0
    at.decoded_ns = end_ns


@inner
def record_details(
    engine: SimulatedEngine, requests: Requests, begin_ns: int, duration_ns: int, load_ns: int, tokens: int
) -> None:
    """Record the admissions of a step, and add it to the time series."""
    state, limits, clock, trace = engine.state, engine.limits, engine.clock, engine.trace
    c = state.counters
    for i in range(0 if has_pool(state) else c.n_admitted):
        row = state.lists.admitted[i]
        request, adapter = state.rows.request[row], state.rows.adapter[row]
        if limits.load_beside and trace.admitted_ns[request] == NEVER:
            since_ns = max(requests.arrival_ns[request], clock.begun_ns[adapter])
            if clock.ready_ns[adapter] > since_ns:
                record_wait_for_load(trace, request, clock.ready_ns[adapter] - since_ns)
        record_admission(trace, request, adapter, begin_ns, load_ns)
        if limits.policy == SLORA and adapter != 0:
            trace.pool.misses += clock.ready_ns[adapter] > begin_ns
            trace.pool.hits += clock.ready_ns[adapter] <= begin_ns
    record_step(
        trace,
        begin_ns,
        duration_ns,
        c.n_running - c.n_ending,
        c.n_waiting,
        c.kv_tokens,
        c.n_active - c.n_claimed,
        c.n_resident,
        c.n_loads,
        load_ns,
        tokens,
    )


@with_pool(None)
def record_admissions(engine: SimulatedEngine, begin_ns: int, load_ns: int) -> None:
    """Record the admitted requests, which wait for their adapters among the running ones or in steps."""
    state, limits, clock, trace = engine.state, engine.limits, engine.clock, engine.trace
    for i in range(state.counters.n_admitted):
        row = state.lists.admitted[i]
        adapter = state.rows.adapter[row]
        wait_ns = wait_for_load_ns(clock, adapter, begin_ns)
        held_ns = wait_ns if limits.loading == ASYNCHRONOUS else load_ns - trace.counts.load_ns
        request, hit = state.rows.request[row], wait_ns == 0
        record_first_admission(trace, request, adapter, begin_ns, held_ns, hit)


@inner
def record_tokens(engine: SimulatedEngine) -> None:
    """Record first tokens, tokens after a stall, and last tokens of a step."""
    state, trace = engine.state, engine.trace
    c = state.counters
    now = trace.counts.now_ns
    for i in range(c.n_first):
        request = state.rows.request[state.lists.first[i]]
        record_first_token(trace, request, now, trace.counts.load_ns)
        if has_pool(state):
            trace.stalled_ns[request] = now
    for i in range(c.n_resumed):
        request = state.rows.request[state.lists.resumed[i]]
        trace.gaps[gap_bin(now - trace.stalled_ns[request])] += 1
        if has_pool(state):
            trace.stalled_ns[request] = now
    for i in range(c.n_finished):
        record_finish(trace, state.rows.request[state.lists.finished[i]], now)
