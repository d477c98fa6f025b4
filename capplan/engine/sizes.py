"""How large everything is: slots, KV blocks, pages, the longest request."""

from __future__ import annotations

from typing import NamedTuple

import torch

from capplan.engine.lora.layout import AdapterLayout
from capplan.engine.lora.residency import Residency
from capplan.engine.models import ModelConfig
from capplan.engine.pages import kv_page_elements
from capplan.engine.settings import EngineSettings
from capplan.errors import InfeasibleError, InputError
from capplan.spec import allowed_lora_rank

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
    residency: Residency,
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
