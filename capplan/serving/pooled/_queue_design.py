"""Queues by request size from a sample of requests (Chameleon, section 4.3).

Clusters of request sizes, by exact one-dimensional K-means, and their number (4.3.4); quotas of queues by the
load of each (4.3.5); weights, cut-offs and queues.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import inner, jit
from capplan.spec import (
    MOST_QUEUES,
    PROMPT_WEIGHT,
    AdapterCharge,
    ClusterRule,
    QueueClass,
    QueueConfig,
    Queues,
    QuotaSize,
    RestWeights,
    SizeForm,
    Wrs,
)

SAMPLE: Final = 2000
"""Maximum number of sizes that are clustered."""
_MIN_REDUCTION: Final = 0.10
"""Minimum reduction of the sum of squares by one more queue, relative to one queue, for ``elbow``."""
_WCSS_TOLERANCE: Final = 1e-12
"""Relative difference between sums of squares that is rounding error."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Clustering:
    """Optimal clusters of sizes for one number of clusters."""

    centroids: tuple[float, ...]
    """Means, ascending."""
    wcss: float
    """Within-cluster sum of squares."""


def subsample(sizes: Floats) -> Floats:
    """Return at most `SAMPLE` sizes, ascending, evenly spaced in order."""
    ordered = np.sort(sizes)
    if ordered.size <= SAMPLE:
        return ordered
    return ordered[np.linspace(0, ordered.size - 1, SAMPLE).round().astype(np.int64)]


def cluster_sizes(sizes: Floats, most: int) -> tuple[Clustering, ...]:
    """Return the optimal K-means clusterings for 1, 2, ..., `most` clusters, by dynamic programming.

    Optimal clusters of numbers are intervals (Chameleon, section 4.3.4). There are never more clusters than
    distinct sizes.
    """
    values, counts = np.unique(sizes, return_counts=True)
    centred = values - counts @ values / sizes.size  # sums of squares far from 0 would cancel
    sums = np.zeros((3, values.size + 1))
    np.cumsum([counts, counts * centred, counts * centred**2], axis=1, out=sums[:, 1:])
    most = min(most, values.size)
    starts, least = np.zeros((most, values.size + 1), np.int64), np.zeros((2, values.size + 1))
    _last_starts(sums, starts, least)
    clusterings = []
    for clusters in range(1, most + 1):
        borders = [values.size]
        for each in starts[clusters - 1 :: -1]:
            borders.append(int(each[borders[-1]]))
        clusterings.append(_clustering(values, counts, borders[::-1]))
    return tuple(clusterings)


@jit
def _last_starts(sums: Floats, starts: Ints, least: Floats) -> None:
    """Fill in the start of the last of 1, 2, ... optimal clusters of the first 0, 1, ... values.

    A later end never has an earlier start, so the starts of neighbours bound the search: n log n steps.

    `sums` are number, sum and sum of squares of the first 0, 1, ... values, shape (3, values + 1); `starts`
    is the result, shape (clusters, values + 1); `least` is scratch for the sums of squares with one cluster
    fewer and with as many, shape (2, values + 1).
    """
    ends = sums.shape[1]
    for end in range(1, ends):
        least[0, end] = _within(sums, 0, end)
    for clusters in range(1, starts.shape[0]):
        before, here = (clusters - 1) % 2, clusters % 2
        stride = 1
        while 2 * stride < ends:
            stride *= 2
        while stride > 0:
            end = stride
            while end < ends:
                if end > clusters:
                    low = max(clusters, starts[clusters, end - stride])
                    high = end - 1
                    if end + stride < ends:
                        high = min(high, starts[clusters, end + stride])
                    best = np.inf
                    for start in range(low, high + 1):
                        total = least[before, start] + _within(sums, start, end)
                        if total < best:
                            best = total
                            starts[clusters, end] = start
                    least[here, end] = best
                end += 2 * stride
            stride //= 2


@inner
def _within(sums: Floats, start: int, end: int) -> float:
    """Return the sum of squares of the values in [start, end) around their mean."""
    total = sums[1, end] - sums[1, start]
    return float(max(0.0, sums[2, end] - sums[2, start] - total * total / (sums[0, end] - sums[0, start])))


def _clustering(values: Floats, counts: Ints, borders: Sequence[int]) -> Clustering:
    """Return the clusters between borders; sums are recomputed, since differences lose digits."""
    first = borders[:-1]
    centroids = np.add.reduceat(counts * values, first) / np.add.reduceat(counts, first)
    deviations = values - centroids.repeat(np.diff(borders))
    return Clustering(tuple(centroids.tolist()), float(np.sum(counts * deviations**2)))


def choose_clustering(clusterings: Sequence[Clustering], sizes: Floats, by: ClusterRule) -> Clustering:
    """Return one of the clusterings of `sizes`.

    ``elbow``: the fewest clusters after which one more reduces the sum of squares by less than a tenth of
    that of one cluster. ``wcss``: the least sum of squares, as in the paper, which is the largest number.
    ``silhouette``: the best mean silhouette by centroids. Ties go to fewer clusters.
    """
    whole = clusterings[0].wcss
    if by == "silhouette":
        return max(clusterings[1:], key=lambda each: silhouette(each, sizes), default=clusterings[0])
    if by == "wcss":
        least = clusterings[-1].wcss + _WCSS_TOLERANCE * whole
        return next(each for each in clusterings if each.wcss <= least)
    for each, larger in pairwise(clusterings):
        if each.wcss - larger.wcss < _MIN_REDUCTION * whole:
            return each
    return clusterings[-1]


