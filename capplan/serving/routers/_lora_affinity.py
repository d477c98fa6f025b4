"""LoRA affinity: holders with the adapter active, then those with room for it; shorter queues first.

The classes are those of the Kubernetes inference gateway's ``lora-affinity-scorer``
(kubernetes-sigs/gateway-api-inference-extension,
``pkg/epp/scheduling/framework/plugins/scorer/lora_affinity.go``), by the metric ``vllm:lora_requests_info``:
the adapter is active; there is room for one more; requests of it wait; none of these. An adapter is *active*
while requests of it run. One that only occupies a slot is not active, nor is the base model. The class
decides, as in the filters of the gateway's first versions; `gateway` sums scores as later versions do. Ties
rotate.
"""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.routers._fleet import (
    ACTIVE,
    AWAITED,
    ArrivingRequest,
    Fleet,
    Placement,
    Router,
    RoutingRule,
    after,
)


@inner
def affinity(fleet: Fleet, placement: Placement, place: int) -> int:
    """Return the class of a holder for the request's adapter; 0 is best."""
    record = fleet.instances[placement.instance[place]]
    if fleet.standing[place] & ACTIVE:
        return 0
    if record.active_adapters + record.queued_adapters < record.max_loras:
        return 1
    return 2 if fleet.standing[place] & AWAITED else 3


@inner
def nearest(
    rule: RoutingRule, fleet: Fleet, placement: Placement, first: int, last: int, request: ArrivingRequest
) -> int:
    """Return the holder of the best class, of several the one with the shortest queue."""
    chosen = first
    best = shortest = least_distance = 2**62
    for place in range(first, last):
        instance = placement.instance[place]
        kind = affinity(fleet, placement, place)
        queue = fleet.instances.queued[instance]
        distance = after(instance, rule.turn[0], fleet.instances.size)
        better = kind < best or (kind == best and queue < shortest)
        if better or (kind == best and queue == shortest and distance < least_distance):
            chosen, best, shortest, least_distance = place, kind, queue, distance
    return chosen


ROUTERS = {
    "lora-affinity": Router(
        nearest,
        "instances running the adapter, else with a free slot, else that wait for it; ties: queue length",
        "`lora-affinity-scorer` of kubernetes-sigs/gateway-api-inference-extension",
        reads_adapter=True,
    )
}
