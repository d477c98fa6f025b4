"""Queues by request size with token quotas (Chameleon, section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InfeasibleError
from capplan.planner.problem import Assignment, Problem, horizon_s
from capplan.planner.queue_clusters import choose_clustering, classify, cluster_sizes, cut_offs, subsample
from capplan.serving.memory import adapter_bytes, kv_bytes_per_token, lora_elements_per_rank
from capplan.spec import ModelArch, QueueClass, QueueConfig, Queues, Slo, Workload, Wrs
from capplan.spec.workload import AdapterCharge, QuotaSize, RestWeights, SizeForm
from capplan.twin import RequestTable, SimulationResult, simulate_detailed
from capplan.twin.per_request import REJECTED
from capplan.twin.simulate import keywords_of

__all__ = [
    "RequestSample",
    "group_queues",
    "plan_queues",
]

PROMPT_WEIGHT: Final = 0.4
OUTPUT_WEIGHT: Final = 0.6
"""Weights of prompt and output (Chameleon, section 4.3.1)."""

_MAX_LENGTH_PERCENTILE: Final = 99.9
"""The paper does not say what its largest lengths are; the few longer than this percentile count as this."""


@dataclass(frozen=True, eq=False)
class RequestSample:
    """Requests that one instance serves, and what their adapters weigh.

    Attributes
    ----------
    prompt_tokens, output_tokens
        Lengths, one per request.
    adapter
        Number of each request's adapter; 0 stands for the base model.
    execution_s
        Time that each request spends in execution; NaN where unknown.
    adapter_bytes
        Weights of each adapter by number. Entry 0 is what the base model counts as: with no weights its
        requests would all be smallest, so `with_base_model` takes the smallest adapter.
    adapter_tokens
        KV tokens that take the same memory, by number; 0 for the base model.
    """

    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    adapter: NDArray[np.int64]
    execution_s: NDArray[np.float64]
    adapter_bytes: NDArray[np.int64]
    adapter_tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return self.adapter.size

    def charges(self, adapter_charge: AdapterCharge) -> NDArray[np.int64]:
        """Return the tokens that each request takes from a quota while it is in execution."""
        tokens = self.prompt_tokens + self.output_tokens
        return tokens if adapter_charge == "none" else tokens + self.adapter_tokens[self.adapter]


def with_base_model(
    adapter_bytes: NDArray[np.int64], adapter_tokens: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return weights and tokens of adapters 1, 2, ... with an entry 0 for the base model."""
    smallest = adapter_bytes.min()
    return np.concatenate([[smallest], adapter_bytes]), np.concatenate([[0], adapter_tokens])


def size_weights(sample: RequestSample, form: SizeForm) -> Wrs:
    """Return how sizes are computed, with the maxima of a sample."""
    alone = form == "output_only"
    return Wrs(
        form=form,
        a=0.0 if alone else PROMPT_WEIGHT,
        b=1.0 if alone else OUTPUT_WEIGHT,
        max_prompt_tokens=_max_length(sample.prompt_tokens),
        max_output_tokens=_max_length(sample.output_tokens),
        max_adapter_bytes=int(sample.adapter_bytes.max()),
    )


def request_sizes(wrs: Wrs, sample: RequestSample) -> NDArray[np.float64]:
    """Return the size of each request, from 0 to 1."""
    prompt = np.minimum(sample.prompt_tokens / wrs.max_prompt_tokens, 1.0)
    output = np.minimum(sample.output_tokens / wrs.max_output_tokens, 1.0)
    adapter = np.minimum(sample.adapter_bytes[sample.adapter] / wrs.max_adapter_bytes, 1.0)
    lengths: NDArray[np.float64] = wrs.a * prompt + wrs.b * output
    match wrs.form:
        case "degree2":
            return lengths * adapter
        case "degree1":  # the paper gives no weights for this one: lengths and adapter count alike
            return (lengths + adapter) / 2.0
        case "output_only":
            return lengths


