"""Base profile, KV capacity and adapter-loading times of the reference engine."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from capplan.engine import Engine, EngineOptions, SamplingParams, Sizes, device_name, free_unused
from capplan.engine.lora import MODULES, AdapterLayout
from capplan.engine.models import ModelConfig, model_config
from capplan.errors import InfeasibleError
from capplan.models.calibration import Hardware, assumed_profile
from capplan.profiling._tables import MIN_LOAD_MS, loading_row
from capplan.profiling.engine._options import EngineProfilingOptions, SlotSetting
from capplan.serving import kv_bytes_per_token, lora_elements_per_rank, weight_bytes
from capplan.spec import Kernel, ModelArch, Profile
from capplan.version import installed_version

BLOCK_TOKENS: Final = 16
_CPU_KV_BYTES: Final = 256 * 2**20
_PADDED: Final = ("padded", "bgmv")
_RULES: Final = "vllm-0.8"
"""With these rules a step waits for its adapter, so its record holds the load time."""
_ATTENTION: Final = 4
"""Modules of the attention, the first of a layer."""
_ADAPTER_SCALE: Final = 0.1
_WARM_UP: Final = 2


def base_profile(options: EngineProfilingOptions) -> Profile:
    """Return the profile that calibration starts from; unmeasured values are assumptions."""
    config = model_config(options.model)
    dtype = EngineOptions.parse(options.engine_fields()).torch_dtype(config)
    arch = config.arch(dtype.itemsize)
    chip = device_name(options.device)
    hardware = Hardware(
        gpu=chip,
        gpu_memory_bytes=_device_bytes(options, arch),
        engine="capplan",
        engine_version=installed_version(),
        rules=options.rules,
    )
    profile = assumed_profile(arch, hardware)
    kernel = Kernel.BGMV if options.lora_kernel in _PADDED else Kernel.MBGMV
    engine = profile.engine.replace(kernel=kernel, block_size=BLOCK_TOKENS)
    return profile.replace(name=f"{chip}/{arch.name}/capplan-{installed_version()}", engine=engine)


def _device_bytes(options: EngineProfilingOptions, arch: ModelArch) -> int:
    if options.on_gpu:
        properties: Any = torch.cuda.get_device_properties(torch.device(options.device))
        return int(properties.total_memory)
    if options.memory_bytes is not None:
        return options.memory_bytes
    slots = max(options.a_max) * max(options.s_max) * lora_elements_per_rank(arch) * arch.dtype_bytes
    return int((weight_bytes(arch) + slots + _CPU_KV_BYTES) / options.widest.gpu_memory_utilization)


def memory_row(options: EngineProfilingOptions, base: Profile, slots: SlotSetting) -> dict[str, float]:
    """Start an engine and return its row of the memory table.

    A GPU engine reports its free memory. For a CPU engine the row holds the blocks that fit into the
    profile's memory beside weights and slots. Raise `InfeasibleError` if no memory is left for KV.
    """
    a_max, s_max = slots
    fields = options.engine_fields(max_loras=a_max, max_lora_rank=s_max)
    if not options.on_gpu:
        fields["num_kv_blocks"] = -(-options.widest.max_model_len // BLOCK_TOKENS)
    sizes = _sizes(options.model, fields)
    free_unused(torch.device(options.device))  # a server may start next
    blocks = sizes.num_blocks
    if not options.on_gpu:
        room = base.gpu.memory_bytes * options.widest.gpu_memory_utilization - weight_bytes(base.model)
        blocks = int((room - a_max * sizes.slot_bytes) // (kv_bytes_per_token(base.model) * BLOCK_TOKENS))
    if blocks < 1:
        message = f"{a_max} slots of rank {s_max} leave no KV in {base.gpu.memory_bytes} bytes"
        raise InfeasibleError(message, "memory")
    return {
        "a_max": a_max,
        "s_max": s_max,
        "kv_tokens": blocks * BLOCK_TOKENS,
        "max_num_seqs": options.widest.max_num_seqs,
        "max_num_batched_tokens": options.widest.max_num_batched_tokens,
        "gpu_memory_utilization": options.widest.gpu_memory_utilization,
    }


def _sizes(model: str, fields: Mapping[str, Any]) -> Sizes:
    with Engine(model, {}, max_adapters=1, **fields) as engine:
        return engine.sizes


def linear_maps(config: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Yield the name in weight files, the inputs and the outputs of each linear map of a model's layers."""
    for layer in range(config.layers):
        for number, (size_in, size_out) in enumerate(AdapterLayout(config).sizes):
            part = "self_attn" if number < _ATTENTION else "mlp"
            yield f"model.layers.{layer}.{part}.{MODULES[number]}", size_in, size_out


def write_adapter(folder: Path, config: ModelConfig, rank: int, seed: int) -> None:
    """Write a random PEFT adapter of one rank on all modules."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size_in, size_out in linear_maps(config):
        a, b = (torch.randn(shape, generator=generator) for shape in ((rank, size_in), (size_out, rank)))
        tensors[f"base_model.model.{name}.lora_A.weight"] = a * size_in**-0.5
        tensors[f"base_model.model.{name}.lora_B.weight"] = b * _ADAPTER_SCALE
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES)}
    fields |= {"bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": config.name}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    file = folder / "adapter_model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    with file.open("rb") as written:
        os.fsync(written.fileno())


def loading_rows(options: EngineProfilingOptions, s_max: int, rounds: int) -> list[dict[str, float | str]]:
    """Return a row for each rank and kind of load at one slot rank.

    Two adapters alternate in one slot, so that every request loads one: with both on the host a copy into the
    slot, with room for one on the host also a read from disk. The read time is the difference of the medians.
    """
    rows: list[dict[str, float | str]] = []
    config = model_config(options.model)
    for rank in options.fitting(s_max):
        with tempfile.TemporaryDirectory() as name:
            folders = [Path(name) / str(at) for at in range(2)]
            for at, folder in enumerate(folders):
                write_adapter(folder, config, rank, at)
            copies = _load_times_ms(options, s_max, folders, rounds, on_host=2)
            reads = _load_times_ms(options, s_max, folders, rounds, on_host=1)
        rows.append(loading_row(rank, s_max, "gpu", copies))
        read = [max(MIN_LOAD_MS, each - float(np.median(copies))) for each in reads]
        rows.append(loading_row(rank, s_max, "disk", read))
    return rows


def _load_times_ms(
    options: EngineProfilingOptions, s_max: int, folders: Sequence[Path], rounds: int, *, on_host: int
) -> list[float]:
    fields = options.engine_fields(max_loras=1, max_lora_rank=s_max, max_cpu_loras=on_host, rules=_RULES)
    fields["num_kv_blocks"] = -(-options.widest.max_model_len // BLOCK_TOKENS) + 1
    waits = []
    with Engine(options.model, {str(at): each for at, each in enumerate(folders)}, **fields) as engine:
        for turn in range(rounds + _WARM_UP):
            at = turn % len(folders)
            _drop_from_page_cache(folders[at] / "adapter_model.safetensors")
            request = engine.new_request([1], str(at), SamplingParams(max_tokens=1, ignore_eos=True))
            engine.submit(request)
            while request.finish_reason is None:
                step = engine.step()
                if step is not None and step.record is not None and step.record.loads and turn >= _WARM_UP:
                    waits.append(step.record.load_ms)
    return waits


def _drop_from_page_cache(path: Path) -> None:
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
