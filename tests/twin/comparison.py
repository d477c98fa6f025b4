"""The twin on one scenario: fast-forwarding, stepping, stopped after every step, and the reference."""

from collections import deque

import numpy as np

from capplan.serving import Limits, State
from capplan.serving.state import SLORA
from capplan.testing import check_integrity
from capplan.twin import Scenario
from capplan.twin.instance import _trace as t
from capplan.twin.instance import run
from capplan.twin.instance._clock import NEVER_NS, TwinClock
from capplan.twin.instance._core import advance, idle_engine, mark_running, record_pool, refresh_queues
from tests.oracle import run_reference

# State of the compiled twin alone; the reference stores every token instead.
COMPARED = [field for field in t.TwinTrace._fields if field != "stalled_ns"]


def assert_same(ours: t.TwinTrace, theirs: t.TwinTrace, but: tuple[str, ...] = ()) -> None:
    for field in t.TwinTrace._fields:
        if field not in but:
            np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field), err_msg=field)


def differs(ours: t.TwinTrace, theirs: t.TwinTrace) -> bool:
    return any(not np.array_equal(getattr(ours, field), getattr(theirs, field)) for field in COMPARED)


def assert_forms_agree(scenario: Scenario) -> None:
    """Assert that fast-forwarding and the reference leave the trace of stepping, and that it adds up."""
    stepping = run(scenario, fast_forward=False)
    assert_same(run(scenario), stepping)
    assert_same(run_reference(scenario), stepping, but=("stalled_ns",))
    assert_same(run_stopping(scenario), stepping)


def run_stopping(scenario: Scenario) -> t.TwinTrace:
    """Simulate as `run` does, but stop after every step and check the state."""
    engine, horizon_ns = idle_engine(scenario), scenario.horizon_ns
    state, clock, trace = engine.state, engine.clock, engine.trace
    refreshes_ns = deque([*scenario.refreshes_ns, horizon_ns])
    until_ns = 1
    while True:
        until_ns = min(until_ns, refreshes_ns[0])
        advance(engine, scenario.requests, until_ns, fast_forward=False)
        check_integrity(state, scenario.limits, scenario.num_blocks)
        check_requests(state, trace)
        if trace.counts.now_ns >= refreshes_ns[0] or (clock.at.idle and until_ns == refreshes_ns[0]):
            at_ns = refreshes_ns.popleft()
            if at_ns == horizon_ns:
                mark_running(engine.state, engine.trace)
                record_pool(engine)
                return trace
            refresh_queues(scenario, engine, at_ns)
        elif clock.at.idle:
            until_ns = _next_event_ns(scenario, clock, trace) + 1
        else:
            until_ns = int(trace.counts.now_ns) + 1


def _next_event_ns(scenario: Scenario, clock: TwinClock, trace: t.TwinTrace) -> int:
    events_ns = [scenario.horizon_ns]
    upcoming = trace.counts.next_request
    if upcoming < scenario.requests.arrival_ns.size:
        events_ns.append(int(scenario.requests.arrival_ns[upcoming]))
    if clock.at.n_copies > 0:
        events_ns.append(int(clock.ready_ns[clock.copies[clock.at.first_copy]]))
    if clock.at.prefetched:
        asked_ns, copy_ns, ready_ns = clock.link.prefetches[0].tolist()
        waiting = asked_ns != NEVER_NS
        events_ns.append(max(clock.link.at.free_ns, asked_ns) + copy_ns if waiting else ready_ns)
    return min(events_ns)


def check_requests(state: State, trace: t.TwinTrace) -> None:
    """Assert that every arrived request is finished, running, waiting or rejected."""
    c = state.counters
    finished = int((trace.finish_ns != t.NEVER).sum())
    in_engine = int(c.n_running - c.n_ending + c.n_waiting)
    assert finished + in_engine + trace.counts.rejected == trace.counts.next_request


def rules_in(limits: Limits) -> str:
    """Return the switches that decide which code runs, in words."""
    if limits.policy == SLORA:
        return "slora"
    switches = {
        "async": limits.async_scheduling,
        "prefix caching": limits.prefix_caching,
        "reversed": limits.reverse_skipped,
        "whole sequence": limits.reserve_full_sequence,
        "beside": limits.load_beside,
    }
    return ", ".join(["vllm", *(name for name, on in switches.items() if on)])
