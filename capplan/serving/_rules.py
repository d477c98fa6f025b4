"""Serving rules by name: switches for the differences between engines and their versions.

Scheduler and adapter cache of a workload or plan as switches of the compiled rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from capplan.errors import InputError
from capplan.serving.pooled import _state as p
from capplan.serving.state import SLORA, VLLM, Limits
from capplan.spec import SLORA_CADENCE, Cache, EngineArgs, Scheduler, version_numbers
from capplan.version import installed_version

_NS_PER_S: Final = 1_000_000_000
_ORDERS: Final = MappingProxyType({"fifo": p.FIFO, "sjf": p.SJF, "static": p.QUEUES, "chameleon": p.QUEUES})
_CACHES: Final = MappingProxyType(
    {"none": p.NO_CACHE, "lru": p.LRU, "fairshare": p.FAIRSHARE, "gdsf": p.GDSF, "chameleon": p.SCORE}
)
_PREFETCHES: Final = MappingProxyType(
    {"none": p.NO_PREFETCH, "queue": p.BY_QUEUE, "histogram": p.BY_HISTOGRAM}
)
_LOADINGS: Final = MappingProxyType(
    {
        "asynchronous": p.ASYNCHRONOUS,
        "on-demand": p.ON_DEMAND,
        "assisted": p.ASSISTED,
        "resident": p.RESIDENT,
        "cached": p.RESIDENT,
    }
)


def with_scheduling(limits: Limits, scheduler: Scheduler, cache: Cache) -> Limits:
    """Return the limits of `rules_of_scheduler` with the switches of a scheduler and a cache."""
    limits = limits._replace(admit_every=scheduler.admit_every)
    if limits.policy == SLORA:
        return limits
    if scheduler.merging is not None:
        merging = scheduler.merging
        if cache.loads:
            rule = "must be resident or cached under scheduler.merging: all adapters are in GPU memory"
            raise InputError(rule, cache.loading, "cache.loading")
        times_ms = {"merged_ns": merging.merged_ms, "unmerged_ns": merging.unmerged_ms}
        times_ms["switch_ns"] = merging.switch_ms
        limits = limits._replace(**{name: round(1e6 * value) for name, value in times_ms.items()})
    return limits._replace(
        order=_ORDERS[scheduler.policy],
        cache=_CACHES[cache.policy],
        prefetch=_PREFETCHES[cache.prefetch] if cache.loads else p.NO_PREFETCH,
        loading=_LOADINGS[cache.loading],
        chunked=int(scheduler.chunked),
        bypass=int(scheduler.bypass),
        ageing_ns=round((scheduler.ageing_s or 0.0) * _NS_PER_S),
        refresh_ns=round(scheduler.refresh_s * _NS_PER_S),
    )


VLLM_ENGINE: Final = "vllm"
SLORA_ENGINE: Final = "s-lora"
CAPPLAN_ENGINE: Final = "capplan"
_SLORA_REVISION: Final = "c1ddf48"


@dataclass(frozen=True)
class Releases:
    """Releases from `first` to `last`, later patches of `last` included."""

    first: str
    last: str

    def __str__(self) -> str:
        minor = ".".join(map(str, version_numbers(self.last)[:2]))
        return self.first if self.first == self.last else f"{self.first} to {minor}"

    def cover(self, version: str) -> bool:
        """Return whether a version is among them; one without a patch number if any patch of it is."""
        return not (self.follow(version) or self.precede(version))

    def follow(self, version: str) -> bool:
        """Return whether all of them are later than a version."""
        numbers = version_numbers(version)
        return version_numbers(self.first)[: len(numbers)] > numbers

    def precede(self, version: str) -> bool:
        """Return whether all of them are earlier than a version."""
        return version_numbers(self.last)[:2] < version_numbers(version)[:2]


@dataclass(frozen=True)
class ServingRules:
    """The switches of one engine version.

    Parameters
    ----------
    name
        The name that profiles and plans use.
    engine
        Name of the engine.
    releases
        Releases of vLLM that these rules describe; None: another engine.
    is_default
        Whether these releases follow these rules unless configured otherwise.
    lora_extra_vocab
        Rows of extra vocabulary in an adapter slot (256 in vLLM up to 0.11).
    prefix_caching
        Full KV blocks are kept until they are allocated again. Requests that begin with the same tokens under
        the same adapter reuse them, and a preempted request its own.
    unhashed_to_front
        Unregistered blocks are allocated before all others (vLLM since 0.27), otherwise in the order in which
        they became free.
    async_scheduling
        A step is decided while the previous one runs (vLLM's default on GPUs since 0.14).
    reserve_full_sequence
        Admit a waiting request only if its whole known sequence fits into free KV blocks now
        (vLLM's ``scheduler_reserve_full_isl``, on since 0.19).
    reverse_skipped
        Skipped requests return to the queue in reversed order (vLLM 0.9.2 to 0.13), otherwise in order.
    watermark
        Share of the KV blocks that stays free when a request is admitted while others run (since vLLM 0.27).
    long_prefill_tokens
        Maximum of prompt tokens of one request in one step; 0: no limit (vLLM's
        ``long_prefill_token_threshold``).
    lone_prefill_exempt
        The limit does not apply to a request that is alone in the engine (vLLM 0.32).
    hold_ending
        Async: the adapter of a request whose last token is in flight keeps its slot (since vLLM 0.33),
        otherwise it counts as unused one step earlier than the request leaves.
    load_beside
        Adapters are loaded asynchronously: a request is skipped until its adapter is resident. Otherwise a
        load blocks the step.
    policy
        Code of the scheduler: vLLM's, S-LoRA's (`pooled`), or that of Chameleon and its
        baselines (`capplan.serving.pooled._schedule`).
    """

    name: str
    engine: str = VLLM_ENGINE
    releases: Releases | None = None
    is_default: bool = True
    lora_extra_vocab: int = 0
    prefix_caching: bool = False
    unhashed_to_front: bool = False
    async_scheduling: bool = False
    reserve_full_sequence: bool = False
    reverse_skipped: bool = False
    watermark: float = 0.0
    long_prefill_tokens: int = 0
    lone_prefill_exempt: bool = False
    hold_ending: bool = False
    load_beside: bool = False
    policy: int = VLLM

    def __post_init__(self) -> None:
        if not 0.0 <= self.watermark < 1.0:
            raise InputError(rule="must be in [0, 1)", value=self.watermark, location="rules.watermark")
        if self.load_beside and self.reverse_skipped:
            raise InputError("must be off where reverse_skipped is on", True, "rules.load_beside")
        if self.long_prefill_tokens < 0:
            raise InputError(
                rule="must be >= 0", value=self.long_prefill_tokens, location="rules.long_prefill_tokens"
            )

    @property
    def unified_memory(self) -> bool:
        """Whether adapters take KV blocks, not slots."""
        return self.policy != VLLM

    @property
    def short_name(self) -> str:
        """Name without the kind of scheduling."""
        return self.name.removesuffix("-async").removesuffix("-sync")

    @property
    def version(self) -> str:
        """Last release of the engine that these rules describe."""
        if self.releases is not None:
            return self.releases.last
        return installed_version() if self.engine == CAPPLAN_ENGINE else _SLORA_REVISION

    def limits(self, args: EngineArgs, adapters: int, block_size: int, num_blocks: int) -> Limits:
        """Return the limits of an engine under these rules.

        Parameters
        ----------
        args
            Settings of the engine.
        adapters
            Number of adapters the engine serves.
        block_size
            Tokens of one KV block.
        num_blocks
            Usable KV blocks.
        """
        host_slots = adapters if args.max_cpu_loras is None else args.max_cpu_loras
        return Limits(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=args.max_model_len,
            max_loras=max(1, adapters) if self.unified_memory else args.max_loras,
            max_cpu_loras=max(1, host_slots),
            block_size=block_size,
            watermark_blocks=int(self.watermark * (num_blocks + 1)),  # vLLM counts its null block, too
            long_prefill_tokens=self.long_prefill_tokens,
            reserve_full_sequence=int(self.reserve_full_sequence),
            reverse_skipped=int(self.reverse_skipped),
            lone_prefill_exempt=int(self.lone_prefill_exempt),
            async_scheduling=int(self.async_scheduling),
            prefix_caching=int(self.prefix_caching),
            unhashed_to_front=int(self.unhashed_to_front),
            hold_ending=int(self.hold_ending),
            load_beside=int(self.load_beside),
            policy=self.policy,
            admit_every=SLORA_CADENCE if self.policy == SLORA else 1,
        )
