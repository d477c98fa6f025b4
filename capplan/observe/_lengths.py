"""Distributions of lengths: by the distinct values of a log, or by the buckets of a server's histogram."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.observe._observation import Tokens

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

    Within a bucket the lengths follow a power law whose exponent, one for all, is that of the mean.

    Parameters
    ----------
    passed
        Requests up to the end of each bucket, in tokens; an infinite end or none.
    total, count
        Tokens of all requests, and their number.
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
