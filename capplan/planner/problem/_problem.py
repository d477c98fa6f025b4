"""Placement problem: adapters with constraints, GPU pools, engine settings, and assignments.

Every placement keeps some rules: all traffic is placed, on available instances, within the constraints of
the adapters (apart, together, in one pool, on few instances). All pools of a problem serve in one way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import Final, Protocol, Self

from capplan.errors import InfeasibleError, InfeasibleReason, InputError
from capplan.models import KvBudget, kv_budget, pessimistic_profile
from capplan.planner.problem._execution import NEVER, Deadline, parallel_map
from capplan.serving import VLLM_ENGINE, adapter_bytes, adapter_tokens, vllm_rank
from capplan.spec import (
    Adapter,
    EngineArgs,
    EngineConfig,
    EngineLimits,
    Lengths,
    Profile,
    Queues,
    Workload,
)
from capplan.twin.instance import Run, choose_policies, chosen_rules
from capplan.workload import (
    DecidingTime,
    busiest_window,
    deciding_time,
    is_modulated,
    trace_windows,
)

_TOLERANCE: Final = 1e-6
"""Rounding error of the fractions of one adapter."""


def require_valid(problem: Problem, assignments: Sequence[Assignment], solver: str) -> None:
    """Refuse a placement of a solver for the first rule that it breaks.

    A single instance is simulated with the adapters that it has, so an adapter that is placed nowhere would
    not show in the simulation.
    """
    broken = next(broken_rules(problem, assignments), None)
    if broken is not None:
        raise InputError(f"must return a valid placement: {broken}", location=f"solver {solver}")


def require_one_kind(problem: Problem) -> None:
    """Refuse pools if only some have a scheduler and an adapter cache, and what only the twin merges.

    The cluster twin, which verifies a plan, simulates one kind of memory. Without this rule the search would
    end in its refusal.
    """
    scheduler = problem.workload.scheduler
    if scheduler is not None and scheduler.merging is not None:
        rule = "must be absent from what is planned: only the twin merges adapters"
        raise InputError(rule, location="scheduler.merging")
    pooled = [choose_policies(problem.workload, pool.profile).pooled for pool in problem.pools]
    for pool, own in zip(problem.pools, pooled, strict=True):
        if own != pooled[0]:
            rule = "must serve with a scheduler and an adapter cache, or without, like the first pool"
            raise InputError(rule, pool.profile.engine.rules, f"pools: {pool.name}.profile")


def broken_rules(problem: Problem, assignments: Sequence[Assignment]) -> Iterator[str]:
    """Yield the rules that a placement breaks, as text."""
    used = Counter(assignment.pool for assignment in assignments)
    for number, count in used.items():
        available = problem.pools[number].instances if number < len(problem.pools) else 0
        if count > available:
            yield f"{count} instances of pool {number}, which has {available}"
    yield from _misplaced_traffic(problem, assignments)
    yield from _broken_constraints(problem, assignments)


def _misplaced_traffic(problem: Problem, assignments: Sequence[Assignment]) -> Iterator[str]:
    placed: dict[str, float] = {item.name: 0.0 for item in problem.traffic}
    for assignment in assignments:
        for share in assignment.shares:
            if share.name not in placed:
                yield f"{share.name} is not in the workload"
                return
            placed[share.name] += share.fraction
    for name, fraction in placed.items():
        if abs(fraction - 1.0) > _TOLERANCE:
            yield f"{fraction:.6g} of the requests of {name} are placed"


def _broken_constraints(problem: Problem, assignments: Sequence[Assignment]) -> Iterator[str]:
    constraints = problem.constraints
    instances: dict[str, set[int]] = {}
    for number, assignment in enumerate(assignments):
        pool, names = problem.pools[assignment.pool].name, {share.name for share in assignment.shares}
        for name in sorted(names):
            leader = constraints.leader[name]
            instances.setdefault(name, set()).add(number)
            if constraints.pinned_pool.get(leader, pool) != pool:
                yield f"{name} is in pool {pool}, pinned to {constraints.pinned_pool[leader]}"
            if names & constraints.conflicts.get(name, frozenset()):
                yield f"{name} is with an adapter that it is apart_from"
    for name, numbers in sorted(instances.items()):
        leader = constraints.leader[name]
        if numbers != instances.get(leader):
            yield f"{name} is not with {leader}, together_with it"
        if len(numbers) > constraints.max_replicas.get(leader, len(numbers)):
            yield f"{name} is on {len(numbers)} instances, more than max_replicas"


@dataclass(frozen=True)
class Constraints:
    """Placement constraints of all adapters."""

    leader: Mapping[str, str]
    """First adapter, in the workload's order, of the group that each adapter is placed with."""
    groups: frozenset[str]
    """Leaders of groups of several adapters."""
    conflicts: Mapping[str, frozenset[str]]
    """Adapters that must not be on an instance with an adapter; symmetric."""
    pinned_pool: Mapping[str, str]
    """Pool that a group is pinned to, by leader."""
    max_replicas: Mapping[str, int]
    """Maximum number of instances of a group, by leader."""