def _max_length(tokens: NDArray[np.int64]) -> int:
    return max(1, int(np.percentile(tokens, _MAX_LENGTH_PERCENTILE, method="higher")))


_P99: Final = 99.0


@dataclass(frozen=True)
class QueueLoad:
    """What one queue has to carry."""

    rate_rps: float
    size_tokens: float
    """S: tokens that stand for those of its requests."""
    mean_tokens: float
    largest_tokens: int
    execution_s: float
    """D: mean time in execution."""

    def least_tokens(self, bound_s: float, percentile: float | None = None) -> int:
        """Return Tok_min: with fewer tokens requests take longer than `bound_s` on average.

        Parameters
        ----------
        bound_s
            Bound on the time in queue and execution, in seconds.
        percentile
            Share of requests that is to keep the bound, instead of the mean; times in an M/M/1 are
            exponential.
        """
        times = 1.0 if percentile is None else -math.log1p(-percentile)
        return math.ceil(self.size_tokens * self.execution_s * (times / bound_s + self.rate_rps))


def queue_loads(
    charges: NDArray[np.int64],
    execution_s: NDArray[np.float64],
    queue: NDArray[np.int64],
    rate_rps: float,
    size: QuotaSize,
) -> tuple[QueueLoad, ...]:
    """Return the load of each queue, as a sample of requests shows it.

    Parameters
    ----------
    charges, execution_s
        Tokens and time in execution of each request; time NaN where unknown, but known of one at least.
    queue
        Number of each request's queue; no number from 0 to the largest is left out.
    rate_rps
        Rate of all requests together, shared out as in the sample.
    size
        Whether the largest size stands for those of a queue, the 99th percentile, or the mean.
    """
    known = ~np.isnan(execution_s)
    loads = []
    for number in range(int(queue.max()) + 1):
        mine = queue == number
        timed = known & mine if np.any(known & mine) else known
        tokens = charges[mine]
        loads.append(
            QueueLoad(
                rate_rps=rate_rps * float(mine.mean()),
                size_tokens=_representative_tokens(tokens, size),
                mean_tokens=float(tokens.mean()),
                largest_tokens=int(tokens.max()),
                execution_s=float(execution_s[timed].mean()),
            )
        )
    return tuple(loads)


def allocate_quotas(
    loads: Sequence[QueueLoad],
    tokens: int,
    bound_s: float,
    *,
    percentile: float | None = None,
    rest: RestWeights = "minimum",
) -> tuple[int, ...]:
    """Return the quota of each queue, `tokens` together.

    Each gets what its bound needs, and at least its largest request, which would otherwise never run. The
    rest goes by weight: of the minima (``minimum``), of the mean load, lambda S D with mean S (``load``), or
    of the rates (``rate``).

    Raises
    ------
    InfeasibleError
        With reason ``slo`` when the minima do not fit, and ``memory`` when not even the largest requests do.
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


def _representative_tokens(tokens: NDArray[np.int64], size: QuotaSize) -> float:
    match size:
        case "max":
            return float(tokens.max())
        case "p99":
            return float(np.percentile(tokens, _P99))
        case "mean":
            return float(tokens.mean())


def _proportional(tokens: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers that sum to `tokens`, by the largest remainders."""
    total = math.fsum(weights)
    shares = [weight / total for weight in weights] if total > 0.0 else [1.0 / len(weights)] * len(weights)
    exact = [tokens * share for share in shares]
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


