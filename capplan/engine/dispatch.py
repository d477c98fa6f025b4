"""Which kernels run a step: PyTorch's on the CPU, Triton's on a GPU, or those that were asked for."""

from __future__ import annotations

from collections.abc import Callable

from capplan.engine.attention import KvCache, TorchAttention
from capplan.engine.batch import Batch
from capplan.engine.lora.grouped import GroupedAdapters
from capplan.engine.lora.layout import AdapterLayout
from capplan.engine.lora.padded import PaddedAdapters
from capplan.engine.lora.residency import Residency
from capplan.engine.models.config import ModelConfig
from capplan.engine.models.decoder import Adapters, Attention
from capplan.engine.settings import EngineSettings

_OF_TORCH = ("grouped", "padded")


def attention_of(
    settings: EngineSettings, config: ModelConfig, cache: KvCache
) -> Callable[[Batch], Attention]:
    """Return what makes the attention of a step."""
    if settings.chosen_attention() == "torch":
        return lambda batch: TorchAttention(config, cache, batch)
    from capplan.engine.kernels.attention import TritonAttention

    return lambda batch: TritonAttention(config, cache, batch)


def adapters_of(
    settings: EngineSettings, layout: AdapterLayout, residency: Residency, most_adapters: int, max_rank: int
) -> Callable[[Batch], Adapters]:
    """Return what makes the adapters of a step; Triton's kernels are given tables, which `residency` keeps.

    Parameters
    ----------
    settings, layout, residency
        The engine's.
    most_adapters, max_rank
        Adapters in memory at most, and their largest rank.
    """
    kernel = settings.chosen_lora_kernel()
    if kernel == "grouped":
        return lambda batch: GroupedAdapters(batch.segments, residency.views)
    if kernel == "padded":
        return lambda batch: PaddedAdapters(
            batch.segments, residency.views, batch.tokens.shape[0], batch.tokens.device
        )
    from capplan.engine.kernels.lora import TritonAdapters
    from capplan.engine.kernels.tables import RowTables

    memory = residency.memory
    tables = RowTables(layout, most_adapters, max_rank, memory.storage.device)
    residency.keep_tables(tables)
    kind = None if kernel == "triton" else kernel
    return lambda batch: TritonAdapters(
        layout, tables, memory.storage, batch.segments, batch.tokens.shape[0], kind
    )
