"""Serving rules of an instance: those of its engine, or a scheduler and an adapter cache in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from capplan.errors import InputError
from capplan.serving import Limits, ServingRules, serving_rules
from capplan.serving.scheduling import rules_of_scheduler, with_scheduling
from capplan.serving.state import POOLED
from capplan.spec import Cache, EngineArgs, Predictor, Profile, Queues, Scheduler, Workload
from capplan.spec.scheduling import cache_of, completed, scheduler_of

SchedulerLike: TypeAlias = Scheduler | Mapping[str, Any] | str
"""A scheduler, its name, or its fields."""

CacheLike: TypeAlias = Cache | Mapping[str, Any] | str
"""A cache, its name, or its fields."""


@dataclass(frozen=True)
class Policies:
    """How an instance serves, beside its engine flags."""

    rules: ServingRules
    scheduling: tuple[Scheduler, Cache] | None = None
    """Scheduler and cache; None: those of the rules."""
    queues: Queues | None = None
    """Queues by request size at the start."""

    @property
    def predictor(self) -> Predictor:
        """Predictor of output lengths."""
        return Predictor() if self.scheduling is None else self.scheduling[0].predictor

    @property
    def pooled(self) -> bool:
        """Whether adapters are cached in the memory of KV."""
        return self.rules.policy == POOLED

    def limits(self, args: EngineArgs, adapters: int, block_size: int, num_blocks: int) -> Limits:
        """Return the limits of an engine; parameters as for `ServingRules.limits`."""
        limits = self.rules.limits(args, adapters, block_size, num_blocks)
        return limits if self.scheduling is None else with_scheduling(limits, *self.scheduling)


def choose_policies(
    workload: Workload,
    profile: Profile,
    *,
    rules: str | None = None,
    prefix_caching: bool | None = None,
    scheduler: SchedulerLike | None = None,
    cache: CacheLike | None = None,
    queues: Queues | None = None,
) -> Policies:
    """Return how an instance serves a workload.

    Parameters
    ----------
    workload
        With the scheduler and cache that apply if neither they nor `rules` are given.
    profile
        With the rules that apply otherwise.
    rules
        Name of serving rules, without a scheduler.
    prefix_caching
        None: as in the measured engine, or else as the rules define.
    scheduler, cache
        None: those of the workload; with only one of them, first come first served, or no cache.
    queues
        Queues at the start, which imply the scheduler ``chameleon``.

    Raises
    ------
    InputError
        For an unknown name, settings that exclude each other, or prefix caching under rules without it.
    """
    if rules is not None and (scheduler is not None or cache is not None or queues is not None):
        raise InputError("must not be given beside a scheduler, a cache or queues", rules, "rules")
    planned = workload.scheduling if rules is None else None
    chosen, kept = scheduler_of(scheduler), cache_of(cache)
    if chosen is None and queues is not None and planned is None:
        chosen = Scheduler(policy="chameleon")
    if planned is not None:
        chosen, kept = chosen or planned[0], kept or planned[1]
    scheduling = completed(chosen, kept)
    if scheduling is None:
        own = chosen_rules(profile, rules, prefix_caching)
        scheduling = completed(Scheduler(policy="fifo"), None) if own.policy == POOLED else None
        return Policies(own, scheduling)
    if queues is not None and not scheduling[0].has_queues:
        raise InputError("must be chameleon or static beside queues", scheduling[0].policy, "scheduler")
    own = rules_of_scheduler(scheduling[0])
    return Policies(chosen_rules(profile, own.name, prefix_caching), scheduling, queues)


def chosen_rules(profile: Profile, name: str | None, prefix_caching: bool | None) -> ServingRules:
    """Return the named serving rules; None: those of the profile.

    `prefix_caching` None: as in the measured engine, or else as the rules define.

    Raises
    ------
    InputError
        For an unknown name, or prefix caching under rules without it.
    """
    rules = serving_rules(name or profile.engine.rules)
    if prefix_caching is None and not rules.unified_memory:
        prefix_caching = profile.engine.prefix_caching
    if prefix_caching is None:
        return rules
    if prefix_caching and rules.unified_memory:
        raise InputError(f"must be off under the rules {rules.name}, which have none", True, "prefix_caching")
    return replace(rules, prefix_caching=prefix_caching)
