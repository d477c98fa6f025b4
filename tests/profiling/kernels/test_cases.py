"""Batches of the grids, and the sampling of their medians."""

from collections import Counter
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError
from capplan.profiling.kernels import SamplingLimits
from capplan.profiling.kernels._measure import (
    GRIDS,
    MIN_PASSES,
    Case,
    KernelPoint,
    KernelTiming,
    cases,
    relative_error,
    rounds,
)

SEEDS = st.integers(0, 10_000)


@given(SEEDS)
def test_the_grid_of_the_paper_has_its_batches_and_ranks(seed: int) -> None:
    grid = cases("paper", seed)
    assert {case.requests for case in grid} == set(range(4, 33, 4))
    assert {rank for case in grid for rank in case.ranks} == {8, 16, 32, 64}
    assert all(case.tokens == case.requests == len(case.ranks) for case in grid)


@given(SEEDS)
def test_mixes_separate_the_largest_rank_from_the_sum(seed: int) -> None:
    for _, same_batch in groupby(cases("paper", seed), key=lambda case: case.requests):
        padded_as_64 = [sum(case.ranks) for case in same_batch if max(case.ranks) == 64]
        assert min(padded_as_64) < 0.5 * max(padded_as_64)


@pytest.mark.parametrize("grid", GRIDS)
def test_names_of_cases_are_unique(grid: str) -> None:
    names = [case.name for case in cases(grid)]
    assert len(set(names)) == len(names)


def test_the_wide_grid_includes_the_papers_and_the_required_range() -> None:
    wide = cases("wide")
    assert set(cases("paper")) < set(wide)
    assert {case.requests for case in wide} >= {1, 256}
    assert {rank for case in wide for rank in case.ranks} >= {8, 128}
    assert {case.phase for case in wide} == {"decode", "prefill"}


def test_draws_of_a_batch_share_a_configuration() -> None:
    drawn = [case for case in cases("paper") if case.mix.startswith("drawn") and case.requests == 32]
    assert len(drawn) > 1
    assert len({case.ranks for case in drawn}) == len(drawn)
    assert len({case.configuration for case in drawn}) == 1


def test_shared_adapters_count_once_and_their_requests_each() -> None:
    case = Case("wide", "decode", "shared", 0, (8, 16), requests_each=4, tokens_each=3)
    assert (case.requests, case.tokens) == (8, 24)


def test_an_unknown_grid_is_refused_with_the_valid_names() -> None:
    with pytest.raises(InputError, match="paper, wide"):
        cases("papers")


def points(number: int) -> list[KernelPoint]:
    return [KernelPoint("grouped", 64, case) for case in cases("paper")[:number]]


def add_pass(point: KernelPoint, us: float) -> None:
    point.add(KernelTiming(us, False), KernelTiming(2.0 * us, False))


def test_stable_medians_converge_after_the_minimum_of_passes() -> None:
    every = points(7)
    for point in rounds(every, SamplingLimits(budget_s=1e9), seed=0):
        add_pass(point, 10.0)
    assert [point.passes for point in every] == [MIN_PASSES] * 7


def test_unstable_points_get_more_passes_up_to_the_limit() -> None:
    every = points(4)
    rng = np.random.default_rng(0)
    limits = SamplingLimits(budget_s=1e9, max_passes=30)
    for point in rounds(every, limits, seed=0):
        add_pass(point, 10.0 if point is not every[0] else float(rng.uniform(1.0, 100.0)))
    assert every[0].passes == 30
    assert [point.passes for point in every[1:]] == [MIN_PASSES] * 3


def test_the_budget_ends_sampling_with_equal_passes() -> None:
    every, clock_s = points(8), iter(range(10_000))
    rng = np.random.default_rng(1)
    counts: Counter[str] = Counter()
    for point in rounds(every, SamplingLimits(budget_s=100.0), seed=0, now_s=lambda: float(next(clock_s))):
        add_pass(point, float(rng.uniform(1.0, 100.0)))
        counts[point.case.name] += 1
    assert 90 <= counts.total() <= 100
    assert max(counts.values()) - min(counts.values()) <= 1


def test_without_budget_there_are_no_passes() -> None:
    assert list(rounds(points(3), SamplingLimits(budget_s=0.0), seed=0)) == []


@given(st.lists(st.floats(1.0, 1e6), min_size=2, max_size=30), st.floats(0.1, 100.0))
def test_the_error_of_a_median_has_no_unit(times: list[float], factor: float) -> None:
    scaled = [factor * each for each in times]
    assert relative_error(scaled) == pytest.approx(relative_error(times), rel=1e-6, abs=1e-12)
    assert relative_error(times * 4) <= relative_error(times) + 1e-12
