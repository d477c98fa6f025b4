"""Placement problem: adapters with constraints, GPU pools, engine settings, and assignments."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Final, Protocol

from capplan.datasets import load_profile
from capplan.errors import InputError
from capplan.models.memory import KvBudget, kv_budget
from capplan.spec import Adapter, EngineConfig, Pool, Profile, Trace, Workload, allowed_lora_rank

GRID = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384)
"""Adapter counts and values of A_max tested: 1, 2, 4, and those of the adapter-caching paper (section 7)."""

_RANK: Final = attrgetter("rank")


@dataclass(frozen=True)
class EngineDefaults:
    """Engine settings where the workload leaves them open."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    gpu_memory_utilization: float = 0.9


@dataclass(frozen=True)
class AdapterShare:
    """An adapter, or a share of its traffic: what a solver places."""

    name: str
    rank: int
    rate_rps: float
    """Rate of this share of its requests."""
    fraction: float = 1.0
    number: int = 0
    """Which of the adapter's fractions this is, counted from 0."""


@dataclass(frozen=True)
class GpuPool:
    """Equal instances that a plan may use."""

    name: str | None
    """None where the workload gives profile and GPUs, and no pools."""
    profile: Profile
    instances: int
    usd_per_hour: float | None = None
    """Price of an instance, of all its `tp` GPUs."""


@dataclass(frozen=True)
class Assignment:
    """What one instance serves, and how it is set."""

    shares: tuple[AdapterShare, ...]
    a_max: int
    max_num_seqs: int | None = None
    """None: as the problem's engine has it."""
    pool: int = 0
    """Number of its pool in the problem."""

    @property
    def parts(self) -> tuple[AdapterShare, ...]:
        """Deprecated name of `shares`."""
        warn_renamed("parts", "shares")
        return self.shares

    @property
    def fractions(self) -> dict[str, float]:
        """Share of each adapter's traffic that comes here."""
        return traffic_fractions(self.shares)


@dataclass(frozen=True)
class Estimate:
    """What an estimator says of one GPU."""

    throughput_tok_s: float
    starved: bool
    """Whether it would starve, or break a latency bound where the estimator can tell."""
    e2e_s_mean: float = 0.0
    """Mean time from arrival to last token, who is left behind charged with all there was; 0 where the
    estimator cannot tell."""
    utilization: float = 0.0
    """How near it is to failing, or how far beyond; grows with the load."""
    overload: float = 0.0
    """Share of its load that it would have to lose, as far as is known; 0 where it holds."""


class Estimator(Protocol):
    """Answers what one instance would do; a surrogate or the twin."""

    def __call__(self, assignment: Assignment) -> Estimate:
        """Return the estimate for one instance."""
        ...


@dataclass(frozen=True)
class Problem:
    """Adapters to place on instances of one pool or several.

    Attributes
    ----------
    workload
        The whole workload.
    pools
        What there is to place them on, at least one pool. Solvers of the papers know of one only.
    engine
        Settings of every instance, complete but for the slots.
    shares
        What is to be placed.
    """

    workload: Workload
    pools: tuple[GpuPool, ...]
    engine: EngineDefaults
    shares: tuple[AdapterShare, ...]

    @property
    def parts(self) -> tuple[AdapterShare, ...]:
        """Deprecated name of `shares`."""
        warn_renamed("parts", "shares")
        return self.shares

    @property
    def profile(self) -> Profile:
        """The profile of the first pool, and the only one in a problem of one pool."""
        return self.pools[0].profile

    @property
    def gpus(self) -> int:
        """Instances in all pools together."""
        return sum(pool.instances for pool in self.pools)

    def only_pool(self, number: int) -> Problem:
        """Return the problem with one of the pools; there it has number 0."""
        return replace(self, pools=(self.pools[number],))

    def max_num_seqs(self, assignment: Assignment) -> int:
        """Return the most requests that an instance runs at once."""
        return assignment.max_num_seqs or self.engine.max_num_seqs

    @property
    def fixed_a_max(self) -> int | None:
        """The number of slots, where the workload fixes it."""
        return self.workload.engine.max_loras

    def s_max(self, shares: Sequence[AdapterShare]) -> int:
        """Return the rank that slots for these shares are sized for."""
        return self.workload.engine.max_lora_rank or allowed_lora_rank(max(map(_RANK, shares)))

    def subworkload(self, shares: Sequence[AdapterShare], scale: float = 1.0) -> Workload:
        """Return the workload of one GPU; `scale` multiplies every rate, a trace's too."""
        fractions = traffic_fractions(shares)
        share = self.workload.subset(fractions, fractions)
        if scale == 1.0:
            return share
        # A copy with other rates keeps every rule that the workload kept: no need to check them again.
        adapters = tuple(a.model_copy(update={"rate_rps": a.rate_rps * scale}) for a in share.adapters)
        trace = share.trace if share.trace is None else _scale_trace(share.trace, scale)
        return share.model_copy(update={"adapters": adapters, "trace": trace})

    def fits_in_memory(self, assignment: Assignment) -> bool:
        """Tell whether one request of max_model_len fits beside the slots, and their adapters on the host."""
        shares, a_max = assignment.shares, assignment.a_max
        host = self.workload.engine.max_cpu_loras
        if host is not None and host < min(a_max, distinct_adapters(shares)):
            return False
        budget = self._kv_budgets[assignment.pool]
        tokens = budget.tokens(a_max, self.s_max(shares), self.max_num_seqs(assignment))
        return tokens >= self.engine.max_model_len

    def offered_tok_s(self, share: AdapterShare) -> float:
        """Return the input and output tokens per second that a share asks for."""
        return share.rate_rps * self._tokens_per_request[share.name]

    @cached_property
    def constraints(self) -> Constraints:
        """Where adapters may be."""
        return read_constraints(self.workload)

    @cached_property
    def _kv_budgets(self) -> tuple[KvBudget, ...]:
        utilization = self.engine.gpu_memory_utilization
        return tuple(kv_budget(pool.profile, utilization) for pool in self.pools)

    @cached_property
    def _tokens_per_request(self) -> Mapping[str, float]:
        return {
            a.name: sum(lengths.mean_tokens for lengths in self.workload.lengths_of(a))
            for a in self.workload.adapters
        }


