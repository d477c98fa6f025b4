"""Clusters of request sizes: exact one-dimensional K-means, and the number of clusters (Chameleon, 4.3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan._jit import inner, jit
from capplan.spec import ClusterRule

SAMPLE: Final = 2000
"""Maximum number of sizes that are clustered."""
_MIN_REDUCTION: Final = 0.10
"""Minimum reduction of the sum of squares by one more queue, relative to one queue, for ``elbow``."""
_WCSS_TOLERANCE: Final = 1e-12
"""Relative difference between sums of squares that is rounding error."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Clustering:
    """Optimal clusters of sizes for one number of clusters."""

    centroids: tuple[float, ...]
    """Means, ascending."""
    wcss: float
    """Within-cluster sum of squares."""


def subsample(sizes: Floats) -> Floats:
    """Return at most `SAMPLE` sizes, ascending, evenly spaced in order."""
    ordered = np.sort(sizes)
    if ordered.size <= SAMPLE:
        return ordered
    return ordered[np.linspace(0, ordered.size - 1, SAMPLE).round().astype(np.int64)]


def cluster_sizes(sizes: Floats, most: int) -> tuple[Clustering, ...]:
    """Return the optimal K-means clusterings for 1, 2, ..., `most` clusters, by dynamic programming.

    Optimal clusters of numbers are intervals (Chameleon, section 4.3.4). There are never more clusters than
    distinct sizes.
    """
    values, counts = np.unique(sizes, return_counts=True)
    centred = values - counts @ values / sizes.size  # sums of squares far from 0 would cancel
    sums = np.zeros((3, values.size + 1))
    np.cumsum([counts, counts * centred, counts * centred**2], axis=1, out=sums[:, 1:])
    most = min(most, values.size)
    starts, least = np.zeros((most, values.size + 1), np.int64), np.zeros((2, values.size + 1))
    _last_starts(sums, starts, least)
    clusterings = []
    for clusters in range(1, most + 1):
        borders = [values.size]
        for each in starts[clusters - 1 :: -1]:
            borders.append(int(each[borders[-1]]))
        clusterings.append(_clustering(values, counts, borders[::-1]))
    return tuple(clusterings)


@jit
def _last_starts(sums: Floats, starts: Ints, least: Floats) -> None:
    """Fill in the start of the last of 1, 2, ... optimal clusters of the first 0, 1, ... values.

    A later end never has an earlier start, so the starts of neighbours bound the search: n log n steps.

    Parameters
    ----------
    sums
        Number, sum and sum of squares of the first 0, 1, ... values, shape (3, values + 1).
    starts
        Result, shape (clusters, values + 1).
    least
        Scratch: sums of squares for one cluster fewer and for as many, shape (2, values + 1).
    """
    ends = sums.shape[1]
    for end in range(1, ends):
        least[0, end] = _within(sums, 0, end)
    for clusters in range(1, starts.shape[0]):
        before, here = (clusters - 1) % 2, clusters % 2
        stride = 1
        while 2 * stride < ends:
            stride *= 2
        while stride > 0:
            end = stride
            while end < ends:
                if end > clusters:
                    low = max(clusters, starts[clusters, end - stride])
                    high = end - 1
                    if end + stride < ends:
                        high = min(high, starts[clusters, end + stride])
                    best = np.inf
                    for start in range(low, high + 1):
                        total = least[before, start] + _within(sums, start, end)
                        if total < best:
                            best = total
                            starts[clusters, end] = start
                    least[here, end] = best
                end += 2 * stride
            stride //= 2


@inner
def _within(sums: Floats, start: int, end: int) -> float:
    """Return the sum of squares of the values in [start, end) around their mean."""
    total = sums[1, end] - sums[1, start]
    return float(max(0.0, sums[2, end] - sums[2, start] - total * total / (sums[0, end] - sums[0, start])))


def _clustering(values: Floats, counts: Ints, borders: Sequence[int]) -> Clustering:
    """Return the clusters between borders; sums are recomputed, since differences lose digits."""
    first = borders[:-1]
    centroids = np.add.reduceat(counts * values, first) / np.add.reduceat(counts, first)
    deviations = values - centroids.repeat(np.diff(borders))
    return Clustering(tuple(centroids.tolist()), float(np.sum(counts * deviations**2)))


def choose_clustering(clusterings: Sequence[Clustering], sizes: Floats, by: ClusterRule) -> Clustering:
    """Return one of the clusterings of `sizes`.

    ``elbow``: the fewest clusters after which one more reduces the sum of squares by less than a tenth of
    that of one cluster. ``wcss``: the least sum of squares, as in the paper, which is the largest number.
    ``silhouette``: the best mean silhouette by centroids. Ties go to fewer clusters.
    """
    whole = clusterings[0].wcss
    if by == "silhouette":
        return max(clusterings[1:], key=lambda each: silhouette(each, sizes), default=clusterings[0])
    if by == "wcss":
        least = clusterings[-1].wcss + _WCSS_TOLERANCE * whole
        return next(each for each in clusterings if each.wcss <= least)
    for each, larger in pairwise(clusterings):
        if each.wcss - larger.wcss < _MIN_REDUCTION * whole:
            return each
    return clusterings[-1]


def silhouette(clustering: Clustering, sizes: Floats) -> float:
    """Return the mean silhouette by centroids: (b - a) / b for the distances a, b to the nearest two."""
    centroids = np.array(clustering.centroids)
    distance = np.sort(np.abs(sizes[:, None] - centroids), axis=1)
    return float(np.mean(1.0 - distance[:, 0] / distance[:, 1]))


def cut_offs(clustering: Clustering) -> Floats:
    """Return the borders between queues: midway between centroids."""
    return np.array([(low + high) / 2.0 for low, high in pairwise(clustering.centroids)], np.float64)


def classify(sizes: Floats, borders: Floats) -> Ints:
    """Return the queue of each size; a size equal to a border goes up."""
    return np.searchsorted(borders, sizes, side="right")
