"""Metrics of a part of the requests: all, those of one rank, those of one adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capplan.spec import STARVED_BELOW
from capplan.twin import trace as t
from capplan.twin.reduction import PERCENTILES
from capplan.twin.request_table import FINISHED, REJECTED, RUNNING, STATUSES, WAITING, RequestTable
from capplan.twin.scenario import NS_PER_S


@dataclass(frozen=True)
class Stats:
    """Mean and percentiles, interpolated linearly; NaN without any value."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True)
class GroupMetrics:
    """What a group of requests got. Latencies and waits: those finished within the horizon."""

    name: str
    submitted: int
    finished: int
    running: int
    waiting: int
    rejected: int
    offered_tok_s: float
    """Input and output tokens of submitted requests over the horizon."""
    throughput_tok_s: float
    """Input and output tokens of finished requests over the horizon."""
    served_fraction: float
    """Tokens of finished over submitted requests, those in execution at the end left out of both."""
    starved: bool
    ttft_s: Stats
    tpot_ms: Stats
    tpt_ms: Stats
    e2e_s: Stats
    slowdown: Stats
    """E2E over the E2E of the same request alone on an idle engine, its adapter resident."""
    queue_s: Stats
    load_wait_s: Stats
    """Adapter loads on the way to the first token."""
    itl_ms_mean: float
    admissions: int
    """More than one for a request that was preempted."""
    hit_rate: float
    """Share of admissions whose adapter was resident; NaN without any."""
    adapter_loads: int
    load_s: float
    """Time of those loads."""
    slo_share: float
    """Share of requests that kept every latency bound of the SLO, of those that kept all or broke one."""


def group_metrics(
    table: RequestTable,
    group: NDArray[np.int64],
    names: Sequence[str],
    adapters: NDArray[np.int64],
    kept_slo: NDArray[np.int8],
    duration_s: float,
    client_itl_factor: float,
) -> tuple[GroupMetrics, ...]:
    """Return the metrics of each group.

    Parameters
    ----------
    table
        The requests.
    group
        Number of each request's group, shape (requests,).
    names
        Names of the groups.
    adapters
        `Trace.adapters`, summed over the adapters of each group: shape (groups, columns).
    kept_slo
        Whether each request kept the SLO: 1, broke it: -1, or neither yet: 0.
    duration_s
        Horizon.
    client_itl_factor
        How much longer gaps between tokens are for a client than in the engine.
    """
    count = len(names)

    def per_group(weights: NDArray[Any] | None = None) -> NDArray[np.float64]:
        summed: NDArray[np.float64] = np.bincount(group, weights, minlength=count).astype(np.float64)
        return summed

    tokens = table.prompt_tokens + table.output_tokens
    states = np.stack([per_group(table.status == code) for code in range(len(STATUSES))]).astype(int)
    finished = table.status == FINISHED
    done = per_group(tokens * finished)
    answerable = per_group(tokens * (table.status != RUNNING))
    served = np.divide(done, answerable, out=np.ones(count), where=answerable > 0)
    several = finished & (table.output_tokens > 1)
    gaps = per_group((table.output_tokens - 1) * several)
    decoding_ms = per_group(np.where(several, 1e3 * (table.finish_s - table.first_token_s), 0.0))
    itl_ms = client_itl_factor * _ratio(decoding_ms, gaps)
    kept, broken = per_group(kept_slo > 0), per_group(kept_slo < 0)
    hit_rate = _ratio(adapters[:, t.HITS], adapters[:, t.ADMISSIONS])
    slo_share = _ratio(kept, kept + broken)
    offered = per_group(tokens)

    def stats(column: NDArray[np.float64]) -> list[Stats]:
        return _statistics(column[finished], group[finished], count)

    ttft_s, tpot_ms, tpt_ms, e2e_s = map(stats, (table.ttft_s, table.tpot_ms, table.tpt_ms, table.e2e_s))
    slowdown, queue_s, load_wait_s = map(stats, (table.slowdown, table.queue_s, table.load_wait_s))
    return tuple(
        GroupMetrics(
            name=name,
            submitted=int(states[:, i].sum()),
            finished=int(states[FINISHED, i]),
            running=int(states[RUNNING, i]),
            waiting=int(states[WAITING, i]),
            rejected=int(states[REJECTED, i]),
            offered_tok_s=float(offered[i]) / duration_s,
            throughput_tok_s=float(done[i]) / duration_s,
            served_fraction=float(served[i]),
            starved=bool(served[i] < STARVED_BELOW),
            ttft_s=ttft_s[i],
            tpot_ms=tpot_ms[i],
            tpt_ms=tpt_ms[i],
            e2e_s=e2e_s[i],
            slowdown=slowdown[i],
            queue_s=queue_s[i],
            load_wait_s=load_wait_s[i],
            itl_ms_mean=float(itl_ms[i]),
            admissions=int(adapters[i, t.ADMISSIONS]),
            hit_rate=float(hit_rate[i]),
            adapter_loads=int(adapters[i, t.LOADS]),
            load_s=float(adapters[i, t.ADAPTER_LOAD_NS]) / NS_PER_S,
            slo_share=float(slo_share[i]),
        )
        for i, name in enumerate(names)
    )


def _ratio(part: NDArray[Any], whole: NDArray[Any]) -> NDArray[np.float64]:
    """Return part / whole, NaN where there is nothing."""
    ratio = np.full(part.shape, np.nan)
    np.divide(part, whole, out=ratio, where=whole > 0)
    return ratio


def _statistics(values: NDArray[np.float64], group: NDArray[np.int64], count: int) -> list[Stats]:
    """Return mean and percentiles of the values of each group; NaN among them does not count."""
    known = ~np.isnan(values)
    values, group = values[known], group[known]
    order = np.lexsort((values, group))
    ordered = values[order]
    sizes = np.bincount(group, minlength=count)
    starts = np.cumsum(sizes) - sizes
    answer = np.full((count, 1 + len(PERCENTILES)), np.nan)
    some = sizes > 0
    answer[some, 0] = np.bincount(group, values, minlength=count)[some] / sizes[some]
    last = (sizes - 1)[some]
    for at, percent in enumerate(PERCENTILES, start=1):
        place = percent / 100 * last
        below = place.astype(np.int64)
        low = ordered[starts[some] + below]
        high = ordered[starts[some] + np.minimum(below + 1, last)]
        answer[some, at] = low + (place - below) * (high - low)
    return [Stats(*row) for row in answer.tolist()]
