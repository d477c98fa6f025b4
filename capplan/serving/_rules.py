"""Serving rules by name: switches for the differences between engines and their versions.

Scheduler and adapter cache of a workload or plan as switches of the compiled rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from capplan.errors import InputError
from capplan.serving.pooled import _state as p
from capplan.serving.state import POOLED, SLORA, VLLM, Limits
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


def rules_of_scheduler(scheduler: Scheduler) -> ServingRules:
    """Return the serving rules that run a scheduler: S-LoRA's own, or those of one pool."""
    return serving_rules("slora" if scheduler.policy == "slora" else "chameleon")


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


_VLLM_0_8 = ServingRules(
    "vllm-0.8", releases=Releases("0.8.5", "0.8.5"), lora_extra_vocab=256, prefix_caching=True
)
_VLLM_0_11 = replace(_VLLM_0_8, name="vllm-0.11", releases=Releases("0.9.2", "0.11.2"), reverse_skipped=True)
_VLLM_0_12 = replace(
    _VLLM_0_11, name="vllm-0.12-sync", releases=Releases("0.12.0", "0.13.0"), lora_extra_vocab=0
)
_VLLM_0_14 = replace(
    _VLLM_0_12, name="vllm-0.14-sync", releases=Releases("0.14.0", "0.18.1"), reverse_skipped=False
)
_VLLM_0_20 = replace(
    _VLLM_0_14, name="vllm-0.20-sync", releases=Releases("0.19.0", "0.23.0"), reserve_full_sequence=True
)
_VLLM_0_32 = replace(
    _VLLM_0_20,
    name="vllm-0.32-sync",
    releases=Releases("0.27.0", "0.32.0"),
    unhashed_to_front=True,
    lone_prefill_exempt=True,
)
_VLLM_0_33 = replace(
    _VLLM_0_32, name="vllm-0.33-sync", releases=Releases("0.33.0", "0.33.0"), hold_ending=True
)


def _both(rules: ServingRules, *, async_by_default: bool) -> tuple[ServingRules, ServingRules]:
    """Return the rules without and with async scheduling."""
    overlapping = replace(
        rules,
        name=rules.name.replace("-sync", "-async"),
        async_scheduling=True,
        is_default=async_by_default,
    )
    return replace(rules, is_default=not async_by_default), overlapping


RULES: tuple[ServingRules, ...] = (
    _VLLM_0_8,
    _VLLM_0_11,
    *_both(_VLLM_0_12, async_by_default=False),
    *_both(_VLLM_0_14, async_by_default=True),
    *_both(_VLLM_0_20, async_by_default=True),
    *_both(_VLLM_0_32, async_by_default=True),
    *_both(_VLLM_0_33, async_by_default=True),
    replace(_VLLM_0_32, name="capplan", engine=CAPPLAN_ENGINE, releases=None, load_beside=True),
    ServingRules("slora", engine=SLORA_ENGINE, policy=SLORA),
    ServingRules("chameleon", engine=CAPPLAN_ENGINE, load_beside=True, policy=POOLED),
)
"""Every named set of rules; sources in the docstring of `capplan.serving._scheduler`."""


def serving_rules(name: str) -> ServingRules:
    """Return the rules called `name`; without ``-sync`` or ``-async``, the default of the two.

    Raises
    ------
    InputError
        When no rules have that name; the message lists the names.
    """
    for rules in RULES:
        if rules.name == name or (rules.short_name == name and rules.is_default):
            return rules
    raise InputError(rule=f"must be one of {', '.join(r.name for r in RULES)}", value=name, location="rules")


def rules_of_version(version: str) -> ServingRules:
    """Return the rules that a version of vLLM follows by default.

    Raises
    ------
    InputError
        If no rules describe the version; the message names the nearest releases.
    """
    known = [(rules.releases, rules) for rules in RULES if rules.releases is not None and rules.is_default]
    for releases, rules in known:
        if releases.cover(version):
            return rules
    earlier = [f"{releases} ({rules.name})" for releases, rules in known if releases.precede(version)]
    later = [f"{releases} ({rules.name})" for releases, rules in known if releases.follow(version)]
    nearest = " and ".join([*earlier[-1:], *later[:1]])
    rule = f"must be a version of vLLM with known rules, the nearest being {nearest}, or go with --rules"
    raise InputError(rule, version, "engine_version")


def rules_of_engine(
    version: str | None, rules: str | None, otherwise: str = "vllm-0.32-async"
) -> tuple[ServingRules, str]:
    """Return the rules of an engine and its version, given one of them, both, or the name of a default.

    Raises
    ------
    InputError
        If either is unknown, the version is known to follow other rules, or it is a version of vLLM and the
        rules are those of another engine.
    """
    if rules is None and version is not None:
        return rules_of_version(version), version
    chosen = serving_rules(rules or otherwise)
    if version is None or version == chosen.version:
        return chosen, chosen.version
    if chosen.releases is None:
        engine = f"{chosen.engine} {chosen.version}"
        rule = f"is that of vLLM and does not go with rules {chosen.name}, which are those of {engine}"
        raise InputError(rule, version, "engine_version")
    described = [each.name for each in RULES if each.releases and each.releases.cover(version)]
    if described and chosen.name not in described:
        raise InputError(f"must be {' or '.join(described)} for vLLM {version}", rules, "rules")
    return chosen, version
