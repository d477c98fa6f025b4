"""Clusters of request sizes, and quotas of queues."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.serving.pooled._queue_design import (
    SAMPLE,
    QueueLoad,
    allocate_quotas,
    choose_clustering,
    classify,
    cluster_sizes,
    cut_offs,
    queue_loads,
    silhouette,
    subsample,
)

RULES = ("elbow", "wcss", "silhouette")
levels = st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 1.0])
some_sizes = st.lists(st.floats(0.0, 1.0) | levels, min_size=1, max_size=9).map(np.array)


def sum_of_squares(values: np.ndarray) -> float:
    return float(np.sum((values - values.mean()) ** 2))


def brute_force_wcss(sizes: np.ndarray, clusters: int) -> float:
    """Minimum over all assignments of sizes to clusters."""
    labels = itertools.product(range(clusters), repeat=sizes.size)
    return min(
        sum(sum_of_squares(sizes[np.array(each) == i]) for i in set(each))
        for each in labels
        if len(set(each)) == clusters
    )


@given(some_sizes.filter(lambda sizes: sizes.size <= 6), st.integers(1, 4))
def test_clusters_are_optimal_among_all_assignments(sizes: np.ndarray, most: int) -> None:
    for each in cluster_sizes(sizes, most):
        least = brute_force_wcss(sizes, len(each.centroids))
        assert each.wcss == pytest.approx(least, rel=1e-9, abs=1e-12)


@given(some_sizes, st.integers(1, 5))
def test_there_are_never_more_clusters_than_distinct_sizes(sizes: np.ndarray, most: int) -> None:
    found = cluster_sizes(sizes, most)
    assert [len(each.centroids) for each in found] == [*range(1, min(most, np.unique(sizes).size) + 1)]


@given(some_sizes)
def test_one_more_cluster_never_raises_the_sum_of_squares(sizes: np.ndarray) -> None:
    sums = [each.wcss for each in cluster_sizes(sizes, 6)]
    assert all(more <= fewer + 1e-12 for fewer, more in itertools.pairwise(sums))


@pytest.mark.parametrize("seed", range(3))
def test_clusters_are_optimal_among_all_intervals(seed: int) -> None:
    sizes = np.sort(np.random.default_rng(seed).lognormal(-3.0, 1.2, 60))
    borders = itertools.combinations(range(1, sizes.size), 2)
    least = min(sum(map(sum_of_squares, np.split(sizes, each))) for each in borders)
    assert cluster_sizes(sizes, 3)[2].wcss == pytest.approx(least, rel=1e-9)


@given(some_sizes, st.sampled_from(RULES))
def test_cut_offs_separate_the_clusters(sizes: np.ndarray, rule: str) -> None:
    chosen = choose_clustering(cluster_sizes(sizes, 4), sizes, rule)
    borders = cut_offs(chosen)
    queue = classify(sizes, borders)
    within = [sizes[queue == i] for i in range(len(chosen.centroids))]
    if all(each.size for each in within):  # sizes a rounding error apart can leave one empty
        assert sum(map(sum_of_squares, within)) == pytest.approx(chosen.wcss, rel=1e-9, abs=1e-12)


def test_a_size_equal_to_a_cut_off_goes_up() -> None:
    assert classify(np.array([0.1, 0.2, 0.3]), np.array([0.2])).tolist() == [0, 1, 1]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_finds_two_distinct_sizes(rule: str) -> None:
    sizes = np.repeat([0.1, 0.9], 20)
    chosen = choose_clustering(cluster_sizes(sizes, 4), sizes, rule)
    assert chosen.centroids == (0.1, 0.9)
    assert chosen.wcss == 0.0


def test_wcss_selects_the_maximum_number_of_clusters() -> None:
    sizes = np.random.default_rng(0).random(300)
    for most in (1, 2, 3, 4, 6):
        assert len(choose_clustering(cluster_sizes(sizes, most), sizes, "wcss").centroids) == most


def test_elbow_finds_separated_clusters() -> None:
    rng = np.random.default_rng(1)
    sizes = np.concatenate([rng.normal(centre, 0.005, 200) for centre in (0.1, 0.5, 0.9)])
    assert len(choose_clustering(cluster_sizes(sizes, 6), sizes, "elbow").centroids) == 3


@given(some_sizes)
def test_silhouettes_are_between_0_and_1(sizes: np.ndarray) -> None:
    for each in cluster_sizes(sizes, 4)[1:]:
        assert 0.0 <= silhouette(each, sizes) <= 1.0


@given(st.integers(1, 3 * SAMPLE))
def test_a_subsample_keeps_extremes_and_order(count: int) -> None:
    sizes = np.random.default_rng(count).random(count)
    kept = subsample(sizes)
    assert kept.size == min(count, SAMPLE)
    assert (kept[0], kept[-1]) == (sizes.min(), sizes.max())
    assert np.all(np.diff(kept) >= 0)


RESTS = ("minimum", "load", "rate")


@st.composite
def queue_load(draw: st.DrawFn) -> QueueLoad:
    largest = draw(st.integers(2, 20_000))
    mean = draw(st.floats(2.0, largest))
    return QueueLoad(
        rate_rps=draw(st.floats(1e-6, 50.0)),
        size_tokens=draw(st.floats(mean, largest)),
        mean_tokens=mean,
        largest_tokens=largest,
        execution_s=draw(st.floats(1e-3, 200.0)),
    )


several = st.lists(queue_load(), min_size=1, max_size=4)
bounds = st.floats(0.1, 100.0)
percentiles = st.none() | st.sampled_from([0.5, 0.95, 0.99])


def needed(queues: Sequence[QueueLoad], bound_s: float, percentile: float | None) -> list[int]:
    return [max(each.least_tokens(bound_s, percentile), each.largest_tokens) for each in queues]


@given(several, bounds, percentiles, st.sampled_from(RESTS), st.integers(0, 10**6))
def test_quotas_sum_to_all_tokens_and_keep_their_minima(
    queues: list[QueueLoad], bound_s: float, percentile: float | None, rest: str, spare: int
) -> None:
    least = needed(queues, bound_s, percentile)
    tokens = sum(least) + spare
    made = allocate_quotas(queues, tokens, bound_s, percentile=percentile, rest=rest)  # type: ignore[arg-type]
    quotas, missing = made
    assert missing == 0
    assert sum(quotas) == tokens
    assert all(quota >= minimum for quota, minimum in zip(quotas, least, strict=True))


@given(several, bounds, percentiles, st.floats(0.0, 1.0))
def test_quotas_that_do_not_fit_sum_to_all_tokens_and_hold_the_largest_requests_if_these_fit(
    queues: list[QueueLoad], bound_s: float, percentile: float | None, share: float
) -> None:
    least = needed(queues, bound_s, percentile)
    tokens = max(len(queues), int(share * (sum(least) - 1)))
    quotas, missing = allocate_quotas(queues, tokens, bound_s, percentile=percentile)
    assert missing == max(0, sum(least) - tokens)
    assert sum(quotas) == tokens
    assert min(quotas) >= 1
    largest = [each.largest_tokens for each in queues]
    if sum(largest) <= tokens:
        for quota, low, high in zip(quotas, largest, least, strict=True):
            assert low <= quota <= high + 1


@given(queue_load(), bounds)
def test_the_minimum_keeps_the_mean_time_within_the_bound(load: QueueLoad, bound_s: float) -> None:
    rate = load.least_tokens(bound_s) / (load.size_tokens * load.execution_s)
    assert rate > load.rate_rps
    assert 1.0 / (rate - load.rate_rps) <= bound_s * (1.0 + 1e-9)


@given(queue_load(), bounds, st.floats(0.01, 0.999))
def test_the_minimum_keeps_a_percentile_within_the_bound(
    load: QueueLoad, bound_s: float, percentile: float
) -> None:
    rate = load.least_tokens(bound_s, percentile) / (load.size_tokens * load.execution_s)
    assert 1.0 - math.exp(-(rate - load.rate_rps) * bound_s) >= percentile - 1e-9


def load(rate_rps: float, tokens: int, execution_s: float) -> QueueLoad:
    return QueueLoad(rate_rps, tokens, tokens / 2, tokens, execution_s)


@pytest.mark.parametrize(
    ("rest", "quotas"),
    [
        # Minima are 100 x 2 x (0.5 + 3) = 700 and 300 x 10 x (0.5 + 1) = 4500; 2600 of the 7800 are left.
        ("minimum", (1050, 6750)),
        # Mean loads are 3 x 50 x 2 = 300 and 1 x 150 x 10 = 1500.
        ("load", (700 + 433, 4500 + 2167)),
        # Rates are 3 and 1.
        ("rate", (700 + 1950, 4500 + 650)),
    ],
)
def test_the_rest_is_divided_by_weight(rest: str, quotas: tuple[int, int]) -> None:
    two = (load(3.0, 100, 2.0), load(1.0, 300, 10.0))
    assert allocate_quotas(two, 7800, 2.0, rest=rest).tokens == quotas  # type: ignore[arg-type]


def test_minima_as_weights_scale_the_minima() -> None:
    """Quotas are Tok_min x Tok_total / sum of Tok_min, as in the paper."""
    queues = (load(5.0, 400, 1.0), load(2.0, 900, 3.0), load(0.5, 4000, 9.0))
    least = [each.least_tokens(4.0) for each in queues]
    quotas = allocate_quotas(queues, 3 * sum(least), 4.0).tokens
    assert quotas == pytest.approx([3 * each for each in least], abs=1)


def test_the_representative_size_of_a_queue() -> None:
    charges, alone = np.array([100] * 98 + [700, 9000]), np.zeros(100, np.int64)
    sizes = {
        size: queue_loads(charges, np.ones(100), alone, 4.0, size)[0].size_tokens  # type: ignore[arg-type]
        for size in ("max", "p99", "mean")
    }
    assert sizes["max"] == 9000
    assert sizes["p99"] == np.percentile(charges, 99)
    assert sizes["mean"] == 195.0


def test_a_queue_without_known_times_uses_those_of_other_queues() -> None:
    times = np.array([2.0, 4.0, np.nan, np.nan])
    loads = queue_loads(np.array([10, 10, 90, 90]), times, np.array([0, 0, 1, 1]), 4.0, "max")
    assert [load.execution_s for load in loads] == [3.0, 3.0]
    assert [load.rate_rps for load in loads] == [2.0, 2.0]