def warn_renamed(old: str, new: str) -> None:
    """Warn the caller's caller of a deprecated name."""
    warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=3)


def whole_adapters(problem: Problem) -> tuple[AdapterShare, ...]:
    """Return every adapter as one share."""
    return tuple(AdapterShare(a.name, a.rank, a.rate_rps) for a in problem.workload.adapters)


def distinct_adapters(shares: Sequence[AdapterShare]) -> int:
    """Return how many adapters these are shares of."""
    return len({share.name for share in shares})


def complete_engine(config: EngineConfig) -> EngineDefaults:
    """Return the workload's engine settings with the open ones filled in.

    A step must have a token for every running request: what is open gives way to what is fixed.
    """
    defaults = EngineDefaults()
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    return EngineDefaults(
        max_num_seqs=seqs or min(defaults.max_num_seqs, tokens or defaults.max_num_seqs),
        max_num_batched_tokens=tokens or max(defaults.max_num_batched_tokens, seqs or 0),
        max_model_len=config.max_model_len or defaults.max_model_len,
        gpu_memory_utilization=config.gpu_memory_utilization or defaults.gpu_memory_utilization,
    )


def traffic_fractions(shares: Iterable[AdapterShare]) -> dict[str, float]:
    """Return the share of each adapter's traffic among these shares."""
    fractions: dict[str, float] = {}
    for share in shares:
        fractions[share.name] = min(1.0, fractions.get(share.name, 0.0) + share.fraction)
    return fractions


def merge_shares(shares: Iterable[AdapterShare]) -> tuple[AdapterShare, ...]:
    """Return shares with the fractions of one adapter as one, where its first stands."""
    found: dict[str, AdapterShare] = {}
    for share in shares:
        known = found.get(share.name)
        if known is not None:
            rate_rps, fraction = known.rate_rps + share.rate_rps, min(1.0, known.fraction + share.fraction)
            share = replace(known, rate_rps=rate_rps, fraction=fraction)
        found[share.name] = share
    return tuple(found.values())


def horizon_s(workload: Workload, duration_s: float) -> float:
    """Return how long a workload is simulated: a trace as a whole, whatever the duration."""
    return duration_s if workload.trace is None else workload.trace.duration_s


def _scale_trace(trace: Trace, scale: float) -> Trace:
    arrival_ns = (trace.arrival_ns / scale).astype(trace.arrival_ns.dtype)
    arrival_ns.setflags(write=False)  # as in every trace: numba compiles the twin anew for other arrays
    return replace(trace, arrival_ns=arrival_ns, duration_s=trace.duration_s / scale)


@dataclass(frozen=True)
class Constraints:
    """The wishes of all adapters, made explicit.

    Attributes
    ----------
    bundle
        Of every adapter, the first adapter (in the workload's order) of those that stay with it.
    apart
        Of every adapter, those that must not be on an instance with it, whoever of the two said so.
    pool
        Names of the pools that adapters are pinned to, by the first adapter of their bundle.
    max_replicas
        Most instances that may share an adapter's traffic, by the first adapter of its bundle.
    """

    bundle: Mapping[str, str]
    apart: Mapping[str, frozenset[str]]
    pool: Mapping[str, str]
    max_replicas: Mapping[str, int]


def read_constraints(workload: Workload) -> Constraints:
    """Return the constraints of a workload.

    Raises
    ------
    InputError
        Where they contradict each other.
    """
    bundle = _group_leaders(workload.adapters)
    apart = _conflicts(workload.adapters)
    for name, others in apart.items():
        for other in others:
            if bundle[name] == bundle[other]:
                rule = f"must not name {other}, which together_with keeps on the GPU of {name}"
                raise InputError(rule, other, f"adapters: {name}.apart_from")
    return Constraints(
        bundle, apart, _pinned_pools(workload.adapters, bundle), _max_replicas(workload.adapters, bundle)
    )


