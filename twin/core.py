"""The compiled twin: the serving rules under a clock that the step-latency model moves."""

from __future__ import annotations

from capplan.models.step_latency import StepFeatures, step_ms
from capplan.serving import Limits, State, commit, new_state, schedule, submit
from capplan.serving.compile import jit
from capplan.serving.state import (
    KV_TOKENS,
    N_ACTIVE,
    N_FINISHED,
    N_FIRST,
    N_LOADS,
    N_PREEMPTED,
    N_RESUMED,
    N_RUNNING,
    N_STALLED,
    N_WAITING,
    NONE,
    RUN_HEAD,
    STEP_DECODES,
)
from capplan.twin.scenario import Costs, Scenario
from capplan.twin.trace import (
    ADAPTER_LOADS,
    ADAPTER_NS,
    BUSY_NS,
    DISK_LOADS,
    KV_TOKEN_NS,
    LOAD_NS,
    MAX_RUNNING,
    MAX_WAITING,
    NEXT_REQUEST,
    NOW_NS,
    PREEMPTIONS,
    REJECTED,
    RUNNING_NS,
    STEPS,
    WAITING_NS,
    Trace,
    gap_bin,
    new_trace,
)
from capplan.workload import Requests


def run(scenario: Scenario) -> Trace:
    """Simulate `scenario` to its horizon."""
    requests = scenario.requests.arrival_ns.size
    rows = max(1, min(requests, scenario.max_in_flight))
    state = new_state(rows, scenario.adapters, scenario.num_blocks, scenario.limits)
    trace = new_trace(requests)
    _advance(
        state,
        scenario.limits,
        scenario.requests,
        scenario.costs,
        trace,
        scenario.max_in_flight,
        scenario.horizon_ns,
    )
    return trace


@jit
def _advance(
    state: State,
    limits: Limits,
    requests: Requests,
    costs: Costs,
    trace: Trace,
    max_in_flight: int,
    until_ns: int,
) -> None:
    """Run steps until the clock reaches `until_ns` or nothing is left to do before it."""
    counts = trace.counts
    while counts[NOW_NS] < until_ns:
        _take_arrivals(state, limits, requests, trace, max_in_flight)
        tokens = schedule(state, limits)
        if tokens == 0:
            upcoming = counts[NEXT_REQUEST]
            if upcoming >= requests.arrival_ns.size or requests.arrival_ns[upcoming] >= until_ns:
                break
            counts[NOW_NS] = requests.arrival_ns[upcoming]
            continue
        duration_ns = _charge(state, costs, trace, tokens)
        _observe(state, trace, duration_ns)
        commit(state, limits)
        _record(state, trace)
    row = state.counters[RUN_HEAD]
    while row != NONE:
        trace.running_at_end[state.request[row]] = 1
        row = state.following[row]


@jit
def _take_arrivals(
    state: State, limits: Limits, requests: Requests, trace: Trace, max_in_flight: int
) -> None:
    """Queue what has arrived by now; what the engine cannot take is rejected."""
    counts = trace.counts
    c = state.counters
    i = counts[NEXT_REQUEST]
    while i < requests.arrival_ns.size and requests.arrival_ns[i] <= counts[NOW_NS]:
        row = NONE
        if c[N_RUNNING] + c[N_WAITING] < max_in_flight:
            row = submit(
                state, limits, i, requests.adapter[i], requests.prompt_tokens[i], requests.output_tokens[i]
            )
        if row == NONE:
            counts[REJECTED] += 1
        i += 1
    counts[NEXT_REQUEST] = i


@jit
def _charge(state: State, costs: Costs, trace: Trace, tokens: int) -> int:
    """Return the nanoseconds of the step: the model's answer, and the loads that block it."""
    c = state.counters
    counts = trace.counts
    load_ns = 0
    for i in range(c[N_LOADS]):
        adapter = state.loads[i]
        load_ns += costs.load_ns[adapter]
        if state.load_from_disk[i]:
            load_ns += costs.disk_ns[adapter]
            counts[DISK_LOADS] += 1
    counts[ADAPTER_LOADS] += c[N_LOADS]
    counts[LOAD_NS] += load_ns
    features = StepFeatures(
        tokens=float(tokens),
        requests=float(c[N_RUNNING]),
        kv_tokens=float(c[KV_TOKENS]),
        adapters=float(c[N_ACTIVE]),
        a_max=float(costs.a_max),
        s_max=float(costs.s_max),
        waiting=float(c[N_WAITING]),
        slots_per_adapter=costs.slots_per_adapter,
    )
    return load_ns + round(step_ms(costs.form, costs.coefficients, features) * 1e6)


@jit
def _observe(state: State, trace: Trace, duration_ns: int) -> None:
    """Move the clock over the step and write down what ran in it."""
    c = state.counters
    counts = trace.counts
    sums = trace.sums
    for i in range(c[N_STALLED]):
        trace.stalled_ns[state.request[state.stalled[i]]] = counts[NOW_NS]
    counts[NOW_NS] += duration_ns
    counts[STEPS] += 1
    counts[PREEMPTIONS] += c[N_PREEMPTED]
    counts[MAX_RUNNING] = max(counts[MAX_RUNNING], c[N_RUNNING])
    counts[MAX_WAITING] = max(counts[MAX_WAITING], c[N_WAITING])
    sums[BUSY_NS] += duration_ns
    sums[RUNNING_NS] += float(c[N_RUNNING]) * duration_ns
    sums[WAITING_NS] += float(c[N_WAITING]) * duration_ns
    sums[KV_TOKEN_NS] += float(c[KV_TOKENS]) * duration_ns
    sums[ADAPTER_NS] += float(c[N_ACTIVE]) * duration_ns
    if c[STEP_DECODES] > 0:
        trace.gaps[gap_bin(duration_ns)] += c[STEP_DECODES]


@jit
def _record(state: State, trace: Trace) -> None:
    """Write down the tokens that ended the step, where they begin, resume or end a request."""
    c = state.counters
    now = trace.counts[NOW_NS]
    for i in range(c[N_FIRST]):
        trace.first_ns[state.request[state.first[i]]] = now
    for i in range(c[N_RESUMED]):
        request = state.request[state.resumed[i]]
        trace.gaps[gap_bin(now - trace.stalled_ns[request])] += 1
    for i in range(c[N_FINISHED]):
        trace.finish_ns[state.request[state.finished[i]]] = now
