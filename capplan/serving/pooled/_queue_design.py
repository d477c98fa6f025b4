"""Queues by request size from a sample of requests: weights, clusters, cut-offs, quotas (Chameleon, 4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.serving.pooled._quotas import QueueLoad, allocate_quotas, queue_loads
from capplan.serving.pooled._size_clusters import (
    choose_clustering,
    classify,
    cluster_sizes,
    cut_offs,
    subsample,
)
from capplan.spec import (
    MOST_QUEUES,
    PROMPT_WEIGHT,
    AdapterCharge,
    QueueClass,
    QueueConfig,
    Queues,
    QuotaSize,
    SizeForm,
    Wrs,
)

_MAX_LENGTH_QUANTILE: Final = 0.999
"""Quantile of lengths that has size 1; the paper does not define its largest lengths."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RequestSample:
    """Requests of one instance, and its adapters."""

    prompt_tokens: Ints
    output_tokens: Ints
    """Lengths, one per request."""
    adapter: Ints
    """Number of the adapter of each request; 0 is the base model."""
    execution_s: Floats
    """Time in execution of each request; NaN if unknown."""
    adapter_bytes: Ints
    """Size of each adapter by number; that of the base model is `base_model_bytes`."""
    adapter_tokens: Ints
    """KV tokens that take the same memory, by number; 0 for the base model."""

    def charges(self, adapter_charge: AdapterCharge) -> Ints:
        """Return the tokens that each request takes from a quota during execution."""
        tokens = self.prompt_tokens + self.output_tokens
        return tokens if adapter_charge == "none" else tokens + self.adapter_tokens[self.adapter]

    def loads(
        self, queue: Ints, rate_rps: float, size: QuotaSize, adapter_charge: AdapterCharge
    ) -> tuple[QueueLoad, ...]:
        """Return the load of each queue; its largest request brings its adapter, if that is charged."""
        own = self.charges("none" if adapter_charge == "shared" else adapter_charge)
        found = queue_loads(own, self.execution_s, queue, rate_rps, size)
        whole = self.charges(adapter_charge)
        return tuple(
            replace(load, largest_tokens=int(whole[queue == number].max()))
            for number, load in enumerate(found)
        )


def base_model_bytes(adapter_bytes: Ints) -> int:
    """Return the size of the base model in request sizes: that of the smallest adapter.

    With size 0 its requests would all be smallest. `adapter_bytes` of 0 are free numbers.
    """
    known = adapter_bytes[adapter_bytes > 0]
    return int(known.min()) if known.size else 1


@dataclass(frozen=True, eq=False)
class SizeClasses:
    """Queues without quotas, and the queue of each request of a sample."""

    wrs: Wrs
    cuts: Floats
    """Borders between queues, ascending; a size equal to one is above it."""
    queue: Ints
    """Queue of each request, from 0; none is empty, except for equal ranges."""

    @property
    def count(self) -> int:
        """Number of queues."""
        return self.cuts.size + 1

    def queues(self, quotas: Sequence[int], adapter_charge: AdapterCharge) -> Queues:
        """Return the queues with their quotas, in tokens."""
        uppers = (*self.cuts.tolist(), None)
        classes = (
            QueueClass(upper_wrs=upper, quota_tokens=quota)
            for upper, quota in zip(uppers, quotas, strict=True)
        )
        return Queues(wrs=self.wrs, adapter_charge=adapter_charge, classes=tuple(classes))


def clustered_classes(sample: RequestSample, config: QueueConfig) -> SizeClasses:
    """Return queues by clusters of request sizes."""
    wrs = size_weights(sample, config.size, config.prompt_weight)
    sizes = request_sizes(wrs, sample)
    clustered = subsample(sizes)
    clusterings = cluster_sizes(clustered, config.max_queues)
    cuts = cut_offs(choose_clustering(clusterings, clustered, config.clusters))
    # A cut-off between sizes that differ by rounding error leaves a queue empty; such queues are dropped.
    queue = classify(sizes, cuts)
    present = np.bincount(queue, minlength=cuts.size + 1) > 0
    return SizeClasses(wrs, cuts[np.flatnonzero(present)[1:] - 1], (present.cumsum() - 1)[queue])


