"""Traffic of the base model in the twin: no slot, no load, no LoRA term, any instance."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import InputError, SimulationResult, Workload, simulate, simulate_detailed
from capplan.serving import RULES, serving_rules
from capplan.serving.routers import ROUTERS
from capplan.spec import BaseTraffic, Trace
from capplan.twin import Scenario
from capplan.twin.cluster import Instance, simulate_cluster
from tests.models.memory import kv_tokens
from tests.oracle import simulate_with_reference
from tests.twin.comparison import assert_forms_agree
from tests.twin.examples import profile, workload
from tests.twin.scenarios import scenarios

NAMES = [rules.name for rules in RULES]
MODEL = "org/tiny"
SETTINGS: dict[str, Any] = {"duration_s": 60.0, "max_model_len": 512}


def mixed(base_rps: float = 2.0, **changes: Any) -> Workload:
    return workload(**changes).replace(base=BaseTraffic(rate_rps=base_rps))


def base_only(base_rps: float = 2.0) -> Workload:
    return mixed(base_rps).replace(adapters=())


def answer(served: Workload, twin: Any = simulate, **changes: Any) -> SimulationResult:
    result = twin(served, profile(load_ms=5.0, disk_ms=20.0), **(SETTINGS | changes))
    return dataclasses.replace(result, wall_s=0.0)


def without_lora(scenario: Scenario) -> Scenario:
    """Return the scenario with every request for the base model, on an engine without slots."""
    costs, none = scenario.costs, np.zeros_like(scenario.requests.adapter)
    first = {name: getattr(costs, name)[:1] for name in ("load_ns", "disk_ns", "rank", "pages")}
    return scenario._replace(
        requests=scenario.requests._replace(adapter=none),
        limits=scenario.limits._replace(max_loras=0),
        costs=costs._replace(a_max=0, s_max=0, slots_per_adapter=1.0, **first),
    )


@settings(max_examples=40)
@given(scenarios())
def test_compiled_and_reference_twin_agree_on_an_engine_without_lora(scenario: Scenario) -> None:
    assert_forms_agree(without_lora(scenario))


@pytest.mark.parametrize("rules", NAMES)
def test_an_engine_without_lora_gives_the_memory_of_slots_to_kv(rules: str) -> None:
    result = answer(base_only(), a_max=0, s_max=0, rules=rules)
    np.testing.assert_equal(result.document(), answer(base_only(), a_max=0, rules=rules).document())
    assert result.kv_tokens == kv_tokens(profile(), 0, 0, 0.9, 256)
    assert (result.adapter_loads, result.adapters_mean) == (0, 0.0)
    assert result.completed > 80
    if not serving_rules(rules).unified_memory:
        assert result.kv_tokens > answer(base_only(), a_max=4, s_max=8, rules=rules).kv_tokens


@settings(max_examples=24)
@given(
    rules=st.sampled_from(NAMES),
    seed=st.integers(0, 9),
    a_max=st.integers(1, 5),
    base_rps=st.floats(0, 6),
    seqs=st.integers(1, 12),
)
def test_mixed_traffic_is_served_as_by_the_reference_and_none_is_lost(
    rules: str, seed: int, a_max: int, base_rps: float, seqs: int
) -> None:
    served = mixed(base_rps)
    fields = {"a_max": a_max, "seed": seed, "rules": rules, "max_num_seqs": seqs, "duration_s": 10.0}
    compiled = answer(served, **fields)
    assert repr(compiled) == repr(answer(served, twin=simulate_with_reference, **fields))
    detail = simulate_detailed(served, profile(), **(SETTINGS | fields))
    table = detail.requests
    assert len(table) == compiled.submitted == sum(np.bincount(table.status, minlength=4))
    assert np.all(table.rank[table.adapter == 0] == 0)
    names = {"": detail.by_adapter.get("")} | dict(detail.by_adapter)
    assert sum(group.submitted for group in names.values() if group) == compiled.submitted


@pytest.mark.parametrize("rules", NAMES)
def test_base_traffic_loads_no_adapter(rules: str) -> None:
    fields = {"a_max": 4, "rules": rules, "max_num_seqs": 64}
    if rules not in ("slora", "chameleon"):  # which drop an adapter as soon as no request uses it
        assert answer(mixed(), **fields).adapter_loads == answer(workload(), **fields).adapter_loads == 4
    assert answer(base_only(), **fields).adapter_loads == 0


@pytest.mark.parametrize("rules", [name for name in NAMES if name not in ("slora", "chameleon")])
def test_a_base_request_never_waits_for_a_slot(rules: str) -> None:
    """While a long request has the only slot, a request of another adapter waits."""

    def ttft_s(name: str) -> float:
        trace = Trace.from_arrays([0.0, 0.05], ["a0", name], [8, 8], [100, 4])
        served = mixed().replace(trace=trace)
        detail = simulate_detailed(served, profile(), a_max=1, rules=rules, **SETTINGS)
        return float(detail.requests.ttft_s[1])

    assert ttft_s(MODEL) < 0.1
    assert ttft_s("a1") > 0.9


@pytest.mark.parametrize(
    ("served", "settings_", "message"),
    [
        (workload(), {"a_max": 0}, "a_max: must be a whole number from 1"),
        (mixed(), {"a_max": 0, "s_max": 0}, "a_max: must be a whole number from 1"),
        (base_only(), {"a_max": 0, "s_max": 8}, "s_max: must be 0 without slots (got 8)"),
        (base_only(), {"a_max": 4, "s_max": 0}, "s_max: must be at least 1 (got 0)"),
        (base_only(), {"a_max": -1}, "a_max: must be a whole number from 0"),
    ],
)
def test_slots_that_do_not_go_with_the_workload_are_refused(
    served: Workload, settings_: dict[str, int], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        answer(served, **settings_)
    assert message in str(caught.value)


def instances(*shares: dict[str, float], **changes: Any) -> list[Instance]:
    slots = [1 if set(share) - {MODEL} else 0 for share in shares]
    return [
        Instance(profile(), a_max=n, s_max=8 * n, max_model_len=512, adapters=share, **changes)
        for n, share in zip(slots, shares, strict=True)
    ]


@pytest.mark.parametrize("router", ROUTERS)
def test_base_requests_go_to_any_instance_also_one_without_adapters(router: str) -> None:
    served = mixed(adapters=2)
    placed = instances({"a0": 1.0, MODEL: 0.25}, {"a1": 1.0}, {MODEL: 0.75})
    result = simulate_cluster(served, placed, router=router, duration_s=60.0)
    assert sum(result.requests_per_instance) == result.submitted
    base = result.requests.instance[result.requests.adapter == 0]
    share = np.bincount(base, minlength=3) / base.size
    if router in ("plan-shares", "smooth-shares"):
        np.testing.assert_allclose(share, [0.25, 0.0, 0.75], atol=0.1)
    assert result.instances[2].adapter_loads == 0
    assert np.all(result.requests.instance[result.requests.adapter == 1] == 0)


def test_one_instance_of_a_cluster_is_the_engine_alone() -> None:
    served = mixed(base_rps=6.0)
    placed = [Instance(profile(), a_max=2, s_max=8, max_model_len=512)]
    alone = simulate(served, profile(), a_max=2, s_max=8, **SETTINGS)
    cluster = simulate_cluster(served, placed, router="smooth-shares", duration_s=60.0)
    assert dataclasses.replace(cluster.instances[0], wall_s=0.0) == dataclasses.replace(alone, wall_s=0.0)
