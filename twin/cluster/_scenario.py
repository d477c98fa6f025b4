"""Scenario of a cluster: engines, placement of adapters, and requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.serving import adapter_bytes
from capplan.serving.rebalancing import AdapterDemand
from capplan.serving.routers import Placement, adapter_of_places, normalised_shares, placement_of
from capplan.spec import (
    DEFAULT_GPU_MEMORY_UTILIZATION,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    Adapter,
    Cache,
    EngineArgs,
    Predictor,
    Profile,
    Queues,
    Scheduler,
    Workload,
)
from capplan.twin.instance._scenario import (
    NS_PER_S,
    CacheLike,
    Policies,
    Run,
    Scenario,
    SchedulerLike,
    build_scenario,
    draw_for,
    on_shared_link,
    require_documents,
    with_length_correlation,
    with_predictions,
)
from capplan.twin.instance._simulate import SimulateSettings, typed_settings
from capplan.workload import Requests


@dataclass(frozen=True)
class Instance:
    """One engine of a cluster; settings as for `capplan.simulate`.

    Parameters
    ----------
    profile
        GPU, model and engine.
    a_max, s_max
        Adapter slots, and their rank.
    max_num_seqs, max_num_batched_tokens, max_model_len, gpu_memory_utilization, max_cpu_loras
        As vLLM's flags of the same names; `max_cpu_loras` None: all adapters of the instance.
    adapters
        Share of the requests of each adapter it holds, normalised over the holders; None: all adapters in
        equal shares. Every instance has the base model, whose shares are given under its name.
    max_in_flight, rules, prefix_caching, scheduler, cache, queues
        As for `capplan.simulate`; all instances have one predictor of output lengths.
    """

    profile: Profile
    a_max: int
    s_max: int
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    max_model_len: int | None = None
    gpu_memory_utilization: float = DEFAULT_GPU_MEMORY_UTILIZATION
    max_cpu_loras: int | None = None
    adapters: Mapping[str, float] | None = None
    max_in_flight: int | None = None
    rules: str | None = None
    prefix_caching: bool | None = None
    scheduler: SchedulerLike | None = None
    cache: CacheLike | None = None
    queues: Queues | None = None

    def __post_init__(self) -> None:
        for name, share in (self.adapters or {}).items():
            if not (isinstance(share, int | float) and 0 <= share < math.inf):
                raise InputError("must be a finite number >= 0", share, f"Instance.adapters[{name}]")

    @classmethod
    def of(
        cls,
        profile: Profile,
        args: EngineArgs,
        adapters: Mapping[str, float] | None = None,
        scheduling: tuple[Scheduler, Cache] | None = None,
        queues: Queues | None = None,
    ) -> Instance:
        """Return an instance with these engine settings, scheduler and cache, and queues."""
        scheduler, cache = scheduling or (None, None)
        return cls(
            profile,
            a_max=args.max_loras,
            s_max=args.max_lora_rank,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=args.max_model_len,
            gpu_memory_utilization=args.gpu_memory_utilization,
            max_cpu_loras=args.max_cpu_loras,
            prefix_caching=args.enable_prefix_caching,
            adapters=adapters,
            scheduler=scheduler,
            cache=cache,
            queues=queues,
        )

    @property
    def settings(self) -> SimulateSettings:
        """The settings of its engine, by their names in `capplan.simulate`."""
        named = {name: value for name, value in vars(self).items() if name not in ("profile", "adapters")}
        return cast("SimulateSettings", named)

    def engine_args(self, workload: Workload) -> EngineArgs:
        """Return its engine settings, checked."""
        return typed_settings(workload, self.profile, self.settings)[0]

    def policies(self, workload: Workload) -> Policies:
        """Return how it serves, beside its engine settings."""
        options = Run(
            max_in_flight=self.max_in_flight,
            rules=self.rules,
            scheduler=self.scheduler,
            cache=self.cache,
            queues=self.queues,
        )
        return options.policies(workload, self.profile, self.prefix_caching)


@dataclass(frozen=True, eq=False)
class MovableAdapters:
    """Adapters that any instance may serve, and number alike."""

    demands: tuple[AdapterDemand, ...]
    """Adapters 1, 2, ... with their declared demand, then the base model if it has traffic."""
    stored: NDArray[np.int8]
    """Whether an instance stores an adapter at first, shape (instances, adapters + 1); column 0 is 1."""

    @property
    def names(self) -> dict[int, str]:
        """Names by number; 0 is the base model, if it has traffic."""
        adapters = self.stored.shape[1] - 1
        return {(i + 1) % (adapters + 1): demand.name for i, demand in enumerate(self.demands)}


@dataclass(frozen=True, eq=False)
class ClusterScenario:
    """A cluster under one stream of requests."""

    engines: tuple[Scenario, ...]
    """One per instance without requests; adapters have the numbers of the instance."""
    placement: Placement
    requests: Requests
    """All requests; adapters are numbered as in the workload, from 1."""
    rank: NDArray[np.int64]
    """Rank of each adapter, shape (adapters + 1,); 0 for the base model."""
    horizon_ns: int
    link: NDArray[np.int64]
    """Number of the link to host memory of each instance, ascending, shape (instances,)."""
    shared_prefix_tokens: int = 0
    movable: MovableAdapters | None = None
    """None: adapters stay on the instances that hold them."""

    @property
    def instances(self) -> int:
        """Number of instances."""
        return len(self.engines)

    def local_numbers(self, instance: int) -> NDArray[np.int32]:
        """Return the number of each adapter at an instance, shape (adapters + 1,); 0 if it has none."""
        if self.movable is not None:
            return np.arange(self.rank.size, dtype=np.int32)
        here = self.placement.instance == instance
        adapters = adapter_of_places(self.placement)
        local = np.zeros(self.rank.size, np.int32)
        local[adapters[here]] = self.placement.local[here]
        return local


def build_cluster(
    workload: Workload,
    instances: Sequence[Instance],
    duration_s: float,
    seed: int,
    requests: Requests | None = None,
    gpus_per_link: int = 1,
) -> ClusterScenario:
    """Check instances and placement, size every engine, and draw the requests unless given.

    `gpus_per_link` GPUs, in the order of the instances, share a link to host memory. Raise `InfeasibleError`
    with reason ``memory`` for an instance whose engine would not start; `InputError` for an invalid setting,
    an unknown adapter, or one without a holder.
    """
    if not instances:
        raise InputError("must be at least one instance", [], "instances")
    for instance in instances:
        if not isinstance(instance, Instance):
            raise InputError("must be of class Instance", instance, "instances")
    first = instances[0]
    require_documents(workload, first.profile)
    Run(duration_s, seed, gpus_per_link=gpus_per_link)  # checks them
    held = _held(workload, instances)
    shares = [_shares(workload, instance) for instance in instances]
    placement = place(held, shares, len(workload.adapters), _base_shares(workload, instances))
    if requests is None:
        requests = _draw(workload, instances, placement, duration_s, seed)
        predictor = _predictor(workload, instances)
        requests = with_predictions(workload, requests, predictor, seed)
    _require_one_kind(workload, instances)
    parts = [_part_of(workload, placement, i) for i in range(len(instances))]
    return ClusterScenario(
        engines=_engines(parts, instances, held, requests.arrival_ns.size, duration_s, gpus_per_link),
        placement=placement,
        requests=requests,
        rank=np.array([0, *(adapter.rank for adapter in workload.adapters)], np.int64),
        horizon_ns=round(duration_s * NS_PER_S),
        link=_links([instance.profile.tp for instance in instances], gpus_per_link),
        shared_prefix_tokens=workload.shared_prefix_tokens,
    )


def build_movable_cluster(
    workload: Workload, instances: Sequence[Instance], duration_s: float, seed: int, gpus_per_link: int = 1
) -> ClusterScenario:
    """Return a cluster whose adapters may move: all instances know all of them, and store those they hold.

    Parameters, requests and placement are those of `build_cluster`; holders without a share get no requests.
    The terms of a step that depend on the number of served adapters keep that of the initial placement. Raise
    `InputError` as `build_cluster`, and if the slots of an instance are too small for an adapter.
    """
    planned = build_cluster(workload, instances, duration_s, seed, gpus_per_link=gpus_per_link)
    wide = [
        replace(each, adapters=each.adapters and {n: each.adapters.get(n, 0.0) for n in workload.traffic})
        for each in instances
    ]
    known = build_cluster(workload, wide, duration_s, seed, planned.requests, gpus_per_link)
    engines = tuple(
        each._replace(
            costs=each.costs._replace(
                slots_per_adapter=own.costs.slots_per_adapter, adapters_served=own.costs.adapters_served
            )
        )
        for own, each in zip(planned.engines, known.engines, strict=True)
    )
    adapters = len(workload.adapters)
    stored = np.zeros((len(instances), adapters + 1), np.int8)
    stored[:, 0] = 1
    for row, numbers in zip(stored, _held(workload, instances), strict=True):
        row[numbers] = 1
    movable = MovableAdapters(_demands(workload, instances[0].profile), stored)
    placement = _with_shares(planned.placement)
    return replace(planned, engines=engines, placement=placement, movable=movable)


def _demands(workload: Workload, profile: Profile) -> tuple[AdapterDemand, ...]:
    """Return the declared demand of the adapters, and of the base model if it has traffic."""
    demands = []
    for name, traffic in workload.traffic.items():
        tok_s = traffic.rate_rps * sum(lengths.mean_tokens for lengths in workload.lengths_of(traffic))
        if isinstance(traffic, Adapter):
            modules = traffic.target_modules or profile.engine.target_modules
            size = adapter_bytes(profile.model, traffic.rank, modules)
            demands.append(AdapterDemand(name, traffic.rank, tok_s, size, traffic.max_replicas))
        else:
            demands.append(AdapterDemand(name, 0, tok_s))
    return tuple(demands)


def _with_shares(placement: Placement) -> Placement:
    """Return the places with a share, and those of the base model, with the numbers of the workload."""
    adapter = adapter_of_places(placement)
    kept = (placement.share > 0.0) | (adapter == 0)
    number = adapter[kept]
    shares = placement.share[kept]
    return placement_of(number, placement.instance[kept], number, shares, placement.start.size - 2)


def _require_one_kind(workload: Workload, instances: Sequence[Instance]) -> None:
    """Check that all instances have one pool for adapters and KV, or none has."""
    pooled = [instance.policies(workload).pooled for instance in instances]
    if len(set(pooled)) > 1:
        rule = "must have a scheduler and a cache like the other instances"
        raise InputError(rule, instances[pooled.index(False)].rules, f"instances[{pooled.index(False)}]")


def _predictor(workload: Workload, instances: Sequence[Instance]) -> Predictor:
    """Return the predictor of all instances with a scheduler; the oracle without any."""
    every = [(i, instance.policies(workload)) for i, instance in enumerate(instances)]
    predictors = [(i, each.predictor) for i, each in every if each.scheduling is not None]
    for i, other in predictors:
        if other != predictors[0][1]:
            raise InputError("must be that of the other instances", other.kind, f"instances[{i}].predictor")
    return predictors[0][1] if predictors else Predictor()


def _links(gpus: Sequence[int], gpus_per_link: int) -> NDArray[np.int64]:
    """Return the number of the link of each instance; an instance of more GPUs has several for itself."""
    links: list[int] = []
    link, used = -1, gpus_per_link
    for count in gpus:
        if used + count > gpus_per_link:
            link, used = link + 1, 0
        links.append(link)
        used += count
    return np.array(links, np.int64)


def _draw(
    workload: Workload, instances: Sequence[Instance], placement: Placement, duration_s: float, seed: int
) -> Requests:
    """Draw the requests; an adapter has the correlation of lengths of the instance that serves most of it."""
    longest = max(each.max_model_len or each.profile.model.default_max_model_len for each in instances)
    first = instances[0].profile
    requests = draw_for(workload, first, duration_s, seed, longest)
    others = {each.profile.length_correlation: each.profile for each in instances[1:]}
    others.pop(first.length_correlation, None)
    if with_length_correlation(workload, first) is workload:
        return requests
    main = np.array([_main_instance(placement, number) for number in range(len(workload.adapters) + 1)])
    for correlation, profile in others.items():
        there = [each.profile.length_correlation == correlation for each in instances]
        drawn = draw_for(workload, profile, duration_s, seed, longest)
        own = np.array(there)[main][requests.adapter]
        lengths = {
            name: np.where(own, getattr(drawn, name), getattr(requests, name))
            for name in ("prompt_tokens", "output_tokens")
        }
        requests = requests._replace(**lengths)
    return requests


def _main_instance(placement: Placement, adapter: int) -> int:
    """Return the first of the instances with the largest share of an adapter; 0: the base model."""
    places = slice(placement.start[adapter], placement.start[adapter + 1])
    return int(placement.instance[places][np.argmax(placement.share[places])])


def _held(workload: Workload, instances: Sequence[Instance]) -> list[NDArray[np.int64]]:
    """Return the numbers of the adapters that each instance holds, in the order of the workload."""
    number = {adapter.name: i for i, adapter in enumerate(workload.adapters, start=1)}
    everything = np.arange(1, len(number) + 1)
    traffic = workload.traffic
    held = []
    for i, instance in enumerate(instances):
        if instance.adapters is None:
            held.append(everything)
            continue
        for name in instance.adapters:
            if name not in traffic:
                raise InputError("must be an adapter of the workload", name, f"instances[{i}].adapters")
        if not instance.adapters:
            raise InputError("must hold at least one adapter", {}, f"instances[{i}].adapters")
        numbers = [number[name] for name in instance.adapters if name in number]
        held.append(np.sort(np.array(numbers, np.int64)))
    missing = np.setdiff1d(everything, np.concatenate(held))
    if missing.size:
        name = workload.adapters[int(missing[0]) - 1].name
        raise InputError("must be held by an instance", name, "instances")
    return held


def _shares(workload: Workload, instance: Instance) -> NDArray[np.float64]:
    """Return the shares of the adapters that an instance holds, in the order of the workload."""
    shares = instance.adapters
    if shares is None:
        return np.ones(len(workload.adapters))
    return np.array([shares[a.name] for a in workload.adapters if a.name in shares], np.float64)


def _base_shares(workload: Workload, instances: Sequence[Instance]) -> NDArray[np.float64]:
    """Return the share of the base model's requests of each instance; equal shares if none is given."""
    if workload.base is None:
        return np.ones(len(instances))
    name = workload.base_model
    return np.array([1.0 if i.adapters is None else i.adapters.get(name, 0.0) for i in instances], np.float64)


