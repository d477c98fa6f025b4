"""Models by name, for profiles that nobody measured; numbers as in each ``config.json``."""

from __future__ import annotations

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
