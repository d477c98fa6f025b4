"""A placement problem and its answers: what solvers get and give, apart from files and plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from capplan.models.memory import kv_tokens
from capplan.spec import EngineConfig, Profile, Trace, Workload, allowed_lora_rank

GRID = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384)
"""Adapter counts and values of A_max tested: 1, 2, 4, and those of the adapter-caching paper (section 7)."""


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
class Assignment:
    """What one GPU serves, and with how many slots."""

    parts: tuple[Part, ...]
    a_max: int


@dataclass(frozen=True)
class Estimate:
    """What an estimator says of one GPU."""

    throughput_tok_s: float
    starved: bool
    """Whether it would starve, or break a latency bound where the estimator can tell."""
    ttft_s_p99: float = 0.0
    """99th percentile of the time to first token; 0 where the estimator cannot tell."""


class Estimator(Protocol):
    """Answers what one GPU would do; a surrogate or the twin."""

    def __call__(self, parts: Sequence[Part], a_max: int) -> Estimate:
        """Return the estimate for a GPU that serves `parts` with `a_max` slots."""
        ...


@dataclass(frozen=True)
class Problem:
    """Adapters to place on at most `gpus` equal instances, each of the profile's `tp` GPUs.

    Attributes
    ----------
    workload
        The whole workload.
    profile
        What is known of the GPUs.
    gpus
        How many instances the GPUs make.
    engine
        Settings of every instance, complete but for the slots.
    parts
        What is to be placed.
    """

    workload: Workload
    profile: Profile
    gpus: int
    engine: EngineDefaults
    parts: tuple[Part, ...]

    @property
    def fixed_a_max(self) -> int | None:
        """The number of slots, where the workload fixes it."""
        return self.workload.engine.max_loras

    def s_max(self, parts: Sequence[Part]) -> int:
        """Return the rank that slots for these parts are sized for."""
        return self.workload.engine.max_lora_rank or allowed_lora_rank(max(part.rank for part in parts))

    def subworkload(self, parts: Sequence[Part], scale: float = 1.0) -> Workload:
        """Return the workload of one GPU; `scale` multiplies every rate, a trace's too."""
        shares = _shares(parts)
        part = self.workload.subset(shares, shares)
        if scale == 1.0:
            return part
        # A copy with other rates keeps every rule that the workload kept: no need to check them again.
        adapters = tuple(a.model_copy(update={"rate_rps": a.rate_rps * scale}) for a in part.adapters)
        trace = part.trace if part.trace is None else _faster(part.trace, scale)
        return part.model_copy(update={"adapters": adapters, "trace": trace})

    def fits_in_memory(self, parts: Sequence[Part], a_max: int) -> bool:
        """Tell whether one request of max_model_len fits beside the slots, and their adapters on the host."""
        engine, host = self.engine, self.workload.engine.max_cpu_loras
        if host is not None and host < min(a_max, distinct_adapters(parts)):
            return False
        tokens = kv_tokens(
            self.profile, a_max, self.s_max(parts), engine.gpu_memory_utilization, engine.max_num_seqs
        )
        return tokens >= engine.max_model_len

    def offered_tok_s(self, part: Part) -> float:
        """Return the input and output tokens per second that a part asks for."""
        return part.rate_rps * self._tokens_per_request[part.name]

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


def _shares(parts: Sequence[Part]) -> dict[str, float]:
    """Return the share of each adapter's traffic among these parts."""
    shares: dict[str, float] = {}
    for part in parts:
        shares[part.name] = min(1.0, shares.get(part.name, 0.0) + part.share)
    return shares


def _faster(trace: Trace, scale: float) -> Trace:
    arrival_ns = (trace.arrival_ns / scale).astype(trace.arrival_ns.dtype)
    arrival_ns.setflags(write=False)  # as in every trace: numba compiles the twin anew for other arrays
    return replace(trace, arrival_ns=arrival_ns, duration_s=trace.duration_s / scale)
