"""Re-balancing in the cluster twin: the compiled loop equals the reference, and nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import InputError, Workload
from capplan.serving.routers import ROUTERS
from capplan.spec import RebalanceSettings, Trace
from capplan.twin.cluster import (
    Candidate,
    Crash,
    Faults,
    Instance,
    Rebalancing,
    RoutedRequest,
    TransferLink,
    served_router,
    simulate_cluster,
)
from capplan.twin.cluster._python_loop import run_with
from capplan.twin.cluster._routers import build_rule
from capplan.twin.cluster._run import run_cluster
from capplan.twin.instance import LOST, REJECTED
from tests.twin.cluster.movable import World, assert_integrity, movable_clusters
from tests.twin.cluster.scenarios import report_period_s, router_and_reference
from tests.twin.cluster.workloads import even, same
from tests.twin.comparison import assert_same

pytestmark = pytest.mark.long

few = settings(max_examples=25)
"""`python -m benchmarks.rebalance_invariants` runs more."""


@few
@given(movable_clusters(), st.sampled_from(list(ROUTERS)), st.sampled_from([0.0, 0.003, 0.02]))
def test_nothing_is_lost_on_the_way(world: World, router: str, state_period_s: float) -> None:
    scenario, rebalancing = world
    rule = build_rule(served_router(router), scenario)
    trace = run_cluster(scenario, rule, 1, 1, None, state_period_s, rebalancing)
    assert_integrity(scenario, rebalancing, trace)


@pytest.mark.parametrize("name", ROUTERS)
@settings(max_examples=5, deadline=None)
@given(movable_clusters(), st.integers(0, 999), st.sampled_from([0.0, 0.003, 0.02, 1e3]))
def test_the_compiled_loop_does_as_the_reference(
    name: str, world: World, seed: int, state_period_s: float
) -> None:
    scenario, rebalancing = world
    state_period_s = report_period_s(scenario, state_period_s)
    router, reference = router_and_reference(name, scenario.instances, seed)
    compiled = run_cluster(
        scenario,
        build_rule(router, scenario),
        seed,
        state_period_s=state_period_s,
        rebalancing=rebalancing,
    )
    readable = run_with(scenario, reference, seed, state_period_s, rebalancing)
    assert compiled.moves == readable.moves
    np.testing.assert_array_equal(compiled.instance, readable.instance)
    for ours, theirs in zip(compiled.traces, readable.traces, strict=True):
        assert_same(ours, theirs)


@few
@given(movable_clusters(), st.sampled_from(["smooth-shares", "least-work-left"]))
def test_the_same_seed_gives_the_same_moves(world: World, router: str) -> None:
    scenario, rebalancing = world
    one, other = (
        run_cluster(scenario, build_rule(router, scenario), 3, rows, rebalancing=rebalancing)
        for rows in (1, 64)
    )
    assert one.moves == other.moves
    np.testing.assert_array_equal(one.instance, other.instance)


@few
@given(movable_clusters(), st.sampled_from(list(ROUTERS)))
def test_without_a_round_the_placement_stays(world: World, router: str) -> None:
    scenario, rebalancing = world
    rule = build_rule(served_router(router), scenario)
    settings = rebalancing.settings.replace(every_s=2.0 * scenario.horizon_ns / 1e9)
    quiet = replace(rebalancing, settings=settings, faults=Faults())
    once = run_cluster(scenario, rule, 1, rebalancing=quiet)
    frozen = run_cluster(scenario, build_rule(served_router(router), scenario), 1)
    assert once.moves is not None
    assert (once.moves.rounds, once.moves.events) == ((), ())
    assert once.moves.stored_mean == scenario.movable.stored[:, 1:].sum() / scenario.instances
    np.testing.assert_array_equal(once.instance, frozen.instance)
    for ours, theirs in zip(once.traces, frozen.traces, strict=True):
        assert_same(ours, theirs)


POINTS = {8: 9000.0, 16: 9000.0}


def drifting(base: Workload, rps: float, duration_s: float) -> Workload:
    """Return requests for the first half of the adapters only, then for the second half."""
    names = [adapter.name for adapter in base.adapters]
    rng = np.random.default_rng(0)
    arrival_s = np.sort(rng.uniform(0.0, duration_s, int(rps * duration_s)))
    half = len(names) // 2
    number = rng.integers(half, size=arrival_s.size) + half * (arrival_s > duration_s / 2)
    ones = np.ones(arrival_s.size, np.int64)
    trace = Trace.from_arrays(arrival_s, [names[i] for i in number], 200 * ones, 200 * ones, duration_s)
    return base.model_copy(update={"trace": trace})


def halves(workload: Workload) -> list[Instance]:
    names = [adapter.name for adapter in workload.adapters]
    half = len(names) // 2
    shares = [dict.fromkeys(own, 1.0) for own in (names[:half], names[half:])]
    return [replace(each, adapters=own) for each, own in zip(same(2), shares, strict=True)]


def test_rebalancing_follows_a_drift_that_overloads_a_frozen_placement() -> None:
    workload = drifting(even(8, 20.0), 40.0, 600.0)
    instances = halves(workload)
    frozen = simulate_cluster(workload, instances, router="smooth-shares", duration_s=600.0)
    settings = RebalanceSettings(every_s=30.0, forecast="last")
    moving = simulate_cluster(
        workload, instances, router="smooth-shares", duration_s=600.0, rebalance=Rebalancing(settings, POINTS)
    )
    assert moving.moves is not None
    assert moving.ttft_s_p95 < 0.5 * frozen.ttft_s_p95
    assert 0 < moving.moves.transferred_bytes <= sum(each.moved_bytes for each in moving.moves.rounds)
    assert moving.completed + moving.moves.lost > frozen.completed
    assert moving.submitted == frozen.submitted


def test_a_crash_loses_the_requests_of_its_instance_and_sends_later_ones_to_the_other() -> None:
    workload = even(8, 20.0)
    crashed = Rebalancing(
        RebalanceSettings(), dict.fromkeys((0, 8, 16), 9000.0), faults=Faults((Crash(0, 30.0, 20.0),))
    )
    result = simulate_cluster(workload, halves(workload), duration_s=90.0, rebalance=crashed)
    moves = result.moves
    assert moves is not None
    assert [(each.at_s, each.reason) for each in moves.rounds] == [(30.0, "crash"), (50.0, "restart")]
    assert moves.lost > 0
    requests = result.requests
    down = (requests.arrival_s > 30.0) & (requests.arrival_s < 50.0)
    assert set(requests.instance[down].tolist()) == {1}
    lost = requests.status == LOST
    assert np.isnan(requests.e2e_s[lost]).all()
    assert set(requests.instance[lost].tolist()) == {0}
    assert (requests.arrival_s[lost] <= 30.0).all()
    assert int(lost.sum()) == moves.lost == result.lost
    assert result.rejected == 0
    assert not (requests.status == REJECTED).any()


@pytest.mark.parametrize("state_period_s", [0.0, 0.1])
def test_requests_that_wait_for_a_transfer_are_load_of_their_instance(state_period_s: float) -> None:
    workload, waiting = even(8, 20.0), []

    def first_candidate(request: RoutedRequest, candidates: Sequence[Candidate]) -> int:
        if request.arrival_s >= 30.0 and request.adapter <= 4:  # of the instance that has crashed
            [only] = candidates
            waiting.append(request)
            if len(waiting) > 1:
                assert len(only.queued) >= len(waiting) - 1
                assert only.queued_tokens >= sum(each.prompt_tokens for each in waiting[:-1])
                assert only.queued_adapters >= len({each.adapter for each in waiting[:-1]})
                assert only.is_queued == (request.adapter in {each.adapter for each in waiting[:-1]})
        return 0

    stuck = Rebalancing(
        RebalanceSettings(),
        POINTS,
        link=TransferLink(bytes_per_s=1.0, location_bytes_per_s=1.0),
        faults=Faults((Crash(0, 30.0, 1e6),)),
    )
    result = simulate_cluster(
        workload,
        halves(workload),
        router=first_candidate,
        duration_s=60.0,
        state_period_s=state_period_s,
        rebalance=stuck,
    )
    assert result.moves is not None
    assert result.moves.waited == len(waiting) > 100


def test_invalid_crashes_and_routers_are_rejected() -> None:
    workload = even(8, 20.0)

    def run(*crashes: Crash, router: str = "smooth-shares") -> None:
        rebalance = Rebalancing(RebalanceSettings(), POINTS, faults=Faults(crashes))
        simulate_cluster(workload, halves(workload), router=router, duration_s=9.0, rebalance=rebalance)

    with pytest.raises(InputError, match=r"crash.instance: must be below 2"):
        run(Crash(2, 1.0, 1.0))
    with pytest.raises(InputError, match=r"crash.at_s: must leave an instance that is up"):
        run(Crash(0, 1.0, 3.0), Crash(1, 2.0, 1.0))
    with pytest.raises(InputError, match=r"crash.instance: must not crash while it is down"):
        run(Crash(0, 1.0, 3.0), Crash(0, 2.0, 1.0))
    small = [replace(each, s_max=8) for each in halves(even(8, 20.0))]
    mixed = workload.model_copy(
        update={"adapters": (*workload.adapters[:-1], workload.adapters[-1].replace(rank=16))}
    )
    with pytest.raises(InputError, match="must be at least the largest adapter rank, 16"):
        simulate_cluster(mixed, small, rebalance=Rebalancing(RebalanceSettings(), POINTS))