def read_constraints(adapters: Sequence[Adapter], traffic: Sequence[Adapter]) -> Constraints:
    """Return the constraints of adapters, which must not contradict each other.

    `traffic` also has the base model as an adapter of rank 0 if it has any.
    """
    leader = _group_leaders(traffic)
    conflicts = _conflicts(adapters)
    for name, others in conflicts.items():
        for other in others:
            if leader[name] == leader[other]:
                rule = f"must not name {other}, which together_with keeps on the GPU of {name}"
                raise InputError(rule, other, f"adapters: {name}.apart_from")
    pinned_pool: dict[str, str] = {}
    max_replicas: dict[str, int] = {}
    for adapter in adapters:
        first = leader[adapter.name]
        if adapter.pool is not None and pinned_pool.setdefault(first, adapter.pool) != adapter.pool:
            rule = (
                f"must be {pinned_pool[first]}, where an adapter is pinned that together_with keeps on the "
                "same GPU"
            )
            raise InputError(rule, adapter.pool, f"adapters: {adapter.name}.pool")
        if adapter.max_replicas is not None:
            max_replicas[first] = min(adapter.max_replicas, max_replicas.get(first, adapter.max_replicas))
    groups = frozenset(first for name, first in leader.items() if name != first)
    return Constraints(leader, groups, conflicts, pinned_pool, max_replicas)


def _group_leaders(adapters: Iterable[Adapter]) -> dict[str, str]:
    """Return the first member of the connected component of every adapter."""
    parent = {adapter.name: adapter.name for adapter in adapters}
    order = {name: position for position, name in enumerate(parent)}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    for adapter in adapters:
        for other in adapter.together_with:
            low, high = sorted((root(adapter.name), root(other)), key=order.__getitem__)
            parent[high] = low
    return {name: root(name) for name in parent}


def _conflicts(adapters: Iterable[Adapter]) -> dict[str, frozenset[str]]:
    conflicts: dict[str, set[str]] = {}
    for adapter in adapters:
        for other in adapter.apart_from:
            conflicts.setdefault(adapter.name, set()).add(other)
            conflicts.setdefault(other, set()).add(adapter.name)
    return {name: frozenset(others) for name, others in conflicts.items()}


GRID = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384)
"""Values of A_max and of adapter counts to try; from 8, those of the adapter-caching paper (section 7)."""

SIMULATED_S: Final = 3600.0
"""Least simulated time of an estimate and of a verification, and default of `slo_window`."""
_MAX_SIMULATED_S: Final = 7.0 * 86_400.0
_MAX_REQUESTS: Final = 2_000_000
"""Time and requests up to which simulations are longer for the sake of slow arrivals."""

OPEN_FACTOR: Final = 8
"""GPUs of a pool whose number is open, over the lower bound."""

_RANK: Final = attrgetter("rank")


@dataclass(frozen=True)
class AdapterShare:
    """An adapter, or a fraction of its traffic: the item that a solver places.

    So is the traffic of the base model, under its name and with rank 0.
    """

    name: str
    rank: int
    rate_rps: float
    """Request rate of this share."""
    fraction: float = 1.0
    number: int = 0
    """Index among the shares of the adapter."""

    @classmethod
    def of(cls, adapter: Adapter, fraction: float = 1.0, number: int = 0) -> Self:
        """Return a fraction of an adapter."""
        return cls(adapter.name, adapter.rank, adapter.rate_rps * fraction, fraction, number)


