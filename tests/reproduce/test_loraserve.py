"""LoRAServe's experiments: servers, workloads, placements, percentiles."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.reproduce.loraserve._figures import (
    CONTIGUOUS,
    LORASERVE,
    RANDOM,
    TOPPINGS,
    Alone,
    Run,
    Scene,
    alone,
    held,
    serve,
    served,
)
from capplan.reproduce.loraserve._setting import server, setting

POINTS = tuple(zip(setting().ranks, (5500.0, 5400.0, 5250.0, 5000.0, 4500.0), strict=True))


@pytest.mark.parametrize("model", ["llama-7b", "llama-30b", "llama-2-70b"])
@pytest.mark.parametrize("rank", [8, 128])
def test_a_prompt_alone_takes_the_time_of_the_authors_sweep(model: str, rank: int) -> None:
    terms = setting().sweeps[model]
    profile = server(model, terms.tp, "sweeps")
    found = alone(Alone((rank,), 0.02, 0, 1000, 48, model, terms.tp, "sweeps", "deterministic"))
    load_ms = profile.loading.value("gpu_base_ms") + rank * profile.loading.value("gpu_ms_per_rank")
    line_ms = terms.step_ms + terms.prompt_ms + terms.ms_per_ktoken + terms.ms_per_krank * rank
    assert line_ms - 1e-6 <= found["ttft_ms"] <= line_ms + load_ms + 1.0
    assert found["tbt_ms"] == pytest.approx(terms.step_ms, rel=0.01)


def test_work_by_rank_is_divided_by_the_gpus() -> None:
    two, four = (server("llama-7b", tp, "authors").step_latency for tp in (2, 4))
    for name in ("ms_per_prefill_krank", "ms_per_decode_krank"):
        assert two.value(name) == pytest.approx(2.0 * four.value(name))


@given(st.sampled_from(sorted(setting().mixes)), st.integers(1, 3), st.floats(1.0, 100.0))
def test_a_mix_has_its_shares_at_every_rate_and_size(mix: str, copies: int, rps: float) -> None:
    own, load = setting().mixes[mix], Scene(mix, copies=copies).load(rps, 0)
    assert load.total_rate_rps == pytest.approx(rps)
    assert Counter(a.rank for a in load.adapters) == {
        rank: copies * count for rank, count in zip(setting().ranks, own.adapters, strict=True)
    }
    smallest = sum(a.rate_rps for a in load.adapters if a.rank == setting().ranks[0])
    assert smallest / rps == pytest.approx(own.shares[0] / sum(own.shares))


def test_requests_of_a_rank_go_round_its_adapters() -> None:
    few, many = (Scene(f"production-{adapters}").load(20.0, 3).trace for adapters in (50, 200))
    assert few is not None
    assert many is not None
    for column in ("arrival_ns", "prompt_tokens", "output_tokens"):
        np.testing.assert_array_equal(getattr(few, column), getattr(many, column))
    for trace in (few, many):
        counts = Counter(trace.names[i] for i in trace.adapter)
        for rank in setting().ranks:
            own = [number for name, number in counts.items() if name.startswith(f"r{rank}-")]
            assert max(own) - min(own) <= 1


@given(st.sampled_from([CONTIGUOUS, RANDOM]), st.integers(2, 12), st.integers(0, 99))
def test_a_static_placement_has_equally_many_adapters_on_each_server(
    system: str, servers: int, draw: int
) -> None:
    scene = Scene("uniform", servers=servers)
    load = scene.load(10.0, 0)
    placed = [list(own or ()) for own in held(Run(scene, system, (), 10.0, 0, draw), load)]
    assert sorted(name for own in placed for name in own) == sorted(a.name for a in load.adapters)
    assert max(map(len, placed)) - min(map(len, placed)) <= 1
    rank_of = {a.name: a.rank for a in load.adapters}
    if system == CONTIGUOUS:
        ranks = [rank_of[name] for own in placed for name in own]
        assert ranks == sorted(ranks)


@pytest.mark.long
def test_a_run_is_repeated_by_its_seed_and_rebalancing_follows_a_shift() -> None:
    run = Run(Scene("shifting"), LORASERVE, POINTS, 26.0, 0)
    found = served(run)
    assert served(run) == found
    assert found["p95_s"] < served(Run(run.scene, CONTIGUOUS, (), 26.0, 0))["p95_s"]
    assert serve(run).moves is not None


@pytest.mark.long
def test_toppings_needs_all_adapters_on_every_server_and_loraserve_few() -> None:
    adapters = {
        system: min(
            used for used, _ in served(Run(Scene("production-100"), system, POINTS, 20.0, 0))["emptiest"]
        )
        for system in (LORASERVE, TOPPINGS)
    }
    assert adapters[LORASERVE] < adapters[TOPPINGS] / 3
