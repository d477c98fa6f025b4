"""One simulated instance as plain arrays and numbers: requests, limits, costs.

Serving rules of an instance: those of its engine, or a scheduler and an adapter cache in their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Final, NamedTuple, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from capplan._jit import by_reference
from capplan.errors import InfeasibleError, InputError
from capplan.models import (
    coefficient_array,
    disk_load_ms,
    gpu_load_ms,
    latency_code,
    load_share,
    require_kv_tokens,
    uses_decode_ranks,
    uses_ranks,
)
from capplan.serving import (
    Limits,
    ServingRules,
    State,
    adapter_pages,
    kv_bytes_per_token,
    new_state,
    rules_of_scheduler,
    serving_rules,
    with_scheduling,
)
from capplan.serving.pooled import PoolSetup, pool_setup, set_up
from capplan.serving.state import POOLED
from capplan.spec import (
    ALL_MODULES,
    LORA_MODULES,
    Cache,
    EngineArgs,
    Predictor,
    Profile,
    Queues,
    Scheduler,
    Workload,
    cache_of,
    completed,
    require_duration,
    scheduler_of,
)
from capplan.twin.instance._assist import NO_ASSIST, CpuAssist, cpu_assist
from capplan.workload import Requests, draw_requests, predicted_tokens

SchedulerLike: TypeAlias = Scheduler | Mapping[str, Any] | str
"""A scheduler, its name, or its fields."""

CacheLike: TypeAlias = Cache | Mapping[str, Any] | str
"""A cache, its name, or its fields."""


@dataclass(frozen=True)
class Run:
    """One simulation of an engine, beside its settings; parameters as for `simulate`.

    Raises
    ------
    InputError
        For a value of a wrong type or out of range; scheduler, cache and queues are checked together later.
    """

    duration_s: float = 3600.0
    seed: int = 0
    max_in_flight: int | None = None
    rules: str | None = None
    gpus_per_link: int = 1
    scheduler: SchedulerLike | None = None
    cache: CacheLike | None = None
    queues: Queues | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.duration_s):
            raise InputError("must be a finite number > 0", self.duration_s, "duration_s")
        require_duration(self.duration_s)
        if not _is_whole(self.seed) or self.seed < 0:
            raise InputError("must be a whole number >= 0", self.seed, "seed")
        if self.max_in_flight is not None:
            _require_count(self.max_in_flight, 1, "max_in_flight")
        if not (self.rules is None or isinstance(self.rules, str)):
            raise InputError("must be the name of serving rules", self.rules, "rules")
        _require_count(self.gpus_per_link, 1, "gpus_per_link")

    def policies(self, workload: Workload, profile: Profile, prefix_caching: bool | None) -> Policies:
        """Return how the engine serves, by `choose_policies`."""
        return choose_policies(
            workload,
            profile,
            rules=self.rules,
            prefix_caching=prefix_caching,
            scheduler=self.scheduler,
            cache=self.cache,
            queues=self.queues,
        )


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


_MOST: Final = 2**31 - 1  # rows and tokens are 32-bit integers

_OPTIONAL: Final = ("s_max", "max_cpu_loras", "max_model_len")

_SLOTS: Final = ("a_max", "s_max")  # 0 for an engine without LoRA


def require_documents(workload: Workload, profile: Profile) -> None:
    """Check the types of a workload and a profile."""
    if not isinstance(workload, Workload):
        raise InputError("must be a Workload, as load_workload returns it", workload, "workload")
    if not isinstance(profile, Profile):
        raise InputError("must be a Profile, as load_profile returns it", profile, "profile")


def require_engine_settings(workload: Workload, settings: Mapping[str, Any]) -> None:
    """Check types and ranges of the engine settings of `simulate` one by one; `settings` by name."""
    for name, value in settings.items():
        if name == "gpu_memory_utilization":
            if not _is_number(value) or not 0 < value <= 1:
                raise InputError("must be a number above 0 and at most 1", value, name)
        elif name == "prefix_caching":
            if not (value is None or isinstance(value, bool)):
                raise InputError("must be true or false", value, name)
        elif not (value is None and name in _OPTIONAL):
            _require_count(value, 0 if name in _SLOTS and not workload.adapters else 1, name)
    _require_both_or_none(settings)


def _require_count(value: object, least: int, name: str) -> None:
    if not (_is_whole(value) and least <= value <= _MOST):
        raise InputError(f"must be a whole number from {least} to {_MOST}", value, name)


def _require_both_or_none(settings: Mapping[str, Any]) -> None:
    """Check that an engine has slots and a rank of slots, or neither."""
    a_max, s_max = settings.get("a_max"), settings.get("s_max")
    if a_max is not None and s_max is not None and (a_max == 0) != (s_max == 0):
        raise InputError("must be 0 without slots" if a_max == 0 else "must be at least 1", s_max, "s_max")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

_MOST_CUT = 0.1
"""Maximum share of a workload's tokens that max_model_len may cut off."""


