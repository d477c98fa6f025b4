"""Metrics of an engine under a scheduler and an adapter cache: waits, hits, prefetches, size classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.serving.pooled.queue_design import RequestSample, clustered_classes
from capplan.spec.latency_stats import LatencyStats, latency_stats
from capplan.spec.queues import QueueConfig
from capplan.twin.instance.scenario import NS_PER_MS, NS_PER_S, Scenario
from capplan.twin.instance.trace import NEVER, STATUS_REJECTED, TwinTrace

_NAMES: Final = (
    ("all",),
    ("small", "large"),
    ("small", "medium", "large"),
    ("small", "medium", "large", "largest"),
)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SizeMetrics:
    """Requests of one size class. Latencies and waits: requests finished within the horizon."""

    name: str
    submitted: int
    finished: int
    queue_s: LatencyStats
    """From arrival to first admission."""
    ttft_s: LatencyStats
    e2e_s: LatencyStats
    queue_share: float
    """Sum of queueing times over the sum of E2E; NaN without requests."""


@dataclass(frozen=True)
class PoolMetrics:
    """Metrics of scheduler, adapter cache and host link. Waits: requests finished within the horizon."""

    hit_rate: float
    """Share of first admissions whose adapter was loaded, without the base model; NaN without any."""
    hits: int
    misses: int
    load_wait_ms: LatencyStats
    """Adapter loads on the critical path, requests of adapters: from first admission until the adapter is
    loaded; under S-LoRA's rules the wait of its batch."""
    missed_load_wait_ms: LatencyStats
    """The same over the requests that waited."""
    queue_s: LatencyStats
    """From arrival to first admission."""
    queue_share: float
    """Sum of queueing times over the sum of E2E; NaN without requests."""
    sizes: tuple[SizeMetrics, ...]
    """By ascending size: clusters of the weighted sizes of all requests with their true outputs (Chameleon,
    section 4.3), whatever the scheduler."""
    squashes: int
    bypasses: int
    overruns: int
    """Growths of the reservation of a request beyond its predicted output."""
    recomputes: int
    """Preemptions for lack of blocks."""
    prefetches_useful: int
    prefetches_late: int
    """Prefetches still in progress at the first admission of a request for the adapter."""
    prefetches_wasted: int
    """Prefetched adapters that were evicted before any use."""
    evictions: int
    refreshes: int
    """Designs of the queues adopted."""
    refreshes_kept: int
    """Refreshes with too few requests for a design."""
    quotas_scaled: int
    """Designs whose minima exceeded the pool."""
    link_utilization: float
    """Share of the horizon in which the link from host memory copied."""


def pool_metrics(scenario: Scenario, trace: TwinTrace, overhead_s: float) -> PoolMetrics | None:
    """Return the metrics of a simulation; None without scheduler and cache.

    Parameters
    ----------
    scenario, trace
        Input and record of the simulation.
    overhead_s
        Time of a request outside the engine, part of its TTFT and E2E.
    """
    if scenario.pool is None:
        return None
    requests, counts = scenario.requests, trace.pool
    done = (trace.finish_ns != NEVER) & (trace.finish_ns <= scenario.horizon_ns)
    queue_s = (trace.admitted_ns - requests.arrival_ns) / NS_PER_S
    ttft_s = (trace.first_ns - requests.arrival_ns) / NS_PER_S + overhead_s
    e2e_s = (trace.finish_ns - requests.arrival_ns) / NS_PER_S + overhead_s
    wait_ms = trace.held_up_ns[done & (requests.adapter > 0)] / NS_PER_MS
    size = size_classes(scenario, trace)
    names = _NAMES[max(0, int(size.max(initial=0)))]
    hits, misses = int(counts.hits), int(counts.misses)
    return PoolMetrics(
        hit_rate=hits / (hits + misses) if hits + misses else float("nan"),
        hits=hits,
        misses=misses,
        load_wait_ms=latency_stats(wait_ms),
        missed_load_wait_ms=latency_stats(wait_ms[wait_ms > 0]),
        queue_s=latency_stats(queue_s[done]),
        queue_share=_share(queue_s[done], e2e_s[done]),
        sizes=_by_size(size, names, done, queue_s, ttft_s, e2e_s) if size.size else (),
        squashes=int(counts.squashes),
        bypasses=int(counts.bypasses),
        overruns=int(counts.overruns),
        recomputes=int(counts.recomputes),
        prefetches_useful=int(counts.useful_prefetches),
        prefetches_late=int(counts.late_prefetches),
        prefetches_wasted=int(counts.wasted_prefetches),
        evictions=int(counts.evictions),
        refreshes=int(counts.refreshes),
        refreshes_kept=int(counts.kept_queues),
        quotas_scaled=int(counts.scaled_quotas),
        link_utilization=min(1.0, float(counts.link_ns) / scenario.horizon_ns),
    )


def size_classes(scenario: Scenario, trace: TwinTrace) -> NDArray[np.int64]:
    """Return the size class of each request, from 0; -1: rejected."""
    requests, pool = scenario.requests, scenario.pool
    size = np.full(requests.arrival_ns.size, -1, np.int64)
    taken = np.flatnonzero(trace.status != STATUS_REJECTED)
    if pool is None or taken.size == 0:
        return size
    sample = RequestSample(
        prompt_tokens=requests.prompt_tokens[taken].astype(np.int64),
        output_tokens=requests.output_tokens[taken].astype(np.int64),
        adapter=requests.adapter[taken].astype(np.int64),
        execution_s=np.full(taken.size, np.nan),
        adapter_bytes=pool.adapter_bytes,
        adapter_tokens=pool.adapter_tokens,
    )
    size[taken] = clustered_classes(sample, QueueConfig()).queue
    return size


def _by_size(
    size: NDArray[np.int64],
    names: Sequence[str],
    done: NDArray[np.bool_],
    queue_s: Floats,
    ttft_s: Floats,
    e2e_s: Floats,
) -> tuple[SizeMetrics, ...]:
    found = []
    for number, name in enumerate(names):
        mine = done & (size == number)
        found.append(
            SizeMetrics(
                name=name,
                submitted=int(np.count_nonzero(size == number)),
                finished=int(np.count_nonzero(mine)),
                queue_s=latency_stats(queue_s[mine]),
                ttft_s=latency_stats(ttft_s[mine]),
                e2e_s=latency_stats(e2e_s[mine]),
                queue_share=_share(queue_s[mine], e2e_s[mine]),
            )
        )
    return tuple(found)


def _share(part_s: Floats, whole_s: Floats) -> float:
    return float(part_s.sum() / whole_s.sum()) if part_s.size else float("nan")
