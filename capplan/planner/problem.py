"""A placement problem and its answers: what solvers get and give, apart from files and plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Final, Protocol

from capplan.models.memory import KvBudget, kv_budget
from capplan.planner.constraints import Constraints, constraints_of
from capplan.spec import EngineConfig, Profile, Trace, Workload, allowed_lora_rank

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
class Part:
    """An adapter, or a share of its traffic: what a solver places."""

    name: str
    rank: int
    rate_rps: float
    """Rate of this share of its requests."""
    share: float = 1.0
    number: int = 0
    """Which of the adapter's shares this is, counted from 0."""


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

    parts: tuple[Part, ...]
    a_max: int
    max_num_seqs: int | None = None
    """None: as the problem's engine has it."""
    pool: int = 0
    """Number of its pool in the problem."""

    @property
    def shares(self) -> dict[str, float]:
        """Share of each adapter's traffic that comes here."""
        return shares_of(self.parts)


@dataclass(frozen=True)
class Estimate:
    """What an estimator says of one GPU."""

    throughput_tok_s: float
    starved: bool
    """Whether it would starve, or break a latency bound where the estimator can tell."""
    e2e_s_mean: float = 0.0
    """Mean time from arrival to last token, who is left behind charged with all there was; 0 where the
    estimator cannot tell."""
    strain: float = 0.0
    """How near it is to failing, or how far beyond; grows with the load."""
    short: float = 0.0
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
    parts
        What is to be placed.
    """

    workload: Workload
    pools: tuple[GpuPool, ...]
    engine: EngineDefaults
    parts: tuple[Part, ...]

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

    def s_max(self, parts: Sequence[Part]) -> int:
        """Return the rank that slots for these parts are sized for."""
        return self.workload.engine.max_lora_rank or allowed_lora_rank(max(map(_RANK, parts)))

    def subworkload(self, parts: Sequence[Part], scale: float = 1.0) -> Workload:
        """Return the workload of one GPU; `scale` multiplies every rate, a trace's too."""
        shares = shares_of(parts)
        part = self.workload.subset(shares, shares)
        if scale == 1.0:
            return part
        # A copy with other rates keeps every rule that the workload kept: no need to check them again.
        adapters = tuple(a.model_copy(update={"rate_rps": a.rate_rps * scale}) for a in part.adapters)
        trace = part.trace if part.trace is None else _faster(part.trace, scale)
        return part.model_copy(update={"adapters": adapters, "trace": trace})

    def fits_in_memory(self, assignment: Assignment) -> bool:
        """Tell whether one request of max_model_len fits beside the slots, and their adapters on the host."""
        parts, a_max = assignment.parts, assignment.a_max
        host = self.workload.engine.max_cpu_loras
        if host is not None and host < min(a_max, distinct_adapters(parts)):
            return False
        budget = self._kv_budgets[assignment.pool]
        tokens = budget.tokens(a_max, self.s_max(parts), self.max_num_seqs(assignment))
        return tokens >= self.engine.max_model_len

    def offered_tok_s(self, part: Part) -> float:
        """Return the input and output tokens per second that a part asks for."""
        return part.rate_rps * self._tokens_per_request[part.name]

    @cached_property
    def constraints(self) -> Constraints:
        """Where adapters may be."""
        return constraints_of(self.workload)

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


def distinct_adapters(parts: Sequence[Part]) -> int:
    """Return how many adapters these are parts of."""
    return len({part.name for part in parts})


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


def shares_of(parts: Iterable[Part]) -> dict[str, float]:
    """Return the share of each adapter's traffic among these parts."""
    shares: dict[str, float] = {}
    for part in parts:
        shares[part.name] = min(1.0, shares.get(part.name, 0.0) + part.share)
    return shares


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return parts with the shares of one adapter as one, where its first stands."""
    found: dict[str, Part] = {}
    for part in parts:
        known = found.get(part.name)
        if known is not None:
            rate_rps, share = known.rate_rps + part.rate_rps, min(1.0, known.share + part.share)
            part = replace(known, rate_rps=rate_rps, share=share)
        found[part.name] = part
    return tuple(found.values())


def replayed_s(workload: Workload, duration_s: float) -> float:
    """Return how long a workload is simulated: a trace as a whole, whatever the duration."""
    return duration_s if workload.trace is None else workload.trace.duration_s


def _faster(trace: Trace, scale: float) -> Trace:
    arrival_ns = (trace.arrival_ns / scale).astype(trace.arrival_ns.dtype)
    arrival_ns.setflags(write=False)  # as in every trace: numba compiles the twin anew for other arrays
    return replace(trace, arrival_ns=arrival_ns, duration_s=trace.duration_s / scale)