@by_reference
class Costs(NamedTuple):
    """Parameters of all durations, for compiled code."""

    form: int
    """Code of the step-latency form."""
    coefficients: NDArray[np.float64]
    a_max: int
    """Adapter slots; the number of adapters under a scheduler or a cache."""
    s_max: int
    slots_per_adapter: float
    adapters_served: int
    load_ns: NDArray[np.int64]
    """Copy of each adapter from host to GPU, shape (adapters + 1,); entry 0 is the base model."""
    disk_ns: NDArray[np.int64]
    """Read of each adapter from disk, same shape."""
    rank: NDArray[np.int64]
    """Rank of each adapter, same shape."""
    uses_ranks: bool
    """Whether the duration of a step depends on its `StepRanks`."""
    uses_decode_ranks: bool
    """Whether it depends on those of requests that decode."""
    pages: NDArray[np.int64]
    """KV blocks of each adapter if adapters and KV share one pool (S-LoRA), same shape."""
    assist: CpuAssist = NO_ASSIST
    """CPU cores that assist loading."""


class Scenario(NamedTuple):
    """One instance under one stream of requests."""

    requests: Requests
    limits: Limits
    num_blocks: int
    costs: Costs
    horizon_ns: int
    max_in_flight: int
    """Maximum of requests in the engine; further arrivals are rejected."""
    shared_prefix_tokens: int = 0
    """Length of the prefix that all prompts of an adapter share."""
    buckets: int = 0
    """Buckets of the time series; 0: a plain run without details."""
    pool: PoolSetup | None = None
    """Set-up of one pool for adapters and KV; None: an engine without scheduler and cache of capplan."""
    scheduler: Scheduler | None = None
    """Settings of the refresh of queues; None: they stay as they are."""

    @property
    def adapters(self) -> int:
        """Number of adapters."""
        return self.costs.load_ns.size - 1

    @property
    def refreshes_ns(self) -> range:
        """Times of refreshes, before the horizon."""
        if self.scheduler is None:
            return range(0)
        period_ns = round(self.scheduler.refresh_s * NS_PER_S)
        return range(period_ns, self.horizon_ns, period_ns)


def new_engine(scenario: Scenario, rows: int) -> State:
    """Return an idle engine of a scenario for so many requests in flight."""
    state = new_state(rows, scenario.adapters, scenario.num_blocks, scenario.limits)
    state.adapters.pages[:] = scenario.costs.pages
    if scenario.pool is not None and scenario.limits.policy == POOLED:
        set_up(state, scenario.limits, scenario.pool)
    return state


def build_scenario(
    workload: Workload,
    profile: Profile,
    args: EngineArgs,
    *,
    duration_s: float,
    seed: int,
    max_in_flight: int | None = None,
    requests: Requests | None = None,
    policies: Policies | None = None,
) -> Scenario:
    """Size the memory of an engine and draw the requests, unless given; the rest as for `simulate`."""
    adapters = len(workload.adapters)
    policies = policies or choose_policies(workload, profile, prefix_caching=args.enable_prefix_caching)
    serving = policies.rules
    _require_slots(workload, args)
    _require_modules(workload, profile)
    profile.model.require_positions(args.max_model_len)
    _require_room(workload, args.max_model_len)
    host_slots = adapters if args.max_cpu_loras is None else args.max_cpu_loras
    if serving.unified_memory and host_slots < adapters:
        rule = f"must be at least the {adapters} adapters under the rules {serving.name}"
        raise InputError(rule, host_slots, "max_cpu_loras")
    kv = require_kv_tokens(profile, args, 0 if serving.unified_memory else args.max_loras)
    num_blocks = kv // profile.engine.block_size
    if requests is None:
        requests = draw_for(workload, profile, duration_s, seed, args.max_model_len)
        requests = with_predictions(workload, requests, policies.predictor, seed)
    # Without slots, all adapters can be in a step: the models take their number for that of the slots.
    slots = adapters if serving.unified_memory else args.max_loras
    cache = None if policies.scheduling is None else policies.scheduling[1]
    costs = build_costs(workload, profile, slots, args.max_lora_rank, cache)
    if cache is not None and cache.loading == "resident":
        num_blocks = _beside_adapters(num_blocks, costs, profile.engine.block_size, args.max_model_len)
    return Scenario(
        requests=requests,
        limits=policies.limits(args, adapters, profile.engine.block_size, num_blocks),
        num_blocks=num_blocks,
        costs=costs,
        horizon_ns=round(duration_s * NS_PER_S),
        max_in_flight=max_in_flight if max_in_flight is not None else max(1, requests.arrival_ns.size),
        shared_prefix_tokens=workload.shared_prefix_tokens,
        pool=_pool(workload, profile, costs, policies),
        scheduler=policies.scheduling[0] if policies.scheduling is not None and policies.pooled else None,
    )


