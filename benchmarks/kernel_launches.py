"""Launches of every Triton kernel of the engine at the shapes of three models, for benchmarks of kernels.

On the ``meta`` device nothing is allocated, and the launches can only be compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final

import torch

from capplan.datasets import hf_config
from capplan.engine import ModelConfig
from capplan.engine._input_batch import Prefill
from capplan.engine._pool import KvCache, PagePool, kv_page_elements
from capplan.engine.kernels import Kind
from capplan.engine.kernels._triton_attention import decode_launches, prompt_launch, prompt_tiles
from capplan.engine.kernels._triton_lora import Launch, StepLoRA
from capplan.engine.lora import MODULES, AdapterLayout, B, RowTables
from capplan.engine.lora._adapter import SITES
from capplan.engine.lora._memory import StaticSlots
from capplan.engine.models import ModelShard
from capplan.engine.models._config import config_from_hf

BLOCK_SIZE: Final = 16
SITE_NAMES: Final = tuple(
    ", ".join(MODULES[module].removesuffix("_proj") for module in site) for site in SITES
)


@cache
def gpu_models() -> Mapping[str, ModelConfig]:
    """Return the models by name, each as one GPU holds it, with one layer."""
    configs = {
        "Llama-3.1-8B": ("meta-llama/Llama-3.1-8B-Instruct", 1),
        "Qwen2.5-7B": ("Qwen/Qwen2.5-7B-Instruct", 1),
        "Llama-3.1-70B, TP 8": ("meta-llama/Llama-3.1-70B-Instruct", 8),
    }
    return MappingProxyType({name: _share(*source) for name, source in configs.items()})


def _share(hf_id: str, tp: int) -> ModelConfig:
    config = config_from_hf(hf_config(hf_id) or {}, hf_id)
    return ModelShard(0, tp).config(config).replace(layers=1)


@dataclass(frozen=True)
class LoraBatch:
    """Adapters of one rank on all modules, each with the same number of tokens."""

    kind: Kind
    adapters: int
    rank: int
    tokens_each: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of all adapters."""
        return self.adapters * self.tokens_each


def lora_launches(
    config: ModelConfig, batch: LoraBatch, device: torch.device
) -> Iterator[tuple[str, str, Launch]]:
    """Yield (half, site, launch) of every site; activations are views of wider tensors, as in a step.

    The launches of tiles read what the first launch of all writes.
    """
    dtype = getattr(torch, config.dtype)
    layout = AdapterLayout(config)
    memory = StaticSlots(layout, batch.adapters, batch.rank, dtype, device)
    tables = RowTables(layout, batch.adapters, batch.rank, device)
    for number in range(1, batch.adapters + 1):
        placement = memory.place(number, layout.ranks(batch.rank))
        tables.add(number, placement, memory.padding(number, batch.rank))
    numbers = torch.arange(batch.adapters, dtype=torch.int32, device=device)
    numbers = numbers.repeat_interleave(batch.tokens_each, output_size=batch.tokens)
    step = StepLoRA(layout, tables, memory.storage, numbers, batch.kind, batch.rank)
    if batch.kind == "sgmv":
        yield "tiles", "", step.tiles_launch()
    for site, modules in enumerate(SITES):
        width = sum(layout.sizes[module][B] for module in modules)
        x = torch.zeros((batch.tokens, layout.sizes[modules[0]][0]), dtype=dtype, device=device)
        out = torch.zeros((batch.tokens, width), dtype=dtype, device=device)
        yield "shrink", SITE_NAMES[site], step.shrink_launch(0, site, x)
        yield "expand", SITE_NAMES[site], step.expand_launch(0, site, out)


def attention_launches(
    config: ModelConfig, requests: int, tokens: int, device: torch.device, splits: int | None = None
) -> Sequence[Launch]:
    """Return the launches of decode attention over `tokens` of context each."""
    cache, tables = _cache(config, requests, tokens, device)
    q = _queries(config, requests, device)
    context = torch.full((requests,), tokens, dtype=torch.int64, device=device)
    return decode_launches(cache, 0, q, tables, context, torch.zeros_like(q), splits)


def prompts_launch(config: ModelConfig, prompts: int, tokens: int, device: torch.device) -> Launch:
    """Return the launch of the attention of prompts of `tokens` each."""
    cache, tables = _cache(config, prompts, tokens, device)
    q = _queries(config, prompts * tokens, device)
    prefills = [Prefill(i * tokens, (i + 1) * tokens, tokens, tables[i]) for i in range(prompts)]
    tiles = prompt_tiles(prefills, config.heads // config.kv_heads).to(device)
    return prompt_launch(cache, 0, q, tables.view(-1), tiles, torch.zeros_like(q))


def _cache(
    config: ModelConfig, requests: int, tokens: int, device: torch.device
) -> tuple[KvCache, torch.Tensor]:
    """Return a cache of requests of `tokens` each, and their pages, shape (requests, blocks)."""
    blocks = -(-tokens // BLOCK_SIZE)
    dtype = getattr(torch, config.dtype)
    pool = PagePool(requests * blocks, kv_page_elements(config, BLOCK_SIZE), dtype, device)
    tables = torch.arange(1, 1 + requests * blocks, device=device).view(requests, blocks)
    return KvCache(config, pool, BLOCK_SIZE), tables


def _queries(config: ModelConfig, tokens: int, device: torch.device) -> torch.Tensor:
    """Return queries as a view of queries, keys and values, shape (tokens, heads, head_dim)."""
    heads, dtype = config.heads + 2 * config.kv_heads, getattr(torch, config.dtype)
    return torch.zeros((tokens, heads, config.head_dim), dtype=dtype, device=device)[:, : config.heads]
