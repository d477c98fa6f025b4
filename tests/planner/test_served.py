"""Plans simulated as clusters behind their routers, and the load that they sustain."""

from dataclasses import replace

import numpy as np
import pytest

from capplan import Adapter, InputError, Plan, Workload, plan
from capplan.planner.problem._evaluate import evaluate_cluster
from capplan.planner.problem._setup import rebuild
from capplan.planner.verification import (
    RelativeBound,
    SimulatedFleet,
    by_rank,
    capacity,
    fewest_instances,
    fleet_of_plan,
    stored_adapters,
    with_bounds,
)
from capplan.planner.verification._served import highest_load
from capplan.spec import EngineConfig, Lengths, Slo, Trace
from capplan.twin.cluster import MODELLED, Instance, served_router, served_rule, simulate_cluster, workload_of
from tests.twin.cluster.workloads import PROFILE, even, same

SLO = Slo(ttft_p95_s=2.0)


def replicated(count: int, router: str = "least-loaded") -> SimulatedFleet:
    """Return equal instances that hold every adapter."""
    return SimulatedFleet(even(8, 20.0), tuple(same(count)), tuple(map(str, range(count))), router)


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, Workload]:
    workload = Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        profile=PROFILE.name,
        adapters=[Adapter(name=f"a{i}", rank=8 << (i % 2), rate_rps=1.5) for i in range(16)],
        prompt_tokens=Lengths(mean=200),
        output_tokens=Lengths(mean=200),
        router="least-work-left",
    )
    return plan(workload, gpus=4, seeds=1), workload


@pytest.mark.parametrize("limit", [0.004, 0.3, 1.0, 7.7, 300.0])
def test_the_highest_load_is_within_the_precision_below_the_first_that_fails(limit: float) -> None:
    found = highest_load(lambda load: load <= limit, 0.01)
    assert found <= limit < found * 1.01


def test_no_load_holds_and_every_load_holds() -> None:
    assert highest_load(lambda _: False) == 0.0
    assert highest_load(lambda _: True) == 1024.0


def test_a_plan_names_its_router_and_is_verified_with_it(planned) -> None:
    made, workload = planned
    assert made.router == "least-work-left"
    assert made.verification.ok
    fleet = fleet_of_plan(made, workload, None, "workload")
    assert (fleet.router, len(fleet.instances)) == ("least-work-left", made.totals.gpus)
    seed, duration_s = made.verification.seeds[0], made.verification.duration_s
    result = fleet.simulate(seed, duration_s)
    served = min(each.served_fraction for each in result.instances)
    assert made.verification.min_served_fraction == pytest.approx(served, abs=1e-9)
    assert Plan.model_validate_json(made.to_json()) == made


def test_instances_of_a_plan_share_its_links_as_in_the_verification() -> None:
    """Two instances, each with fewer slots than adapters."""
    workload = Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        profile=PROFILE.name,
        adapters=[Adapter(name=f"a{i}", rank=16, rate_rps=0.5) for i in range(24)],
        prompt_tokens=Lengths(mean=100),
        output_tokens=Lengths(mean=20),
        engine=EngineConfig(max_loras=6),
    )
    made = plan(workload, gpus=2, solver="slora-contiguous", seeds=1, verify=False, gpus_per_link=2)
    fleet = fleet_of_plan(made, workload, None, "workload")
    assert (len(fleet.instances), fleet.gpus_per_link) == (2, 2)
    shared = fleet.simulate(3, 120.0)
    rebuilt = rebuild(made, workload, None, "workload")
    verified = evaluate_cluster(
        rebuilt.problem, [each.assignment for each in rebuilt.groups], 3, duration_s=120.0
    )
    assert [each.result for each in verified] == list(shared.instances)
    assert shared.load_s > replace(fleet, gpus_per_link=1).simulate(3, 120.0).load_s


def test_a_plan_without_a_router_does_not_mention_one(planned) -> None:
    text = planned[0].replace(router=None).to_json()
    assert '"router"' not in text
    assert Plan.model_validate_json(text).router is None


