"""From a sample of requests to queues with quotas, all at once, so that sizes and cut-offs agree."""

from __future__ import annotations

import numpy as np

from capplan.planner.queues.clusters import choose, classify, cluster, cut_offs, thinned
from capplan.planner.queues.quotas import queue_loads, share_out
from capplan.planner.queues.sizes import RequestSample, request_sizes, weighting
from capplan.spec import QueueClass, Queues, QueueWishes


def plan_queues(
    sample: RequestSample,
    *,
    rate_rps: float,
    kv_tokens: int,
    bound_s: float,
    wishes: QueueWishes | None = None,
) -> Queues:
    """Return the queues of one instance.

    Parameters
    ----------
    sample
        Requests that it serves, at least one whose time in execution is known.
    rate_rps
        How many arrive per second.
    kv_tokens
        Tokens that the quotas share.
    bound_s
        Bound on the time from arrival to the last token, in seconds.
    wishes
        How; None: as in the paper.

    Raises
    ------
    InfeasibleError
        When the least quotas exceed `kv_tokens`.
    """
    wishes = wishes or QueueWishes()
    wrs = weighting(sample, wishes.size)
    sizes = request_sizes(wrs, sample)
    clustered = thinned(sizes)
    chosen = choose(cluster(clustered, wishes.max_queues), clustered, wishes.clusters)
    borders = cut_offs(chosen)
    # Sizes a rounding error apart can have a cut-off between them that leaves a queue empty: it is no queue.
    taken, queue = np.unique(classify(sizes, borders), return_inverse=True)
    uppers = (*(float(borders[above - 1]) for above in taken[1:]), None)
    charges = sample.charges(wishes.adapter_charge)
    quotas = share_out(
        queue_loads(charges, sample.execution_s, queue, rate_rps, wishes.quota_size),
        kv_tokens,
        bound_s,
        percentile=wishes.percentile,
        rest=wishes.rest,
    )
    return Queues(
        wrs=wrs,
        adapter_charge=wishes.adapter_charge,
        classes=tuple(
            QueueClass(upper_wrs=upper, quota_tokens=quota)
            for upper, quota in zip(uppers, quotas, strict=True)
        ),
    )
