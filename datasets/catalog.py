"""Model architectures and GPU data sheets by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from capplan.errors import InputError
from capplan.spec import ModelArch

ARCHS: Final = (
    ModelArch(
        name="Llama-2-7B",
        hf_ids=("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf"),
        layers=32,
        hidden_size=4096,
        heads=32,
        kv_heads=32,
        head_dim=128,
        intermediate_size=11008,
        vocab_size=32000,
        lora_on_embeddings=True,
    ),
    ModelArch(
        name="Llama-3.1-8B",
        hf_ids=("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        layers=32,
        hidden_size=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        lora_on_embeddings=True,
    ),
    ModelArch(
        name="Llama-3.1-70B",
        hf_ids=("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B"),
        layers=80,
        hidden_size=8192,
        heads=64,
        kv_heads=8,
        head_dim=128,
        intermediate_size=28672,
        vocab_size=128256,
        lora_on_embeddings=True,
    ),
    ModelArch(
        name="Qwen2.5-7B",
        hf_ids=("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        layers=28,
        hidden_size=3584,
        heads=28,
        kv_heads=4,
        head_dim=128,
        intermediate_size=18944,
        vocab_size=152064,
    ),
)


def model_arch(name: str) -> ModelArch:
    """Return a model by its short name, such as ``llama-3.1-8b``, or by its Hugging Face id.

    Raises
    ------
    InputError
        When it is not known; the message lists those there are.
    """
    for arch in ARCHS:
        if name.lower() == arch.name.lower() or name in arch.hf_ids:
            return arch
    known = ", ".join(arch.name.lower() for arch in ARCHS)
    raise InputError(f"must be one of {known}; others by --model-config", name, "--model")


_MIB: Final = 2**20

_GEN4: Final = 32e9

"""PCIe 4.0 x16, bytes per second in one direction."""

_GEN5: Final = 64e9


@dataclass(frozen=True)
class GpuSheet:
    """A GPU type.

    Attributes
    ----------
    key
        What `--gpu` takes.
    name
        As the driver calls it.
    memory_bytes
        As the driver tells it, which is what engines size themselves by.
    bytes_per_s
        Peak of its memory.
    flop_per_s
        Peak of its tensor cores on 16-bit floats, accumulated in float32, without sparsity.
    host_bytes_per_s
        Peak of the link to the host, one direction.
    peer_bytes_per_s
        Peak of the links to its peers, one direction; the host's link where there are no others.
    source
        Where the numbers are from.
    """

    key: str
    name: str
    memory_bytes: int
    bytes_per_s: float
    flop_per_s: float
    host_bytes_per_s: float
    peer_bytes_per_s: float
    source: str


_A100: Final = "NVIDIA A100 datasheet (2021)"

_H100: Final = "NVIDIA H100 datasheet (2023)"

_H200: Final = "NVIDIA H200 datasheet (2024)"

GPUS: Final = (
    GpuSheet("a10", "NVIDIA A10", 23028 * _MIB, 600e9, 125e12, _GEN4, _GEN4, "NVIDIA A10 datasheet"),
    GpuSheet("a10g", "NVIDIA A10G", 23028 * _MIB, 600e9, 70e12, _GEN4, _GEN4, "NVIDIA A10G datasheet"),
    GpuSheet("a100-40g", "NVIDIA A100-SXM4-40GB", 40960 * _MIB, 1.555e12, 312e12, _GEN4, 300e9, _A100),
    GpuSheet("a100-80g", "NVIDIA A100-SXM4-80GB", 81920 * _MIB, 2.039e12, 312e12, _GEN4, 300e9, _A100),
    GpuSheet("a100-80g-pcie", "NVIDIA A100 80GB PCIe", 81920 * _MIB, 1.935e12, 312e12, _GEN4, _GEN4, _A100),
    GpuSheet(
        "h100-64g",
        "NVIDIA H100 64GB HBM2",
        65536 * _MIB,
        2.0e12,
        989e12,
        _GEN5,
        450e9,
        f"made for one computing centre, no datasheet; {_H100}, with the bandwidth of the PCIe card",
    ),
    GpuSheet("h100-80g", "NVIDIA H100 80GB HBM3", 81559 * _MIB, 3.35e12, 989e12, _GEN5, 450e9, _H100),
    GpuSheet("h100-80g-pcie", "NVIDIA H100 PCIe", 81559 * _MIB, 2.0e12, 756e12, _GEN5, _GEN5, _H100),
    GpuSheet("h200", "NVIDIA H200", 143771 * _MIB, 4.8e12, 989e12, _GEN5, 450e9, _H200),
    GpuSheet(
        "b200",
        "NVIDIA B200",
        183359 * _MIB,
        8.0e12,
        2250e12,
        _GEN5,
        900e9,
        "NVIDIA HGX B200 datasheet (2025)",
    ),
    GpuSheet("l4", "NVIDIA L4", 23034 * _MIB, 300e9, 121e12, _GEN4, _GEN4, "NVIDIA L4 datasheet (2023)"),
    GpuSheet(
        "l40s", "NVIDIA L40S", 46068 * _MIB, 864e9, 362e12, _GEN4, _GEN4, "NVIDIA L40S datasheet (2023)"
    ),
)

"""Every GPU that is known."""


def gpu_sheet(key: str) -> GpuSheet:
    """Return what is known of a GPU type.

    Raises
    ------
    InputError
        When nothing is; the message lists those there are.
    """
    for sheet in GPUS:
        if sheet.key == key:
            return sheet
    raise InputError(f"must be one of {', '.join(sheet.key for sheet in GPUS)}", key, "--gpu")
