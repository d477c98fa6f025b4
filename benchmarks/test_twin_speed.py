"""How fast the twin and its surrogate answer; ``python -m pytest benchmarks --benchmark-only``."""

from __future__ import annotations

import resource
import sys

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from sklearn.ensemble import RandomForestRegressor

from capplan import Adapter, Lengths, Workload, load_profile, simulate
from capplan.models.forest import flatten_forest, forest_answer
from capplan.twin import SimulationResult

PROFILE = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")
HOUR_S = 3600.0
MIN_TIMES_REAL_TIME = 2000.0


def workload(adapters: int, total_rps: float) -> Workload:
    """Return adapters of rank 8 that share the rate evenly, with the lengths of chats."""
    each = total_rps / adapters
    return Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        adapters=tuple(Adapter(name=f"a{i}", rank=8, rate_rps=each) for i in range(adapters)),
        prompt_tokens=Lengths(mean=223, std=245),
        output_tokens=Lengths(mean=194, std=206),
    )


def hour(adapters: int, total_rps: float) -> SimulationResult:
    return simulate(
        workload(adapters, total_rps),
        PROFILE,
        a_max=min(64, adapters),
        s_max=8,
        duration_s=HOUR_S,
        max_num_seqs=512,
    )


def peak_rss_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def time_hour(benchmark: BenchmarkFixture, adapters: int, total_rps: float) -> SimulationResult:
    hour(adapters, total_rps)  # compile first
    result: SimulationResult = benchmark.pedantic(hour, (adapters, total_rps), rounds=5)  # type: ignore[no-untyped-call]
    assert benchmark.stats is not None
    median_s: float = benchmark.stats.stats.median
    benchmark.extra_info |= {
        "times_real_time": round(HOUR_S / median_s),
        "steps": result.steps,
        "requests": result.submitted,
        "ns_per_step": round(1e9 * median_s / result.steps),
        "peak_rss_mb": round(peak_rss_mb()),
    }
    return result


def test_an_hour_of_128_adapters(benchmark: BenchmarkFixture) -> None:
    result = time_hour(benchmark, 128, 7.5)
    assert result.submitted == pytest.approx(7.5 * HOUR_S, rel=0.05)
    assert benchmark.extra_info["times_real_time"] > MIN_TIMES_REAL_TIME


@pytest.mark.parametrize("adapters", [16, 64, 256, 1024])
def test_an_hour_by_number_of_adapters(benchmark: BenchmarkFixture, adapters: int) -> None:
    time_hour(benchmark, adapters, 7.5)


@pytest.mark.parametrize("total_rps", [1.0, 4.0, 16.0, 64.0])
def test_an_hour_by_rate(benchmark: BenchmarkFixture, total_rps: float) -> None:
    time_hour(benchmark, 128, total_rps)


@pytest.fixture(scope="module")
def forest() -> tuple[RandomForestRegressor, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (5000, 20)).astype(np.float32)
    y = np.sin(6 * x[:, 0]) * x[:, 1] + x[:, 2] + rng.normal(0, 0.05, 5000)
    return RandomForestRegressor(64, min_samples_leaf=2, max_features=0.5, random_state=0).fit(x, y), x


def test_an_answer_of_the_compiled_forest(
    benchmark: BenchmarkFixture, forest: tuple[RandomForestRegressor, np.ndarray]
) -> None:
    model, x = forest
    flat = flatten_forest(model)
    answer = benchmark(forest_answer, flat, x[0])
    assert answer == pytest.approx(model.predict(x[:1])[0], rel=1e-6)


def test_an_answer_of_scikit_learn(
    benchmark: BenchmarkFixture, forest: tuple[RandomForestRegressor, np.ndarray]
) -> None:
    model, x = forest
    benchmark(model.predict, x[:1])
