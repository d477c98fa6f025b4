"""How many queues, and where one ends and the next begins: exact K-means of request sizes.

Sizes lie on a line, where the best clusters are intervals: dynamic programming finds them, without the random
starts of the general algorithm. The start of the last cluster never falls as points are added, so that divide
and conquer needs O(n log n) for each number of clusters instead of O(n²).

Source: Chameleon, section 4.3.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.spec.workload import ClusterRule

SAMPLE: Final = 2000
"""Most sizes that are clustered."""

_MIN_REDUCTION: Final = 0.10
"""Least part of the whole sum of squares that one more queue must take away, by the rule ``elbow``."""

_WCSS_TOLERANCE: Final = 1e-12
"""Sums of squares nearer than this, as part of the whole, are equal: the rest is rounding."""

Floats = NDArray[np.float64]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Clustering:
    """The best clusters for one number of them."""

    centroids: tuple[float, ...]
    """Means, ascending."""
    wcss: float
    """Sum of the squared distances to the own centroid."""


def subsample(sizes: Floats) -> Floats:
    """Return at most SAMPLE sizes, ascending, evenly spread over their order."""
    ordered = np.sort(sizes)
    if ordered.size <= SAMPLE:
        return ordered
    return ordered[np.linspace(0, ordered.size - 1, SAMPLE).round().astype(np.int64)]


def cluster_sizes(sizes: Floats, most: int) -> tuple[Clustering, ...]:
    """Return the best clusterings for 1, 2, ... clusters: at most `most`, and no more than distinct sizes.

    Parameters
    ----------
    sizes
        At least one.
    most
        At least 1.
    """
    values, counts = np.unique(sizes, return_counts=True)
    points = _Points(values, counts.astype(np.float64))
    least = np.array([0.0, *(points.cost(np.array([0]), j)[0] for j in range(1, values.size + 1))])
    starts: list[Ints] = []
    found = [points.clustering([0, values.size])]
    for clusters in range(2, min(most, values.size) + 1):
        least, start = _add_cluster(points, least, clusters)
        starts.append(start)
        borders = [values.size]
        for each in reversed(starts):
            borders.append(int(each[borders[-1]]))
        found.append(points.clustering([0, *reversed(borders)]))
    return tuple(found)


def choose_clustering(clusterings: tuple[Clustering, ...], sizes: Floats, by: ClusterRule) -> Clustering:
    """Return one of the clusterings of `sizes`.

    ``elbow``: the fewest clusters after which one more takes away less than a tenth of the whole sum of
    squares. ``wcss``: the least sum of squares, as the paper says, which is the largest number; ties to
    fewer. ``silhouette``: the best mean silhouette by centroids; ties to fewer.
    """
    whole = clusterings[0].wcss
    if by == "silhouette":
        quality = [silhouette(each, sizes) for each in clusterings[1:]]
        return clusterings[1 + quality.index(max(quality))] if quality else clusterings[0]
    if by == "wcss":
        least = clusterings[-1].wcss + _WCSS_TOLERANCE * whole
        return next(each for each in clusterings if each.wcss <= least)
    for each, next_one in pairwise(clusterings):
        if each.wcss - next_one.wcss < _MIN_REDUCTION * whole:
            return each
    return clusterings[-1]


def silhouette(clustering: Clustering, sizes: Floats) -> float:
    """Return the mean of (b - a) / b: a is the distance to the own centroid, b to the nearest other one.

    Two clusters or more.
    """
    centroids = np.array(clustering.centroids)
    distance = np.sort(np.abs(sizes[:, None] - centroids), axis=1)
    return float(np.mean(1.0 - distance[:, 0] / distance[:, 1]))


def cut_offs(clustering: Clustering) -> Floats:
    """Return where queues meet: midway between centroids."""
    return np.array([(low + high) / 2.0 for low, high in pairwise(clustering.centroids)], np.float64)


def classify(sizes: Floats, borders: Floats) -> Ints:
    """Return the number of each size's queue; a size equal to a cut-off goes up."""
    return np.searchsorted(borders, sizes, side="right")


class _Points:
    """Distinct ascending values with their counts, and the sum of squares of any interval of them."""

    def __init__(self, values: Floats, counts: Floats) -> None:
        self.values, self.counts = values, counts
        centred = values - np.average(values, weights=counts)  # sums of squares far from 0 would cancel
        self._n, self._sum, self._squares = (
            np.concatenate([[0.0], np.cumsum(counts * centred**power)]) for power in (0, 1, 2)
        )

    def cost(self, first: Ints, end: int) -> Floats:
        """Return the sum of squares of [first, end), for each `first` below `end`."""
        total = self._sum[end] - self._sum[first]
        squares: Floats = self._squares[end] - self._squares[first]
        squares -= total**2 / (self._n[end] - self._n[first])
        return squares.clip(min=0.0)

    def clustering(self, borders: list[int]) -> Clustering:
        """Return the clusters between borders, with sums taken anew: differences of sums lose digits."""
        centroids, wcss = [], 0.0
        for first, end in pairwise(borders):
            values, counts = self.values[first:end], self.counts[first:end]
            centroids.append(float(np.average(values, weights=counts)))
            wcss += float(np.sum(counts * (values - centroids[-1]) ** 2))
        return Clustering(tuple(centroids), wcss)


def _add_cluster(points: _Points, least: Floats, clusters: int) -> tuple[Floats, Ints]:
    """Return the least sum of squares of the first 0, 1, ... points in `clusters`, and where the last begins.

    Parameters
    ----------
    least
        The same for one cluster fewer.
    """
    count = points.values.size
    best, start = np.full(count + 1, np.inf), np.zeros(count + 1, np.int64)
    jobs = [(clusters, count, clusters - 1, count - 1)]  # ends from, to; the last cluster begins from, to
    while jobs:
        low, high, from_, to = jobs.pop()
        middle = (low + high) // 2
        first = np.arange(from_, min(to, middle - 1) + 1)
        sums = least[first] + points.cost(first, middle)
        which = int(sums.argmin())
        best[middle], start[middle] = sums[which], first[which]
        if low < middle:
            jobs.append((low, middle - 1, from_, int(first[which])))
        if middle < high:
            jobs.append((middle + 1, high, int(first[which]), to))
    return best, start
