"""Serving rules by name: switches for the differences between engines and their versions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from capplan.errors import InputError
from capplan.serving.state import SLORA, VLLM, Limits
from capplan.spec.engine_args import EngineArgs


@dataclass(frozen=True)
class ServingRules:
    """The switches of one engine version.

    Parameters
    ----------
    name
        The name that profiles and plans use.
    prefix_caching
        Full KV blocks are kept until they are allocated again. Requests that begin with the same tokens under
        the same adapter reuse them, and a preempted request its own.
    unhashed_to_front
        Unregistered blocks are allocated before all others (vLLM after 0.14), otherwise in the order in which
        they became free.
    async_scheduling
        A step is decided while the previous one runs (vLLM's default on GPUs since 0.14).
    reserve_full_sequence
        Admit a waiting request only if its whole known sequence fits into free KV blocks now
        (vLLM's ``scheduler_reserve_full_isl``, on since 0.20).
    reverse_skipped
        Skipped requests return to the queue in reversed order (vLLM 0.9.2 to 0.13), otherwise in order.
    watermark
        Share of the KV blocks that stays free when a request is admitted while others run (since vLLM 0.27).
    long_prefill_tokens
        Maximum of prompt tokens of one request in one step; 0: no limit (vLLM's
        ``long_prefill_token_threshold``).
    lone_prefill_exempt
        The limit does not apply to a request that is alone in the engine (vLLM 0.32).
    load_beside
        Adapters are loaded asynchronously: a request is skipped until its adapter is resident. Otherwise a
        load blocks the step.
    declared_output
        S-LoRA's rules instead of vLLM's: see `capplan.serving.slora`. Adapters take KV blocks, not slots.
    """

    name: str
    prefix_caching: bool = False
    unhashed_to_front: bool = False
    async_scheduling: bool = False
    reserve_full_sequence: bool = False
    reverse_skipped: bool = False
    watermark: float = 0.0
    long_prefill_tokens: int = 0
    lone_prefill_exempt: bool = False
    load_beside: bool = False
    declared_output: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.watermark < 1.0:
            raise InputError(rule="must be in [0, 1)", value=self.watermark, location="rules.watermark")
        if self.load_beside and self.reverse_skipped:
            raise InputError("must be off where reverse_skipped is on", True, "rules.load_beside")
        if self.long_prefill_tokens < 0:
            raise InputError(
                rule="must be >= 0", value=self.long_prefill_tokens, location="rules.long_prefill_tokens"
            )

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
            max_loras=max(1, adapters) if self.declared_output else args.max_loras,
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
            load_beside=int(self.load_beside),
            policy=SLORA if self.declared_output else VLLM,
        )


_VLLM_0_32 = ServingRules(
    "vllm-0.32-sync",
    prefix_caching=True,
    unhashed_to_front=True,
    reserve_full_sequence=True,
    lone_prefill_exempt=True,
)

RULES: tuple[ServingRules, ...] = (
    ServingRules("vllm-0.8", prefix_caching=True),
    ServingRules("vllm-0.11", prefix_caching=True, reverse_skipped=True),
    _VLLM_0_32,
    replace(_VLLM_0_32, name="vllm-0.32-async", async_scheduling=True),
    replace(_VLLM_0_32, name="capplan", load_beside=True),
    ServingRules("slora", declared_output=True),
)
"""Every named set of rules; sources in the docstring of `capplan.serving.scheduler`."""


def serving_rules(name: str) -> ServingRules:
    """Return the rules called `name`.

    Raises
    ------
    InputError
        When no rules have that name; the message lists the names.
    """
    for rules in RULES:
        if rules.name == name:
            return rules
    raise InputError(rule=f"must be one of {', '.join(r.name for r in RULES)}", value=name, location="rules")