@dataclass(frozen=True)
class GpuPool:
    """Equal instances that are available to a plan."""

    name: str | None
    """None if the workload has no pools."""
    profile: Profile
    instances: int
    usd_per_hour: float | None = None
    """Price of an instance with all its `tp` GPUs."""
    is_open: bool = False
    """Whether the workload leaves the number of instances open, which then follows from the lower bound."""


@dataclass(frozen=True)
class Assignment:
    """Adapter shares and settings of one instance."""

    shares: tuple[AdapterShare, ...]
    a_max: int
    pool: int = 0
    """Index of its pool in the problem."""
    knobs: EngineConfig = EngineConfig()
    """Engine settings beside the slots, where they differ from the problem's."""
    queues: Queues | None = None
    """Queues by request size at the start; None: one, or none."""

    @property
    def fractions(self) -> dict[str, float]:
        """Fraction of each adapter's traffic on this instance."""
        return traffic_fractions(self.shares)


@dataclass(frozen=True)
class Estimate:
    """Estimated performance of one instance."""

    throughput_tok_s: float
    starved: bool
    """Whether it starves, or breaks a latency bound that the estimator supports."""
    e2e_s_mean: float = 0.0
    """Mean time from arrival to last token, with waiting requests charged in full; 0 if unknown."""
    utilization: float = 0.0
    """Distance to failure; grows with the load."""
    overload: float = 0.0
    """Excess share of the load, if known; 0 if the instance holds."""


class Estimator(Protocol):
    """Estimates the performance of one instance: a surrogate or the twin."""

    def __call__(self, assignment: Assignment) -> Estimate:
        """Return the estimate of one instance."""
        ...


def estimate_all(estimator: Estimator, assignments: Sequence[Assignment]) -> list[Estimate]:
    """Return the estimates of several instances, in their order.

    An estimator may have a batch method ``estimate_all(assignments)``; any other is called in threads.
    """
    own: Callable[[Sequence[Assignment]], list[Estimate]] | None = getattr(estimator, "estimate_all", None)
    return parallel_map(estimator, assignments) if own is None else own(assignments)


class KnobSearch(StrEnum):
    """Values of open engine knobs that the planner may choose."""

    DEFAULT = "default"
    """The defaults only."""
    FITTED = "fitted"
    """Values inside the fitted range of the profile."""
    ANY = "any"
    """All values of the grids."""

    @classmethod
    def named(cls, name: str) -> KnobSearch:
        """Return the member of a name; an unknown one is an `InputError`."""
        if name not in (*cls,):
            raise InputError(f"must be one of {', '.join(cls)}", name, "knobs")
        return cls(name)