def place(
    held: Sequence[NDArray[np.int64]],
    shares: Sequence[NDArray[np.float64]],
    adapters: int,
    base_shares: NDArray[np.float64] | None = None,
) -> Placement:
    """Return the placement of adapters on instances.

    Shares are normalised over the holders of an adapter, and equal if all are 0. Every instance has the base
    model; its shares are equal if not given.
    """
    count = len(held)
    adapter = np.concatenate([np.zeros(count, np.int64), *held])
    instance = np.concatenate([np.arange(count), np.repeat(np.arange(count), [h.size for h in held])])
    local = np.concatenate([np.zeros(count, np.int64), *(np.arange(1, h.size + 1) for h in held)])
    share = np.concatenate([np.ones(count) if base_shares is None else base_shares, *shares])
    return placement_of(adapter, instance, local, normalised_shares(adapter, share), adapters)


def _part_of(workload: Workload, placement: Placement, instance: int) -> Workload:
    """Return the workload of an instance; beside traffic of the base model, with the rates it gets."""
    here = placement.instance == instance
    numbers = adapter_of_places(placement)[here].tolist()
    adapters = [workload.adapters[number - 1] for number in numbers if number]
    if workload.base is None:
        if len(adapters) == len(workload.adapters):
            return workload
        return workload.model_copy(update={"adapters": tuple(adapters), "trace": None})
    base_share, *shares = placement.share[here].tolist()
    scaled = [
        adapter.model_copy(update={"rate_rps": adapter.rate_rps * share})
        for adapter, share in zip(adapters, shares, strict=True)
    ]
    base = workload.base.model_copy(update={"rate_rps": workload.base.rate_rps * base_share})
    return workload.model_copy(update={"adapters": tuple(scaled), "base": base, "trace": None})


