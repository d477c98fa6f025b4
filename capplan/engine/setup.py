"""Putting an engine together: weights, adapters, memory, scheduler, loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from capplan.engine.attention import KvCache
from capplan.engine.blocks import BlockTables, CountedBlocks, NamedBlocks
from capplan.engine.clock import Clock, VirtualClock, WallClock
from capplan.engine.dispatch import adapters_of, attention_of, graphs_of, norms_of
from capplan.engine.kernels.tables import RowTables
from capplan.engine.loads import Loads
from capplan.engine.loop import Loop
from capplan.engine.lora.layout import AdapterLayout
from capplan.engine.lora.loader import Loader, ThreadLoader, VirtualLoader
from capplan.engine.lora.memory import AdapterMemory, StaticSlots, UnifiedPages
from capplan.engine.lora.residency import Residency
from capplan.engine.lora.sources import AdapterSource
from capplan.engine.models import (
    ModelConfig,
    Weights,
    builtin_config,
    load_weights,
    packed,
    random_weights,
    read_config,
)
from capplan.engine.models.rope import RopeTable
from capplan.engine.pages import PagePool, kv_page_elements
from capplan.engine.runner import ModelRunner
from capplan.engine.settings import EngineSettings
from capplan.engine.sizes import Sizes, choose_sizes
from capplan.engine.withdraw import with_host_adapters
from capplan.serving import Limits, new_state


class Model(NamedTuple):
    """A model and the folder it came from, if any."""

    config: ModelConfig
    weights: Weights
    folder: Path | None


def load_model(model: str | Path | ModelConfig, settings: EngineSettings) -> Model:
    """Return a model from its folder, or with random weights from a ``config.json``, a name or a config."""
    device = torch.device(settings.device)
    if isinstance(model, ModelConfig):
        config, folder = model, None
    elif Path(model).exists():
        config, folder = read_config(model), Path(model) if Path(model).is_dir() else None
    else:
        config, folder = builtin_config(str(model)), None
    dtype = settings.torch_dtype(config)
    if folder is None:
        return Model(config, packed(random_weights(config, dtype, device, settings.seed)), None)
    return Model(config, packed(load_weights(config, folder, dtype, device)), folder)


def build_loop(
    model: Model, sources: Sequence[AdapterSource], settings: EngineSettings, virtual_time: bool
) -> tuple[Loop, Sizes]:
    """Allocate everything and return the loop, and the sizes that were chosen."""
    dtype, device = model.weights.embed.dtype, model.weights.embed.device
    layout = AdapterLayout(model.config)
    capacity = settings.adapter_capacity(len(sources))
    host_slots = capacity if settings.max_cpu_loras is None else settings.max_cpu_loras
    residency = Residency(capacity, layout, dtype, pin=device.type == "cuda")
    for number, source in enumerate(sources, start=1):
        residency.enter(number, source, settings.s_max)
        residency.read(number)  # all of them once, so that a broken one is noticed now; ...
        residency.drop(number - host_slots)  # ... the host keeps the last ones
    sizes = choose_sizes(model.config, layout, settings, residency, dtype, device)
    pool = PagePool(sizes.pool_pages, kv_page_elements(model.config, settings.block_size), dtype, device)
    limits = _limits(settings, sizes, capacity, host_slots)
    state = new_state(settings.max_in_flight, capacity, sizes.num_blocks, limits)
    state = with_host_adapters(state, max(1, len(sources) - host_slots + 1), len(sources) + 1)
    blocks: BlockTables
    if limits.prefix_caching:
        blocks = NamedBlocks(state, pool, sizes.num_blocks)
    else:
        blocks_per_request = -(-sizes.max_model_len // settings.block_size)
        blocks = CountedBlocks(pool, settings.max_in_flight, blocks_per_request, settings.block_size)
    memory: AdapterMemory
    if settings.chosen_memory() == "unified":
        memory = UnifiedPages(layout, pool)
    else:
        memory = StaticSlots(layout, sizes.a_max, sizes.s_max, dtype, device)
    residency.attach(memory)
    runner = _runner(model, settings, limits, layout, residency, pool, sizes)
    clock: Clock = VirtualClock() if virtual_time else WallClock()
    loader: Loader = VirtualLoader(clock) if virtual_time else ThreadLoader(clock)
    loads = Loads(state, limits, residency, loader, clock)
    for number in range(1, len(sources) + 1):
        loads.tell_pages(number)
    return Loop(state, limits, runner, blocks, loads, clock, device), sizes


def _limits(settings: EngineSettings, sizes: Sizes, adapters: int, host_slots: int) -> Limits:
    rules = settings.serving_rules()
    return rules.limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        max_loras=max(1, adapters) if rules.declared_output else sizes.a_max,
        max_cpu_loras=max(host_slots, 1),
        block_size=settings.block_size,
        num_blocks=sizes.num_blocks,
    )


def _runner(
    model: Model,
    settings: EngineSettings,
    limits: Limits,
    layout: AdapterLayout,
    residency: Residency,
    pool: PagePool,
    sizes: Sizes,
) -> ModelRunner:
    dtype, device = pool.tensor.dtype, pool.tensor.device
    cache = KvCache(model.config, pool, settings.block_size)
    rope = RopeTable(model.config, sizes.max_model_len, dtype, device)
    tables = RowTables(layout, limits.max_loras, sizes.s_max, device)
    runner = ModelRunner(
        model.weights,
        cache,
        attention_of(settings, model.config, cache, rope),
        adapters_of(settings, layout, residency, tables),
        norms_of(settings, model.config, dtype),
    )
    storage = residency.memory.storage
    runner.graphs = graphs_of(settings, limits, layout, tables, storage, cache, runner)
    return runner
