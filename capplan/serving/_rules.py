"""Serving rules by name: switches for the differences between engines and their versions.

`RELEASES` has what is known of each release of vLLM. A new release is one entry of it, and one recording of
its scheduler (``tests/golden/README.md``). Scheduler and adapter cache of a workload or plan are switches of
the compiled rules as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Final

from capplan.errors import InputError
from capplan.serving.pooled import _state as p
from capplan.serving.state import POOLED, SLORA, VLLM, Limits
from capplan.spec import SLORA_CADENCE, Cache, EngineArgs, Scheduler, allowed_lora_rank, version_numbers
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


@dataclass(frozen=True)
class StartUp:
    """Memory that an engine keeps back beside weights, adapter slots and KV."""

    reserved_bytes: float
    """Memory that PyTorch does not know, on GPUs with links of their own."""
    reserved_bytes_by_pcie: float
    """The same on GPUs without."""
    collectives_bytes: float
    """Memory that PyTorch does not know for NCCL and custom all-reduce, with tensor parallelism."""
    logit_copies: float
    """Float32 logits of a request that the sampler holds at a time."""
    source: str
    """What was measured, on GPUs with links of their own."""
    source_by_pcie: str
    """The same on GPUs without."""
    seqs_in_reserve: float = 0.0
    """Requests whose logits are part of `reserved_bytes`."""
    activations_in_reserve: bool = False
    """Whether activations are part of `reserved_bytes`; otherwise they have the size of a step."""
    windows_save_kv: bool = True
    """Whether layers with a sliding window keep the window's KV alone, in blocks of their own."""


@dataclass(frozen=True)
class Release:
    """Releases of vLLM from `first` to `last` that are alike."""

    first: str
    last: str
    """The last one that was looked at; one without an entry is as the entry before it."""
    rules: ServingRules
    """Rules of its scheduler, without async scheduling."""
    async_by_default: bool | None
    """Whether it schedules asynchronously unless told otherwise; None: it never does."""
    flags: frozenset[str]
    """Flags of ``vllm serve`` and variables of the environment that `capplan.deploy` uses."""
    min_lora_rank: int
    """Smallest ``--max-lora-rank``."""
    start_up: StartUp
    """Memory that it keeps back."""


_OF_PROFILES: Final = "kept-back memory of the shipped profiles of vLLM 0.8.5, rounded"
_BY_SIZES: Final = "activations and logits by their sizes; the rest as vLLM 0.19.0 kept back on"