def _beside_adapters(num_blocks: int, costs: Costs, block_size: int, max_model_len: int) -> int:
    """Return the KV blocks that all adapters leave if they are loaded at the start."""
    left = num_blocks - int(costs.pages.sum())
    if left * block_size < max_model_len:
        raise InfeasibleError(
            f"memory: {costs.pages.size - 1} resident adapters leave {max(0, left) * block_size} of "
            f"{num_blocks * block_size} KV tokens, fewer than one request of max_model_len {max_model_len}",
            reason="memory",
        )
    return left


def _pool(workload: Workload, profile: Profile, costs: Costs, policies: Policies) -> PoolSetup | None:
    """Return the set-up of the pool under a scheduler and a cache."""
    if policies.scheduling is None:
        return None
    every = profile.engine.target_modules
    scheduler, cache = policies.scheduling
    return pool_setup(
        profile.model,
        profile.tp,
        [(adapter.rank, adapter.target_modules or every) for adapter in workload.adapters],
        pages=costs.pages,
        load_ns=costs.load_ns,
        scheduler=scheduler,
        cache=cache,
        queues=policies.queues,
    )


def with_predictions(workload: Workload, requests: Requests, predictor: Predictor, seed: int) -> Requests:
    """Return the requests of a workload with their predicted outputs."""
    if predictor.kind == "oracle":
        return requests
    predicted = predicted_tokens(requests, predictor, seed, [adapter.name for adapter in workload.adapters])
    return requests._replace(predicted_tokens=predicted.astype(np.int32))


def on_shared_link(scenario: Scenario, tp: int, gpus_per_link: int) -> Scenario:
    """Return the scenario of an instance of `tp` GPUs, so many of which share a link to host memory.

    The profile's load time is that of one GPU's shard. Shards for GPUs of one link are copied one after the
    other, and a load ends with the last of them.
    """
    shards = min(tp, gpus_per_link)
    if shards == 1:
        return scenario
    costs = scenario.costs
    return scenario._replace(costs=costs._replace(load_ns=shards * costs.load_ns))


def _require_slots(workload: Workload, args: EngineArgs) -> None:
    """Check the slots against the adapters; errors name the arguments of `simulate`."""
    largest_rank = max((a.rank for a in workload.adapters), default=0)
    if args.max_lora_rank < largest_rank:
        rule = f"must be at least the largest adapter rank, {largest_rank}"
        raise InputError(rule, args.max_lora_rank, "s_max")
    if args.max_cpu_loras is not None and args.max_cpu_loras < min(args.max_loras, len(workload.adapters)):
        raise InputError(f"must be at least a_max, {args.max_loras}", args.max_cpu_loras, "max_cpu_loras")


def _require_modules(workload: Workload, profile: Profile) -> None:
    """Check that the engine adapts every module that an adapter targets."""
    whole = ALL_MODULES if profile.model.lora_on_embeddings else LORA_MODULES
    adapted = profile.engine.target_modules or whole
    for adapter in workload.adapters:
        for name in adapter.target_modules or ():
            if name not in adapted:
                rule = f"must be among {', '.join(adapted)}, which {profile.engine.name} adapts"
                raise InputError(rule, name, f"adapter {adapter.name}: target_modules")


def draw_for(
    workload: Workload, profile: Profile, duration_s: float, seed: int, max_model_len: int
) -> Requests:
    """Draw the requests. Drawn prompts leave room for one token; long recorded ones are rejected later."""
    correlated = with_length_correlation(workload, profile)
    return draw_requests(correlated, duration_s, seed, max_model_len, max(1, max_model_len - 1))


