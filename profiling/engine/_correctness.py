"""Kernels of a device against PyTorch's: logits of the same prompts by the same engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from capplan.engine import Completion, Engine, ModelConfig
from capplan.engine.models import model_config

_BLOCK_TOKENS: Final = 16
_REFERENCE: Final = MappingProxyType(
    {"lora_kernel": "grouped", "attention_kernel": "torch", "cuda_graphs": False}
)
_VARIANTS: Final = MappingProxyType(
    {
        "cuda": (
            ("bgmv", "triton", False),
            ("mbgmv", "triton", False),
            ("sgmv", "triton", False),
            ("triton", "triton", False),
            ("triton", "triton", True),
        ),
        "cpu": (("padded", "torch", False), ("compiled", "compiled", False)),
    }
)
"""LoRA kernel, attention kernel, CUDA graphs."""
_DTYPES: Final = MappingProxyType({"cuda": ("float32", "bfloat16"), "cpu": ("float32",)})
_LIMITS: Final = MappingProxyType({"float32": 1e-4, "bfloat16": 3e-2})
"""Largest difference of two logits over the largest logit: sums in another order, and bfloat16's rounding."""


@dataclass(frozen=True)
class CorrectnessCase:
    """Model, adapters and prompts of the comparison."""

    model: str = "meta-llama/Llama-3.1-8B-Instruct"
    layers: int = 2
    """Of the model; further ones repeat the same shapes."""
    ranks: tuple[int, ...] = (8, 16, 64, 128)
    """Of the adapters."""
    prompts: tuple[int, ...] = (1, 15, 16, 17, 100, 333, 1000, 6000)
    """Tokens of the prompts; adapters and the base model take turns."""
    repeats: int = 2
    """Requests per prompt and adapter."""
    output_tokens: int = 8

    def config(self) -> ModelConfig:
        """Return the model with fewer layers."""
        config = model_config(self.model)
        return config.replace(layers=min(self.layers, config.layers))


def correctness_rows(device: str, case: CorrectnessCase) -> Iterator[dict[str, Any]]:
    """Compare every kernel of a device with PyTorch's, and yield its row of the correctness table.

    ``error`` is that of the logits relative to the largest one. ``compared`` is the number of logits vectors;
    those after a token that differs are not.
    """
    kind = torch.device(device).type
    for dtype in _DTYPES[kind]:
        right = _completions(device, dtype, case, _REFERENCE)
        for lora_kernel, attention_kernel, graphs in _VARIANTS[kind]:
            kernels = {
                "lora_kernel": lora_kernel,
                "attention_kernel": attention_kernel,
                "cuda_graphs": graphs,
            }
            errors = [
                error
                for mine, theirs in zip(_completions(device, dtype, case, kernels), right, strict=True)
                for error in _errors(mine, theirs)
            ]
            yield {
                "dtype": dtype,
                **kernels,
                "compared": len(errors),
                "error": max(errors),
                "limit": _LIMITS[dtype],
            }


def _completions(
    device: str, dtype: str, case: CorrectnessCase, kernels: Mapping[str, Any]
) -> list[Completion]:
    adapters = {f"r{rank}": rank for rank in case.ranks}
    names = [None, *adapters]
    config, rng = case.config(), np.random.default_rng(0)
    work = [
        (rng.integers(0, config.vocab_size, tokens).tolist(), name)
        for tokens in case.prompts
        for name in names
        for _ in range(case.repeats)
    ]
    held = sum(-(-(len(prompt) + case.output_tokens) // _BLOCK_TOKENS) for prompt, _ in work)
    settings: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "max_model_len": max(case.prompts) + case.output_tokens,
        "num_kv_blocks": held + 1,
        "max_num_seqs": len(work),
        "rules": "vllm-0.32-sync",
        **kernels,
    }
    with Engine(config, adapters, **settings) as engine:
        prompts, chosen = zip(*work, strict=True)
        sampling = {"max_tokens": case.output_tokens, "ignore_eos": True, "keep_logits": True}
        return engine.generate(prompts, chosen, **sampling)


def _errors(mine: Completion, theirs: Completion) -> Iterator[float]:
    """Yield the error of each logits vector up to the first token that differs."""
    if mine.logits is None or theirs.logits is None:
        raise RuntimeError("logits were not kept")
    same = [a == b for a, b in zip(mine.token_ids, theirs.token_ids, strict=True)]
    until = same.index(False) + 1 if False in same else len(same)
    for a, b in zip(mine.logits[:until].double(), theirs.logits[:until].double(), strict=True):
        yield float((a - b).abs().max() / b.abs().max())
