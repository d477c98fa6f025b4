import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.planner.queue_clusters import (
    SAMPLE,
    choose_clustering,
    classify,
    cluster_sizes,
    cut_offs,
    silhouette,
    subsample,
)

RULES = ("elbow", "wcss", "silhouette")
levels = st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 1.0])
some_sizes = st.lists(st.floats(0.0, 1.0) | levels, min_size=1, max_size=9).map(np.array)


def sum_of_squares(values: np.ndarray) -> float:
    return float(np.sum((values - values.mean()) ** 2))


def least_by_trying(sizes: np.ndarray, clusters: int) -> float:
    """Every way to give each size a cluster, not only intervals."""
    labels = itertools.product(range(clusters), repeat=sizes.size)
    return min(
        sum(sum_of_squares(sizes[np.array(each) == i]) for i in set(each))
        for each in labels
        if len(set(each)) == clusters
    )


@given(some_sizes.filter(lambda sizes: sizes.size <= 6), st.integers(1, 4))
def test_no_other_clusters_have_a_smaller_sum_of_squares(sizes: np.ndarray, most: int) -> None:
    for each in cluster_sizes(sizes, most):
        least = least_by_trying(sizes, len(each.centroids))
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
def test_many_sizes_are_clustered_as_by_trying_every_border(seed: int) -> None:
    sizes = np.sort(np.random.default_rng(seed).lognormal(-3.0, 1.2, 60))
    borders = itertools.combinations(range(1, sizes.size), 2)
    least = min(sum(map(sum_of_squares, np.split(sizes, each))) for each in borders)
    assert cluster_sizes(sizes, 3)[2].wcss == pytest.approx(least, rel=1e-9)


@given(some_sizes, st.sampled_from(RULES))
def test_every_cluster_holds_what_lies_between_its_cut_offs(sizes: np.ndarray, rule: str) -> None:
    chosen = choose_clustering(cluster_sizes(sizes, 4), sizes, rule)
    borders = cut_offs(chosen)
    queue = classify(sizes, borders)
    within = [sizes[queue == i] for i in range(len(chosen.centroids))]
    if all(each.size for each in within):  # sizes a rounding error apart can leave one empty
        assert sum(map(sum_of_squares, within)) == pytest.approx(chosen.wcss, rel=1e-9, abs=1e-12)


def test_a_size_equal_to_a_cut_off_goes_up() -> None:
    assert classify(np.array([0.1, 0.2, 0.3]), np.array([0.2])).tolist() == [0, 1, 1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 2, 50])
def test_equal_sizes_make_one_queue(rule: str, count: int) -> None:
    sizes = np.full(count, 0.3)
    chosen = choose_clustering(cluster_sizes(sizes, 4), sizes, rule)
    assert chosen.centroids == (0.3,)
    assert cut_offs(chosen).size == 0


@pytest.mark.parametrize("rule", RULES)
def test_clear_groups_are_found_by_every_rule(rule: str) -> None:
    """Two points, each with equal sizes: one more cluster is not to be had."""
    sizes = np.repeat([0.1, 0.9], 20)
    chosen = choose_clustering(cluster_sizes(sizes, 4), sizes, rule)
    assert chosen.centroids == (0.1, 0.9)
    assert chosen.wcss == 0.0


def test_the_least_sum_of_squares_takes_all_queues_there_may_be() -> None:
    sizes = np.random.default_rng(0).random(300)
    for most in (1, 2, 3, 4, 6):
        assert len(choose_clustering(cluster_sizes(sizes, most), sizes, "wcss").centroids) == most


def test_the_elbow_stops_where_a_queue_takes_away_less_than_a_tenth() -> None:
    rng = np.random.default_rng(1)
    sizes = np.concatenate([rng.normal(centre, 0.005, 200) for centre in (0.1, 0.5, 0.9)])
    assert len(choose_clustering(cluster_sizes(sizes, 6), sizes, "elbow").centroids) == 3


@given(some_sizes)
def test_silhouettes_lie_between_none_and_whole(sizes: np.ndarray) -> None:
    for each in cluster_sizes(sizes, 4)[1:]:
        assert 0.0 <= silhouette(each, sizes) <= 1.0


@given(st.integers(1, 3 * SAMPLE))
def test_a_thinned_sample_keeps_the_ends_and_the_order(count: int) -> None:
    sizes = np.random.default_rng(count).random(count)
    kept = subsample(sizes)
    assert kept.size == min(count, SAMPLE)
    assert (kept[0], kept[-1]) == (sizes.min(), sizes.max())
    assert np.all(np.diff(kept) >= 0)
