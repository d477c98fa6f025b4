"""Scheduler and adapter cache of a workload or plan as switches of the compiled rules."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from capplan.serving._rules import ServingRules, serving_rules
from capplan.serving.pooled import _state as p
from capplan.serving.state import SLORA, Limits
from capplan.spec import Cache, Scheduler

_NS_PER_S: Final = 1_000_000_000
_ORDERS: Final = MappingProxyType({"fifo": p.FIFO, "sjf": p.SJF, "static": p.QUEUES, "chameleon": p.QUEUES})
_CACHES: Final = MappingProxyType(
    {"none": p.NO_CACHE, "lru": p.LRU, "fairshare": p.FAIRSHARE, "gdsf": p.GDSF, "chameleon": p.SCORE}
)
_PREFETCHES: Final = MappingProxyType(
    {"none": p.NO_PREFETCH, "queue": p.BY_QUEUE, "histogram": p.BY_HISTOGRAM}
)


def rules_of_scheduler(scheduler: Scheduler) -> ServingRules:
    """Return the serving rules that run a scheduler: S-LoRA's own, or those of one pool."""
    return serving_rules("slora" if scheduler.policy == "slora" else "chameleon")


def with_scheduling(limits: Limits, scheduler: Scheduler, cache: Cache) -> Limits:
    """Return the limits of `rules_of_scheduler` with the switches of a scheduler and a cache."""
    limits = limits._replace(admit_every=scheduler.admit_every)
    if limits.policy == SLORA:
        return limits
    return limits._replace(
        order=_ORDERS[scheduler.policy],
        cache=_CACHES[cache.policy],
        prefetch=_PREFETCHES[cache.prefetch],
        chunked=int(scheduler.chunked),
        bypass=int(scheduler.bypass),
        ageing_ns=round((scheduler.ageing_s or 0.0) * _NS_PER_S),
        refresh_ns=round(scheduler.refresh_s * _NS_PER_S),
    )
