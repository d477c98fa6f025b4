"""The Kubernetes inference gateway's scores: weighted, added up, the highest wins.

Three scorers of kubernetes-sigs/gateway-api-inference-extension
(``pkg/epp/scheduling/framework/plugins/scorer``, now in llm-d), each from 0 to 1: ``queue-scorer`` (1 for
the shortest queue among the candidates, 0 for the longest, all 1 where they are equal),
``kv-cache-utilization-scorer`` (the free share of the KV cache) and ``lora-affinity-scorer`` (1.0, 0.8, 0.6
or 0 by the classes of `lora_affinity`); ``max-score-picker`` picks. The prefix-cache scorer is left out.
Ties go round, where the gateway draws.
"""

from __future__ import annotations

from dataclasses import dataclass

from capplan._jit import inner
from capplan.errors import InputError
from capplan.serving.routers._fleet import ArrivingRequest, Fleet, Placement, Router, RoutingRule, after
from capplan.serving.routers._lora_affinity import affinity


@dataclass(frozen=True)
class Gateway:
    """The weights of the scorers; a scorer without a weight has 1 in the gateway's configuration."""

    queue: float = 1.0
    kv_cache: float = 1.0
    lora: float = 1.0

    def __post_init__(self) -> None:
        for name, weight in vars(self).items():
            if not 0 <= weight < float("inf"):
                raise InputError("must be a finite number >= 0", weight, f"Gateway.{name}")


@inner
def highest_score(
    rule: RoutingRule, fleet: Fleet, placement: Placement, first: int, last: int, request: ArrivingRequest
) -> int:
    """Return the holder with the highest score, of several the first behind the last chosen instance."""
    weights = rule.weights  # of queue, KV cache and LoRA
    shortest, longest = 2**62, 0
    for place in range(first, last):
        queue = fleet.instances.queued[placement.instance[place]]
        shortest, longest = min(shortest, queue), max(longest, queue)
    chosen = first
    highest = -1.0
    least_distance = 2**62
    for place in range(first, last):
        instance = placement.instance[place]
        record = fleet.instances[instance]
        idle = (longest - record.queued) / (longest - shortest) if longest > shortest else 1.0
        free = record.free_blocks / record.blocks
        score = (
            weights[0] * idle
            + weights[1] * free
            + weights[2] * _lora_score(affinity(fleet, placement, place))
        )
        distance = after(instance, rule.turn[0], fleet.instances.size)
        if score > highest or (score == highest and distance < least_distance):
            chosen, highest, least_distance = place, score, distance
    return chosen


@inner
def _lora_score(kind: int) -> float:
    if kind == 0:
        return 1.0
    if kind == 1:
        return 0.8
    return 0.6 if kind == 2 else 0.0


ROUTERS = {
    "inference-gateway": Router(
        highest_score,
        "sum of the scores for queue, KV cache and LoRA (`Gateway(queue, kv_cache, lora)`; 1 each)",
        "kubernetes-sigs/gateway-api-inference-extension, `pkg/epp/scheduling/framework/plugins/scorer`",
        reads_adapter=True,
    )
}
