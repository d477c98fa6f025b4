"""Engine construction: memory sizes, adapters, scheduler state and core."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from capplan.engine.engine_core import EngineCore
from capplan.engine.lora.adapter import AdapterSource
from capplan.engine.lora.load_times import measured_load_times
from capplan.engine.lora.loader import AdapterLoader, ThreadLoader, VirtualLoader
from capplan.engine.lora.manager import AdapterLoads
from capplan.engine.pool import BlockTables, CountedBlocks, NamedBlocks, kv_page_elements
from capplan.engine.scheduler_output import with_host_adapters
from capplan.engine.settings import EngineOptions
from capplan.engine.timing import EngineClock, VirtualClock, WallClock
from capplan.engine.worker import Sizes, Worker
from capplan.errors import InfeasibleError, InputError
from capplan.serving import new_state
from capplan.serving.pooled.pool_setup import set_up_policies
from capplan.serving.pooled.state import GDSF
from capplan.serving.state import POOLED
from capplan.spec import EngineArgs, allowed_lora_rank

_CPU_KV_BYTES: Final = 256 * 2**20
_INDEX_BYTES: Final = 8


def build_core(
    worker: Worker, sources: Sequence[AdapterSource], options: EngineOptions, virtual_time: bool
) -> tuple[EngineCore, Sizes]:
    """Allocate an engine and return its core and sizes.

    Parameters
    ----------
    worker
        First rank, with its model.
    """
    lora, config, dtype = worker.lora, worker.config, worker.dtype
    capacity = lora.rank_of.size - 1
    host_slots = options.args.get("max_cpu_loras", capacity)
    for number, source in enumerate(sources, start=1):
        lora.register(number, source, options.args.get("max_lora_rank"))
        lora.read(number)  # each is read once, so that a broken one fails here; the host keeps the last ones
        lora.drop(number - host_slots)
    sizes = choose_sizes(worker, options)
    _require_memory(sizes, kv_page_elements(config, options.block_size) * dtype.itemsize, options)
    worker.allocate(sizes)
    args, pool = sizes.args, worker.pool
    limits = options.limits(args, capacity, sizes.num_blocks)
    state = new_state(options.max_in_flight, capacity, sizes.num_blocks, limits)
    if limits.policy != POOLED:  # where the host keeps every adapter
        state = with_host_adapters(state, max(1, len(sources) - host_slots + 1), len(sources) + 1)
    scheduler = None
    if limits.policy == POOLED and options.scheduling is not None:
        scheduler, cache = options.scheduling
        set_up_policies(state, limits, cache.score_weights, options.queues)
    blocks: BlockTables
    if limits.prefix_caching:
        blocks = NamedBlocks(state, pool, sizes.num_blocks)
    else:
        blocks_per_request = -(-args.max_model_len // options.block_size)
        blocks = CountedBlocks(pool, options.max_in_flight, blocks_per_request, options.block_size)
    clock: EngineClock = VirtualClock() if virtual_time else WallClock()
    loader: AdapterLoader = VirtualLoader(clock) if virtual_time else ThreadLoader(clock)
    token_bytes = kv_page_elements(config, 1) * dtype.itemsize if options.charges_adapters else 0
    if limits.policy == POOLED and limits.cache == GDSF:
        lora.load_times = options.load_times or measured_load_times(lora, range(1, len(sources) + 1))
    loads = AdapterLoads(state, limits, lora, loader, clock, token_bytes)
    for number in range(1, len(sources) + 1):
        loads.set_sizes(number)
    core = EngineCore(state, limits, worker.all_ranks(), blocks, loads, clock, worker.device, scheduler)
    return core, sizes


def choose_sizes(worker: Worker, options: EngineOptions) -> Sizes:
    """Return the sizes of an engine, of each rank, chosen where the options leave them open.

    In unified memory under rules that count slots, the pool has pages for A_max adapters of rank S_max beside
    the KV blocks, because those rules guarantee every slot. Under S-LoRA's rules one count covers both.

    Raises
    ------
    InfeasibleError
        If no request of `max_model_len` fits.
    """
    config, lora, dtype, layout = worker.config, worker.lora, worker.dtype, worker.lora.layout
    adapters = lora.rank_of.size - 1
    chosen = {"max_loras": max(1, min(adapters, 8)), "max_model_len": config.max_positions}
    if adapters == 0 and not {"max_loras", "max_lora_rank"} & options.args.keys():
        chosen |= {"max_loras": 0, "max_lora_rank": 0}  # an engine without LoRA
    elif "max_lora_rank" not in options.args:
        chosen["max_lora_rank"] = _slot_rank(int(lora.rank_of.max()))
    args = options.engine_args(**chosen)
    if args.max_model_len > config.max_positions:
        raise InputError(
            f"must be at most the model's {config.max_positions}", args.max_model_len, "max_model_len"
        )
    slotless = options.serving_rules().unified_memory
    _check_host_slots(args, adapters, slotless)
    page_bytes = kv_page_elements(config, options.block_size) * dtype.itemsize
    slot_bytes = layout.elements(layout.ranks(args.max_lora_rank)) * dtype.itemsize
    unified = options.chosen_memory() == "unified"
    slots_bytes = 0 if slotless else args.max_loras * slot_bytes
    num_blocks = options.num_kv_blocks or _blocks_that_fit(
        worker, args, page_bytes, slots_bytes if unified else 0
    )
    most = num_blocks * options.block_size
    if num_blocks >= 1 and "max_model_len" not in options.args:
        args = args.replace(max_model_len=min(config.max_positions, most))
    if args.max_model_len > most:
        message = (
            f"a request of max_model_len {args.max_model_len} needs more KV than the {most} tokens there are"
        )
        raise InfeasibleError(message, "memory")
    adapter_pages = 0
    if unified and slots_bytes:
        # Rows do not cross page boundaries: less than a row is lost in each page.
        usable = page_bytes - layout.longest_row * dtype.itemsize + dtype.itemsize
        adapter_pages = args.max_loras * -(-slot_bytes // max(1, usable))
    return Sizes(args, num_blocks, num_blocks + adapter_pages, 0 if unified else slot_bytes)


def _check_host_slots(args: EngineArgs, adapters: int, slotless: bool) -> None:
    needed = adapters if slotless else min(args.max_loras, adapters)
    if args.max_cpu_loras is not None and args.max_cpu_loras < needed:
        rule = (
            f"must be at least {f'the {adapters} adapters' if slotless else f'max_loras, {args.max_loras}'}"
        )
        raise InputError(rule, args.max_cpu_loras, "max_cpu_loras")


def _require_memory(sizes: Sizes, page_bytes: int, options: EngineOptions) -> None:
    """Check that this machine has the memory of pool, slots and block tables.

    Raises
    ------
    InfeasibleError
        If it has not; the operating system would end the process as it fills them.
    """
    blocks_per_request = -(-sizes.args.max_model_len // options.block_size)
    tables_bytes = options.max_in_flight * blocks_per_request * _INDEX_BYTES
    pool_bytes = sizes.pool_pages * page_bytes + sizes.args.max_loras * sizes.slot_bytes
    needed_bytes = tables_bytes + (pool_bytes if options.device == "cpu" else 0)
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed_bytes > machine_bytes:
        message = (
            f"KV blocks, adapter slots and block tables take {needed_bytes / 2**30:.3g} GiB, "
            f"and this machine has {machine_bytes / 2**30:.3g} GiB"
        )
        raise InfeasibleError(f"memory: {message}", "memory")


def _blocks_that_fit(worker: Worker, args: EngineArgs, page_bytes: int, adapters_bytes: int) -> int:
    """Return the KV blocks that fit: on a GPU as measured, beside adapters that are in pages."""
    if worker.device.type != "cuda":
        return max(1, _CPU_KV_BYTES // page_bytes)
    return (worker.measure(args).room_bytes - adapters_bytes) // page_bytes


def _slot_rank(largest: int) -> int:
    """Return the default rank of slots for adapters of up to this rank."""
    try:
        return allowed_lora_rank(max(1, largest))
    except ValueError:
        raise InputError(
            "must be given for an adapter of so large a rank", largest, "max_lora_rank"
        ) from None
