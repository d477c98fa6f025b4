"""Rates over time as steps, and distributions of lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.observe._observation import Tokens

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
    """Return the first bins of segments of constant rate, and their mean counts per bin of `bin_s` seconds.

    The segments maximise the likelihood of Poisson counts less a penalty per segment, by dynamic programming
    (Jackson et al. 2005, "An algorithm for optimal partitioning of data on an interval", with the Bayesian
    information criterion). More than `_MOST_BINS` bins are merged before. Segments are then cut at whole
    hours wherever the rates of two neighbouring hours differ by over a percent: each hour has its own mean.
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


QUANTILES: Final = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
_OWN_QUANTILES: Final = (*(at / 50 for at in range(50)), 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999, 1.0)
"""Edges of an adapter's histogram; narrow at the end, where lengths are far apart."""
_BUCKET_SAMPLE: Final = 20_000

ValueCounts: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Distinct lengths, ascending, and how often each occurs: few, however many requests there are."""


def quantile(counts: ValueCounts, place: float) -> int:
    """Return the smallest length that so large a share of the requests does not exceed."""
    values, times = counts
    passed = np.cumsum(times)
    return int(values[min(int(np.searchsorted(passed, place * passed[-1])), len(values) - 1)])


def own_histogram(counts: ValueCounts) -> dict[str, list[int]]:
    """Return a histogram with edges at `_OWN_QUANTILES`; equal ones are one."""
    edges = sorted({quantile(counts, place) for place in _OWN_QUANTILES})
    edges = [*edges, edges[-1] + 1]  # the last bin holds the longest requests alone
    values, times = counts
    weights = np.histogram(values, bins=edges, weights=times)[0]
    return {"edges": edges, "counts": [int(weight) for weight in weights]}


def quantiles_of(counts: ValueCounts) -> dict[str, float]:
    """Return the mean and `QUANTILES` of lengths, by name."""
    mean = float(np.average(counts[0], weights=counts[1]))
    return {"mean": mean, **{f"p{100 * place:g}": float(quantile(counts, place)) for place in QUANTILES}}


def prefix_of_share(share: float, prompts: Tokens) -> int:
    """Return the length of a prefix that all prompts share and that is this share of their tokens."""
    total = float(prompts.sum())
    low, high = 0, int(prompts.max())
    while low < high:
        middle = (low + high + 1) // 2
        if float(np.minimum(prompts, middle).sum()) <= share * total:
            low = middle
        else:
            high = middle - 1
    return low


def sample_of_buckets(passed: Mapping[float, float], total: float, count: float) -> Tokens:
    """Return lengths at equal distances of a histogram's distribution, with its mean.

    Within a bucket the lengths follow a power law whose exponent, one for all, is that of the mean. `passed`
    has the requests up to the end of each bucket, in tokens; an infinite end or none. `total` and `count` are
    the tokens of all requests, and their number.
    """
    from scipy.optimize import brentq

    highs = sorted(end for end in passed if math.isfinite(end))
    up_to = np.maximum.accumulate(np.array([0.0, *(passed[end] for end in highs)]))
    edges = np.array([0.0, *highs])
    if count > up_to[-1]:  # requests beyond the last bucket
        up_to, edges = np.append(up_to, count), np.append(edges, 2.0 * edges[-1])
    places = (np.arange(_BUCKET_SAMPLE) + 0.5) / _BUCKET_SAMPLE * up_to[-1]
    at = np.clip(np.searchsorted(up_to, places) - 1, 0, len(edges) - 2)
    within = (places - up_to[at]) / np.maximum(up_to[at + 1] - up_to[at], 1e-12)

    def lengths(exponent: float) -> NDArray[np.float64]:
        found: NDArray[np.float64] = edges[at] + (edges[at + 1] - edges[at]) * within**exponent
        return np.maximum(found, 1.0)

    def excess(exponent: float) -> float:
        return float(lengths(exponent).mean() - total / count)

    low, high = 0.02, 50.0
    exponent = low if excess(low) <= 0 else high if excess(high) >= 0 else float(brentq(excess, low, high))
    return np.rint(lengths(exponent)).astype(np.int32)
