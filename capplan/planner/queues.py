"""Queues by request size with token quotas (Chameleon, section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InfeasibleError
from capplan.planner.problem import Assignment, Problem, horizon_s
from capplan.serving.memory import adapter_bytes, kv_bytes_per_token, lora_elements_per_rank
from capplan.spec import ModelArch, QueueClass, QueueConfig, Queues, Slo, Workload, Wrs
from capplan.spec.scheduling import AdapterCharge, ClusterRule, QuotaSize, RestWeights, SizeForm
from capplan.twin import RequestTable, SimulationResult, simulate_detailed
from capplan.twin.per_request import REJECTED
from capplan.twin.simulate import keywords_of

_QUEUE_SEED: Final = 11
_SAMPLE_REQUESTS: Final = 4000
"""Approximate number of simulated requests; the 99.9th percentile of lengths needs a thousand."""
_MIN_DURATION_S: Final = 300.0
"""Chameleon's window (section 4.3.4)."""
_MAX_DURATION_S: Final = 86_400.0
_BOUND_OVER_ISOLATED: Final = 5.0
"""Default bound on E2E, relative to the mean time of a request alone (Chameleon, section 5.1)."""

PROMPT_WEIGHT: Final = 0.4
OUTPUT_WEIGHT: Final = 0.6
"""Weights of prompt and output (Chameleon, section 4.3.1)."""
_MAX_LENGTH_PERCENTILE: Final = 99.9
"""Percentile of lengths that has size 1; the paper does not define its largest lengths."""

SAMPLE: Final = 2000
"""Maximum number of sizes that are clustered."""
_MIN_REDUCTION: Final = 0.10
"""Minimum reduction of the sum of squares by one more queue, relative to one queue, for ``elbow``."""
_WCSS_TOLERANCE: Final = 1e-12
"""Relative difference between sums of squares that is rounding error."""

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
    """Size of each adapter by number. With size 0, requests of the base model would all be smallest, so
    `with_base_model` gives it the size of the smallest adapter."""
    adapter_tokens: Ints
    """KV tokens that take the same memory, by number; 0 for the base model."""

    def charges(self, adapter_charge: AdapterCharge) -> Ints:
        """Return the tokens that each request takes from a quota during execution."""
        tokens = self.prompt_tokens + self.output_tokens
        return tokens if adapter_charge == "none" else tokens + self.adapter_tokens[self.adapter]


def with_base_model(adapter_bytes: Ints, adapter_tokens: Ints) -> tuple[Ints, Ints]:
    """Return sizes and tokens of adapters 1, 2, ... with an entry 0 for the base model."""
    smallest = adapter_bytes.min() if adapter_bytes.size else 1
    return np.append(smallest, adapter_bytes), np.append(0, adapter_tokens)


def group_queues(
    problem: Problem, assignment: Assignment, results: Sequence[SimulationResult]
) -> Queues | None:
    """Return the queues of one instance; None if the workload has none, or the instance no requests.

    The quotas share the KV tokens of the first of its simulations.

    Raises
    ------
    InfeasibleError
        If the minimum quotas do not fit.
    """
    config = problem.workload.queues
    rate_rps = sum(share.rate_rps for share in assignment.shares)
    if config is None or rate_rps == 0.0:
        return None
    workload = problem.subworkload(assignment.shares).model_copy(update={"slo": Slo()})
    requests = _simulate_requests(problem, assignment, workload, rate_rps)
    if np.isnan(requests.isolated_s).all():
        return None
    profile = problem.pools[assignment.pool].profile
    try:
        return plan_queues(
            _sample(requests, workload, profile.model, profile.tp),
            rate_rps=rate_rps,
            kv_tokens=results[0].kv_tokens,
            bound_s=time_bound_s(problem.workload.slo, float(np.nanmean(requests.isolated_s))),
            config=config,
        )
    except InfeasibleError as error:
        names = [f"adapter {adapter.name}" for adapter in workload.adapters] or ["the base model"]
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        hint = "" if config.quota_size == "mean" else "; queues.quota_size p99 or mean asks for less"
        raise InfeasibleError(
            f"{error.message}, on the GPU of {names[0]}{others}{hint}", error.reason
        ) from None


