"""How many tokens each queue may have in execution.

A queue is taken for an M/M/1 server. With a quota of Tok tokens it ends Tok / (S D) requests per second,
where S is a request's size in tokens and D its time in execution, and a request stays 1 / (Tok / (S D) -
lambda) seconds on average. That is at most the bound when Tok >= S D (1 / bound + lambda).

Source: Chameleon, section 4.3.5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InfeasibleError
from capplan.spec.queue_wishes import QuotaSize, RestWeights

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
                size_tokens=_stands_for(tokens, size),
                mean_tokens=float(tokens.mean()),
                largest_tokens=int(tokens.max()),
                execution_s=float(execution_s[timed].mean()),
            )
        )
    return tuple(loads)


def share_out(
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
        raise _too_much(loads, needed, tokens, bound_s)
    weights = {
        "minimum": [float(least) for least in minima],
        "load": [load.rate_rps * load.mean_tokens * load.execution_s for load in loads],
        "rate": [load.rate_rps for load in loads],
    }[rest]
    return tuple(need + more for need, more in zip(needed, _in_proportion(left, weights), strict=True))


def _stands_for(tokens: NDArray[np.int64], size: QuotaSize) -> float:
    match size:
        case "max":
            return float(tokens.max())
        case "p99":
            return float(np.percentile(tokens, _P99))
        case "mean":
            return float(tokens.mean())


def _in_proportion(tokens: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers that sum to `tokens`, by the largest remainders."""
    total = math.fsum(weights)
    parts = [weight / total for weight in weights] if total > 0.0 else [1.0 / len(weights)] * len(weights)
    exact = [tokens * part for part in parts]
    whole = [math.floor(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    for i in by_remainder[: tokens - sum(whole)]:
        whole[i] += 1
    return whole


def _too_much(
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
