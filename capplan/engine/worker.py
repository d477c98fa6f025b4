"""Worker: model weights, adapters, KV pages and kernels of one rank."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from capplan.engine.lora.adapter import AdapterLayout
from capplan.engine.lora.manager import LoRAManager
from capplan.engine.lora.memory import RowTables, StaticSlots, UnifiedPages
from capplan.engine.lora.streams import copy_stream
from capplan.engine.model_runner import (
    ModelRunner,
    Runner,
    attention_factory,
    decode_graphs,
    lora_factory,
    norms_for,
)
from capplan.engine.models import ModelConfig, Weights, load_weights, model_config, packed, random_weights
from capplan.engine.models.decoder import RopeTable
from capplan.engine.models.shard import WHOLE, ModelShard, require_shardable
from capplan.engine.parallel.collectives import Collectives
from capplan.engine.pool import KvCache, PagePool, kv_page_elements
from capplan.engine.settings import EngineOptions
from capplan.spec import EngineArgs


class LoadedModel(NamedTuple):
    """A model, one rank's weights of it, and its folder if it has one."""

    config: ModelConfig
    """Of the whole model."""
    weights: Weights
    folder: Path | None


class Sizes(NamedTuple):
    """Complete settings of an engine and sizes of its allocations."""

    args: EngineArgs
    num_blocks: int
    """Blocks of the scheduler. Under S-LoRA's rules adapters take their share of them."""
    pool_pages: int
    slot_bytes: int
    """Bytes of one static slot; 0 in unified memory."""


def load_model(model: str | Path | ModelConfig, options: EngineOptions, shard: ModelShard) -> LoadedModel:
    """Return a model from its folder, or with random weights from a ``config.json``, a name or a config."""
    device = torch.device(options.device)
    if isinstance(model, ModelConfig):
        config, folder = model, None
    else:
        config, folder = model_config(model), Path(model) if Path(model).is_dir() else None
    require_shardable(config, shard.size)
    dtype = options.torch_dtype(config)
    if folder is None:
        weights = random_weights(config, dtype, device, options.seed, shard)
    else:
        weights = load_weights(config, folder, dtype, device, shard)
    return LoadedModel(config, packed(weights), folder)


class Worker:
    """One rank of an engine.

    Parameters
    ----------
    capacity
        Maximum number of adapters.

    Attributes
    ----------
    config
        Architecture of this rank's part of the model.
    pool, runner
        Pages, and runner of steps on this rank, set by `allocate`.
    """

    pool: PagePool
    runner: ModelRunner

    def __init__(
        self,
        model: str | Path | ModelConfig,
        options: EngineOptions,
        capacity: int,
        shard: ModelShard = WHOLE,
    ) -> None:
        self.options = options
        self._shard = shard
        self.model = load_model(model, options, shard)
        self.config = shard.config(self.model.config)
        self.dtype = self.model.weights.embed.dtype
        self.device = self.model.weights.embed.device
        self.collectives = Collectives()
        self.lora = self._new_lora(capacity, AdapterLayout(self.model.config, shard))

    def allocate(self, sizes: Sizes) -> None:
        """Allocate KV pages and adapter slots, and set up the kernels."""
        self._allocate(sizes)

    def all_ranks(self) -> Runner:
        """Return the runner of steps on all ranks."""
        return self.runner

    def _allocate(self, sizes: Sizes) -> None:
        page_elements = kv_page_elements(self.config, self.options.block_size)
        self.pool = PagePool(sizes.pool_pages, page_elements, self.dtype, self.device)
        layout, args = self.lora.layout, sizes.args
        self.lora.memory = (
            UnifiedPages(layout, self.pool)
            if self.options.chosen_memory() == "unified"
            else StaticSlots(layout, args.max_loras, args.max_lora_rank, self.dtype, self.device)
        )
        self.runner = self._new_runner(sizes)

    def check(self) -> None:
        """Raise an error if another rank has ended."""

    def watched(self) -> Sequence[socket.socket]:
        """Return the sockets that are readable once another rank has ended."""
        return ()

    def _new_lora(self, capacity: int, layout: AdapterLayout) -> LoRAManager:
        pin = self.device.type == "cuda"
        return LoRAManager(capacity, layout, self.dtype, pin, copy_stream(self.device))

    def _new_runner(self, sizes: Sizes) -> ModelRunner:
        options, args, config, device = self.options, sizes.args, self.config, self.device
        limits = options.limits(args, self.lora.rank_of.size - 1, sizes.num_blocks)
        cache = KvCache(config, self.pool, options.block_size)
        rope = RopeTable(config, limits.max_model_len, self.dtype, device)
        tables = RowTables(self.lora.layout, limits.max_loras, args.max_lora_rank, device)
        runner = ModelRunner(
            self.model.weights,
            cache,
            attention_factory(options, config, cache, rope),
            lora_factory(options, self.lora, tables),
            norms_for(options, config, self.dtype),
            self.collectives,
        )
        runner.graphs = decode_graphs(options, limits, self.lora, tables, cache, runner)
        return runner
