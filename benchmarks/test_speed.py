"""Speed regressions: `make bench` times surrogates and the twin against their bars.

Bars are for one quiet core; a shared machine may be slower by `NOISE`. Memory, ratios within one run and
exponents of growth have no such margin.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import placement_growth as placement
from benchmarks import surrogate_latency as latency
from benchmarks import twin_speed as speed
from benchmarks.common import cpu_timed
from benchmarks.twin_speed import Case, Cost
from capplan.planner.problem._setup import make_problem

NOISE = 0.6
SCIKIT_OVER_COMPILED = 20.0  # one answer, from Python
MOST_NS_PER_DRAWN_REQUEST = 35 / NOISE
NEAR_LINEAR = 1.1  # exponent of CPU time in the number of requests
REFERENCE_OVER_COMPILED = 20.0
GREEDY_FAST_BAR_S = 1e-3


@pytest.fixture(scope="module")
def models() -> latency.Models:
    return latency.models()


def test_all_forms_give_the_same_answers(benchmark: BenchmarkFixture, models: latency.Models) -> None:
    expected = models.learned_tree.predict(models.rows)
    forms = latency.one_by_one(models)
    for name in ("compiled tree", "flat tree"):
        assert [forms[name](row) for row in models.rows] == expected.tolist()
    assert benchmark(models.tree.predict, models.rows).tolist() == expected.tolist()
    forest = [forms["forest"](row) for row in models.rows]
    assert forest == pytest.approx(models.learned_forest.predict(models.rows), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "bar_ns"), [("compiled tree", latency.TREE_BAR_NS), ("forest", latency.FOREST_BAR_NS)]
)
def test_an_answer_in_compiled_code(
    benchmark: BenchmarkFixture, models: latency.Models, name: str, bar_ns: float
) -> None:
    run = latency.in_compiled_code(models)[name]
    run()
    benchmark(run)
    found = 1e9 * float(np.median(benchmark.stats.stats.data)) / latency.ANSWERS
    benchmark.extra_info["ns_per_answer"] = round(found, 1)
    assert found <= bar_ns / NOISE


@pytest.mark.parametrize("name", ["tree", "forest"])
def test_an_answer_from_python_beside_scikit_learn(
    benchmark: BenchmarkFixture, models: latency.Models, name: str
) -> None:
    forms = latency.one_by_one(models)
    ours = forms["compiled tree" if name == "tree" else "forest"]
    rows = itertools.cycle(models.rows)
    benchmark(lambda: ours(next(rows)))
    others = latency.median_ns(lambda: forms[f"scikit-learn's {name}"](next(rows)), 1, 201)
    ratio = others / (1e9 * float(np.median(benchmark.stats.stats.data)))
    benchmark.extra_info["scikit_learn_over_compiled"] = round(ratio, 1)
    assert ratio > SCIKIT_OVER_COMPILED


def test_features_of_a_scenario(benchmark: BenchmarkFixture) -> None:
    drawn = itertools.cycle(latency.samples())
    benchmark.pedantic(  # type: ignore[no-untyped-call]
        lambda: next(drawn).features(latency.PROFILE), rounds=200, warmup_rounds=5
    )


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    speed.small_case().run()


def measure(benchmark: BenchmarkFixture, cases: list[Case], rounds: int = 1) -> Cost:
    result: Cost = benchmark.pedantic(speed.total, (cases,), rounds=rounds)  # type: ignore[no-untyped-call]
    benchmark.extra_info |= {
        "times_real_time": round(result.times_real_time),
        "requests": result.requests,
        "steps": result.steps,
        "ns_per_request": round(result.ns_per_request),
        "of_it_drawing": round(1e9 * result.drawing_s / result.requests),
    }
    return result


def test_the_grid_of_section_8_2(benchmark: BenchmarkFixture) -> None:
    result = measure(benchmark, [case for rates in speed.RATE_SETS for case in speed.grid(rates)])
    assert result.times_real_time >= NOISE * speed.GRID_BAR
    assert 1e9 * result.drawing_s / result.requests <= MOST_NS_PER_DRAWN_REQUEST


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_12_000_requests_at_20_per_second(benchmark: BenchmarkFixture, spread: float) -> None:
    result = measure(benchmark, list(speed.short_cases(spread)))
    assert result.requests == pytest.approx(20 * 12_000, rel=0.02)
    assert result.times_real_time >= NOISE * speed.SHORT_BAR


def test_peak_memory_of_400_000_arrivals(benchmark: BenchmarkFixture) -> None:
    peak_mb: float = benchmark.pedantic(speed.peak_rss_mb)  # type: ignore[no-untyped-call]
    benchmark.extra_info["peak_rss_mb"] = round(peak_mb)
    assert peak_mb < speed.RSS_BAR_MB


@pytest.mark.parametrize(
    "case",
    [case for family in (speed.by_adapters, speed.by_rate, speed.by_horizon) for case in family().values()],
    ids=lambda case: case.name,
)
def test_hours_by_adapters_rate_and_horizon(benchmark: BenchmarkFixture, case: Case) -> None:
    measure(benchmark, [case], rounds=3)


def test_time_grows_no_faster_than_requests(benchmark: BenchmarkFixture) -> None:
    """Over a 64-fold horizon, a 256-fold rate, and 10,000 adapters instead of 128 for the same requests."""

    def exponents() -> tuple[float, float, float]:
        adapters, rates, hours = (
            [speed.cost(case, 3) for case in family().values()]
            for family in (speed.by_adapters, speed.by_rate, speed.by_horizon)
        )
        return adapters[-1].cpu_s / adapters[1].cpu_s, speed.slope(rates), speed.slope(hours)

    ratio, by_rate, by_horizon = benchmark.pedantic(exponents)  # type: ignore[no-untyped-call]
    benchmark.extra_info |= {"10,000 / 128 adapters": ratio, "by rate": by_rate, "by horizon": by_horizon}
    assert ratio < 3.0
    assert by_rate < NEAR_LINEAR
    assert by_horizon < NEAR_LINEAR


def test_the_compiled_twin_beside_the_reference(benchmark: BenchmarkFixture) -> None:
    small = speed.small_case()
    compiled = measure(benchmark, [small], rounds=5)
    reference_s, _ = cpu_timed(small.run_reference)
    benchmark.extra_info["reference_over_compiled"] = reference_s / compiled.cpu_s
    assert reference_s > REFERENCE_OVER_COMPILED * compiled.cpu_s


@pytest.mark.parametrize("spread", [0.0, 0.8], ids=["5 rates", "384 rates"])
def test_greedy_fast_places_384_adapters_on_4_gpus(benchmark: BenchmarkFixture, spread: float) -> None:
    """The fluid model adds up over distinct rates: the mixed set of the paper has five."""
    given = placement.workload(384, 4, placement.LOAD, spread)
    problem = make_problem(given, 4, None)
    assert len({adapter.rate_rps for adapter in given.adapters}) == (384 if spread else 5)
    solves_s: list[float] = []
    benchmark(lambda: solves_s.append(placement.solve_once(problem, "greedy-fast")[0].solve_s))
    found_s = float(np.median(solves_s))
    benchmark.extra_info["solve_ms"] = 1e3 * found_s
    assert found_s <= GREEDY_FAST_BAR_S / NOISE
