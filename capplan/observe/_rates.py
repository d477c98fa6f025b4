"""Rates over time as steps: few where they are steady, minutes where they are not."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

_MOST_BINS: Final = 3000
"""Bins that segments are searched in; the search takes their square."""
_MOST_SEGMENTS: Final = 200
"""Segments of a workload file that one still reads; the penalty grows until there are no more."""
_LEAST_CHANGE: Final = 0.01
"""Of the rate, between hours that are told apart: less would not be noticed in a plan."""
_LEAST_SIGMAS: Final = 2.0
"""Of their difference, if both were of one rate."""


def rate_steps(counts: Counts, bin_s: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the first bins of segments of constant rate, and their mean counts per bin.

    The segments maximise the likelihood of Poisson counts less a penalty per segment, by dynamic programming
    (Jackson et al. 2005, "An algorithm for optimal partitioning of data on an interval", with the Bayesian
    information criterion). More than `_MOST_BINS` bins are merged before. Segments are then cut at whole
    hours wherever the rates of two neighbouring hours differ by over a percent: each hour has its own mean.

    Parameters
    ----------
    counts
        Requests in each bin.
    bin_s
        Seconds of a bin.
    """
    merged = max(1, -(-len(counts) // _MOST_BINS))
    padded = (
        np.concatenate([counts, np.zeros(-len(counts) % merged, np.int64)]).reshape(-1, merged).sum(axis=1)
    )
    penalty = math.log(max(len(padded), 2)) + 1.0
    while len(found := _segments(padded, penalty)) > _MOST_SEGMENTS:
        penalty *= 2.0
    starts = np.array(found, np.int64) * merged
    starts = np.union1d(starts, _hours(counts, bin_s))
    sums = np.add.reduceat(counts, starts)
    widths = np.diff(np.append(starts, len(counts)))
    return starts, sums / widths


def _segments(counts: Counts, penalty: float) -> list[int]:
    """Return the first bins of the segments of least penalised cost."""
    n = len(counts)
    total = np.concatenate([[0.0], np.cumsum(counts, dtype=float)])
    best = np.zeros(n + 1)
    best[0] = -penalty
    before = np.zeros(n + 1, np.int64)
    for end in range(1, n + 1):
        sums = total[end] - total[:end]
        widths = end - np.arange(end)
        # Minus the log-likelihood at the mean; what does not depend on the segments is left out.
        with np.errstate(divide="ignore", invalid="ignore"):
            cost = np.where(sums > 0, -sums * np.log(sums / widths), 0.0)
        costs = best[:end] + cost + penalty
        before[end] = int(np.argmin(costs))
        best[end] = costs[before[end]]
    starts = []
    end = n
    while end > 0:
        end = int(before[end])
        starts.append(end)
    return starts[::-1]


def _hours(counts: Counts, bin_s: float) -> NDArray[np.int64]:
    """Return the first bins of the hours whose rate differs from that of the hour before."""
    bins = max(1, round(3600.0 / bin_s))
    starts = np.arange(0, len(counts), bins)
    sums, widths = np.add.reduceat(counts, starts), np.diff(np.append(starts, len(counts)))
    rates = sums / widths
    change = np.abs(np.diff(rates))
    noise = np.sqrt((sums[:-1] + sums[1:]) / (widths[:-1] * widths[1:]))
    change = (change > _LEAST_CHANGE * rates[:-1]) & (change > _LEAST_SIGMAS * noise)
    changed: NDArray[np.int64] = starts[np.append(True, change)]
    return changed


def dispersion(counts: Counts, expected: NDArray[np.float64]) -> float:
    """Return the variance over the mean of counts whose expectations differ: 1 for a Poisson process.

    The variance is that of the differences of neighbouring counts (Allan's), which a slow drift of the rate
    does not raise.
    """
    if len(counts) < 2 or expected.sum() <= 0:
        return 1.0
    steps = np.diff(counts - expected)
    return float((steps**2).sum() / (expected[:-1] + expected[1:]).sum())
