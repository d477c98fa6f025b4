"""The twin under a scheduler and an adapter cache: exactness of its forms, events, metrics."""

import numpy as np
import pytest
from hypothesis import given, settings

from capplan.serving import refresh
from capplan.serving.pooled_state import QUEUES
from capplan.spec import Scheduler
from capplan.twin import Scenario
from capplan.twin import trace as t
from capplan.twin.core import run
from capplan.twin.reference import run_reference
from tests.twin.comparison import assert_forms_agree, assert_same
from tests.twin.pooled import pooled_scenarios, seeded_pooled

SEEDS = range(300)
EVENTS = [name for name in t.POOL_COUNTS if name != "refreshes"]


@settings(max_examples=150)
@given(pooled_scenarios())
def test_fast_forward_stepping_and_the_reference_leave_the_same_trace(scenario: Scenario) -> None:
    assert_forms_agree(scenario)


def test_every_event_happens_in_some_of_the_scenarios() -> None:
    seen = dict.fromkeys((*EVENTS, "preemptions", "rejected", "load wait"), 0)
    for scenario in map(seeded_pooled, SEEDS):
        trace = run(scenario)
        for name in EVENTS:
            seen[name] += int(trace.pool[name]) > 0
        seen["preemptions"] += trace.counts.preemptions > trace.pool.squashes
        seen["rejected"] += trace.counts.rejected > 0
        seen["load wait"] += bool(np.any(trace.held_up_ns > 0))
    assert all(count >= 5 for count in seen.values()), seen


def test_refreshed_queues_leave_the_same_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of these scenarios are too short for the least number of requests that queues need."""
    monkeypatch.setattr(refresh, "LEAST_REQUESTS", 2)
    refreshes = 0
    for seed in range(80):
        scheduler = Scheduler(policy="chameleon", refresh_s=0.3 if seed % 3 else 0.15)
        scenario = seeded_pooled(seed)
        if scenario.limits.order == QUEUES:
            trace = run(scenario._replace(scheduler=scheduler))
            assert_same(run_reference(scenario._replace(scheduler=scheduler)), trace, but=("stalled_ns",))
            refreshes += int(trace.pool.refreshes)
    assert refreshes > 10