def plan_queues(
    sample: RequestSample,
    *,
    rate_rps: float,
    kv_tokens: int,
    bound_s: float,
    wishes: QueueConfig | None = None,
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
    wishes = wishes or QueueConfig()
    wrs = size_weights(sample, wishes.size)
    sizes = request_sizes(wrs, sample)
    clustered = subsample(sizes)
    chosen = choose_clustering(cluster_sizes(clustered, wishes.max_queues), clustered, wishes.clusters)
    borders = cut_offs(chosen)
    # Sizes a rounding error apart can have a cut-off between them that leaves a queue empty: it is no queue.
    taken, queue = np.unique(classify(sizes, borders), return_inverse=True)
    uppers = (*(float(borders[above - 1]) for above in taken[1:]), None)
    charges = sample.charges(wishes.adapter_charge)
    quotas = allocate_quotas(
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


_QUEUE_SEED: Final = 11
_SAMPLE_REQUESTS: Final = 4000
"""Requests to look at, about; the 99.9th percentile of lengths needs a thousand."""

_MIN_DURATION_S: Final = 300.0
"""Chameleon's window (section 4.3.4)."""

_MAX_DURATION_S: Final = 86_400.0
_BOUND_OVER_ISOLATED: Final = 5.0
"""Bound over the mean time of a request alone, where the workload has none (Chameleon, section 5.1)."""


def group_queues(
    problem: Problem, assignment: Assignment, results: Sequence[SimulationResult]
) -> Queues | None:
    """Return the queues of one instance; None where none are wished for, or it serves no request.

    Parameters
    ----------
    problem, assignment
        What the instance serves, and how it is set.
    results
        What the twin said of it; its KV tokens are what quotas share.

    Raises
    ------
    InfeasibleError
        When the least quotas do not fit.
    """
    wishes = problem.workload.queues
    rate_rps = sum(share.rate_rps for share in assignment.shares)
    if wishes is None or rate_rps == 0.0:
        return None
    workload = problem.subworkload(assignment.shares).model_copy(update={"slo": Slo()})  # nothing to judge
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
            wishes=wishes,
        )
    except InfeasibleError as error:
        names = [adapter.name for adapter in workload.adapters]
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        hint = "" if wishes.quota_size == "mean" else "; queues.quota_size p99 or mean asks for less"
        raise InfeasibleError(
            f"{error.message}, on the GPU of adapter {names[0]}{others}{hint}", error.reason
        ) from None


def time_bound_s(slo: Slo, isolated_s: float) -> float:
    """Return the bound on the time of a request: the tightest one on E2E, or else a multiple of it alone."""
    bounds = [bound for name, bound in slo.latency_bounds().items() if name.startswith("e2e")]
    return min(bounds, default=_BOUND_OVER_ISOLATED * isolated_s)


def _simulate_requests(
    problem: Problem, assignment: Assignment, workload: Workload, rate_rps: float
) -> RequestTable:
    """Return what the twin does with enough requests, or with the whole trace."""
    duration_s = min(max(_SAMPLE_REQUESTS / rate_rps, _MIN_DURATION_S), _MAX_DURATION_S)
    length_s = horizon_s(workload, duration_s)
    settings = keywords_of(problem.engine_args(assignment))
    profile = problem.pools[assignment.pool].profile
    return simulate_detailed(workload, profile, seed=_QUEUE_SEED, duration_s=length_s, **settings).requests


def _sample(requests: RequestTable, workload: Workload, arch: ModelArch, tp: int) -> RequestSample:
    ranks = np.array([adapter.rank for adapter in workload.adapters], np.int64)
    tokens_per_rank = arch.dtype_bytes * lora_elements_per_rank(arch, tp) / kv_bytes_per_token(arch, tp)
    weights, tokens = with_base_model(
        np.array([adapter_bytes(arch, int(rank)) for rank in ranks], np.int64),
        np.ceil(ranks * tokens_per_rank).astype(np.int64),
    )
    taken = requests.status != REJECTED
    return RequestSample(
        prompt_tokens=requests.prompt_tokens[taken],
        output_tokens=requests.output_tokens[taken],
        adapter=requests.adapter[taken].astype(np.int64),
        execution_s=(requests.finish_s - requests.admitted_s)[taken],
        adapter_bytes=weights,
        adapter_tokens=tokens,
    )
