"""Predicted metrics of one GPU of a plan's group.

Mean and percentiles of latencies, for simulations and measurements alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from capplan.spec._validation import (
    Fraction,
    Many,
    Natural,
    NonNegative,
    SparseModel,
    SpecModel,
    Text,
    rule_error,
)

PERCENTILES: Final = (50, 90, 95, 99)
_LOOKED_AT: Final = 256
"""Values by which the way to the percentiles is chosen."""


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
    # Where most values are the least one, such as no wait at all, NumPy's selection takes ten times as long
    # as elsewhere, and its sorting less than a selection.
    some = values[:: values.size // _LOOKED_AT + 1]
    is_sorted = 2 * np.count_nonzero(some == some.min()) > some.size
    if is_sorted:
        values.sort()
    last = values.size - 1
    above, skipped = values, 0  # the values from the last percentile on, and how many are below
    for percent in PERCENTILES:
        at = percent / 100 * last
        below = int(at) - skipped
        if not is_sorted:
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


class Percentiles(SpecModel):
    """Distribution of a latency over completed requests; null where none completed."""

    mean: NonNegative | None = Field(default=None, description="Mean.")
    p50: NonNegative | None = Field(default=None, description="Median.")
    p95: NonNegative | None = Field(default=None, description="95th percentile.")
    p99: NonNegative | None = Field(default=None, description="99th percentile.")


class SizePrediction(SpecModel):
    """Predicted metrics of one size class of requests."""

    name: Text = Field(description="Class: small, medium, large, largest, or all.")
    ttft_p99_s: NonNegative | None = Field(
        default=None, description="99th percentile of the time to first token; null where none completed."
    )
    queue_share: Fraction | None = Field(
        default=None,
        description="Queueing time / time from arrival to last token; null where none completed.",
    )
    queue_mean_s: NonNegative | None = Field(
        default=None, description="Mean time from arrival to first admission; null where none completed."
    )
    interruption_mean_count: NonNegative | None = Field(
        default=None, description="Mean pauses of a request's decoding; null where none completed."
    )
    interruption_mean_share: Fraction | None = Field(
        default=None, description="Mean share of these pauses in a request's time; null where none completed."
    )


class SchedulingPrediction(SpecModel):
    """Predicted metrics of scheduler and adapter cache; means over the seeds."""

    hit_rate: Fraction | None = Field(
        default=None,
        description="Share of requests whose adapter was loaded at admission; null without adapters.",
    )
    load_wait_ms: NonNegative | None = Field(
        default=None, description="Mean wait of an admitted request for its adapter, in ms."
    )
    sizes: Many[SizePrediction] = Field(default=(), description="Size classes, ascending.")


class Predicted(SparseModel):
    """Predicted metrics of one GPU of the group."""

    _optional_keys = ("scheduling",)

    throughput_tok_s: NonNegative = Field(
        description="Input + output tokens of completed requests per second."
    )
    low_tok_s: NonNegative | None = Field(
        default=None,
        description="Lower end of the 90 % interval of an hour's throughput, over seeds and the uncertainty "
        "of the profile; null after one seed.",
    )
    high_tok_s: NonNegative | None = Field(default=None, description="Upper end of that interval.")
    ttft_s: Percentiles = Field(default=Percentiles(), description="Time to first token, in seconds.")
    tpot_ms: Percentiles = Field(
        default=Percentiles(), description="Time per output token after the first, in ms."
    )
    intervals: dict[str, tuple[NonNegative, NonNegative]] = Field(
        default={},
        description="90 % intervals of latencies by the names of their bounds, such as ttft_p99_s.",
    )
    bounded: dict[str, NonNegative] = Field(
        default={}, description="Latencies that the workload bounds, by the names of their bounds."
    )
    served_fraction: Fraction = Field(description="Tokens of completed requests / tokens submitted.")
    kv_tokens: Natural = Field(description="Tokens the KV cache holds.")
    waiting_max: Natural | None = Field(
        default=None,
        description="Longest queue of waiting requests over the seeds; null in plans of before it was kept.",
    )
    load_over_capacity: NonNegative | None = Field(
        default=None, description="Offered load / sustainable load."
    )
    source: Text = Field(description="Where the numbers come from, such as twin or surrogate.")
    scheduling: SchedulingPrediction | None = Field(
        default=None, description="Metrics of scheduler and adapter cache; absent without them."
    )

    def latency(self, bound: str) -> float | None:
        """Return the latency that a bound such as ``ttft_p99_s`` is on; None if it is not in the plan."""
        if bound in self.bounded:
            return self.bounded[bound]
        metric, statistic, unit = bound.split("_")
        value: float | None = getattr(getattr(self, f"{metric}_{unit}", None), statistic, None)
        return value

    @model_validator(mode="after")
    def _ordered_interval(self) -> Self:
        low, high = self.low_tok_s, self.high_tok_s
        if low is not None and high is not None and low > high:
            raise rule_error("must not be below low_tok_s", key=("high_tok_s",), value=self.high_tok_s)
        return self
