"""Visits go on until medians stand still or the time is up, and meet all points alike."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.profiling.kernels.cases import (
    MIN_PASSES,
    KernelPoint,
    KernelTiming,
    SamplingLimits,
    cases,
    relative_error,
    rounds,
)


def points(number: int) -> list[KernelPoint]:
    return [KernelPoint("grouped", 64, case) for case in cases("paper")[:number]]


def add_pass(point: KernelPoint, us: float) -> None:
    point.add(KernelTiming(us, False), KernelTiming(2.0 * us, False))


def test_still_medians_are_settled_after_the_least_visits() -> None:
    every = points(7)
    for point in rounds(every, SamplingLimits(budget_s=1e9), seed=0):
        add_pass(point, 10.0)
    assert [point.passes for point in every] == [MIN_PASSES] * 7


def test_restless_spots_are_visited_more_often_but_not_for_ever() -> None:
    every = points(4)
    rng = np.random.default_rng(0)
    limits = SamplingLimits(budget_s=1e9, max_passes=30)
    for point in rounds(every, limits, seed=0):
        add_pass(point, 10.0 if point is not every[0] else float(rng.uniform(1.0, 100.0)))
    assert every[0].visits == 30
    assert [point.passes for point in every[1:]] == [MIN_PASSES] * 3


def test_the_budget_ends_it_with_all_spots_visited_alike() -> None:
    every, clock_s = points(8), iter(range(10_000))
    rng = np.random.default_rng(1)
    counts: Counter[str] = Counter()
    for point in rounds(every, SamplingLimits(budget_s=100.0), seed=0, now_s=lambda: float(next(clock_s))):
        add_pass(point, float(rng.uniform(1.0, 100.0)))
        counts[point.case.name] += 1
    assert 90 <= counts.total() <= 100
    assert max(counts.values()) - min(counts.values()) <= 1


def test_no_budget_means_no_visit() -> None:
    assert list(rounds(points(3), SamplingLimits(budget_s=0.0), seed=0)) == []


@given(st.lists(st.floats(1.0, 1e6), min_size=2, max_size=30), st.floats(0.1, 100.0))
def test_the_error_of_a_median_has_no_unit(times: list[float], factor: float) -> None:
    scaled = [factor * each for each in times]
    assert relative_error(scaled) == pytest.approx(relative_error(times), rel=1e-6, abs=1e-12)
    assert relative_error(times * 4) <= relative_error(times) + 1e-12