@dataclass(frozen=True)
class Problem:
    """Adapters to place on the instances of one or more pools."""

    workload: Workload
    """Complete workload."""
    pools: tuple[GpuPool, ...]
    """Available instances, at least one pool. Solvers of the papers use the first only."""
    engine: EngineArgs
    """Engine settings of every instance; the slots are those of each assignment."""
    shares: tuple[AdapterShare, ...]
    """Items to place."""
    knobs: KnobSearch = KnobSearch.FITTED
    """Values of engine knobs that the workload leaves open."""
    robust: float | None = None
    """Quantile of the step times at which the bounds must hold; None: the fitted step times."""
    gpus_per_link: int = 1
    """GPUs, in the order of the instances, that share a link to host memory."""
    simulated_s: float | None = None
    """Simulated time of estimates and verification; None: as the arrivals require. A trace is replayed."""
    deadline: Deadline = field(default=NEVER, compare=False)
    """Time at which every simulation of the problem ends with `OutOfTimeError`."""

    def __post_init__(self) -> None:
        if self.gpus_per_link < 1:
            raise InputError("must be a whole number >= 1", self.gpus_per_link, "gpus_per_link")
        if self.simulated_s is not None and self.workload.trace is not None:
            rule = "does not go with a trace, which is replayed; slo_window is the time in which bounds hold"
            raise InputError(rule, self.simulated_s, "duration_s")

    @property
    def profile(self) -> Profile:
        """Profile of the first pool."""
        return self.pools[0].profile

    @property
    def gpus(self) -> int:
        """Instances in all pools."""
        return sum(pool.instances for pool in self.pools)

    def with_profiles(self, profiles: Sequence[Profile]) -> Problem:
        """Return the problem with other profiles of its pools."""
        pools = (replace(own, profile=each) for own, each in zip(self.pools, profiles, strict=True))
        return replace(self, pools=tuple(pools))

    @cached_property
    def pessimistic(self) -> Problem:
        """The problem with the step times of `robust`."""
        if self.robust is None:
            return self
        slow = [pessimistic_profile(pool.profile, self.robust) for pool in self.pools]
        return replace(self.with_profiles(slow), robust=None)

    @property
    def has_slots(self) -> bool:
        """Whether the number of adapter slots matters: under a scheduler or a cache, memory is shared."""
        return self.workload.scheduling is None

    @property
    def adapters_come(self) -> bool:
        """Whether an instance may serve adapters that are not placed on it."""
        return self.workload.rebalance is not None or self.workload.stores_everywhere

    def stored(self, assignment: Assignment) -> dict[str, float]:
        """Return what an instance stores, with its fraction of the traffic; 0: for the router to choose."""
        placed = assignment.fractions
        if not self.workload.stores_everywhere:
            return placed
        pool = self.pools[assignment.pool].name
        return {a.name: 0.0 for a in self.workload.adapters if a.pool in (None, pool)} | placed

    def caches_prefixes(self, pool: int) -> bool:
        """Tell whether instances of a pool keep the prefixes of prompts in the KV cache."""
        return self.has_slots and chosen_rules(self.pools[pool].profile, None, None).prefix_caching

    def cached_prefix_tokens(self, pool: int) -> int:
        """Return the tokens of a prompt that the prefix cache of an instance may hold."""
        return self.workload.shared_prefix_tokens if self.caches_prefixes(pool) else 0

    def slots(self, assignment: Assignment) -> tuple[int, int]:
        """Return number and rank of the slots of an instance; 0 and 0 if it serves the base model alone.

        Without slots the number is that of its adapters, or of all if `adapters_come`.
        """
        rank = self.s_max(assignment.shares)
        if self.has_slots or self.fixed_a_max is not None:
            return (assignment.a_max if rank else 0), rank
        if self.adapters_come:
            return len(self.workload.adapters), rank
        return distinct_adapters(assignment.shares), rank

    def run(self, assignment: Assignment, duration_s: float, seed: int) -> Run:
        """Return what the twin simulates of an instance, beside its engine settings."""
        link, pair = self.gpus_per_link, self.workload.scheduling
        if pair is None:
            return Run(duration_s, seed, gpus_per_link=link)
        scheduler, cache = pair
        return Run(
            duration_s, seed, gpus_per_link=link, scheduler=scheduler, cache=cache, queues=assignment.queues
        )

    def engine_args(self, assignment: Assignment) -> EngineArgs:
        """Return the engine settings of an instance."""
        return self.engine.model_copy(update=self.engine_limits(assignment)._asdict())

    def engine_limits(self, assignment: Assignment) -> EngineLimits:
        """Return the engine settings that differ between instances."""
        knobs, engine = assignment.knobs, self.engine
        return EngineLimits(
            *self.slots(assignment),
            knobs.max_num_seqs or engine.max_num_seqs,
            knobs.max_num_batched_tokens or engine.max_num_batched_tokens,
        )

    @property
    def load_with_headroom(self) -> float:
        """Multiple of the planned load at which the bounds must hold, too."""
        return 1.0 / (1.0 - self.workload.headroom)

    @property
    def bounds_latency(self) -> bool:
        """Whether the workload bounds a latency."""
        slo = self.workload.slo
        return bool(slo.latency_bounds()) or slo.tpt_over_base is not None

    @property
    def fixed_a_max(self) -> int | None:
        """Number of slots that the workload fixes, or None."""
        return self.workload.engine.max_loras

    @cached_property
    def _oldest_vllm(self) -> str | None:
        """Version of vLLM with the fewest flags among the pools; None without vLLM."""
        engines = [pool.profile.engine for pool in self.pools]
        versions = [engine.version for engine in engines if engine.name == VLLM_ENGINE]
        return min(versions, key=lambda version: vllm_rank(1, version) == 1, default=None)

    def s_max(self, shares: Sequence[AdapterShare]) -> int:
        """Return the rank of the slots for these shares, or for all adapters if `adapters_come`.

        It is 0 without adapters, unless the slots are fixed.
        """
        comes = self.workload.adapters if self.adapters_come else ()
        largest: int = max(map(_RANK, (*shares, *comes)))
        if largest == 0 and self.fixed_a_max is None:
            return 0
        return self.workload.engine.max_lora_rank or vllm_rank(max(1, largest), self._oldest_vllm)

    def subworkload(self, shares: Sequence[AdapterShare], scale: float = 1.0) -> Workload:
        """Return the workload of one instance; `scale` multiplies every rate, also of a trace."""
        fractions = traffic_fractions(shares)
        subset = self.busiest_workload.subset(fractions, fractions)
        return subset if scale == 1.0 else subset.at_load(scale)

    def fits_in_memory(self, assignment: Assignment) -> bool:
        """Tell whether one request of max_model_len fits beside the slots, and the adapters on the host."""
        limits = self.engine_limits(assignment)
        host = self.workload.engine.max_cpu_loras
        if host is not None:
            adapters = len(self.stored(assignment).keys() - {self.workload.base_model})
            if host < (min(limits.max_loras, adapters) if self.has_slots else adapters):
                return False
        budget = self._kv_budgets[assignment.pool]
        tokens = budget.tokens(limits, None if self.has_slots else 0)
        return tokens - self._resident_tokens(assignment) >= self.engine.max_model_len

    def _resident_tokens(self, assignment: Assignment) -> int:
        """Return the KV tokens that adapters take which are loaded at the start."""
        pair = self.workload.scheduling
        if pair is None or pair[1].loading != "resident":
            return 0
        profile, held = self.pools[assignment.pool].profile, {share.name for share in assignment.shares}
        every = profile.engine.target_modules
        return sum(
            adapter_tokens(profile.model, adapter.rank, profile.tp, adapter.target_modules or every)
            for adapter in self.workload.adapters
            if adapter.name in held
        )

    def adapter_bytes(self, adapter: Adapter) -> int:
        """Return the bytes of an adapter's own weights."""
        modules = adapter.target_modules or self.profile.engine.target_modules
        return adapter_bytes(self.profile.model, adapter.rank, modules)

    def offered_tok_s(self, share: AdapterShare) -> float:
        """Return the offered input and output tokens per second of a share."""
        return share.rate_rps * self._tokens_per_request[share.name]

    @cached_property
    def duration_s(self) -> float:
        """Simulated time of estimates and verification; for a trace that of its busiest window.

        Arrivals with slow bursts or changes, and rare ones, take longer than an hour to show.
        """
        workload = self.busiest_workload
        if workload.trace is not None:
            return workload.trace.duration_s
        return self._simulated_s

    @property
    def _window_s(self) -> float:
        return self.workload.slo_window or SIMULATED_S

    @property
    def _simulated_s(self) -> float:
        if self.simulated_s is not None:
            return self.simulated_s
        if is_modulated(self.workload):
            return self._window_s
        rate_rps = self.workload.total_rate_rps
        longest_s = min(_MAX_SIMULATED_S, _MAX_REQUESTS / rate_rps) if rate_rps else SIMULATED_S
        return max(SIMULATED_S, min(math.ceil(self.deciding_time.duration_s), longest_s))

    @cached_property
    def deciding_time(self) -> DecidingTime:
        """Simulated time that would decide on the workload."""
        return deciding_time(self.workload)

    @cached_property
    def windows(self) -> tuple[tuple[float, Problem], ...]:
        """Start and problem of each window of the trace in which the bounds hold; without a trace itself."""
        trace = self.workload.trace
        if trace is None:
            return ((0.0, self),)
        windows = trace_windows(self.workload, trace, self._window_s)
        return tuple((start_s, replace(self, workload=part)) for start_s, part in windows)

    def resampled(self, seed: int) -> Problem:
        """Return the problem with a bootstrap sample of its trace; itself without a trace."""
        trace = self.workload.trace
        if trace is None:
            return self
        workload = self.workload.model_copy(update={"trace": trace.resampled(seed)})
        return replace(self, workload=workload)

    @cached_property
    def busiest_workload(self) -> Workload:
        """Workload in the busiest window of its arrivals, which estimates simulate."""
        if self.workload.trace is None:
            return busiest_window(self.workload, self._simulated_s)

        def tokens(part: Workload) -> int:
            own = part.trace
            return 0 if own is None else int(own.prompt_tokens.sum() + own.output_tokens.sum())

        return max((part.workload for _, part in self.windows), key=tokens, default=self.workload)

    @cached_property
    def traffic(self) -> tuple[Adapter, ...]:
        """Adapters, and the base model as one of rank 0 if it has traffic, at the simulated rates.

        As an item of a placement the base model differs from an adapter: it needs no slot and no bytes.
        """
        workload = self.workload if self.workload.trace is None else self.busiest_workload
        base = workload.base
        if base is None:
            return workload.adapters
        item = Adapter.model_construct(  # without validation: no adapter has rank 0, or a name with spaces
            name=workload.base_model,
            rank=0,
            rate_rps=base.rate_rps,
            prompt_tokens=base.prompt_tokens,
            output_tokens=base.output_tokens,
        )
        return (*workload.adapters, item)

    @cached_property
    def lengths(self) -> Mapping[str, tuple[Lengths, Lengths]]:
        """Prompt and output lengths of all traffic, by name."""
        return {each.name: self.workload.lengths_of(each) for each in self.traffic}

    @cached_property
    def has_common_lengths(self) -> bool:
        """Whether all traffic has the lengths of the workload, and adapters differ in rank and rate only."""
        own = any(each.prompt_tokens is not None or each.output_tokens is not None for each in self.traffic)
        return not own and self.workload.trace is None

    @cached_property
    def known_points(self) -> dict[int, float]:
        """Operating points measured so far, by rank."""
        return {}

    @cached_property
    def known_queues(self) -> dict[Assignment, Queues | None]:
        """Initial queues designed so far, by instance."""
        return {}

    @cached_property
    def constraints(self) -> Constraints:
        """Placement constraints of the workload."""
        return read_constraints(self.workload.adapters, self.traffic)

    @cached_property
    def _kv_budgets(self) -> tuple[KvBudget, ...]:
        return tuple(kv_budget(pool.profile, self.engine.gpu_memory_utilization) for pool in self.pools)

    @cached_property
    def _tokens_per_request(self) -> Mapping[str, float]:
        return {name: sum(part.mean_tokens for part in both) for name, both in self.lengths.items()}


