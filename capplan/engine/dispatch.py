"""Which kernels run a step: numba's or PyTorch's on the CPU, Triton's on a GPU, or those asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from capplan.engine.attention import KvCache, TorchAttention
from capplan.engine.batch import Batch
from capplan.engine.cpu.attention import CompiledAttention
from capplan.engine.cpu.lora import CompiledAdapters
from capplan.engine.cpu.norms import CompiledNorms
from capplan.engine.graphs import CudaCapture, DecodeGraphs
from capplan.engine.kernels.tables import RowTables
from capplan.engine.lora.grouped import GroupedAdapters
from capplan.engine.lora.layout import AdapterLayout
from capplan.engine.lora.padded import PaddedAdapters
from capplan.engine.lora.residency import Residency
from capplan.engine.models.config import ModelConfig
from capplan.engine.models.decoder import Adapters, Attention, Norms, TorchNorms
from capplan.engine.models.rope import RopeTable
from capplan.engine.runner import ModelRunner
from capplan.engine.settings import EngineSettings
from capplan.serving import Limits


def attention_of(
    settings: EngineSettings, config: ModelConfig, cache: KvCache, rope: RopeTable
) -> Callable[[Batch], Attention]:
    """Return what makes the attention of a step."""
    kernel = settings.chosen_attention(cache.pool.tensor.dtype)
    if kernel == "torch":
        return lambda batch: TorchAttention(config, cache, rope, batch)
    if kernel == "compiled":
        return lambda batch: CompiledAttention(config, cache, rope, batch)
    from capplan.engine.kernels.attention import TritonAttention

    return lambda batch: TritonAttention(config, cache, rope, batch)


def norms_of(settings: EngineSettings, config: ModelConfig, dtype: torch.dtype) -> Norms:
    """Return the norms; they go with the kernel of attention."""
    compiled = settings.chosen_attention(dtype) == "compiled"
    return CompiledNorms(config.rms_eps) if compiled else TorchNorms(config.rms_eps)


def adapters_of(
    settings: EngineSettings, layout: AdapterLayout, residency: Residency, tables: RowTables
) -> Callable[[Batch], Adapters]:
    """Return what makes the adapters of a step; `tables` are what compiled kernels are told of adapters."""
    weights, views = residency.memory.storage, residency.views
    kernel = settings.chosen_lora_kernel(weights.dtype)
    if kernel == "grouped":
        return lambda batch: GroupedAdapters(batch.segments, views)
    if kernel == "padded":
        return lambda batch: PaddedAdapters(batch.segments, views, batch.tokens.shape[0], batch.tokens.device)
    residency.keep_tables(tables)
    if kernel == "compiled":
        return lambda batch: CompiledAdapters(
            layout, tables, weights, batch.segments, batch.tokens.shape[0], views
        )
    from capplan.engine.kernels.lora import TritonAdapters

    kind = None if kernel == "triton" else kernel
    return lambda batch: TritonAdapters(layout, tables, weights, batch.segments, batch.tokens.shape[0], kind)


def graphs_of(
    settings: EngineSettings,
    limits: Limits,
    layout: AdapterLayout,
    tables: RowTables,
    weights: torch.Tensor,
    cache: KvCache,
    runner: ModelRunner,
) -> DecodeGraphs | None:
    """Return what runs decode steps as graphs, where they are to."""
    if not settings.chosen_graphs(weights.dtype):
        return None
    from capplan.engine.kernels.lora import TokenAdapters

    def forward(batch: Batch, numbers: torch.Tensor | None) -> torch.Tensor:
        adapters = None
        if numbers is not None:
            adapters = TokenAdapters(layout, tables, weights, numbers, tables.max_rank)
        return runner.hidden(batch, adapters)

    return DecodeGraphs(
        forward,
        CudaCapture() if weights.device.type == "cuda" else lambda run: run,
        tables.number_of,
        limits.max_num_seqs,
        -(-limits.max_model_len // limits.block_size),
        cache.pool.dump_page,
        weights.device,
    )
