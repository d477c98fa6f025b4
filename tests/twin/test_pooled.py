"""The twin under a scheduler and an adapter cache: exactness of its forms, events, metrics."""

import numpy as np
import pytest
from hypothesis import given, settings

from capplan.serving import Limits, State
from capplan.serving.pooled import QUEUES
from capplan.serving.pooled import _refresh as refresh
from capplan.spec import Scheduler
from capplan.twin import Scenario
from capplan.twin.instance import _core as core
from capplan.twin.instance import _trace as t
from capplan.twin.instance import run
from tests.oracle import run_reference
from tests.twin.comparison import assert_forms_agree, assert_same
from tests.twin.pooled import pooled_scenarios, seeded_pooled, with_period

pytestmark = pytest.mark.long

SEEDS = range(600)
EVENTS = [name for name in t.POOL_COUNTS if name not in ("refreshes", "kept_queues", "scaled_quotas")]


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
    assert all(count >= 3 for count in seen.values()), seen


def test_refreshed_queues_leave_the_same_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of these scenarios are too short for the least number of requests that queues need."""
    monkeypatch.setattr(refresh, "LEAST_REQUESTS", 2)
    seen = dict.fromkeys(("refreshes", "kept_queues", "scaled_quotas"), 0)
    for seed in range(80):
        scheduler = with_period(Scheduler(policy="chameleon"), 0.3 if seed % 3 else 0.15)
        scenario = seeded_pooled(seed)
        if scenario.limits.order == QUEUES:
            trace = run(scenario._replace(scheduler=scheduler))
            assert_same(run_reference(scenario._replace(scheduler=scheduler)), trace, but=("stalled_ns",))
            for name in seen:
                seen[name] += int(trace.pool[name])
    assert min(seen.values()) > 10, seen


def test_every_request_is_in_the_window_of_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that arrive during the step that goes on at the time of the refresh."""
    windows = []

    def noted(state: State, limits: Limits, scheduler: Scheduler, at_ns: int) -> None:
        windows.append((at_ns, int(state.pooled.counts.n_window)))
        refresh.refresh(state, limits, scheduler, at_ns)

    monkeypatch.setattr(core, "refresh", noted)
    for seed in range(40):
        scheduler = Scheduler(policy="chameleon").model_copy(update={"refresh_s": 0.05})
        scenario = seeded_pooled(seed)._replace(scheduler=scheduler)
        windows.clear()
        trace = run(scenario)
        arrival_ns = scenario.requests.arrival_ns[trace.status != t.STATUS_REJECTED]
        assert windows == [(at_ns, np.count_nonzero(arrival_ns < at_ns)) for at_ns in scenario.refreshes_ns]


def test_the_adapters_of_first_admissions_are_counted_alike_by_adapter_and_in_all() -> None:
    readmissions = 0
    for scenario in map(seeded_pooled, range(60)):
        trace = run(scenario._replace(buckets=3))
        admissions = trace.adapters.admissions.sum()
        assert admissions == np.count_nonzero(trace.admitted_ns != t.NEVER)
        assert trace.adapters.admissions[1:].sum() <= trace.pool.hits + trace.pool.misses
        readmissions += trace.counts.preemptions
    assert readmissions > 0
