"""Options of the reference engine in addition to `EngineArgs`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, Literal, Self

import torch
from pydantic import Field

from capplan.engine.lora._load_times import LoadTimes
from capplan.engine.models._config import ModelConfig
from capplan.errors import InputError
from capplan.serving import Limits, ServingRules, rules_of_scheduler, serving_rules, with_scheduling
from capplan.spec import (
    ENGINE_DEFAULTS,
    AdapterCharge,
    Cache,
    CacheSource,
    Count,
    EngineArgs,
    Natural,
    Positive,
    Predictor,
    Queues,
    Scheduler,
    SchedulerSource,
    SpecModel,
    completed,
    format_key,
    require_room,
    unknown_key,
    validate_document,
)

Memory = Literal["slots", "unified"]
LoraKernel = Literal["compiled", "grouped", "padded", "triton", "bgmv", "mbgmv", "sgmv"]
AttentionKernel = Literal["compiled", "torch", "triton"]
_TRITON_KERNELS: Final = ("triton", "bgmv", "mbgmv", "sgmv")

_DTYPES: Final = ("float32", "float16", "bfloat16")
_CHOSEN_ARGS: Final = ("max_loras", "max_lora_rank", "max_model_len")
"""Chosen for the model and its adapters if not given; see `capplan.engine._engine.choose_sizes`."""
_MOST: Final = MappingProxyType(
    {
        "max_num_seqs": 2**16,
        "max_num_batched_tokens": 2**22,
        "max_loras": 2**16,
        "max_cpu_loras": 2**20,
        "max_adapters": 2**20,
        "tensor_parallel_size": 2**6,
        "max_in_flight": 2**20,
        "max_model_len": 2**24,
        "block_size": 2**16,
        "num_kv_blocks": 2**31 - 1,
        "shared_prefix_tokens": 2**24,
    }
)
"""Largest settings: beyond those of any engine, and the tables of the scheduler have a row for each."""


class EngineOptions(SpecModel):
    """Options of the reference engine in addition to `EngineArgs`.

    Parameters
    ----------
    args
        Given fields of `EngineArgs`. By default `max_loras` is the number of adapters, at most 8,
        `max_lora_rank` the rank that the adapters need, and `max_model_len` that of the model, or what the
        KV blocks hold.
    dtype
        ``auto`` is the dtype that the model is stored in.
    device
        ``cpu``, ``cuda``, ``cuda:1`` and so on; under tensor parallelism the first of the GPUs.
    tensor_parallel_size
        GPUs, or on the CPU processes, that share the model and its adapters.
    rules
        Serving rules by name; see `capplan.serving._rules`.
    scheduler, cache
        Scheduler and adapter cache, by name or as a mapping, instead of `rules`: adapters and KV share the
        memory. Beside the other, None is the scheduler ``fifo``, and the cache ``none``.
    queues
        Queues by request size until the first refresh, of a scheduler that has them; None: one queue. Without
        a scheduler they imply ``chameleon``.
    load_times
        Time of adapter loads for the cache ``gdsf``, as in a profile; None: measured at the start.
    memory
        ``slots``: `max_loras` slots of `max_lora_rank` rows. ``unified``: adapters at their true ranks in
        pages of the KV pool. None: unified under rules without slots, and slots otherwise.
    copy_gb_per_s
        Bandwidth of copies of adapters to the memory of a CPU, GB per second, which stand in for those over a
        GPU's link; None: that of the memory.
    block_size
        Tokens of one KV block.
    num_kv_blocks
        KV blocks; None: as many as fit (GPU: into `gpu_memory_utilization` of it; CPU: into 256 MiB).
    max_adapters
        Maximum number of registered adapters; None: the number given at the start.
    max_in_flight
        Maximum number of requests running and waiting; further ones are refused.
    shared_prefix_tokens
        Prompts of one adapter with the same first tokens, this many, share their KV; 0: no sharing.
    lora_kernel
        ``compiled``: by numba at true ranks for adapters with few tokens, as ``grouped`` for others.
        In PyTorch ``grouped`` (true ranks) or ``padded`` (largest rank in the batch, for comparison).
        In Triton ``bgmv`` (padded), ``mbgmv`` (true ranks, for decode), ``sgmv`` (true ranks, for prefill) or
        ``triton`` (one of the latter two, step by step).
        None: ``triton`` on a GPU, ``compiled`` on the CPU in float32, ``grouped`` otherwise.
    sgmv_from_tokens
        Mean tokens per adapter in a step from which ``triton`` uses ``sgmv``, as measured into
        `capplan.Profile.engine`. None: 2, by the bytes that they read.
    attention_kernel
        Of decode steps: ``torch``, ``compiled`` (by numba, on the CPU in float32) or ``triton``.
        None: ``triton`` on a GPU, ``compiled`` on the CPU in float32, ``torch`` otherwise.
    cuda_graphs
        Run decode steps as CUDA graphs; None: on a GPU with Triton's kernels. On the CPU steps are padded as
        for graphs, and nothing is captured.
    seed
        Of random weights, random adapters, and requests without a seed.
    """

    args: dict[str, Any] = Field(default_factory=dict)
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: str = "cpu"
    tensor_parallel_size: Count = 1
    rules: str = "capplan"
    scheduler: SchedulerSource | None = None
    cache: CacheSource | None = None
    queues: Queues | None = None
    load_times: LoadTimes | None = None
    memory: Memory | None = None
    copy_gb_per_s: Positive | None = None
    block_size: Count = 16
    num_kv_blocks: Count | None = None
    max_adapters: Count | None = None
    max_in_flight: Count = 1024
    shared_prefix_tokens: Natural = 0
    lora_kernel: LoraKernel | None = None
    sgmv_from_tokens: Count | None = None
    attention_kernel: AttentionKernel | None = None
    cuda_graphs: bool | None = None
    seed: int = 0

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Return the options from fields of `EngineArgs` and `EngineOptions`; None is the default.

        Raises
        ------
        InputError
            If a setting is unknown or invalid.
        """
        args: dict[str, Any] = {}
        options: dict[str, Any] = {}
        for name, value in settings.items():
            if name not in EngineArgs.model_fields and (name == "args" or name not in cls.model_fields):
                names = [*EngineArgs.model_fields, *cls.model_fields]
                raise InputError(unknown_key(name, names), location=name)
            if value is not None:
                (args if name in EngineArgs.model_fields else options)[name] = value
        for name, value in (args | options).items():
            if name in _MOST and isinstance(value, int) and value > _MOST[name]:
                raise InputError(f"must be at most {_MOST[name]}", value, name)
        validate_document(EngineArgs, dict.fromkeys(_CHOSEN_ARGS, 1) | ENGINE_DEFAULTS | args, format_key)
        parsed = validate_document(cls, options | {"args": args}, format_key)
        parsed._check_rules()
        parsed._check_kernels()
        return parsed

    def _check_rules(self) -> None:
        if "rules" in self.model_fields_set and self.scheduling is not None:
            raise InputError("does not go with scheduler, cache or queues", self.rules, "rules")
        rules = self._named_rules()
        if rules.unified_memory and self.memory == "slots":
            raise InputError(f"must be unified under the rules {rules.name}", self.memory, "memory")
        if rules.unified_memory and self.args.get("enable_prefix_caching"):
            rule = f"must be off under the rules {rules.name}, which have none"
            raise InputError(rule, True, "enable_prefix_caching")
        if self.queues is not None and self.scheduler is not None and not self.scheduler.has_queues:
            raise InputError("go with scheduler chameleon or static", self.scheduler.policy, "queues")
        if self.queues is not None:
            require_room(self.queues, "queues")
        if self.loading == "assisted" and self.tensor_parallel_size > 1:
            rule = "must not be assisted with tensor parallelism: the cores serve one process"
            raise InputError(rule, self.loading, "cache.loading")
        if self.scheduler is not None and self.scheduler.merging is not None:
            rule = "must be absent in an engine: only the twin merges adapters"
            raise InputError(rule, location="scheduler.merging")
        if self.copy_gb_per_s is not None and self.device != "cpu":
            rule = "goes with device cpu: copies to a GPU take what they take"
            raise InputError(rule, self.copy_gb_per_s, "copy_gb_per_s")

    def _check_kernels(self) -> None:
        if self.device != "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
            return
        for name in ("lora_kernel", "attention_kernel"):
            if getattr(self, name) in _TRITON_KERNELS:
                rule = "is a kernel of Triton: it runs on a GPU, or anywhere with TRITON_INTERPRET=1"
                raise InputError(rule, getattr(self, name), name)

    def engine_args(self, **defaults: int) -> EngineArgs:
        """Return the complete settings of the engine."""
        return EngineArgs(**(ENGINE_DEFAULTS | defaults | self.args))

    def adapter_capacity(self, given: int) -> int:
        """Return the number of adapters the engine can register, `given` of them at its start."""
        if self.max_adapters is not None and self.max_adapters < given:
            rule = f"must be at least the {given} adapters given"
            raise InputError(rule, self.max_adapters, "max_adapters")
        return given if self.max_adapters is None else self.max_adapters

    @property
    def scheduling(self) -> tuple[Scheduler, Cache] | None:
        """Scheduler and adapter cache; None: those of the rules."""
        implied = Scheduler(policy="chameleon") if self.queues is not None else None
        return completed(self.scheduler or implied, self.cache)

    @property
    def loading(self) -> str:
        """Policy by which adapters are loaded, of those of a cache."""
        return "asynchronous" if self.scheduling is None else self.scheduling[1].loading

    def _named_rules(self) -> ServingRules:
        if self.scheduling is None:
            return serving_rules(self.rules)
        return rules_of_scheduler(self.scheduling[0])

    def serving_rules(self) -> ServingRules:
        """Return the rules, with prefix caching as given."""
        rules = self._named_rules()
        prefix_caching = self.args.get("enable_prefix_caching")
        return rules if prefix_caching is None else replace(rules, prefix_caching=prefix_caching)

    def limits(self, args: EngineArgs, adapters: int, num_blocks: int) -> Limits:
        """Return the limits of an engine with complete settings, so many adapters and KV blocks."""
        limits = self.serving_rules().limits(args, adapters, self.block_size, num_blocks)
        return limits if self.scheduling is None else with_scheduling(limits, *self.scheduling)

    @property
    def predictor(self) -> Predictor:
        """Predictor of output lengths."""
        return Predictor() if self.scheduling is None else self.scheduling[0].predictor

    @property
    def adapter_charge(self) -> AdapterCharge:
        """Who takes an adapter's memory from the quotas of queues."""
        if self.scheduling is None:
            return "none"
        return (self.queues or self.scheduling[0].queues).adapter_charge

    def chosen_memory(self) -> Memory:
        """Return the memory of adapters."""
        if self.memory is not None:
            return self.memory
        return "unified" if self._named_rules().unified_memory else "slots"

    def chosen_lora_kernel(self, dtype: torch.dtype) -> LoraKernel:
        """Return the LoRA kernel for a model of this dtype."""
        return self.lora_kernel or self._device_kernel(dtype) or "grouped"

    def chosen_attention(self, dtype: torch.dtype) -> AttentionKernel:
        """Return the kernel of decode attention for a model of this dtype."""
        return self.attention_kernel or self._device_kernel(dtype) or "torch"

    def chosen_graphs(self, dtype: torch.dtype) -> bool:
        """Return whether decode steps run as graphs."""
        kernels = self.chosen_lora_kernel(dtype), self.chosen_attention(dtype)
        possible = kernels[0] in ("triton", "mbgmv", "sgmv") and kernels[1] == "triton"
        if self.cuda_graphs and not possible:
            rule = "must be off unless lora_kernel is triton, mbgmv or sgmv and attention_kernel is triton"
            raise InputError(rule, True, "cuda_graphs")
        return possible and self.device != "cpu" if self.cuda_graphs is None else self.cuda_graphs

    def _device_kernel(self, dtype: torch.dtype) -> Literal["compiled", "triton"] | None:
        if self.device != "cpu":
            return "triton"
        return "compiled" if dtype == torch.float32 else None

    def torch_dtype(self, config: ModelConfig) -> torch.dtype:
        """Return the dtype of weights, activations, KV and adapters."""
        name = config.dtype if self.dtype == "auto" else self.dtype
        if name not in _DTYPES:
            raise InputError(f"must be one of {', '.join(_DTYPES)}", name, f"{config.name}: dtype")
        dtype: torch.dtype = getattr(torch, name)
        compiled = "compiled" in (self.lora_kernel, self.attention_kernel)
        if compiled and (self.device != "cpu" or dtype != torch.float32):
            raise InputError("must be float32 on the CPU for compiled kernels", name, "dtype")
        return dtype