def silhouette(clustering: Clustering, sizes: Floats) -> float:
    """Return the mean silhouette by centroids: (b - a) / b for the distances a, b to the nearest two."""
    centroids = np.array(clustering.centroids)
    distance = np.sort(np.abs(sizes[:, None] - centroids), axis=1)
    return float(np.mean(1.0 - distance[:, 0] / distance[:, 1]))


def cut_offs(clustering: Clustering) -> Floats:
    """Return the borders between queues: midway between centroids."""
    return np.array([(low + high) / 2.0 for low, high in pairwise(clustering.centroids)], np.float64)


def classify(sizes: Floats, borders: Floats) -> Ints:
    """Return the queue of each size; a size equal to a border goes up."""
    return np.searchsorted(borders, sizes, side="right")


@dataclass(frozen=True)
class QueueLoad:
    """Load of one queue."""

    rate_rps: float
    size_tokens: float
    """S: representative tokens of its requests."""
    mean_tokens: float
    largest_tokens: int
    execution_s: float
    """D: mean time in execution."""

    def least_tokens(self, bound_s: float, percentile: float | None = None) -> int:
        """Return Tok_min, the fewest tokens with which time in queue and execution keeps a bound.

        `percentile` is the share of requests that keep it; None: the mean does. Times in an M/M/1 queue are
        exponential.
        """
        times = 1.0 if percentile is None else -math.log1p(-percentile)
        return math.ceil(self.size_tokens * self.execution_s * (times / bound_s + self.rate_rps))


def queue_loads(
    charges: Ints, execution_s: Floats, queue: Ints, rate_rps: float, size: QuotaSize
) -> tuple[QueueLoad, ...]:
    """Return the load of each queue, from the tokens, execution time and queue of each request.

    At least one execution time is not NaN, and no queue is empty. `rate_rps` is the rate of all requests.
    """
    known = ~np.isnan(execution_s)
    loads = []
    for number in range(int(queue.max()) + 1):
        mine = queue == number
        timed = known & mine if np.any(known & mine) else known
        tokens = charges[mine]
        largest, mean = int(tokens.max()), float(tokens.mean())
        execution = float(execution_s[timed].mean())
        representative = _representative(tokens, size)
        loads.append(QueueLoad(rate_rps * float(mine.mean()), representative, mean, largest, execution))
    return tuple(loads)


def _representative(tokens: Ints, size: QuotaSize) -> float:
    match size:
        case "max":
            return float(tokens.max())
        case "p99":
            return float(np.percentile(tokens, 99.0))
        case "mean":
            return float(tokens.mean())


def needed_tokens(
    loads: Sequence[QueueLoad], bound_s: float, percentile: float | None = None
) -> tuple[int, ...]:
    """Return the fewest tokens of each queue: for its bound, and for its largest request."""
    return tuple(max(load.least_tokens(bound_s, percentile), load.largest_tokens) for load in loads)


class Quotas(NamedTuple):
    """Quotas of queues."""

    tokens: tuple[int, ...]
    missing: int
    """Tokens by which the minima exceed those to divide; 0 if they fit."""


def allocate_quotas(
    loads: Sequence[QueueLoad],
    tokens: int,
    bound_s: float,
    *,
    percentile: float | None = None,
    rest: RestWeights = "minimum",
) -> Quotas:
    """Return the quota of each queue, `tokens` in total.

    Each gets the minimum for its bound, and at least its largest request. The rest is divided by weight: the
    minima (``minimum``), the mean load, lambda S D with mean S (``load``), or the rates (``rate``). Where the
    minima do not fit, each has its largest request if all of them fit, and the minima beyond them are scaled
    down; otherwise quotas are in proportion to the largest requests.
    """
    needed = needed_tokens(loads, bound_s, percentile)
    largest = [load.largest_tokens for load in loads]
    missing = max(0, sum(needed) - tokens)
    if sum(largest) > tokens:
        return Quotas(_shared_out(tokens, [1] * len(loads), largest), missing)
    if missing:
        beyond = [need - own for need, own in zip(needed, largest, strict=True)]
        return Quotas(_shared_out(tokens, largest, beyond), missing)
    weights: dict[RestWeights, list[float]] = {
        "minimum": [float(load.least_tokens(bound_s, percentile)) for load in loads],
        "load": [load.rate_rps * load.mean_tokens * load.execution_s for load in loads],
        "rate": [load.rate_rps for load in loads],
    }
    return Quotas(_shared_out(tokens, needed, weights[rest]), 0)


def _shared_out(tokens: int, least: Sequence[int], weights: Sequence[float]) -> tuple[int, ...]:
    """Return shares of `tokens`: the least of each, and the rest by weight."""
    rest = _proportional(tokens - sum(least), weights)
    return tuple(own + more for own, more in zip(least, rest, strict=True))


def _proportional(tokens: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers that sum to `tokens`, by largest remainder."""
    total = math.fsum(weights)
    exact = [tokens * (weight / total if total > 0.0 else 1.0 / len(weights)) for weight in weights]
    whole = [math.floor(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    for i in by_remainder[: tokens - sum(whole)]:
        whole[i] += 1
    return whole


_MAX_LENGTH_QUANTILE: Final = 0.999
"""Quantile of lengths that has size 1; the paper does not define its largest lengths."""


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
