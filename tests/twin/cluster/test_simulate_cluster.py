"""`simulate_cluster` through its public surface."""

from dataclasses import fields, replace

import numpy as np
import pytest

from capplan import InfeasibleError, InputError, SimulationResult, Slo, simulate, simulate_detailed
from capplan.serving.routers import ROUTERS, Dlora, Gateway, Performance, Toppings
from capplan.spec import Trace
from capplan.twin.cluster import Instance, simulate_cluster, simulate_without_adapters
from capplan.twin.cluster._scenario import build_cluster
from capplan.twin.instance import draw_for
from tests.twin.cluster.workloads import OTHER, PROFILE, even, same

MINUTE = 60.0


def as_single(result: SimulationResult) -> SimulationResult:
    values = {f.name: getattr(result, f.name) for f in fields(SimulationResult)}
    return SimulationResult(**(values | {"wall_s": 0.0}))


@pytest.mark.parametrize("router", ROUTERS)
def test_one_instance_gives_the_result_of_simulate(router: str) -> None:
    workload = even(24, 6.0, (8, 64))
    settings = {"a_max": 8, "s_max": 64, "max_cpu_loras": 12, "max_in_flight": 40}
    alone = simulate(workload, PROFILE, duration_s=MINUTE, seed=3, **settings)
    cluster = simulate_cluster(
        workload, [Instance(PROFILE, **settings)], router=router, duration_s=MINUTE, seed=3
    )
    assert as_single(cluster) == as_single(alone)
    assert as_single(cluster.instances[0]) == as_single(alone)
    assert cluster.requests_per_instance == (alone.submitted,)


@pytest.mark.parametrize("options", [{}, {"scheduler": "chameleon", "cache": "chameleon"}])
def test_requests_wait_in_the_queue_of_one_instance_as_on_one_gpu(options: dict[str, str]) -> None:
    workload = even(24, 60.0, (8, 64))
    settings = {"a_max": 8, "s_max": 64, **options}
    alone = simulate_detailed(workload, PROFILE, duration_s=MINUTE, seed=3, **settings)
    cluster = simulate_cluster(workload, [Instance(PROFILE, **settings)], duration_s=MINUTE, seed=3)
    queue_s = cluster.requests.queue_s
    np.testing.assert_allclose(queue_s, alone.requests.queue_s, atol=1e-9)
    assert np.nanmax(queue_s) > 0.1
    answered = ~np.isnan(cluster.requests.ttft_s)
    assert (queue_s[answered] <= cluster.requests.ttft_s[answered]).all()


def test_a_cluster_s_totals_are_those_of_its_instances() -> None:
    result = simulate_cluster(even(24, 20.0, (8, 64)), same(3), router="random", duration_s=MINUTE)
    for name in ("submitted", "completed", "rejected", "steps", "adapter_loads", "kv_tokens"):
        assert getattr(result, name) == sum(getattr(one, name) for one in result.instances), name
    for name in ("throughput_tok_s", "input_tok_s", "output_tok_s", "offered_tok_s"):
        total = sum(getattr(one, name) for one in result.instances)
        assert getattr(result, name) == pytest.approx(total), name
    assert result.running_max == max(one.running_max for one in result.instances)
    assert result.submitted == sum(result.requests_per_instance)
    finished = ~np.isnan(result.requests.tpt_ms)
    assert finished.sum() == result.completed
    assert result.tpt_ms_mean == pytest.approx(result.requests.tpt_ms[finished].mean())
    assert result.ttft_s_p99 == pytest.approx(np.quantile(result.requests.ttft_s[finished], 0.99), rel=0.02)


def test_instances_may_differ_in_model_gpu_and_engine() -> None:
    """Overall metrics combine instances with different overheads outside the engine."""
    workload = even(12, 8.0)
    instances = [
        Instance(PROFILE, a_max=4, s_max=8, max_model_len=600),
        Instance(OTHER, a_max=12, s_max=16, rules="capplan", max_num_seqs=16),
        Instance(OTHER, a_max=2, s_max=16, rules="vllm-0.32-async", prefix_caching=True),
    ]
    result = simulate_cluster(workload, instances, router="least-loaded", duration_s=MINUTE)
    weights = [one.completed for one in result.instances]
    means = [one.ttft_s_mean for one in result.instances]
    assert result.ttft_s_mean == pytest.approx(np.average(means, weights=weights))
    means = [one.tpt_ms_mean for one in result.instances]
    assert result.tpt_ms_mean == pytest.approx(np.average(means, weights=weights))