def with_length_correlation(workload: Workload, profile: Profile) -> Workload:
    """Return the workload with the profile's correlation of lengths if it has none and draws lengths."""
    recorded = workload.trace is not None or workload.length_pairs is not None
    if recorded or workload.length_correlation is not None:
        return workload
    return workload.model_copy(update={"length_correlation": profile.length_correlation})


def _require_room(workload: Workload, max_model_len: int) -> None:
    """Raise an error if `max_model_len` would cut off too many tokens."""
    if workload.trace is not None:
        return
    if workload.length_pairs is not None:
        pairs = workload.length_pairs
        tokens = pairs.prompt_tokens.astype(np.int64) + pairs.output_tokens
        if np.maximum(tokens - max_model_len, 0).sum() > _MOST_CUT * tokens.sum():
            share = f"{1 - _MOST_CUT:.0%} of the tokens of lengths_from"
            enough = f"engine: {{max_model_len: {tokens.max()}}} in the workload leaves all"
            rule = f"must leave {share}, whose longest row has {tokens.max()}; {enough}"
            raise InputError(rule, max_model_len, "max_model_len")
        return
    traffic = reversed(list(workload.traffic.items()))
    first_with = {(id(own.prompt_tokens), id(own.output_tokens)): (name, own) for name, own in traffic}
    for name, own in first_with.values():
        mean_tokens = sum(lengths.mean_tokens for lengths in workload.lengths_of(own))
        if mean_tokens > max_model_len:
            who = "the base model" if name == workload.base_model else f"adapter {name}"
            mean = f"mean prompt + mean output of {who}, {mean_tokens:g}"
            raise InputError(f"must be at least {mean}", max_model_len, "max_model_len")


def build_costs(
    workload: Workload, profile: Profile, a_max: int, s_max: int, cache: Cache | None = None
) -> Costs:
    """Evaluate the profile's models for these adapters, slots and cache."""
    ranks = [adapter.rank for adapter in workload.adapters]
    shapes = [(adapter.rank, adapter.target_modules) for adapter in workload.adapters]
    shares = {modules: load_share(profile, modules) for _, modules in set(shapes)}
    gpu_ms = {(r, m): gpu_load_ms(profile.loading, r, s_max, shares[m]) for r, m in set(shapes)}
    disk_ms = {(r, m): disk_load_ms(profile.loading, r, shares[m]) for r, m in set(shapes)}
    form = latency_code(profile.step_latency.form, profile.engine.kernel)
    coefficients = coefficient_array(profile.step_latency)
    page_bytes = kv_bytes_per_token(profile.model, profile.tp) * profile.engine.block_size
    every = profile.engine.target_modules
    pages = {
        (rank, modules): adapter_pages(profile.model, rank, page_bytes, profile.tp, modules or every)
        for rank, modules in set(shapes)
    }
    return Costs(
        form=form,
        coefficients=coefficients,
        a_max=a_max,
        s_max=s_max,
        slots_per_adapter=_slots_per_adapter(workload, a_max),
        adapters_served=len(workload.adapters),
        load_ns=_per_adapter_ns([gpu_ms[shape] for shape in shapes]),
        disk_ns=_per_adapter_ns([disk_ms[shape] for shape in shapes]),
        rank=np.array([0, *ranks], np.int64),
        uses_ranks=uses_ranks(form, coefficients),
        uses_decode_ranks=uses_decode_ranks(form, coefficients),
        pages=np.array([0, *(pages[shape] for shape in shapes)], np.int64),
        assist=cpu_assist(profile, cache, shapes),
    )


def _slots_per_adapter(workload: Workload, a_max: int) -> float:
    """Return the share of waiting requests that find their adapter; those of the base model always do."""
    if not workload.adapters:
        return 1.0
    ratio = min(1.0, a_max / len(workload.adapters))
    total_rps = workload.total_rate_rps
    of_base = workload.base_rate_rps / total_rps if total_rps else 0.0
    return ratio + of_base * (1.0 - ratio)


def _per_adapter_ns(adapters_ms: Sequence[float]) -> NDArray[np.int64]:
    """Return nanoseconds by number of the adapter; 0 for the base model."""
    return np.round(np.array([0.0, *adapters_ms]) * NS_PER_MS).astype(np.int64)
