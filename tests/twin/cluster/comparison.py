"""A cluster's instances against the one-GPU twin on the same requests."""

import numpy as np

from capplan.serving import NONE
from capplan.twin import Scenario
from capplan.twin.cluster._run import ClusterTrace
from capplan.twin.cluster._scenario import ClusterScenario, take_requests
from capplan.twin.instance import _trace as t
from capplan.twin.instance import run

PER_REQUEST = ("first_ns", "finish_ns", "stalled_ns", "interruptions", "interrupted_ns", "status")
WAITS = ("admitted_ns", "skipped_ns", "held_up_ns")


def alone(scenario: ClusterScenario, rows: np.ndarray, instance: int) -> Scenario:
    """Return the scenario of one instance with these requests."""
    placement = scenario.placement
    here = placement.instance == instance
    adapters = np.repeat(np.arange(scenario.rank.size), np.diff(placement.start))[here]
    local = np.zeros(scenario.rank.size, np.int32)
    local[adapters] = placement.local[here]
    requests = take_requests(scenario.requests, rows)
    return scenario.engines[instance]._replace(
        requests=requests._replace(adapter=local[requests.adapter]),
        horizon_ns=scenario.horizon_ns,
        shared_prefix_tokens=scenario.shared_prefix_tokens,
    )


def assert_instances_did_as_alone(scenario: ClusterScenario, trace: ClusterTrace) -> None:
    """Assert that every instance leaves the trace of the one-GPU twin with its requests, and their waits."""
    for i, own in enumerate(trace.traces):
        rows = np.flatnonzero(trace.instance == i)
        single = alone(scenario, rows, i)
        expected, detailed = run(single), run(single._replace(buckets=1))
        for name in t.TwinTrace._fields:
            ours, theirs = getattr(own, name), getattr(detailed if name in WAITS else expected, name)
            if name in PER_REQUEST or name in WAITS:
                ours = ours[rows]
            elif name == "pool" and scenario.engines[i].pool is None:
                ours, theirs = ours.link_ns, theirs.link_ns
            if name == "counts":  # requests are numbered differently
                ours, theirs = ours.copy(), theirs.copy()
                ours.next_request = theirs.next_request = 0
            np.testing.assert_array_equal(ours, theirs, err_msg=f"instance {i}: {name}")


def assert_nothing_is_lost(scenario: ClusterScenario, trace: ClusterTrace) -> None:
    """Assert that every request is on one instance that holds its adapter, and in one state there."""
    shared = trace.traces[0]
    seen = finished = rejected = 0
    for number, (instance, adapter) in enumerate(zip(trace.instance, scenario.requests.adapter, strict=True)):
        start, end = scenario.placement.start[adapter : adapter + 2]
        assert instance != NONE, number
        assert instance in scenario.placement.instance[start:end]
        assert (shared.finish_ns[number] == t.NEVER) or shared.status[number] == 0
        seen += 1
        finished += shared.finish_ns[number] != t.NEVER
        rejected += shared.status[number] == t.STATUS_REJECTED
    assert seen == scenario.requests.arrival_ns.size
    assert rejected == sum(own.counts.rejected for own in trace.traces)
    first = shared.first_ns[shared.finish_ns != t.NEVER]
    assert finished == first.size
    assert np.all(first > scenario.requests.arrival_ns[shared.finish_ns != t.NEVER])
