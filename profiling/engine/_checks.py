"""Checks of the engine on a device: kernels against PyTorch's, steps against the bytes that they must move.

Kernels are compared by logits of the same prompts. Steps are decodes, and decodes beside a prompt.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from capplan.engine import Completion, Engine, ModelConfig, SamplingParams
from capplan.engine.lora import AdapterLayout
from capplan.engine.models import ModelShard, model_config

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


_MAX_NUM_BATCHED_TOKENS: Final = 8192
_RULES: Final = "vllm-0.32-sync"
_WARM_UP: Final = 4
"""One in so many steps, the first ones, is not counted: graphs are captured, and caches filled."""


@dataclass(frozen=True)
class DecodeGrid:
    """Batches of decode steps, every request with an adapter of one rank."""

    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    adapters: tuple[int, ...] = (0, 8, 64)
    """Distinct adapters; 0: the base model."""
    rank: int = 16
    context: int = 512
    """Prompt tokens of each request."""
    steps: int = 64
    """Tokens that each request generates."""
    tensor_parallel_size: int = 1
    prompt: int = 512
    """Tokens of a prompt beside decodes."""
    prompts: int = 12
    """Prompts per point, one step each with a decode step between them."""

    @property
    def mean_context(self) -> int:
        """Tokens of KV of each request in the middle of its decode."""
        return self.context + self.steps // 2

    def points(self) -> list[tuple[int, int]]:
        """Return (adapters, batch) of all points."""
        return [(adapters, batch) for adapters in self.adapters for batch in self.batches]


def least_bytes(config: ModelConfig, dtype: torch.dtype, grid: DecodeGrid, batch: int, adapters: int) -> int:
    """Return the least bytes of a decode step on one rank.

    Weights except the embedding, KV of the batch at its mean context, and the rows of its adapters, once
    each.
    """
    shard = ModelShard(0, grid.tensor_parallel_size)
    part = shard.config(config)
    layer = part.hidden_size * (2 * part.query_size + 2 * part.kv_size + 3 * part.intermediate_size)
    weights = config.layers * layer + shard.token_rows(config) * config.hidden_size
    layout = AdapterLayout(config, shard)
    rows = min(adapters, batch) * layout.elements(layout.ranks(grid.rank))
    kv = 2 * config.layers * part.kv_size * batch * grid.mean_context
    return dtype.itemsize * (weights + kv + rows)


def decode_rows(
    model: str,
    device: str,
    grid: DecodeGrid,
    bytes_per_s: float,
    known: Collection[tuple[int, int]],
    budget_s: float,
) -> Iterator[dict[str, Any]]:
    """Measure the points of a grid within `budget_s` seconds, and yield their rows of the decode table.

    `bytes_per_s` is the bandwidth of a copy on the device: bytes read and written. `known` are (adapters,
    batch) of points to be left out. ``step_over_least`` is the median forward pass over the time of a copy of
    `least_bytes`.
    """
    config = model_config(model)
    for engine, adapters, batch in _points_left(model, device, grid, known, budget_s):
        forward_ms, step_ms = _median_step_ms(engine, grid, batch, adapters)
        moved = least_bytes(config, engine.options.torch_dtype(config), grid, batch, adapters)
        least_ms = 1e3 * moved / bytes_per_s
        yield {
            "tensor_parallel_size": grid.tensor_parallel_size,
            "adapters": adapters,
            "batch": batch,
            "rank": grid.rank,
            "context": grid.mean_context,
            "least_bytes": moved,
            "least_ms": least_ms,
            "forward_ms": forward_ms,
            "step_ms": step_ms,
            "step_over_least": forward_ms / least_ms,
        }


def prompt_rows(
    model: str,
    device: str,
    grid: DecodeGrid,
    bytes_per_s: float,
    known: Collection[tuple[int, int]],
    budget_s: float,
) -> Iterator[dict[str, Any]]:
    """Measure steps with one prompt beside a batch of decodes; parameters are those of `decode_rows`.

    The least time is that of a step's bytes, or of its products with the model's matrices at the rate of a
    large one, whichever is longer.
    """
    config = model_config(model)
    rate = None
    for engine, adapters, batch in _points_left(model, device, grid, known, budget_s):
        dtype = engine.options.torch_dtype(config)
        rate = rate or _products_per_s(torch.device(device), dtype)
        forward_ms, step_ms = _median_step_ms(engine, grid, batch, adapters, grid.prompts)
        moved = least_bytes(config, dtype, grid, batch, adapters)
        embedding = config.vocab_size * config.hidden_size
        matrices = least_bytes(config, dtype, grid, 0, 0) // dtype.itemsize - embedding
        products = matrices * (batch + grid.prompt) + embedding * (batch + 1)
        least_ms = 1e3 * max(moved / bytes_per_s, products / rate)
        yield {
            "adapters": adapters,
            "batch": batch,
            "rank": grid.rank,
            "prompt": grid.prompt,
            "bytes_ms": 1e3 * moved / bytes_per_s,
            "products_ms": 1e3 * products / rate,
            "forward_ms": forward_ms,
            "step_ms": step_ms,
            "step_over_least": forward_ms / least_ms,
        }


def _points_left(
    model: str, device: str, grid: DecodeGrid, known: Collection[tuple[int, int]], budget_s: float
) -> Iterator[tuple[Engine, int, int]]:
    """Yield an engine with adapters and batch of each point that is not known, within `budget_s` seconds."""
    left = [point for point in grid.points() if point not in known]
    if not left:
        return
    until_s = time.monotonic() + budget_s
    with _engine(model, device, grid) as engine:
        for adapters, batch in left:
            if time.monotonic() >= until_s:
                return
            yield engine, adapters, batch


def _products_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return multiplications with addition per second of a large matrix product."""
    size = 8192 if device.type == "cuda" else 512
    a, b = torch.ones(2, size, size, dtype=dtype, device=device)
    times_s = []
    for _ in range(8):
        begin_s = time.perf_counter()
        product = a @ b
        product[0, 0].item()  # waits for the device
        times_s.append(time.perf_counter() - begin_s)
    return size**3 / min(times_s)


