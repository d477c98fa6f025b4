"""The settings of an engine, checked against each other before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

import torch

from capplan.engine.models.config import ModelConfig
from capplan.errors import InputError
from capplan.serving import ServingRules, serving_rules

Memory = Literal["slots", "unified"]
LoraKernel = Literal["compiled", "grouped", "padded", "triton", "bgmv", "mbgmv", "sgmv"]
AttentionKernel = Literal["compiled", "torch", "triton"]

_DTYPES: Final = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class EngineSettings:
    """How an engine runs; names as in vLLM where it has them, or as `simulate` calls them.

    Parameters
    ----------
    a_max
        Adapter slots (vLLM: max_loras); None: as many as `max_adapters`, at most 8.
    s_max
        Rank that each slot has room for (vLLM: max_lora_rank); None: what the adapters need.
    dtype
        ``float32``, ``float16``, ``bfloat16``, or ``auto``: the one that the model is stored in.
    device
        ``cpu``, ``cuda``, ``cuda:1`` and so on.
    rules
        Serving rules by name; see `capplan.serving.rules`.
    memory
        ``slots``: A_max slots of S_max rows. ``unified``: adapters at their true ranks in pages of the KV
        pool. None: unified under the rules ``slora``, which know no slots, and slots otherwise.
    block_size
        Tokens of one KV block.
    num_kv_blocks
        KV blocks; None: as many as fit (GPU: into `gpu_memory_utilization` of it; CPU: into 256 MiB).
    max_num_seqs, max_num_batched_tokens
        Most requests running at once, and most tokens in one step.
    max_model_len
        Longest prompt and output together; None: what the model was made for, or what the KV blocks hold.
    max_adapters
        Adapters known at a time, those that are added while the engine runs included; None: those given at
        its start.
    max_cpu_loras
        Adapters kept on the host; None: all.
    max_in_flight
        Most requests running and waiting; further ones are refused.
    prefix_caching
        None: as the rules have it.
    shared_prefix_tokens
        Prompts of one adapter that agree in so many first tokens share the KV of those; 0: nothing is shared
        between requests.
    lora_kernel
        ``compiled``: by numba at true ranks where an adapter has few tokens, as ``grouped`` elsewhere.
        In PyTorch ``grouped`` (true ranks) or ``padded`` (largest rank in the batch, for comparison).
        In Triton ``bgmv`` (padded), ``mbgmv`` (true ranks, for decode), ``sgmv`` (true ranks, for prefill) or
        ``triton`` (one of the latter two, step by step).
        None: ``triton`` on a GPU, ``compiled`` on the CPU in float32, ``grouped`` otherwise.
    attention_kernel
        Of decode steps: ``torch``, ``compiled`` (by numba, on the CPU in float32) or ``triton``.
        None: ``triton`` on a GPU, ``compiled`` on the CPU in float32, ``torch`` otherwise.
    cuda_graphs
        Run decode steps as CUDA graphs; None: where there is a GPU, with Triton's kernels. On the CPU steps
        are padded as for graphs, and nothing is captured.
    gpu_memory_utilization
        Share of a GPU's memory that the engine may use.
    seed
        Of random weights, random adapters, and requests that bring none.
    """

    a_max: int | None = None
    s_max: int | None = None
    dtype: str = "auto"
    device: str = "cpu"
    rules: str = "capplan"
    memory: Memory | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    max_adapters: int | None = None
    max_cpu_loras: int | None = None
    max_in_flight: int = 1024
    prefix_caching: bool | None = None
    shared_prefix_tokens: int = 0
    lora_kernel: LoraKernel | None = None
    attention_kernel: AttentionKernel | None = None
    cuda_graphs: bool | None = None
    gpu_memory_utilization: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError("must be a whole number >= 1", value, name)
        if self.dtype not in (*_DTYPES, "auto"):
            raise InputError(f"must be auto or one of {', '.join(_DTYPES)}", self.dtype, "dtype")
        for name, kind in (
            ("memory", Memory),
            ("lora_kernel", LoraKernel),
            ("attention_kernel", AttentionKernel),
        ):
            value = getattr(self, name)
            if value not in (None, *get_args(kind)):
                raise InputError(f"must be one of {', '.join(get_args(kind))}", value, name)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            rule = "must be a number above 0 and at most 1"
            raise InputError(rule, self.gpu_memory_utilization, "gpu_memory_utilization")
        if self.shared_prefix_tokens < 0:
            raise InputError("must be >= 0", self.shared_prefix_tokens, "shared_prefix_tokens")
        self._check_rules(serving_rules(self.rules))

    def _check_rules(self, rules: ServingRules) -> None:
        if rules.async_scheduling:
            rule = "must be rules without asynchronous scheduling: each step here waits for the one before"
            raise InputError(rule, self.rules, "rules")
        if rules.declared_output and self.memory == "slots":
            raise InputError(f"must be unified under the rules {self.rules}", self.memory, "memory")
        if rules.declared_output and self.prefix_caching:
            raise InputError(
                f"must be off under the rules {self.rules}, which have none", True, "prefix_caching"
            )

    def adapter_capacity(self, given: int) -> int:
        """Return how many adapters the engine has numbers for, when so many are given at its start."""
        if self.max_adapters is not None and self.max_adapters < given:
            raise InputError(
                f"must be at least the {given} adapters given", self.max_adapters, "max_adapters"
            )
        return given if self.max_adapters is None else self.max_adapters

    def serving_rules(self) -> ServingRules:
        """Return the rules, with prefix caching as asked for."""
        rules = serving_rules(self.rules)
        if self.prefix_caching is None:
            return rules
        return replace(rules, prefix_caching=self.prefix_caching)

    def chosen_memory(self) -> Memory:
        """Return where adapters go."""
        if self.memory is not None:
            return self.memory
        return "unified" if serving_rules(self.rules).declared_output else "slots"

    def chosen_lora_kernel(self, dtype: torch.dtype) -> LoraKernel:
        """Return the kernels of adapters, for a model of this dtype."""
        return self.lora_kernel or self._kernel_here(dtype) or "grouped"

    def chosen_attention(self, dtype: torch.dtype) -> AttentionKernel:
        """Return the kernel of decode attention, for a model of this dtype."""
        return self.attention_kernel or self._kernel_here(dtype) or "torch"

    def chosen_graphs(self, dtype: torch.dtype) -> bool:
        """Return whether decode steps run as graphs."""
        kernels = self.chosen_lora_kernel(dtype), self.chosen_attention(dtype)
        possible = kernels[0] in ("triton", "mbgmv") and kernels[1] == "triton"
        if self.cuda_graphs and not possible:
            rule = "must be off unless lora_kernel is triton or mbgmv and attention_kernel is triton"
            raise InputError(rule, True, "cuda_graphs")
        return possible and self.device != "cpu" if self.cuda_graphs is None else self.cuda_graphs

    def _kernel_here(self, dtype: torch.dtype) -> Literal["compiled", "triton"] | None:
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


_COUNTS: Final = (
    "a_max",
    "s_max",
    "block_size",
    "num_kv_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "max_adapters",
    "max_cpu_loras",
    "max_in_flight",
)