_0_8 = Release(
    first="0.8.5",
    last="0.8.5",
    rules=ServingRules("vllm-0.8", lora_extra_vocab=256, prefix_caching=True),
    async_by_default=None,
    flags=frozenset(
        (
            *("--port", "--tensor-parallel-size", "--enable-lora", "--lora-modules", "--max-loras"),
            *("--max-lora-rank", "--max-cpu-loras", "--fully-sharded-loras", "--max-num-seqs"),
            *("--max-num-batched-tokens", "--max-model-len", "--gpu-memory-utilization"),
            *("--enable-prefix-caching", "--no-enable-prefix-caching", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
            *("--kv-cache-dtype", "--quantization"),
        )
    ),
    min_lora_rank=8,
    # Rounded from the shipped H100 profiles, with 2,048 tokens per step; the collectives are assumed.
    # Sampling by sorting holds 3.5 copies.
    start_up=StartUp(
        reserved_bytes=2.2e9,
        reserved_bytes_by_pcie=2.2e9,
        collectives_bytes=0.3e9,
        logit_copies=3.5,
        seqs_in_reserve=270.0,
        activations_in_reserve=True,
        windows_save_kv=False,
        source=_OF_PROFILES,
        source_by_pcie=_OF_PROFILES,
    ),
)
_0_9 = replace(
    _0_8,
    first="0.9.2",
    last="0.9.2",
    rules=replace(_0_8.rules, name="vllm-0.11", reverse_skipped=True),
    # What five starts of vLLM 0.19.0 kept back on an H100 beside weights and peak, and with TP 2 and 4 (2.1
    # instead of 0.2 GiB). Logits in float32, sorted, and 64-bit places: peaks of 1.96 and 3.99 GiB with 1,024
    # requests over 128,256 and 262,208 tokens (llm-d-incubation/llm-d-planner, accuracy/results/v0.19.0).
    # By PCIe: an RTX 4090 with Llama-3.1-8B (request logs of casys-kaist/LLMServingSim, commit 5daddb2).
    start_up=StartUp(
        reserved_bytes=0.22e9,
        reserved_bytes_by_pcie=0.71e9,
        collectives_bytes=2.04e9,
        logit_copies=4.0,
        source=f"{_BY_SIZES} an H100 and with tensor parallelism",
        source_by_pcie=f"{_BY_SIZES} an RTX 4090",
    ),
)
_0_10 = replace(
    _0_9,
    first="0.10.0",
    last="0.11.0",
    flags=_0_9.flags | {"--async-scheduling", "--no-async-scheduling"},
)
_0_11 = replace(_0_10, first="0.11.1", last="0.11.2", min_lora_rank=1)
_0_12 = replace(
    _0_11,
    first="0.12.0",
    last="0.13.0",
    rules=replace(_0_11.rules, name="vllm-0.12-sync", lora_extra_vocab=0),
    async_by_default=False,
)
_0_14 = replace(
    _0_12,
    first="0.14.0",
    last="0.18.1",
    rules=replace(_0_12.rules, name="vllm-0.14-sync", reverse_skipped=False),
    async_by_default=True,
)
_0_19 = replace(
    _0_14,
    first="0.19.0",
    last="0.19.0",
    rules=replace(_0_14.rules, name="vllm-0.20-sync", reserve_full_sequence=True),
    flags=_0_14.flags | {"--lora-target-modules"},  # pull request 34984
)
_0_20 = replace(
    _0_19,
    first="0.20.0",
    last="0.23.0",
    # Logits in 16 bits and in float32: with four copies, vLLM 0.23.0 could not have kept the KV tokens that
    # it has (inference-sim/residency-vllm, commit 2641b57).
    start_up=replace(_0_19.start_up, logit_copies=1.5),
)
_0_27 = replace(
    _0_20,
    first="0.27.0",
    last="0.32.0",
    rules=replace(_0_20.rules, name="vllm-0.32-sync", unhashed_to_front=True, lone_prefill_exempt=True),
)
_0_33 = replace(
    _0_27,
    first="0.33.0",
    last="0.33.0",
    rules=replace(_0_27.rules, name="vllm-0.33-sync", hold_ending=True),
    # The start-up run samples a second time, with every parameter of sampling: one more float32 copy, read in
    # the code (v1/worker/gpu/model_runner.py) and not measured.
    start_up=replace(_0_27.start_up, logit_copies=2.5),
)

RELEASES: Final = (_0_8, _0_9, _0_10, _0_11, _0_12, _0_14, _0_19, _0_20, _0_27, _0_33)
"""The releases of vLLM, oldest first.

Sources: rules in the docstring of `capplan.serving._scheduler`. Flags: ``vllm/engine/arg_utils.py`` and
``vllm/config/lora.py`` of the wheels 0.8.5, 0.9.2, 0.10.0, 0.11.0, 0.11.1, 0.15.1 to 0.20.0 and 0.32.0.
"""


def release_of(version: str | None) -> Release:
    """Return the entry of a release of vLLM: the newest that is not later, or else the oldest.

    None, and a name that is no version, such as that of a build: the newest.
    """
    try:
        numbers = version_numbers(version) if version is not None else ()
    except InputError:
        numbers = ()
    if not numbers:
        return RELEASES[-1]
    begun = [each for each in RELEASES if version_numbers(each.first)[: len(numbers)] <= numbers]
    return begun[-1] if begun else RELEASES[0]


def flag_since(flag: str) -> str:
    """Return the first release of vLLM that has a flag of the table."""
    return next(release.first for release in RELEASES if flag in release.flags)


def vllm_rank(rank: int, version: str | None) -> int:
    """Return the smallest ``max_lora_rank`` of a release of vLLM that holds a rank; None: the newest.

    Raises
    ------
    ValueError
        Unless 1 <= rank <= 512.
    """
    return allowed_lora_rank(max(rank, release_of(version).min_lora_rank))


def _rules_of_releases() -> tuple[ServingRules, ...]:
    """Return the rules of `RELEASES`, each with the releases that follow them."""
    found: list[ServingRules] = []
    for _, group in groupby(RELEASES, key=lambda release: release.rules.name):
        alike = tuple(group)
        newest = alike[-1]
        rules = replace(newest.rules, releases=Releases(alike[0].first, newest.last))
        if newest.async_by_default is None:
            found.append(rules)
        else:
            found.extend(_both(rules, async_by_default=newest.async_by_default))
    return tuple(found)


def _both(rules: ServingRules, *, async_by_default: bool) -> tuple[ServingRules, ServingRules]:
    """Return the rules without and with async scheduling."""
    overlapping = replace(
        rules,
        name=rules.name.replace("-sync", "-async"),
        async_scheduling=True,
        is_default=async_by_default,
    )
    return replace(rules, is_default=not async_by_default), overlapping


RULES: Final[tuple[ServingRules, ...]] = (
    *_rules_of_releases(),
    replace(_0_27.rules, name="capplan", engine=CAPPLAN_ENGINE, load_beside=True),
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


def rules_of_scheduler(scheduler: Scheduler) -> ServingRules:
    """Return the serving rules that run a scheduler: S-LoRA's own, or those of one pool."""
    return serving_rules("slora" if scheduler.policy == "slora" else "chameleon")