def _engine(model: str, device: str, grid: DecodeGrid) -> Engine:
    """Return an engine for the largest point of a grid."""
    most, longest = max(grid.adapters), max(grid.context + grid.steps, grid.prompt + 1)
    settings: dict[str, Any] = {
        "device": device,
        "max_num_seqs": max(grid.batches) + 1,
        "max_num_batched_tokens": max(_MAX_NUM_BATCHED_TOKENS, max(grid.batches) + grid.prompt),
        "max_model_len": longest + _BLOCK_TOKENS,
        "num_kv_blocks": (max(grid.batches) + 1) * (-(-longest // _BLOCK_TOKENS) + 1),
        "rules": _RULES,
        "tensor_parallel_size": grid.tensor_parallel_size,
        **({"max_loras": most, "max_lora_rank": grid.rank} if most else {}),
    }
    return Engine(model, {f"a{i}": grid.rank for i in range(most)}, **settings)


def _median_step_ms(
    engine: Engine, grid: DecodeGrid, batch: int, adapters: int, prompts: int = 0
) -> tuple[float, float]:
    """Run a batch to its end; return the medians of the forward passes and of the whole steps.

    Of decode steps; or, with `prompts`, of those steps with one of so many prompts.
    """
    rng = np.random.default_rng((batch, adapters))

    def submit(i: int, tokens: int, output_tokens: int) -> None:
        prompt = rng.integers(0, engine.config.vocab_size, tokens).astype(np.int32)
        name = f"a{i % adapters}" if adapters else None
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        engine.submit(engine.new_request(prompt, name, params))

    for i in range(batch):
        submit(i, grid.context, grid.steps)
    engine.records.clear()
    while engine.core.requests:
        if engine.step() is None:
            engine.wait_for_adapter()
        elif prompts and engine.records:
            last = engine.records[-1]
            if (last.decode_requests, last.prefill_requests) == (batch, 0):
                submit(prompts, grid.prompt, 1)
                prompts -= 1
    beside = int(any(each.prefill_requests and each.decode_requests == batch for each in engine.records))
    steps = [
        each for each in engine.records if (each.decode_requests, each.prefill_requests) == (batch, beside)
    ]
    steps = steps[len(steps) // _WARM_UP :]
    return (
        statistics.median(each.forward_ms for each in steps),
        statistics.median(each.duration_ns for each in steps) * 1e-6,
    )
