"""How many KV tokens an engine has beside its adapter slots, and the profile that calibration starts from."""

from __future__ import annotations

from typing import Any, Final

from capplan.engine import Engine
from capplan.engine.models import ModelConfig, builtin_config, read_config
from capplan.engine.settings import EngineSettings
from capplan.errors import InfeasibleError
from capplan.profiling.engine.options import Options
from capplan.serving import weight_bytes
from capplan.serving.memory import kv_bytes_per_token
from capplan.spec import Kernel, Profile

BLOCK_TOKENS: Final = 16

_CPU_KV_BYTES: Final = 256 * 2**20
_PADDED: Final = ("padded", "bgmv")


def config_of(model: str) -> ModelConfig:
    """Return the model's numbers, by a name, a folder or a ``config.json``."""
    from pathlib import Path

    return read_config(model) if Path(model).exists() else builtin_config(model)


def base_profile(options: Options) -> Profile:
    """Return what is known of the engine before anything is measured; the rest is assumed."""
    from capplan import __version__
    from capplan.models.calibration.components import Hardware, assumed_profile
    from capplan.profiling.machine import device_name

    config = config_of(options.model)
    fields: dict[str, Any] = options.engine_fields()
    settings = EngineSettings(**fields)
    arch = config.arch(settings.torch_dtype(config).itemsize)
    chip = device_name(options.device)
    hardware = Hardware(
        gpu=chip,
        gpu_memory_bytes=_device_bytes(options, arch),
        engine="capplan",
        engine_version=__version__,
        rules=options.rules,
    )
    profile = assumed_profile(arch, hardware)
    kernel = Kernel.BGMV if options.lora_kernel in _PADDED else Kernel.MBGMV
    engine = profile.engine.replace(kernel=kernel, block_size=BLOCK_TOKENS)
    return profile.replace(name=f"{chip}/{arch.name}/capplan-{__version__}", engine=engine)


def _device_bytes(options: Options, arch: Any) -> int:
    if options.on_gpu:
        import torch

        properties: Any = torch.cuda.get_device_properties(torch.device(options.device))
        return int(properties.total_memory)
    if options.memory_bytes is not None:
        return options.memory_bytes
    from capplan.serving.memory import lora_elements_per_rank

    slots = max(options.a_max) * max(options.s_max) * lora_elements_per_rank(arch) * arch.dtype_bytes
    return int((weight_bytes(arch) + slots + _CPU_KV_BYTES) / options.gpu_memory_utilization)


def kv_blocks(base: Profile, a_max: int, slot_bytes: int, gpu_memory_utilization: float) -> int:
    """Return the KV blocks that fit beside weights and slots into the memory that a CPU engine may take."""
    room = base.gpu.memory_bytes * gpu_memory_utilization - weight_bytes(base.model) - a_max * slot_bytes
    return int(room // (kv_bytes_per_token(base.model) * BLOCK_TOKENS))


def memory_row(options: Options, base: Profile, a_max: int, s_max: int) -> dict[str, float]:
    """Start an engine and return its row of the memory table.

    A GPU engine says what it found free. One on a CPU takes what it is told; its row holds the blocks that
    fit into the profile's memory beside slots as large as the engine's own.

    Raises
    ------
    InfeasibleError
        When nothing is left for KV.
    """
    fields = options.engine_fields(a_max=a_max, s_max=s_max)
    if not options.on_gpu:
        fields["num_kv_blocks"] = -(-options.max_model_len // BLOCK_TOKENS)
    with Engine(options.model, {}, max_adapters=1, **fields) as engine:
        blocks = engine.sizes.num_blocks
        if not options.on_gpu:
            blocks = kv_blocks(base, a_max, engine.sizes.slot_bytes, options.gpu_memory_utilization)
    if blocks < 1:
        message = f"{a_max} slots of rank {s_max} leave no KV in {base.gpu.memory_bytes} bytes"
        raise InfeasibleError(message, "memory")
    return {
        "a_max": a_max,
        "s_max": s_max,
        "kv_tokens": blocks * BLOCK_TOKENS,
        "max_num_seqs": options.max_num_seqs,
        "gpu_memory_utilization": options.gpu_memory_utilization,
    }
