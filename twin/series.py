"""The course of a simulation: means and rates over buckets of time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from capplan.twin import trace as t
from capplan.twin.request_table import FINISHED, RequestTable
from capplan.twin.scenario import NS_PER_MS, NS_PER_S, Scenario

BUCKETS = 600
_SHORTEST_NS = NS_PER_S // 2
_LARGEST_SUM = 2**62


@dataclass(frozen=True, eq=False)
class TimeSeries:
    """Arrays of one entry per bucket; a step counts where it ends.

    Means are over the time that steps ran: 0 where none ended, but for the adapters resident, which stay.
    """

    bucket_s: float
    """Length of a bucket."""
    time_s: NDArray[np.float64]
    """Middle of each bucket."""
    running: NDArray[np.float64]
    waiting: NDArray[np.float64]
    kv_share: NDArray[np.float64]
    """KV tokens held over KV capacity."""
    active_adapters: NDArray[np.float64]
    """Distinct adapters of running requests."""
    resident_adapters: NDArray[np.float64]
    """Adapters in GPU slots."""
    busy_share: NDArray[np.float64]
    """Time of steps over time; above 1 where a step began in an earlier bucket."""
    step_ms: NDArray[np.float64]
    """Mean duration of a step; NaN where none ended."""
    loads_per_s: NDArray[np.float64]
    """Adapter loads begun."""
    load_share: NDArray[np.float64]
    """Time that steps waited for loads over time."""
    computed_tok_s: NDArray[np.float64]
    """Tokens computed, prefill and decode, again after a preemption."""
    completed_tok_s: NDArray[np.float64]
    """Input and output tokens of the requests that were completed."""
    arrivals_rps: NDArray[np.float64]


def bucket_count(scenario: Scenario) -> int:
    """Return how many buckets suit a scenario: about 600, none much shorter than a step."""
    buckets = max(1, min(BUCKETS, scenario.horizon_ns // _SHORTEST_NS))
    # Sums over a bucket are 64-bit numbers, which only years of a huge queue could exceed.
    kv_tokens = scenario.num_blocks * scenario.limits.block_size
    most = max(kv_tokens, scenario.requests.arrival_ns.size, scenario.adapters, 1)
    return max(buckets, -(-scenario.horizon_ns * most // _LARGEST_SUM))


def time_series(scenario: Scenario, trace: t.Trace, table: RequestTable) -> TimeSeries:
    """Return the course of a detailed run."""
    bucket_ns = int(trace.counts[t.BUCKET_NS])
    count = trace.series.shape[0]
    bucket_s = bucket_ns / NS_PER_S
    sums = trace.series.T.astype(np.float64)
    busy_ns, steps = sums[t.SERIES_BUSY_NS], sums[t.SERIES_STEPS]
    kv_tokens = scenario.num_blocks * scenario.limits.block_size

    def mean(column: int) -> NDArray[np.float64]:
        means: NDArray[np.float64] = np.zeros(count)
        np.divide(sums[column], busy_ns, out=means, where=busy_ns > 0)
        return means

    def per_second(seconds: NDArray[np.float64], weights: NDArray[np.int64] | None) -> NDArray[np.float64]:
        bucket = np.minimum((seconds / bucket_s).astype(np.int64), count - 1)
        return np.bincount(bucket, weights, minlength=count) / bucket_s

    finished = table.status == FINISHED
    tokens = table.prompt_tokens + table.output_tokens
    return TimeSeries(
        bucket_s=bucket_s,
        time_s=bucket_s * (np.arange(count, dtype=np.float64) + 0.5),
        running=mean(t.SERIES_RUNNING_NS),
        waiting=mean(t.SERIES_WAITING_NS),
        kv_share=mean(t.SERIES_KV_TOKEN_NS) / kv_tokens,
        active_adapters=mean(t.SERIES_ACTIVE_NS),
        resident_adapters=_carried(mean(t.SERIES_RESIDENT_NS), busy_ns > 0),
        busy_share=busy_ns / bucket_ns,
        step_ms=np.divide(busy_ns / NS_PER_MS, steps, out=np.full(count, np.nan), where=steps > 0),
        loads_per_s=sums[t.SERIES_LOADS] / bucket_s,
        load_share=sums[t.SERIES_LOAD_NS] / bucket_ns,
        computed_tok_s=sums[t.SERIES_TOKENS] / bucket_s,
        completed_tok_s=per_second(table.finish_s[finished], tokens[finished]),
        arrivals_rps=per_second(table.arrival_s, None),
    )


def _carried(values: NDArray[np.float64], known: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the values, where not known the last known one, and 0 before the first."""
    last = np.maximum.accumulate(np.where(known, np.arange(values.size), -1))
    carried: NDArray[np.float64] = np.where(last >= 0, values[np.maximum(last, 0)], 0.0)
    return carried
