"""Loading policies in the twin: a case computed by hand, and what holds for every workload."""

from typing import Any

import numpy as np
import pytest

from capplan import Profile, simulate
from capplan.errors import InfeasibleError, InputError
from capplan.planner.problem._evaluate import violated_bounds
from capplan.spec import Cache, CpuLora, Provenance, ProvenanceKind, Slo
from capplan.twin import simulate_detailed
from capplan.twin.instance import SimulationResult
from tests.oracle.loop import simulate_with_reference
from tests.twin.examples import profile, workload

SETTINGS: dict[str, Any] = {"a_max": 1, "duration_s": 1000.0, "scheduler": "fifo"}
LOADINGS = ("cached", "resident", "on-demand", "strawman", "assisted")


def assisted_profile(load_ms: float, **changes: float) -> Profile:
    """Return a profile whose steps of 4 layers take 40 ms, with cores that need 20 ms for a layer."""
    # One task per module and 64 tokens at rank 8: 64 x 8 x 512 = 0.262144 million multiplications.
    cores: dict[str, Any] = {"workers": 3, "tokens_per_task": 64, "task_base_ms": 0.0, "signal_ms": 1.0}
    cores |= {"ms_per_mmac": 20.0 / 0.262144} | changes
    source = Provenance(kind=ProvenanceKind.ROOFLINE, source="made up", command="none")
    made = profile(step_ms=40.0, load_ms=load_ms).replace(cpu_lora=CpuLora(**cores, provenance=source))
    return made.replace(engine=made.engine.replace(target_modules=("q_proj", "k_proj", "v_proj")))


def cache(loading: str) -> Cache:
    ahead = {} if loading in ("cached", "resident") else {"prefetch": "none"}
    return Cache.model_validate({"policy": "none", "loading": loading} | ahead)


def served(loading: str, load_ms: float = 30.0, rate_rps: float = 0.01, **more: Any) -> SimulationResult:
    load = workload(adapters=1, rate_rps=rate_rps)
    return simulate(load, assisted_profile(load_ms, **more), cache=cache(loading), **SETTINGS)


@pytest.mark.parametrize(
    ("loading", "load_ms", "ttft_ms"),
    [
        ("cached", 30.0, 40.0),
        ("resident", 30.0, 40.0),
        ("on-demand", 30.0, 70.0),
        ("strawman", 30.0, 70.0),
        # A layer takes 10 ms on the GPU, 21 by the cores, and its copy a quarter of the load. With 7.5 ms the
        # first layer is computed by the cores, the others are copied before their turn: 21 + 3 x 10.
        ("assisted", 30.0, 51.0),
        # With 15 ms one layer is copied while the cores compute the first, and none while the GPU computes
        # that one. With two layers on the cores, two are copied meanwhile: 2 x 21 + 2 x 10.
        ("assisted", 60.0, 62.0),
        ("assisted", 400.0, 84.0),
    ],
)
def test_a_request_alone(loading: str, load_ms: float, ttft_ms: float) -> None:
    result = served(loading, load_ms)
    assert result.completed > 3
    assert 1e3 * result.ttft_s_mean == pytest.approx(ttft_ms, abs=1e-4)
    assert result.interruption_count_p99 == (1 if load_ms > 100 else 0)  # its decoding waits for the copy
    decoding_ms = 15 * 40.0 + (400.0 - 84.0 if load_ms > 100 else 0.0)
    assert 1e3 * result.e2e_s_mean == pytest.approx(ttft_ms + decoding_ms, abs=1e-3)


def test_few_cores_take_turns() -> None:
    # One core computes three layers in 3 x 61 ms; meanwhile the last one is copied.
    assert 1e3 * served("assisted", 400.0, workers=1).ttft_s_mean == pytest.approx(193.0, abs=1e-4)
    small = served("assisted", 400.0, workers=3, tokens_per_task=32)  # twice the tasks, each half as long
    assert 1e3 * small.ttft_s_mean == pytest.approx(84.0, abs=1e-4)


def test_policies_are_in_the_papers_order() -> None:
    """Under load: on demand pauses decoding longest, the strawman least; assistance is between."""
    load = workload(adapters=12, rate_rps=0.25, output=40)
    results = {
        name: simulate(load, assisted_profile(50.0), cache=cache(name), **SETTINGS) for name in LOADINGS
    }
    ttft = {name: result.ttft_s_mean for name, result in results.items()}
    share = {name: result.interruption_share_mean for name, result in results.items()}
    assert ttft["cached"] == ttft["resident"] < ttft["assisted"] < ttft["on-demand"]
    assert ttft["assisted"] < ttft["strawman"]
    assert share["cached"] < share["assisted"] < share["on-demand"]
    assert share["strawman"] < share["on-demand"]
    assert results["cached"].adapter_loads == 0 < results["assisted"].adapter_loads


@pytest.mark.parametrize("loading", LOADINGS)
def test_the_reference_gives_the_same_result(loading: str) -> None:
    load = workload(adapters=6, rate_rps=0.4, output=30)
    settings = SETTINGS | {"duration_s": 60.0, "cache": cache(loading)}
    ours = simulate(load, assisted_profile(35.0), **settings).document()
    theirs = simulate_with_reference(load, assisted_profile(35.0), **settings).document()
    for name in set(ours) - {"wall_s"}:
        np.testing.assert_equal(ours[name], theirs[name], err_msg=name)


def test_bounds_on_interruptions_are_kept_or_broken() -> None:
    load = workload(adapters=12, rate_rps=0.25, output=40)
    found = simulate(load, assisted_profile(50.0), cache=cache("on-demand"), **SETTINGS)
    for share, broken in ((0.5 * found.interruption_share_mean, True), (0.99, False)):
        bounded = load.replace(slo=Slo(interruption_mean_share=share, interruption_p95_count=10_000.0))
        detail = simulate_detailed(bounded, assisted_profile(50.0), cache=cache("on-demand"), **SETTINGS)
        kept = {each.bound: each for each in detail.slo}
        assert kept["interruption_mean_share"].value == found.interruption_share_mean
        assert (kept["interruption_mean_share"].broken > found.completed / 4) == broken
        assert kept["interruption_p95_count"].broken == 0
        assert bool(violated_bounds(bounded.slo, detail.result)) == broken


def test_what_cannot_be_is_refused() -> None:
    load = workload(adapters=1, rate_rps=0.01)
    with pytest.raises(InputError, match="cpu-lora"):
        simulate(load, profile(), cache=cache("assisted"), **SETTINGS)
    crowded = workload(adapters=4000, rate_rps=0.001, rank=64)
    with pytest.raises(InfeasibleError, match="4000 resident adapters leave 0 of"):
        simulate(crowded, profile(), cache=cache("resident"), **SETTINGS)
    assert simulate(crowded, profile(), cache=cache("cached"), **SETTINGS).completed > 0
