"""The twin with step tables: an additive profile as tables, and the pairs of prefill attention."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.step_tables import tabulated
from capplan import Adapter, Lengths, Profile, Workload, load_profile, simulate
from capplan.models import drawn_profiles, pessimistic_profile
from capplan.spec import StepTable
from tests.twin.examples import part, profile

LLAMA = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")


@pytest.mark.parametrize(("total_rps", "max_num_batched_tokens"), [(4.0, 2048), (60.0, 512)])
def test_an_additive_profile_as_tables_simulates_the_same(
    total_rps: float, max_num_batched_tokens: int
) -> None:
    """To rounding: a step of another nanosecond changes no decision of these runs, idle or overloaded."""
    workload = Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        adapters=[Adapter(name=f"a{i}", rank=16, rate_rps=total_rps / 48) for i in range(48)],
        prompt_tokens=Lengths(mean=400, std=500),
        output_tokens=Lengths(mean=150, std=150),
    )
    settings = {"a_max": 24, "s_max": 16, "max_num_batched_tokens": max_num_batched_tokens}
    plain, tables = (
        replace(simulate(workload, each, duration_s=120.0, **settings), wall_s=0.0).document()
        for each in (LLAMA, tabulated(LLAMA))
    )
    assert plain["steps"] > 1000
    assert tables == pytest.approx(plain, rel=1e-6)


def pairs_profile() -> Profile:
    """Return a profile whose steps take 1 ms, and 1 ms more per thousand pairs of prefill attention."""
    tables = {
        "tokens_ms": StepTable.of({"tokens": [1, 2]}, [1.0, 1.0]),
        "requests_ms": StepTable.of({"requests": [1, 2], "kv_tokens": [0, 1]}, [[0.0, 0.0]] * 2),
    }
    of_pairs = part("additive", ms_per_prefill_mpair=1000.0).replace(form="table", tables=tables)
    return profile().replace(step_latency=of_pairs)


def prefill_pairs(prompt: int, requests: int, **options: Any) -> float:
    """Return the pairs that requests of one adapter cost, one after another."""
    workload = Workload(
        base_model="org/tiny",
        adapters=[Adapter(name="a", rank=8, rate_rps=0.1)],
        prompt_tokens=Lengths(mean=prompt),
        output_tokens=Lengths(mean=4),
        arrivals="deterministic",
        shared_prefix_tokens=options.pop("shared", 0),
    )
    engine = {"a_max": 1, "s_max": 8, "max_model_len": 1024} | options
    result = simulate(workload, pairs_profile(), duration_s=10.0 * requests, **engine)
    assert result.completed == requests
    return 1e6 * (result.busy_fraction * result.duration_s - result.steps * 1e-3)


def test_a_prompt_costs_its_pairs_in_one_chunk_or_several() -> None:
    """Every token attends to those before it and itself, so chunks need the context of earlier ones."""
    whole = prefill_pairs(300, 1)
    assert whole == pytest.approx(300 * 301 / 2)
    assert prefill_pairs(300, 1, max_num_batched_tokens=128) == pytest.approx(whole)
    assert prefill_pairs(300, 3) == pytest.approx(3 * whole)


def test_cached_tokens_are_context() -> None:
    """A shared prefix of 16 blocks is computed once; later prompts compute 44 tokens that attend to all."""
    first, later = 300 * 301 / 2, 44 * (256 + 45 / 2)
    found = prefill_pairs(300, 3, shared=256, prefix_caching=True)
    assert found == pytest.approx(first + 2 * later)


def test_drawn_and_pessimistic_profiles_scale_tables_with_the_other_terms() -> None:
    tables = tabulated(LLAMA)
    slow = pessimistic_profile(tables, 0.9)
    factor = slow.step_latency.value("base_ms") / tables.step_latency.value("base_ms")
    assert factor > 1.01
    for made in (slow, *drawn_profiles(tables)):
        common = made.step_latency.value("ms_per_adapter") / tables.step_latency.value("ms_per_adapter")
        for name, table in made.step_latency.tables.items():
            assert table.grid_ms == pytest.approx(common * tables.step_latency.tables[name].grid_ms)