def test_unfinished_requests_do_not_attain_a_bound() -> None:
    overloaded = simulate_cluster(even(4, 60.0), same(1, max_num_seqs=8), duration_s=MINUTE)
    assert overloaded.attainment(1e12) == pytest.approx(overloaded.completed / overloaded.submitted)
    assert overloaded.attainment(0.0) == 0.0
    assert overloaded.starved


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 8}, {"max_in_flight": 20}])
def test_the_bound_relative_to_the_base_model_is_that_of_one_gpu(limits: dict[str, int]) -> None:
    workload = even(24, 12.0, (8, 64)).replace(slo=Slo(tpt_over_base=1.5, attainment=0.9))
    settings = {"a_max": 8, "s_max": 64, **limits}
    alone = simulate_detailed(workload, PROFILE, duration_s=MINUTE, seed=3, **settings)
    cluster = simulate_cluster(workload, [Instance(PROFILE, **settings)], duration_s=MINUTE, seed=3)
    (one,) = (each for each in alone.slo if each.bound == "tpt_over_base")
    (together,) = cluster.tpt_over_base
    assert replace(together, value=0.0) == replace(one, value=0.0)


def test_shares_are_kept_in_the_long_run() -> None:
    workload = even(1, 40.0)
    instances = [Instance(PROFILE, a_max=1, s_max=8, adapters={"a0": share}) for share in (0.5, 0.3, 0.2)]
    drawn = simulate_cluster(workload, instances, duration_s=200.0)
    smooth = simulate_cluster(workload, instances, router="smooth-shares", duration_s=200.0)
    even_shares = np.array([0.5, 0.3, 0.2]) * smooth.submitted
    assert np.all(np.abs(smooth.requests_per_instance - even_shares) < 2)
    expected = np.array([0.5, 0.3, 0.2]) * drawn.submitted
    chi_square = ((np.array(drawn.requests_per_instance) - expected) ** 2 / expected).sum()
    assert chi_square < 13.8  # 0.1 % of samples are beyond


def test_the_first_requests_of_many_adapters_do_not_all_go_to_one_instance() -> None:
    result = simulate_cluster(even(300, 5.0), same(3), router="smooth-shares", duration_s=MINUTE)
    assert max(result.requests_per_instance) < 0.45 * result.submitted


def test_the_reference_without_adapters_has_the_same_requests_and_is_faster() -> None:
    workload, instances = even(24, 20.0, (8, 64)), same(2)
    with_lora = simulate_cluster(workload, instances, router="least-loaded", duration_s=MINUTE)
    without = simulate_without_adapters(workload, instances, duration_s=MINUTE)
    assert without.submitted == with_lora.submitted
    assert without.adapter_loads == 0
    assert without.tpt_ms_mean < with_lora.tpt_ms_mean


def test_invalid_input_is_named() -> None:
    workload, one = even(3, 1.0), same(1)
    with pytest.raises(
        InputError, match=r"router: must be one of plan-shares, .*least-work-left.* \(got 'rand'\)"
    ):
        simulate_cluster(workload, one, router="rand")
    with pytest.raises(InputError, match="instances: must be at least one instance"):
        simulate_cluster(workload, [])
    with pytest.raises(InputError, match=r"instances\[0\].adapters: must be an adapter of the workload"):
        simulate_cluster(workload, [replace(one[0], adapters={"nobody": 1.0})])
    with pytest.raises(InputError, match=r"instances: must be held by an instance .*a1"):
        simulate_cluster(workload, [replace(one[0], adapters={"a0": 1.0, "a2": 1.0})])
    with pytest.raises(InputError, match=r"Instance.adapters\[a0\]: must be a finite number >= 0"):
        replace(one[0], adapters={"a0": -1.0})
    with pytest.raises(InputError, match="duration_s: must be a finite number > 0"):
        simulate_cluster(workload, one, duration_s=0.0)
    with pytest.raises(InputError, match="a_max: must be a whole number"):
        simulate_cluster(workload, same(1, a_max=0))
    with pytest.raises(InfeasibleError) as refused:
        simulate_cluster(workload, same(1, a_max=500))
    assert refused.value.reason == "memory"
    model = Performance(0.0, 1.0, 0.0, 1.0)
    with pytest.raises(InputError, match="one for each of 1 instances"):
        simulate_cluster(workload, one, router=Toppings(performance=[model, model]))
    for bad, message in (
        (lambda: Toppings("sgmv"), "must be bgmv or mbgmv"),
        (lambda: Toppings(slo_ms=0.0), "must be a number > 0"),
        (lambda: Dlora(period_s=0.0), "Dlora.period_s"),
        (lambda: Gateway(queue=-1.0), "Gateway.queue"),
    ):
        with pytest.raises(InputError, match=message):
            bad()