def time_bound_s(slo: Slo, isolated_s: float) -> float:
    """Return the tightest bound on E2E, or a multiple of the time of a request alone."""
    bounds = [bound for name, bound in slo.latency_bounds().items() if name.startswith("e2e")]
    return min(bounds, default=_BOUND_OVER_ISOLATED * isolated_s)


def _simulate_requests(
    problem: Problem, assignment: Assignment, workload: Workload, rate_rps: float
) -> RequestTable:
    duration_s = min(max(_SAMPLE_REQUESTS / rate_rps, _MIN_DURATION_S), _MAX_DURATION_S)
    length_s = horizon_s(workload, duration_s)
    settings = keywords_of(problem.engine_args(assignment))
    profile = problem.pools[assignment.pool].profile
    return simulate_detailed(workload, profile, seed=_QUEUE_SEED, duration_s=length_s, **settings).requests


def _sample(requests: RequestTable, workload: Workload, arch: ModelArch, tp: int) -> RequestSample:
    ranks = np.array([adapter.rank for adapter in workload.adapters], np.int64)
    tokens_per_rank = arch.dtype_bytes * lora_elements_per_rank(arch, tp) / kv_bytes_per_token(arch, tp)
    sizes, tokens = with_base_model(
        np.array([adapter_bytes(arch, int(rank)) for rank in ranks], np.int64),
        np.ceil(ranks * tokens_per_rank).astype(np.int64),
    )
    kept = requests.status != REJECTED
    return RequestSample(
        prompt_tokens=requests.prompt_tokens[kept],
        output_tokens=requests.output_tokens[kept],
        adapter=requests.adapter[kept].astype(np.int64),
        execution_s=(requests.finish_s - requests.admitted_s)[kept],
        adapter_bytes=sizes,
        adapter_tokens=tokens,
    )