def test_an_unknown_router_is_refused(planned) -> None:
    with pytest.raises(InputError, match="router: must be one of plan-shares"):
        planned[1].replace(router="fastest")


def test_shares_of_the_plan_are_stored_and_ranks_are_told_apart(planned) -> None:
    made, workload = planned
    fleet = fleet_of_plan(made, workload, None, "workload", "smooth-shares")
    result = fleet.simulate(3, 60.0)
    ranks = by_rank(fleet, result)
    assert [each.rank for each in ranks] == [8, 16]
    assert sum(each.submitted for each in ranks) == result.submitted
    assert sum(each.finished for each in ranks) == result.completed
    assert all(0.0 <= each.queue_s.p50 <= each.queue_s.p95 <= each.ttft_s.p95 for each in ranks)
    held = stored_adapters(fleet)
    assert sum(each.count for each in held) >= 16
    assert [each.count for each in stored_adapters(replicated(2))] == [8, 8]


def test_a_served_router_moves_no_requests() -> None:
    workload, instances = even(8, 30.0), same(3)
    routed = [
        simulate_cluster(workload, instances, router=router, duration_s=60.0)
        for router in (served_router("dlora"), "least-loaded")
    ]
    assert routed[0].requests_per_instance == routed[1].requests_per_instance


def test_more_instances_sustain_more_and_the_fewest_sustain_the_load() -> None:
    one, two = (capacity(replicated(n), SLO, range(2), 120.0, precision=0.05) for n in (1, 2))
    assert 1.6 < two.mean / one.mean < 2.6
    assert one.low is not None
    assert one.high is not None
    assert one.low <= one.mean <= one.high
    assert one.binds
    needed = fewest_instances(replicated, SLO, range(2), 120.0, most=64)
    results = [replicated(needed).simulate(seed, 120.0) for seed in range(2)]
    assert all(result.ttft_s_p95 <= 2.0 for result in results)


def recorded(requests: int = 600, length_s: float = 60.0) -> SimulatedFleet:
    """Return one instance that holds the adapters of a trace of evenly spaced requests."""
    owners = [f"a{number % 8}" for number in range(requests)]
    arrival_s = np.arange(requests) * length_s / requests
    lengths = (np.full(requests, tokens) for tokens in (200, 100))
    trace = Trace.from_arrays(arrival_s, owners, *lengths, duration_s=length_s)
    workload = even(8, requests / length_s).model_copy(update={"trace": trace})
    return SimulatedFleet(workload, tuple(same(1)), ("i1",), "least-loaded")


def test_a_trace_is_replayed_to_its_end_at_every_load() -> None:
    fleet = recorded()
    for duration_s in (10.0, 600.0):
        assert fleet.replay(0, duration_s, 4.0).duration_s == 15.0
    whole = fleet.replay(0, 60.0)
    assert (whole.submitted, whole.duration_s) == (600, 60.0)
    assert fleet.reference("no-lora", 0, 10.0).duration_s == 60.0
    assert fleet.reference("unloaded", 0, 10.0).duration_s == pytest.approx(6000.0)


def test_the_capacity_for_a_trace_is_near_that_for_its_rate() -> None:
    fleet = recorded()
    found = capacity(fleet, SLO, range(3), 10.0, precision=0.05)
    assert len(found.loads) == 1
    assert (found.low, found.high, found.above_limit) == (None, None, False)
    assert found.binds
    drawn = SimulatedFleet(even(8, 10.0), fleet.instances, fleet.names, fleet.router)
    assert 0.7 < found.mean / capacity(drawn, SLO, range(2), 60.0, precision=0.05).mean < 1.4
    heavy = recorded(round(600 * 3 * found.mean)).workload

    def fleet_of(count: int) -> SimulatedFleet:
        return SimulatedFleet(heavy, tuple(same(count)), tuple(map(str, range(count))), "least-loaded")

    assert 3 <= fewest_instances(fleet_of, SLO, range(2), 10.0, most=64) <= 5