def infeasible(reason: InfeasibleReason, words: str) -> InfeasibleError:
    """Return the error of a problem without an answer; its message begins with the reason."""
    return InfeasibleError(f"{reason}: {words}", reason)


def whole_adapters(problem: Problem) -> tuple[AdapterShare, ...]:
    """Return every adapter as one share, and the traffic of the base model as another."""
    return tuple(map(AdapterShare.of, problem.traffic))


def distinct_adapters(shares: Sequence[AdapterShare]) -> int:
    """Return the number of different adapters; the base model is none."""
    return len({share.name for share in shares if share.rank})


def traffic_fractions(shares: Iterable[AdapterShare]) -> dict[str, float]:
    """Return the fraction of each adapter's traffic in these shares."""
    fractions: dict[str, float] = {}
    for share in shares:
        fractions[share.name] = min(1.0, fractions.get(share.name, 0.0) + share.fraction)
    return fractions


def merge_shares(shares: Iterable[AdapterShare]) -> tuple[AdapterShare, ...]:
    """Return one share per adapter, in the order of the first of each."""
    merged: dict[str, AdapterShare] = {}
    for share in shares:
        first = merged.get(share.name)
        if first is not None:
            rate_rps, fraction = first.rate_rps + share.rate_rps, min(1.0, first.fraction + share.fraction)
            share = replace(first, rate_rps=rate_rps, fraction=fraction)
        merged[share.name] = share
    return tuple(merged.values())
