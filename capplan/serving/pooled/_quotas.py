"""Quotas of queues by the load of each (Chameleon, section 4.3.5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.spec import QuotaSize, RestWeights

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