def _group_leaders(adapters: Iterable[Adapter]) -> dict[str, str]:
    """Return the first member of the connected component of every adapter."""
    first = {adapter.name: adapter.name for adapter in adapters}
    order = {name: position for position, name in enumerate(first)}

    def root(name: str) -> str:
        while first[name] != name:
            name = first[name]
        return name

    for adapter in adapters:
        for other in adapter.together_with:
            low, high = sorted((root(adapter.name), root(other)), key=order.__getitem__)
            first[high] = low
    return {name: root(name) for name in first}


def _conflicts(adapters: Iterable[Adapter]) -> dict[str, frozenset[str]]:
    apart: dict[str, set[str]] = {}
    for adapter in adapters:
        for other in adapter.apart_from:
            apart.setdefault(adapter.name, set()).add(other)
            apart.setdefault(other, set()).add(adapter.name)
    return {name: frozenset(others) for name, others in apart.items()}


def _pinned_pools(adapters: Iterable[Adapter], bundle: Mapping[str, str]) -> dict[str, str]:
    pins: dict[str, str] = {}
    for adapter in adapters:
        if adapter.pool is None:
            continue
        pinned = pins.setdefault(bundle[adapter.name], adapter.pool)
        if pinned != adapter.pool:
            rule = f"must be {pinned}, where an adapter is pinned that together_with keeps on the same GPU"
            raise InputError(rule, adapter.pool, f"adapters: {adapter.name}.pool")
    return pins


def _max_replicas(adapters: Iterable[Adapter], bundle: Mapping[str, str]) -> dict[str, int]:
    most: dict[str, int] = {}
    for adapter in adapters:
        if adapter.max_replicas is not None:
            first = bundle[adapter.name]
            most[first] = min(adapter.max_replicas, most.get(first, adapter.max_replicas))
    return most


def make_problem(workload: Workload, gpus: int | None, profile: Profile | str | None) -> Problem:
    """Return the problem of a workload; `gpus` and `profile` win over what it says itself.

    Raises
    ------
    InputError
        When one of them is missing or does not fit, or wishes contradict each other.
    """
    if workload.pools and (gpus is not None or profile is not None):
        rule = "does not go with pools: the workload says which GPUs there are"
        raise InputError(rule, location="gpus" if gpus is not None else "profile")
    pools = tuple(map(_read_pool, workload.pools)) or (_single_pool(workload, gpus, profile),)
    for pool in pools:
        pool.profile.require_model(workload.base_model)
    engine = complete_engine(workload.engine)
    _require_fitting_prompts(workload, engine.max_model_len)
    problem = Problem(workload, pools, engine, ())
    problem.constraints  # noqa: B018 - contradictions are found here, before anything is solved
    return replace(problem, shares=whole_adapters(problem))


def _single_pool(workload: Workload, gpus: int | None, profile: Profile | str | None) -> GpuPool:
    """Return the GPUs of a workload without pools."""
    count = gpus if gpus is not None else (workload.gpus.count if workload.gpus else None)
    if count is None:
        rule = "is required: say how many GPUs a plan may use (gpus: {count: N} in the workload, or --gpus N)"
        raise InputError(rule, location="gpus")
    if count < 1:
        raise InputError("must be >= 1", count, "gpus")
    wanted = profile if profile is not None else workload.profile
    if wanted is None:
        raise InputError("is required: name a shipped profile or a profile JSON", location="profile")
    loaded = _load_profile(wanted)
    return GpuPool(None, loaded, _instance_count(loaded, count, "gpus"))


def _read_pool(pool: Pool) -> GpuPool:
    loaded = _load_profile(pool.profile)
    price = None if pool.usd_per_hour is None else pool.usd_per_hour * loaded.tp
    return GpuPool(pool.name, loaded, _instance_count(loaded, pool.count, f"pools: {pool.name}.count"), price)


def _load_profile(profile: Profile | str) -> Profile:
    return load_profile(profile) if isinstance(profile, str | os.PathLike) else profile


def _instance_count(profile: Profile, gpus: int, location: str) -> int:
    """Return how many instances so many GPUs make."""
    if gpus < profile.tp:
        rule = f"must be at least the {profile.tp} GPUs of one instance of profile {profile.name}"
        raise InputError(rule, gpus, location)
    return gpus // profile.tp


def _require_fitting_prompts(workload: Workload, max_model_len: int) -> None:
    """Refuse a trace of which so much is too long for the engine that no number of GPUs would do."""
    trace = workload.trace
    if trace is None:
        return
    tokens = trace.prompt_tokens.astype(float) + trace.output_tokens
    too_long = trace.prompt_tokens >= max_model_len
    if tokens[too_long].sum() > (1.0 - workload.slo.served_fraction) * tokens.sum():
        rule = (
            f"must exceed the prompts of the trace: {int(too_long.sum())} of {too_long.size} do not fit, "
            f"the longest has {int(trace.prompt_tokens.max())} tokens"
        )
        raise InputError(rule, max_model_len, "engine.max_model_len")
