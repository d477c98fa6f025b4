"""Set-up and refresh of the reference of the rules for one pool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from capplan.serving import Limits
from capplan.serving.pooled import RESIDENT, PoolSetup, RequestSample, new_queues
from capplan.spec import Scheduler
from tests.oracle.caches import CachedAdapter
from tests.oracle.pooled import ReferencePooled
from tests.oracle.size_queues import SizeQueues

_NS_PER_S = 1_000_000_000


def reference_pool(limits: Limits, num_blocks: int, setup: PoolSetup) -> ReferencePooled:
    """Return an idle engine; without queues in its set-up it has one, with all tokens."""
    columns = (setup.adapter_pages, setup.adapter_bytes, setup.adapter_tokens, setup.load_ns)
    adapters = [CachedAdapter(*values) for values in zip(*(each.tolist() for each in columns), strict=True)]
    if limits.loading == RESIDENT:
        adapters = [
            replace(adapter, pages=0, tokens=0, resident=number > 0)
            for number, adapter in enumerate(adapters)
        ]
    queues = SizeQueues([num_blocks * limits.block_size], [])
    if setup.queues is not None:
        classes = setup.queues.classes
        cuts = [queue.upper_wrs for queue in classes if queue.upper_wrs is not None]
        queues = SizeQueues.of(setup.queues.wrs, cuts, [queue.quota_tokens for queue in classes])
    return ReferencePooled(limits, num_blocks, adapters, queues, setup.weights, setup.shares_charge)


def refreshed_queues(engine: ReferencePooled, scheduler: Scheduler, at_ns: int) -> SizeQueues | None:
    """Return the queues for the requests that arrived in the period before `at_ns`; None: keep the old ones.

    The design is that of `capplan.serving.pooled._refresh`; the window is chosen from all requests so far.
    Queues that are kept and designs that are scaled are counted.
    """
    if not scheduler.has_queues or (scheduler.policy == "static" and len(engine.queues.quotas) > 1):
        return None
    period_ns = round(scheduler.refresh_s * _NS_PER_S)
    seen = [request for request in engine.window if at_ns - period_ns <= request.arrival_ns < at_ns]
    execution_ns = np.array([request.execution_ns for request in seen], np.float64)
    sample = RequestSample(
        prompt_tokens=np.array([request.prompt for request in seen], np.int64),
        output_tokens=np.array([request.predicted_at_first for request in seen], np.int64),
        adapter=np.array([request.adapter for request in seen], np.int64),
        execution_s=np.where(execution_ns < 0, np.nan, execution_ns / _NS_PER_S),
        adapter_bytes=np.array([adapter.size_bytes for adapter in engine.cache.adapters]),
        adapter_tokens=np.array([adapter.tokens for adapter in engine.cache.adapters]),
    )
    rate_rps = len(seen) * _NS_PER_S / period_ns
    made = new_queues(sample, rate_rps, sum(engine.queues.quotas), scheduler)
    if made is None:
        engine.counts["kept_queues"] += 1
        return None
    engine.counts["scaled_quotas"] += made.is_scaled
    return SizeQueues.of(made.classes.wrs, made.classes.cuts.tolist(), made.quotas)
