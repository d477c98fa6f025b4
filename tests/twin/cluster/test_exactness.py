"""Each instance of the cluster twin equals the one-GPU twin; routers only distribute requests."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.serving import State
from capplan.serving.routers import ROUTERS, Dlora
from capplan.twin.cluster import Candidate, NamedRouter, RoutedRequest, simulate_cluster
from capplan.twin.cluster._python_loop import run_with
from capplan.twin.cluster._routers import build_rule
from capplan.twin.cluster._run import run_cluster
from capplan.twin.cluster._scenario import ClusterScenario, place
from capplan.twin.cluster._steps import with_rows
from capplan.twin.instance import run
from capplan.twin.instance._scenario import new_engine
from tests.twin.cluster.comparison import (
    WAITS,
    alone,
    assert_instances_did_as_alone,
    assert_nothing_is_lost,
)
from tests.twin.cluster.scenarios import (
    clusters,
    report_period_s,
    router_and_reference,
    seeded_cluster,
)
from tests.twin.cluster.workloads import even, same
from tests.twin.comparison import assert_same
from tests.twin.pooled import seeded_pooled
from tests.twin.scenarios import scenarios, seeded_scenario

MOVES_OFTEN = Dlora(period_s=0.007, excess=1.0, request_s=0.01, migration_s=0.002)
ALL_ROUTERS = st.sampled_from([*ROUTERS, MOVES_OFTEN])


@given(scenarios())
def test_a_cluster_of_one_leaves_the_trace_of_the_one_gpu_twin(scenario) -> None:
    scenario = scenario._replace(buckets=0)
    everything = np.arange(1, scenario.adapters + 1)
    nobody = scenario.requests._replace(**{name: c[:0] for name, c in scenario.requests._asdict().items()})
    cluster = ClusterScenario(
        engines=(scenario._replace(requests=nobody),),
        placement=place([everything], [np.ones(everything.size)], everything.size),
        requests=scenario.requests,
        rank=scenario.costs.rank,
        horizon_ns=scenario.horizon_ns,
        link=np.zeros(1, np.int64),
        shared_prefix_tokens=scenario.shared_prefix_tokens,
    )
    trace = run_cluster(cluster, build_rule("least-loaded", cluster), 0, first_rows=1)
    hits = () if scenario.pool else ("pool",)  # counted with the waits, which a plain run does not record
    assert_same(trace.traces[0], run(scenario), but=(*WAITS, *hits))
    detailed = run(scenario._replace(buckets=1))
    for name in WAITS:
        np.testing.assert_array_equal(getattr(trace.traces[0], name), getattr(detailed, name), err_msg=name)


@given(clusters(), st.sampled_from(list(ROUTERS)))
def test_every_instance_does_what_it_would_do_alone_with_its_requests(scenario, router) -> None:
    """Tables grow on the way: they begin with one row."""
    trace = run_cluster(scenario, build_rule(router, scenario), 1, first_rows=1)
    if trace.migrations == 0:
        assert_instances_did_as_alone(scenario, trace)


@pytest.mark.parametrize("make", [seeded_scenario, seeded_pooled])
def test_an_engine_with_more_rows_is_one_made_with_as_many(make) -> None:
    for scenario in map(make, range(20)):
        limits = scenario.limits
        grown = with_rows(new_engine(scenario, limits.max_num_seqs), limits, 64)
        made = new_engine(scenario, 64)
        assert grown.rows.shape == made.rows.shape
        for ours, expected in zip(leaves(without_rows(grown)), leaves(without_rows(made)), strict=True):
            np.testing.assert_array_equal(ours, expected)


def without_rows(state: State) -> State:
    """Return a state without its rows that were never taken, which are cleared when they are."""
    return state._replace(rows=state.rows[: state.counters.fresh_row])


def leaves(part: object) -> Iterator[object]:
    """Yield the arrays and numbers of a state."""
    if isinstance(part, tuple):
        for each in part:
            yield from leaves(each)
    else:
        yield part


@pytest.mark.parametrize("seed", range(12))
def test_shares_of_adapters_on_one_instance_each_are_separate_simulations(seed: int) -> None:
    scenario = seeded_cluster(seed, apart=True)
    trace = run_cluster(scenario, build_rule("plan-shares", scenario), seed)
    for i in range(scenario.instances):
        homes = scenario.placement.instance[scenario.placement.start[:-1]]  # of every adapter
        rows = np.flatnonzero((homes[scenario.requests.adapter] == i) & (scenario.requests.adapter > 0))
        assert np.all(trace.instance[rows] == i)
    assert_instances_did_as_alone(scenario, trace)


@given(clusters(shared=True), ALL_ROUTERS)
def test_every_request_is_at_one_instance_that_holds_its_adapter(
    scenario: ClusterScenario, router: NamedRouter
) -> None:
    assert_nothing_is_lost(scenario, run_cluster(scenario, build_rule(router, scenario), 2))


@given(clusters(shared=True), ALL_ROUTERS, st.integers(0, 99))
def test_the_same_seed_gives_the_same_result(
    scenario: ClusterScenario, router: NamedRouter, seed: int
) -> None:
    one, other = (run_cluster(scenario, build_rule(router, scenario), seed, rows) for rows in (1, 64))
    np.testing.assert_array_equal(one.instance, other.instance)
    assert one.migrations == other.migrations
    for ours, theirs in zip(one.traces, other.traces, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("name", ROUTERS)
@settings(max_examples=10, deadline=None)
@given(clusters(shared=True), st.integers(0, 999), st.sampled_from([0.0, 0.003, 0.02, 1e3]))
def test_compiled_routers_decide_as_reference_ones(
    name: str, scenario: ClusterScenario, seed: int, state_period_s: float
) -> None:
    state_period_s = report_period_s(scenario, state_period_s)
    turn_s = (0.0, 0.02, 0.3)[seed // 2 % 3]
    router, reference = router_and_reference(name, scenario.instances, seed, turn_s)
    compiled = run_cluster(scenario, build_rule(router, scenario), seed, state_period_s=state_period_s)
    readable = run_with(scenario, reference, seed, state_period_s)
    np.testing.assert_array_equal(compiled.instance, readable.instance)
    for ours, theirs in zip(compiled.traces, readable.traces, strict=True):
        assert_same(ours, theirs)  # although instances are advanced in other parts


def test_the_instances_report_in_turn() -> None:
    period_s, ages = 1.0, []

    def first_candidate(request: RoutedRequest, candidates: Sequence[Candidate]) -> int:
        for each in candidates if request.arrival_s > period_s else ():
            since_s = (request.arrival_s - each.instance * period_s / 4) % period_s
            ages.append((each.age_ns * 1e-9, since_s))
        return 0

    simulate_cluster(even(4, 20.0), same(4), router=first_candidate, duration_s=5.0, state_period_s=period_s)
    found, expected = zip(*ages, strict=True)
    np.testing.assert_allclose(found, expected, atol=2e-9)


@pytest.mark.long
@given(clusters(shared=True), st.integers(0, 99))
def test_without_any_report_least_work_left_is_smooth_shares(scenario: ClusterScenario, seed: int) -> None:
    looking = run_cluster(scenario, build_rule("least-work-left", scenario), seed, state_period_s=1e6)
    shares = run_cluster(scenario, build_rule("smooth-shares", scenario), seed)
    np.testing.assert_array_equal(looking.instance, shares.instance)


def test_requests_of_one_instance_are_those_of_the_single_twin() -> None:
    """The comparison itself would notice a request on the wrong instance."""
    scenario = next(s for s in map(seeded_cluster, range(99)) if s.instances > 1)
    trace = run_cluster(scenario, build_rule("round-robin", scenario), 0)
    assert_instances_did_as_alone(scenario, trace)
    rows = np.flatnonzero(trace.instance == 0)
    assert run(alone(scenario, rows[1:], 0)).counts.tolist() != trace.traces[0].counts.tolist()


def test_routers_see_the_memory_of_idle_adapters_as_free_and_prompts_before_they_are_computed() -> None:
    idle = 0

    def check(_: RoutedRequest, candidates: Sequence[Candidate]) -> int:
        nonlocal idle
        for each in candidates:
            assert each.running_tokens >= len(each.running)
            if not each.running and not each.queued_adapters:
                assert each.free_tokens == each.kv_tokens
                idle += 1
        return len(candidates) - 1

    for scenario in map(seeded_cluster, range(40)):
        if scenario.engines[0].pool is not None:
            run_with(scenario, check, 0)
    assert idle > 10