def _engines(
    parts: Sequence[Workload],
    instances: Sequence[Instance],
    held: Sequence[NDArray[np.int64]],
    requests: int,
    duration_s: float,
    gpus_per_link: int,
) -> tuple[Scenario, ...]:
    """Size the engine of every instance; equal ones share their costs."""
    none = Requests(np.zeros(0, np.int64), *(np.zeros(0, np.int32) for _ in range(3)))
    known: dict[tuple[object, ...], Scenario] = {}
    engines = []
    for instance, own, numbers in zip(instances, parts, held, strict=True):
        rates_rps = None if own.base is None else (own.base_rate_rps, own.total_rate_rps)
        key = (id(instance.profile), numbers.tobytes(), rates_rps, repr(instance.settings))
        if key not in known:
            engine = build_scenario(
                own,
                instance.profile,
                instance.engine_args(own),
                duration_s=duration_s,
                seed=0,  # without effect: the requests are given
                max_in_flight=instance.max_in_flight,
                requests=none,
                policies=instance.policies(own),
            )
            known[key] = on_shared_link(engine, instance.profile.tp, gpus_per_link)
        engine = known[key]
        most = requests if instance.max_in_flight is None else instance.max_in_flight
        engines.append(engine._replace(max_in_flight=max(1, most)))
    return tuple(engines)


def take_requests(requests: Requests, rows: NDArray[np.int64] | slice) -> Requests:
    """Return writable copies of some of the requests."""
    return Requests(
        np.array(requests.arrival_ns[rows]),
        np.array(requests.adapter[rows]),
        np.array(requests.prompt_tokens[rows]),
        np.array(requests.output_tokens[rows]),
        np.array(requests.predicted_tokens[rows] if requests.predicted_tokens.size else ()).astype(np.int32),
    )


def without_adapters(scenario: ClusterScenario) -> ClusterScenario:
    """Return the same requests and engines without adapters and slots."""
    requests = scenario.requests
    bare = tuple(
        engine._replace(costs=engine.costs._replace(a_max=0, s_max=0)) for engine in scenario.engines
    )
    stripped = requests._replace(adapter=np.zeros_like(requests.adapter))
    return replace(scenario, engines=bare, requests=stripped)