def equal_ranges(sample: RequestSample, config: QueueConfig) -> SizeClasses:
    """Return 4 queues of equal ranges of sizes between the smallest and the largest (Chameleon, Fig. 22)."""
    wrs = size_weights(sample, config.size, config.prompt_weight)
    sizes = request_sizes(wrs, sample)
    cuts = np.unique(np.linspace(sizes.min(), sizes.max(), MOST_QUEUES + 1)[1:-1])
    return SizeClasses(wrs, cuts, classify(sizes, cuts))


def equal_quotas(tokens: int, queues: int) -> tuple[int, ...]:
    """Return equal quotas, `tokens` in total."""
    each, left = divmod(tokens, queues)
    return tuple(each + (queue < left) for queue in range(queues))


def design_queues(
    sample: RequestSample,
    *,
    rate_rps: float,
    kv_tokens: int,
    bound_s: float,
    config: QueueConfig | None = None,
    static: bool = False,
) -> Queues:
    """Return the queues of one instance.

    Parameters
    ----------
    sample
        Requests; the time in execution of at least one is known.
    rate_rps
        Rate of all requests.
    kv_tokens
        Sum of the quotas.
    bound_s
        Bound on the time from arrival to last token, in seconds.
    config
        Settings; None: those of the paper.
    static
        Equal ranges of sizes with equal quotas, instead of clusters with quotas by load.

    Returns
    -------
    Queues
        With `Queues.missing_tokens` where the minimum quotas exceed `kv_tokens`, and are scaled down.
    """
    config = config or QueueConfig()
    if static:
        classes = equal_ranges(sample, config)
        return classes.queues(equal_quotas(kv_tokens, classes.count), config.adapter_charge)
    classes = clustered_classes(sample, config)
    loads = sample.loads(classes.queue, rate_rps, config.quota_size, config.adapter_charge)
    made = allocate_quotas(loads, kv_tokens, bound_s, percentile=config.percentile, rest=config.rest)
    queues = classes.queues(made.tokens, config.adapter_charge)
    return queues.replace(missing_tokens=made.missing) if made.missing else queues


def size_weights(sample: RequestSample, form: SizeForm, prompt_weight: float = PROMPT_WEIGHT) -> Wrs:
    """Return the weights of request sizes, with the maxima of a sample (Chameleon, section 4.3.1)."""
    of_prompt = 0.0 if form == "output_only" else prompt_weight
    return Wrs(
        form=form,
        a=of_prompt,
        b=1.0 - of_prompt,
        max_prompt_tokens=_max_length(sample.prompt_tokens),
        max_output_tokens=_max_length(sample.output_tokens),
        max_adapter_bytes=int(sample.adapter_bytes.max()),
    )


def _max_length(tokens: Ints) -> int:
    """Return the percentile of lengths, the higher of two neighbours."""
    at = math.ceil((tokens.size - 1) * _MAX_LENGTH_QUANTILE)
    return max(1, int(np.partition(tokens, at)[at]))


def request_sizes(wrs: Wrs, sample: RequestSample) -> Floats:
    """Return the size of each request, from 0 to 1."""
    prompt = np.minimum(sample.prompt_tokens / wrs.max_prompt_tokens, 1.0)
    output = np.minimum(sample.output_tokens / wrs.max_output_tokens, 1.0)
    adapter = np.minimum(sample.adapter_bytes[sample.adapter] / wrs.max_adapter_bytes, 1.0)
    lengths: Floats = wrs.a * prompt + wrs.b * output
    match wrs.form:
        case "degree2":
            return lengths * adapter
        case "degree1":  # the paper gives no weights: lengths and adapter count equally
            return (lengths + adapter) / 2.0
        case "output_only":
            return lengths
