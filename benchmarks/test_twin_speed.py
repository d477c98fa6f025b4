"""The twin's speed is kept: ``make bench``. Cases and bars are those of `benchmarks.twin_speed`.

Bars are for one quiet core. A shared machine may be slower by `NOISE`; what is asserted is the bar less that.
Memory, ratios within one run and exponents of growth need no such margin.
"""

from __future__ import annotations

from functools import partial

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import twin_speed as speed
from benchmarks.twin_speed import Case, Cost
from capplan.twin.reference import run_reference

NOISE = 0.6
MOST_NS_PER_DRAWN_REQUEST = 35 / NOISE
NEAR_LINEAR = 1.1  # exponent of CPU time in the number of requests
READABLE_OVER_COMPILED = 20.0


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    speed.small_case().run()


def measure(benchmark: BenchmarkFixture, cases: list[Case], rounds: int = 1) -> Cost:
    """Time all cases, one after the other, as one benchmark, and return the cost of its last round."""
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


@pytest.mark.parametrize("adapters", list(speed.by_adapters()))
def test_an_hour_by_number_of_adapters(benchmark: BenchmarkFixture, adapters: int) -> None:
    measure(benchmark, [speed.by_adapters()[adapters]], rounds=5)


@pytest.mark.parametrize("rate_rps", list(speed.by_rate()))
def test_an_hour_by_rate(benchmark: BenchmarkFixture, rate_rps: float) -> None:
    measure(benchmark, [speed.by_rate()[rate_rps]], rounds=5)


@pytest.mark.parametrize("hours", list(speed.by_horizon()))
def test_hours(benchmark: BenchmarkFixture, hours: float) -> None:
    measure(benchmark, [speed.by_horizon()[hours]], rounds=3)


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


def test_the_compiled_twin_beside_the_readable_one(benchmark: BenchmarkFixture) -> None:
    small = speed.small_case()
    compiled = measure(benchmark, [small], rounds=5)
    readable_s, _ = speed.timed(partial(small.run, run_reference))
    benchmark.extra_info["readable_over_compiled"] = readable_s / compiled.cpu_s
    assert readable_s > READABLE_OVER_COMPILED * compiled.cpu_s