def test_a_load_above_the_largest_one_is_marked() -> None:
    idle = SimulatedFleet(even(2, 0.002), tuple(same(1)), ("i1",), "least-loaded")
    found = capacity(idle, SLO, range(2), 60.0, precision=0.5)
    assert (found.mean, found.above_limit) == (1024.0, True)
    assert (found.low, found.high, found.binds) == (None, None, ())


def test_bounds_may_be_multiples_of_reference_runs() -> None:
    fleet = replicated(1)
    bounds = with_bounds(
        fleet,
        [RelativeBound("ttft_p95_s", 5.0, "unloaded"), RelativeBound("tpt_mean_ms", 1.5, "no-lora")],
        0,
        60.0,
    )
    assert bounds["ttft_p95_s"] == 5.0 * fleet.reference("unloaded", 0, 60.0).ttft_s_p95
    assert bounds["tpt_mean_ms"] == 1.5 * fleet.reference("no-lora", 0, 60.0).tpt_ms_mean


def test_stale_states_cost_little_beside_shares() -> None:
    """Least work left by states of any age costs 20 ms at most, at a load where nothing queues."""
    workload = even(6, 60.0, (8, 64))
    names = [adapter.name for adapter in workload.adapters]
    instances = [Instance(PROFILE, a_max=6, s_max=64, adapters=dict.fromkeys(names, 1.0)) for _ in range(3)]
    shares = simulate_cluster(workload, instances, router="smooth-shares", duration_s=120.0)
    for period_s in (0.0, 0.25, 2.0, 30.0):
        looking = simulate_cluster(
            workload, instances, router="least-work-left", duration_s=120.0, state_period_s=period_s
        )
        assert looking.ttft_s_p95 <= 1.1 * shares.ttft_s_p95 + 0.02


def test_a_running_router_has_a_model_of_every_instance(planned) -> None:
    made, _ = planned
    for name in MODELLED:
        rule = served_rule(made, made.groups, name, {PROFILE.name: PROFILE})
        assert rule.models.shape[0] == made.totals.gpus
        assert np.isfinite(rule.models).all()
        assert rule.models.any()
    plain = served_rule(made, made.groups, "dlora", {})
    assert plain.period_ns > 10**18 - 1
    assert plain.prior_output_tokens == made.provenance["mean_output_tokens"] == 200.0


@pytest.mark.parametrize("router", [None, "least-work-left"])
def test_plans_store_mean_lengths(router: str | None) -> None:
    """With and without a router, for histograms and own lengths of adapters."""
    workload = Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        profile=PROFILE.name,
        adapters=[
            Adapter(name="a", rank=8, rate_rps=3.0),
            Adapter(name="b", rank=8, rate_rps=1.0, output_tokens=Lengths(mean=20)),
        ],
        prompt_tokens=Lengths(values=(100, 300), counts=(3, 1)),
        output_tokens=Lengths(mean=60),
        router=router,
    )
    made = plan(workload, gpus=1, seeds=1, verify=False)
    assert made.router == router
    means = workload_of(made, made.groups)
    assert (means.prompt_tokens.mean, means.output_tokens.mean) == pytest.approx((150.0, 50.0))


def test_a_running_router_assumes_lengths_that_the_engines_take(planned) -> None:
    """A plan without mean lengths, of engines that take short requests only."""
    made, _ = planned
    lengths = {"mean_prompt_tokens", "mean_output_tokens"}
    provenance = {name: value for name, value in made.provenance.items() if name not in lengths}
    short = [
        group.replace(engine_args=group.engine_args.replace(max_model_len=100, max_num_batched_tokens=256))
        for group in made.groups
    ]
    plan = made.replace(provenance=provenance, groups=tuple(short))
    workload = workload_of(plan, plan.groups)
    assert (workload.prompt_tokens.mean, workload.output_tokens.mean) == (80.0, 20.0)
    rule = served_rule(plan, plan.groups, "least-work-left", {PROFILE.name: PROFILE})
    assert np.isfinite(rule.models).all()
