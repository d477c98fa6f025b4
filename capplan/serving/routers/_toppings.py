"""Toppings' rank-aware rule (section 5, Algorithm 1): the holder with the least slowdown by the request.

Two linear models per instance predict iterations from the ranks in them, one for prefill, one for decode
(eq. 2): ``alpha * |S| * largest rank + beta`` for padded kernels (BGMV), ``alpha * sum of ranks + beta`` for
others (MBGMV), and 0 without requests. S are the requests with an adapter. The cost is::

    cost = (PrePerf(queue + new) - PrePerf(queue)) / mean answer + DecPerf(all + new) - DecPerf(all)

The published score is ``cost * requests``, plus infinity if ``DecPerf(all + new)`` exceeds the SLO. It is
undefined for an empty instance, and equal for all instances if all exceed the SLO. So holders are compared by
(no memory for the prompt, SLO exceeded, cost * requests, requests, cost), the same order where the published
one is defined; ties rotate. `requests` does not count the new one.

Eq. 2 has no term in tokens. By default the profile's time per prompt token is added to the prefill;
``literal=True`` omits it. The time per candidate is constant: the instances keep counts per rank.

``rank_aware=False`` is the load-aware router that LoRAServe compares with (section V-D), which considers the
requests served and queued at each server, but not their ranks: all adapters have one rank, and eq. 2 becomes
``alpha * |S| + beta``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from capplan._jit import inner
from capplan.errors import InputError
from capplan.serving.routers._fleet import (
    PRESENT,
    QUEUED,
    ArrivingRequest,
    Fleet,
    Placement,
    Router,
    RoutingRule,
    after,
    fits_memory,
)

BGMV = 0
MBGMV = 1
RANK_BLIND = 2

# Columns of the models' array; each beta stands behind its alpha.
PREFILL_ALPHA = 0
PREFILL_TOKEN = 2
DECODE_ALPHA = 3


@dataclass(frozen=True)
class Performance:
    """Performance model of an instance: eq. 2 for whole iterations, in milliseconds."""

    prefill_alpha_ms: float
    """Per unit of |S| * largest rank, of the sum of ranks, or of |S| for a router that is not rank-aware."""
    prefill_beta_ms: float
    decode_alpha_ms: float
    decode_beta_ms: float
    prefill_ms_per_token: float = 0.0
    """Beyond eq. 2: time per prompt token."""

    @property
    def row(self) -> tuple[float, ...]:
        """The numbers in the order of the columns."""
        prefill = (self.prefill_alpha_ms, self.prefill_beta_ms, self.prefill_ms_per_token)
        return (*prefill, self.decode_alpha_ms, self.decode_beta_ms)


@dataclass(frozen=True)
class Toppings:
    """The rule's parameters.

    Parameters
    ----------
    kernel
        Form of eq. 2.
    slo_ms
        Longest decode iteration within the SLO; None: 1.5 times one without adapters in the middle of the
        paper's grid, by the profile of the first instance.
    literal
        Omit the term in prompt tokens.
    performance
        One per instance, or one for all; None: fitted to what each profile predicts.
    rank_aware
        Whether ranks differ in eq. 2; False: `kernel` has no effect.
    """

    kernel: Literal["bgmv", "mbgmv"] = "bgmv"
    slo_ms: float | None = None
    literal: bool = False
    performance: Performance | Sequence[Performance] | None = None
    rank_aware: bool = True

    def __post_init__(self) -> None:
        if self.kernel not in ("bgmv", "mbgmv"):
            raise InputError("must be bgmv or mbgmv", self.kernel, "Toppings.kernel")
        if self.slo_ms is not None and not self.slo_ms > 0:
            raise InputError("must be a number > 0", self.slo_ms, "Toppings.slo_ms")

    @property
    def code(self) -> int:
        """The form of eq. 2 as a number."""
        if not self.rank_aware:
            return RANK_BLIND
        return BGMV if self.kernel == "bgmv" else MBGMV


@inner
def rank_aware(
    rule: RoutingRule, fleet: Fleet, placement: Placement, first: int, last: int, request: ArrivingRequest
) -> int:
    """Return the holder with the lowest score for a request."""
    rank, prompt, kernel, models = request.rank, request.prompt_tokens, rule.kernel, rule.models
    chosen = first
    least_barred = least_broken = 2
    least = least_cost = np.inf
    fewest = least_distance = 2**62
    for place in range(first, last):
        i = placement.instance[place]
        record = fleet.instances[i]
        requests = record.running + record.queued
        before_ms, decode_ms = _perf(fleet, i, PRESENT, rank, kernel, models[i, DECODE_ALPHA:])
        queue_ms, prefill_ms = _perf(fleet, i, QUEUED, rank, kernel, models[i, PREFILL_ALPHA:])
        prefill_ms += models[i, PREFILL_TOKEN] * prompt
        cost = decode_ms - before_ms + (prefill_ms - queue_ms) / request.mean_answer
        barred = 0 if fits_memory(fleet, i, prompt) else 1
        broken = 1 if decode_ms > rule.slo_ms else 0
        score = cost * requests
        distance = after(i, rule.turn[0], fleet.instances.size)
        if barred != least_barred:
            better = barred < least_barred
        elif broken != least_broken:
            better = broken < least_broken
        elif score != least:
            better = score < least
        elif requests != fewest:
            better = requests < fewest
        elif cost != least_cost:
            better = cost < least_cost
        else:
            better = distance < least_distance
        if better:
            chosen, least_barred, least_broken, least = place, barred, broken, score
            fewest, least_cost, least_distance = requests, cost, distance
    return chosen


@inner
def _perf(
    fleet: Fleet, instance: int, kind: int, rank: int, kernel: int, model: NDArray[np.float64]
) -> tuple[float, float]:
    """Return the prediction of eq. 2 for requests of an instance without and with one of this rank.

    `model` begins with alpha and beta.
    """
    alpha, beta = model[0], model[1]
    counts = fleet.by_rank[instance, kind]
    requests = counts[0]
    adapters = largest = total = 0
    for i in range(fleet.ranks.size - 1):  # the last one is the base model's
        present = counts[fleet.ranks[i]]
        if present > 0:
            adapters += present
            total += present * fleet.ranks[i]
            largest = max(largest, fleet.ranks[i])
    requests += adapters
    before = _eq_2(kernel, adapters, largest, total, alpha, beta) if requests > 0 else 0.0
    adapters += rank > 0
    return before, _eq_2(kernel, adapters, max(largest, rank), total + rank, alpha, beta)


@inner
def _eq_2(kernel: int, adapters: int, largest: int, total: int, alpha: float, beta: float) -> float:
    if kernel == RANK_BLIND:
        return alpha * adapters + beta
    return alpha * (total if kernel == MBGMV else adapters * largest) + beta


ROUTERS = {
    "toppings": Router(
        rank_aware,
        "the holder with the least predicted slowdown, from the ranks it serves (`Toppings(...)`)",
        "Toppings 5, Algorithm 1",
        reads_ranks=True,
    ),
    "toppings-rank-blind": Router(
        rank_aware,
        "the same with one rank for all adapters (`Toppings(rank_aware=False)`)",
        "LoRAServe V-D, which compares with it",
        reads_ranks=True,
    ),
}