def test_a_recorded_trace_is_replayed_as_on_one_gpu() -> None:
    """Its arrays cannot be written to, nor do they change."""
    drawn = even(6, 5.0)
    numbers = np.arange(200)
    trace = Trace.from_arrays(
        arrival_s=numbers * 0.1,
        adapter=[f"a{i % 6}" for i in numbers],
        prompt_tokens=50 + numbers,
        output_tokens=20 + numbers % 50,
    )
    workload = drawn.model_copy(update={"trace": trace})
    alone = simulate(workload, PROFILE, a_max=4, s_max=8, duration_s=MINUTE)
    one = simulate_cluster(workload, [Instance(PROFILE, a_max=4, s_max=8)], duration_s=MINUTE)
    assert as_single(one) == as_single(alone)
    names = [adapter.name for adapter in workload.adapters]
    halves = [
        Instance(PROFILE, a_max=4, s_max=8, adapters=dict.fromkeys(half, 1.0))
        for half in (names[:3], names[3:])
    ]
    two = simulate_cluster(workload, halves, duration_s=MINUTE)
    in_first = int((numbers % 6 < 3).sum())
    assert two.requests_per_instance == (in_first, 200 - in_first)


def test_an_adapter_has_the_length_correlation_of_the_instance_that_serves_it() -> None:
    """Of several instances, that of the largest share; a correlation of the workload holds for all."""
    workload, other = even(3, 12.0), PROFILE.replace(length_correlation=-0.6)
    instances = [
        Instance(PROFILE, a_max=2, s_max=8, adapters={"a0": 1.0, "a1": 0.6}),
        Instance(other, a_max=2, s_max=8, adapters={"a1": 0.4, "a2": 1.0}),
    ]
    requests = build_cluster(workload, instances, MINUTE, 1).requests
    longest = PROFILE.model.default_max_model_len
    plain, correlated = (draw_for(workload, each, MINUTE, 1, longest) for each in (PROFILE, other))
    last = requests.adapter == 3
    assert (plain.output_tokens[last] != correlated.output_tokens[last]).any()
    for name in ("prompt_tokens", "output_tokens"):
        expected = np.where(last, getattr(correlated, name), getattr(plain, name))
        assert (getattr(requests, name) == expected).all()
    given = workload.replace(length_correlation=0.3)
    drawn = draw_for(given, PROFILE, MINUTE, 1, longest)
    assert (build_cluster(given, instances, MINUTE, 1).requests.output_tokens == drawn.output_tokens).all()


def test_an_interrupt_ends_a_simulation_and_changes_nothing_otherwise() -> None:
    workload, calls = even(24, 12.0, (8, 64)), []
    for router in ("smooth-shares", "least-loaded"):
        plain = simulate_cluster(workload, same(2), router=router, duration_s=10 * MINUTE)
        watched = simulate_cluster(
            workload, same(2), router=router, duration_s=10 * MINUTE, interrupt=lambda: calls.append(1)
        )
        assert as_single(watched) == as_single(plain)
        assert len(calls) >= 5, "every simulated minute, or sooner where simulation is slow"
        calls.clear()

    def stop() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        simulate_cluster(workload, same(2), duration_s=10 * MINUTE, interrupt=stop)
