"""Launches of every Triton kernel of the engine at the shapes of three models, for benchmarks of kernels.

On the ``meta`` device nothing is allocated, and the launches can only be compiled.

`python -m benchmarks.kernel_launches` counts the kernels per layer of a decode step on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import command_line, records_table
from capplan.datasets import hf_config
from capplan.engine import ModelConfig
from capplan.engine._input_batch import Decodes, ModelInputs, Prefill
from capplan.engine._pool import KvCache, PagePool, kv_page_elements
from capplan.engine.kernels import Kind
from capplan.engine.kernels._triton_attention import (
    TritonAttention,
    decode_launches,
    prompt_launch,
    prompt_tiles,
)
from capplan.engine.kernels._triton_layers import (
    TritonPointwise,
    gate_launch,
    norm_launch,
    rotate_launch,
)
from capplan.engine.kernels._triton_lora import Launch, StepLoRA
from capplan.engine.lora import MODULES, AdapterLayout, B, RowTables
from capplan.engine.lora._adapter import SITES
from capplan.engine.lora._memory import StaticSlots
from capplan.engine.models import ModelShard
from capplan.engine.models._config import config_from_hf
from capplan.engine.models._decoder import GATE_UP, QKV, Pointwise, RopeTable, TorchAttention, forward
from capplan.engine.models._weights import empty_weights
from capplan.engine.parallel._group import Collectives

BLOCK_SIZE: Final = 16
CONTEXT: Final = 512
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

    Half "add" are expands without what follows, which only assisted loading runs. The launches of tiles read
    what the first launch of all writes.
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
        half = "add" if site in (QKV, GATE_UP) else "expand"
        yield half, SITE_NAMES[site], step.expand_launch(0, site, out)
        if site == QKV:
            rotation = _rotation(config, batch.tokens, device)
            yield "expand", SITE_NAMES[site], step.rotate_launch(0, out, *rotation)
        if site == GATE_UP:
            gates = out.new_empty(batch.tokens, width // 2)
            yield "expand", SITE_NAMES[site], step.gate_launch(0, out, gates)


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


def pointwise_launches(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Launch]:
    """Yield the launches between the matrix products of a layer."""
    dtype = getattr(torch, config.dtype)
    x, gates = (
        torch.zeros((tokens, width), dtype=dtype, device=device)
        for width in (config.hidden_size, 2 * config.intermediate_size)
    )
    yield norm_launch(x, None, x[0], config.rms_eps, torch.empty_like(x))
    yield norm_launch(x, x.clone(), x[0], config.rms_eps, torch.empty_like(x))
    yield gate_launch(gates, gates[:, : config.intermediate_size].clone())
    cache, angles, slots = _rotation(config, tokens, device)
    queries = _queries(config, tokens, device)
    heads = queries.as_strided(
        (tokens, queries.stride(0) // config.head_dim, config.head_dim), queries.stride()
    )
    yield rotate_launch(cache, 0, heads, angles, slots)


def _rotation(
    config: ModelConfig, tokens: int, device: torch.device
) -> tuple[KvCache, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return a cache, and the angles and slots of tokens, each in a page of its own."""
    cache, pages = _cache(config, tokens, 1, device)
    angles = cache.pages.new_zeros((2, tokens, 1, config.head_dim)).unbind()
    return cache, angles, (pages[:, 0], torch.zeros_like(pages[:, 0]))


class _Kernels(TorchDispatchMode):
    """Counter of operators that run a kernel: of all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.number += not (func.is_view or "empty" in func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def kernels_per_layer(
    config: ModelConfig,
    requests: int,
    kind: Kind | None,
    attention: type[TorchAttention] = TritonAttention,
    pointwise: type[Pointwise] = TritonPointwise,
) -> int:
    """Return the kernels of a layer of a decode step: PyTorch's operators, and launches.

    Parameters
    ----------
    kind
        Of LoRA kernels; None: no adapters.
    """
    few, many = (
        _kernels(config.replace(layers=layers), requests, kind, attention, pointwise) for layers in (1, 2)
    )
    return many - few


def _kernels(
    config: ModelConfig,
    requests: int,
    kind: Kind | None,
    attention: type[TorchAttention],
    pointwise: type[Pointwise],
) -> int:
    device, dtype = torch.device("meta"), getattr(torch, config.dtype)
    cache, tables = _cache(config, requests, CONTEXT, device)
    each = tables[:, 0]
    decodes = Decodes(each, each, tables)
    inputs = ModelInputs(each, each, each, each, each[:0], decodes, (), (), each)
    adapters = None
    if kind is not None:
        layout = AdapterLayout(config)
        weights = StaticSlots(layout, 8, 16, dtype, device).storage
        numbers = torch.zeros(requests, dtype=torch.int32, device=device)
        adapters = StepLoRA(layout, RowTables(layout, 8, 16, device), weights, numbers, kind, 16)
    rope = RopeTable(config, CONTEXT, dtype, device)
    with patch.object(Launch, "run", autospec=True) as launched, _Kernels() as counter:
        step = attention(config, cache, rope, inputs)
        forward(empty_weights(config, dtype, device), each, step, adapters, pointwise(1e-5), Collectives())
    return counter.number + launched.call_count


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


def main() -> int:
    command_line(__doc__).parse_args()
    kinds: tuple[Kind | None, ...] = (None, "mbgmv", "sgmv")
    rows = [
        {
            "model": name,
            "requests": requests,
            "LoRA": kind or "none",
            "kernels per layer": kernels_per_layer(config, requests, kind),
        }
        for name, config in gpu_models().items()
        for requests in (1, 256)
        for kind in kinds
    ]
    print(records_table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
