"""Engine construction: weights, memory sizes, adapters, scheduler state and core."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from capplan.engine.engine_core import EngineCore
from capplan.engine.lora.adapter import AdapterLayout, AdapterSource
from capplan.engine.lora.loader import Loader, ThreadLoader, VirtualLoader
from capplan.engine.lora.manager import AdapterLoads, LoRAManager
from capplan.engine.lora.memory import AdapterMemory, RowTables, StaticSlots, UnifiedPages
from capplan.engine.model_runner import ModelRunner, attention_factory, decode_graphs, lora_factory, norms_for
from capplan.engine.models import (
    ModelConfig,
    Weights,
    builtin_config,
    load_weights,
    packed,
    random_weights,
    read_config,
)
from capplan.engine.models.decoder import KvCache, RopeTable
from capplan.engine.pool import BlockTables, CountedBlocks, NamedBlocks, PagePool, kv_page_elements
from capplan.engine.scheduler_output import with_host_adapters
from capplan.engine.settings import EngineSettings
from capplan.engine.timing import EngineClock, VirtualClock, WallClock
from capplan.errors import InfeasibleError, InputError
from capplan.serving import Limits, new_state
from capplan.spec import allowed_lora_rank


class LoadedModel(NamedTuple):
    """A model and the folder it came from, if any."""

    config: ModelConfig
    weights: Weights
    folder: Path | None


def load_model(model: str | Path | ModelConfig, settings: EngineSettings) -> LoadedModel:
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
        return LoadedModel(config, packed(random_weights(config, dtype, device, settings.seed)), None)
    return LoadedModel(config, packed(load_weights(config, folder, dtype, device)), folder)


def build_core(
    model: LoadedModel, sources: Sequence[AdapterSource], settings: EngineSettings, virtual_time: bool
) -> tuple[EngineCore, Sizes]:
    """Allocate everything and return the loop, and the sizes that were chosen."""
    dtype, device = model.weights.embed.dtype, model.weights.embed.device
    layout = AdapterLayout(model.config)
    capacity = settings.adapter_capacity(len(sources))
    host_slots = capacity if settings.max_cpu_loras is None else settings.max_cpu_loras
    residency = LoRAManager(capacity, layout, dtype, pin=device.type == "cuda")
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
    clock: EngineClock = VirtualClock() if virtual_time else WallClock()
    loader: Loader = VirtualLoader(clock) if virtual_time else ThreadLoader(clock)
    loads = AdapterLoads(state, limits, residency, loader, clock)
    for number in range(1, len(sources) + 1):
        loads.tell_pages(number)
    return EngineCore(state, limits, runner, blocks, loads, clock, device), sizes


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
    model: LoadedModel,
    settings: EngineSettings,
    limits: Limits,
    layout: AdapterLayout,
    residency: LoRAManager,
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
        attention_factory(settings, model.config, cache, rope),
        lora_factory(settings, layout, residency, tables),
        norms_for(settings, model.config, dtype),
    )
    storage = residency.memory.storage
    runner.graphs = decode_graphs(settings, limits, layout, tables, storage, cache, runner)
    return runner


_CPU_KV_BYTES = 256 * 2**20


class Sizes(NamedTuple):
    """What an engine allocates."""

    a_max: int
    s_max: int
    num_blocks: int
    """Blocks that the scheduler hands out; under S-LoRA's rules adapters take their share of them."""
    pool_pages: int
    max_model_len: int
    slot_bytes: int
    """Of one static slot; 0 in unified memory."""


def choose_sizes(
    config: ModelConfig,
    layout: AdapterLayout,
    settings: EngineSettings,
    residency: LoRAManager,
    dtype: torch.dtype,
    device: torch.device,
) -> Sizes:
    """Return the sizes that settings leave open, and check those that they give.

    In unified memory under rules that count slots, the pool has room for A_max adapters of rank S_max beside
    the KV blocks, because those rules promise every slot. Under S-LoRA's rules there is one count for both.

    Raises
    ------
    InfeasibleError
        When not even one request of `max_model_len` fits.
    """
    adapters = residency.rank_of.size - 1  # what there are numbers for
    a_max = settings.a_max or max(1, min(adapters, 8))
    s_max = settings.s_max or _rank_of_slots(int(residency.rank_of.max()))
    host_slots = adapters if settings.max_cpu_loras is None else settings.max_cpu_loras
    slotless = settings.serving_rules().declared_output
    needed = adapters if slotless else min(a_max, adapters)
    if host_slots < needed:
        rule = f"must be at least {f'the {adapters} adapters' if slotless else f'a_max, {a_max}'}"
        raise InputError(rule, settings.max_cpu_loras, "max_cpu_loras")
    page_bytes = kv_page_elements(config, settings.block_size) * dtype.itemsize
    slot_bytes = layout.elements(layout.ranks(s_max)) * dtype.itemsize
    unified = settings.chosen_memory() == "unified"
    beside_bytes = 0 if slotless else a_max * slot_bytes
    num_blocks = settings.num_kv_blocks or _blocks_that_fit(settings, page_bytes, beside_bytes, device)
    most = num_blocks * settings.block_size
    max_model_len = settings.max_model_len or min(config.max_positions, most)
    if max_model_len > config.max_positions:
        raise InputError(
            f"must be at most the model's {config.max_positions}", max_model_len, "max_model_len"
        )
    if max_model_len > most or num_blocks < 1:
        message = f"a request of max_model_len {max_model_len} needs more KV than the {most} tokens there are"
        raise InfeasibleError(message, "memory")
    adapter_pages = 0
    if unified and beside_bytes:
        # No row is cut by the end of a page: less than a row is lost in each.
        usable = page_bytes - layout.longest_row * dtype.itemsize + dtype.itemsize
        adapter_pages = a_max * -(-slot_bytes // max(1, usable))
    return Sizes(
        a_max=a_max,
        s_max=s_max,
        num_blocks=num_blocks,
        pool_pages=num_blocks + adapter_pages,
        max_model_len=max_model_len,
        slot_bytes=0 if unified else slot_bytes,
    )


def _blocks_that_fit(
    settings: EngineSettings, page_bytes: int, beside_bytes: int, device: torch.device
) -> int:
    """Return how many KV blocks fit beside weights and slots.

    On a GPU as nano-vllm says it in one line: total * utilization - used - what a step needs; weights are
    there already, slots are still to come.
    """
    if device.type != "cuda":
        return max(1, _CPU_KV_BYTES // page_bytes)
    free, total = torch.cuda.mem_get_info(device)
    room = int(total * settings.gpu_memory_utilization) - (total - free) - beside_bytes - _STEP_BYTES
    return room // page_bytes


_STEP_BYTES = 2 * 2**30
"""Put by for activations and logits of a step on a GPU; to be replaced by a measured peak (docs/gpu.md)."""


def _rank_of_slots(largest: int) -> int:
    """Return the rank of slots for adapters of up to this rank, where nobody says."""
    try:
        return allowed_lora_rank(max(1, largest))
    except ValueError:
        raise InputError("must be given for an adapter of so large a rank", largest, "s_max") from None