def plan_queues(
    sample: RequestSample,
    *,
    rate_rps: float,
    kv_tokens: int,
    bound_s: float,
    config: QueueConfig | None = None,
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

    Raises
    ------
    InfeasibleError
        If the minimum quotas exceed `kv_tokens`.
    """
    config = config or QueueConfig()
    wrs = size_weights(sample, config.size)
    sizes = request_sizes(wrs, sample)
    clustered = subsample(sizes)
    chosen = choose_clustering(cluster_sizes(clustered, config.max_queues), clustered, config.clusters)
    borders = cut_offs(chosen)
    # A cut-off between sizes that differ by rounding error leaves a queue empty; such queues are dropped.
    present, queue = np.unique(classify(sizes, borders), return_inverse=True)
    uppers = (*(float(borders[above - 1]) for above in present[1:]), None)
    charges = sample.charges(config.adapter_charge)
    quotas = allocate_quotas(
        queue_loads(charges, sample.execution_s, queue, rate_rps, config.quota_size),
        kv_tokens,
        bound_s,
        percentile=config.percentile,
        rest=config.rest,
    )
    return Queues(
        wrs=wrs,
        adapter_charge=config.adapter_charge,
        classes=tuple(
            QueueClass(upper_wrs=upper, quota_tokens=quota)
            for upper, quota in zip(uppers, quotas, strict=True)
        ),
    )


def size_weights(sample: RequestSample, form: SizeForm) -> Wrs:
    """Return the weights of request sizes, with the maxima of a sample."""
    alone = form == "output_only"
    return Wrs(
        form=form,
        a=0.0 if alone else PROMPT_WEIGHT,
        b=1.0 if alone else OUTPUT_WEIGHT,
        max_prompt_tokens=_max_length(sample.prompt_tokens),
        max_output_tokens=_max_length(sample.output_tokens),
        max_adapter_bytes=int(sample.adapter_bytes.max()),
    )


def _max_length(tokens: Ints) -> int:
    return max(1, int(np.percentile(tokens, _MAX_LENGTH_PERCENTILE, method="higher")))


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
    centred = values - np.average(values, weights=counts)  # sums of squares far from 0 would cancel
    number, total, squares = (
        np.concatenate([[0.0], np.cumsum(counts * centred**power)]) for power in (0, 1, 2)
    )

    def cost(first: Ints, end: int) -> Floats:
        """Return the sum of squares of [first, end), for each `first` below `end`."""
        rest = (total[end] - total[first]) ** 2 / (number[end] - number[first])
        within: Floats = squares[end] - squares[first] - rest
        return within.clip(min=0.0)

    ends = range(1, values.size + 1)
    least = np.array([0.0, *(cost(np.array([0]), end)[0] for end in ends)])
    starts: list[Ints] = []  # per number of clusters: start of the last one in the first 0, 1, ... values
    clusterings = [_clustering(values, counts, [0, values.size])]
    for clusters in range(2, min(most, values.size) + 1):
        best, start = np.full(values.size + 1, np.inf), np.zeros(values.size + 1, np.int64)
        for end in ends[clusters - 1 :]:
            first = np.arange(clusters - 1, end)
            sums = least[first] + cost(first, end)
            start[end] = first[sums.argmin()]
            best[end] = sums.min()
        least = best
        starts.append(start)
        borders = [values.size]
        for each in reversed(starts):
            borders.append(int(each[borders[-1]]))
        clusterings.append(_clustering(values, counts, [0, *reversed(borders)]))
    return tuple(clusterings)


def _clustering(values: Floats, counts: Ints, borders: Sequence[int]) -> Clustering:
    """Return the clusters between borders; sums are recomputed, since differences lose digits."""
    centroids, wcss = [], 0.0
    for first, end in pairwise(borders):
        centroids.append(float(np.average(values[first:end], weights=counts[first:end])))
        wcss += float(np.sum(counts[first:end] * (values[first:end] - centroids[-1]) ** 2))
    return Clustering(tuple(centroids), wcss)


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
        sizes = {"max": float(largest), "p99": float(np.percentile(tokens, 99.0)), "mean": mean}
        execution = float(execution_s[timed].mean())
        loads.append(QueueLoad(rate_rps * float(mine.mean()), sizes[size], mean, largest, execution))
    return tuple(loads)


def allocate_quotas(
    loads: Sequence[QueueLoad],
    tokens: int,
    bound_s: float,
    *,
    percentile: float | None = None,
    rest: RestWeights = "minimum",
) -> tuple[int, ...]:
    """Return the quota of each queue, `tokens` in total.

    Each gets the minimum for its bound, and at least its largest request, which would otherwise never run.
    The rest is divided by weight: the minima (``minimum``), the mean load, lambda S D with mean S (``load``),
    or the rates (``rate``).

    Raises
    ------
    InfeasibleError
        If the minima do not fit (reason ``slo``), or the largest requests do not (``memory``).
    """
    minima = [load.least_tokens(bound_s, percentile) for load in loads]
    needed = [max(least, load.largest_tokens) for least, load in zip(minima, loads, strict=True)]
    left = tokens - sum(needed)
    if left < 0:
        raise _quota_error(loads, needed, tokens, bound_s)
    weights = {
        "minimum": [float(least) for least in minima],
        "load": [load.rate_rps * load.mean_tokens * load.execution_s for load in loads],
        "rate": [load.rate_rps for load in loads],
    }[rest]
    return tuple(need + more for need, more in zip(needed, _proportional(left, weights), strict=True))


def _proportional(tokens: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers that sum to `tokens`, by largest remainder."""
    total = math.fsum(weights)
    exact = [tokens * (weight / total if total > 0.0 else 1.0 / len(weights)) for weight in weights]
    whole = [math.floor(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    for i in by_remainder[: tokens - sum(whole)]:
        whole[i] += 1
    return whole


def _quota_error(
    loads: Sequence[QueueLoad], needed: Sequence[int], tokens: int, bound_s: float
) -> InfeasibleError:
    worst = max(range(len(needed)), key=needed.__getitem__)
    load = loads[worst]
    largest = sum(each.largest_tokens for each in loads)
    return InfeasibleError(
        f"queues: quotas need at least {sum(needed):,} tokens, {sum(needed) - tokens:,} more than the "
        f"{tokens:,} of KV; queue {worst + 1} of {len(needed)} needs most, {needed[worst]:,}: requests of "
        f"{load.size_tokens:,.0f} tokens (the largest {load.largest_tokens:,}) that take "
        f"{load.execution_s:.3g} s, {load.rate_rps:.3g} per second, within {bound_s:.3g} s",
        reason="memory" if largest > tokens else "slo",
    )
