"""Mean and percentiles of latencies, for simulations and measurements alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

PERCENTILES: Final = (50, 90, 95, 99)


@dataclass(frozen=True)
class LatencyStats:
    """Mean and percentiles, interpolated linearly; NaN without any value."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


def latency_stats(values: NDArray[np.float64]) -> LatencyStats:
    """Return the statistics of values; NaN among them does not count."""
    return latency_stats_in_place(values[~np.isnan(values)])


def latency_stats_in_place(values: NDArray[np.float64]) -> LatencyStats:
    """Return the statistics of values without NaN, and reorder them, which takes linear time."""
    if values.size == 0:
        return LatencyStats(*[math.nan] * (1 + len(PERCENTILES)))
    found = [float(values.mean())]
    last = values.size - 1
    above, skipped = values, 0  # the values from the last percentile on, and how many are below
    for percent in PERCENTILES:
        at = percent / 100 * last
        below = int(at) - skipped
        above.partition(below)
        above, skipped = above[below:], int(at)
        low = float(above[0])
        high = float(above[1:].min()) if above.size > 1 else low
        found.append(low + (at - skipped) * (high - low))
    return LatencyStats(*found)


def grouped_latency_stats(
    values: NDArray[np.float64], group: NDArray[np.int64], groups: int
) -> list[LatencyStats]:
    """Return the statistics of each group; NaN among the values does not count.

    Parameters
    ----------
    values, group
        Values and their group numbers, shape (values,).
    groups
        Number of groups.
    """
    known = ~np.isnan(values)
    values, group = values[known], group[known]
    ordered = values[np.lexsort((values, group))]
    sizes = np.bincount(group, minlength=groups)
    starts = np.cumsum(sizes) - sizes
    stats = np.full((groups, 1 + len(PERCENTILES)), np.nan)
    some = sizes > 0
    stats[some, 0] = np.bincount(group, values, minlength=groups)[some] / sizes[some]
    last = (sizes - 1)[some]
    for at, percent in enumerate(PERCENTILES, start=1):
        place = percent / 100 * last
        below = place.astype(np.int64)
        low = ordered[starts[some] + below]
        high = ordered[starts[some] + np.minimum(below + 1, last)]
        stats[some, at] = low + (place - below) * (high - low)
    return [LatencyStats(*row) for row in stats.tolist()]
