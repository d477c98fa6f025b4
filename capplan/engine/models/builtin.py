"""Models by name, to run with random weights where no folder is at hand; numbers as in ``config.json``."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from capplan.engine.models.config import ModelConfig, Rope
from capplan.errors import InputError

_MODELS: tuple[ModelConfig, ...] = (
    ModelConfig(
        name="tiny-llama",
        layers=2,
        hidden_size=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=320,
        max_positions=2048,
        rope=Rope(theta=10000.0),
    ),
    ModelConfig(
        name="meta-llama/Llama-2-7b-hf",
        layers=32,
        hidden_size=4096,
        heads=32,
        kv_heads=32,
        head_dim=128,
        intermediate_size=11008,
        vocab_size=32000,
        max_positions=4096,
        rms_eps=1e-5,
        dtype="float16",
        eos_token_ids=(2,),
    ),
    ModelConfig(
        name="meta-llama/Llama-3.1-8B-Instruct",
        layers=32,
        hidden_size=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        max_positions=131072,
        rms_eps=1e-5,
        rope=Rope(theta=500000.0, kind="llama3", factor=8.0),
        dtype="bfloat16",
        eos_token_ids=(128001, 128008, 128009),
    ),
    ModelConfig(
        name="Qwen/Qwen2.5-7B-Instruct",
        layers=28,
        hidden_size=3584,
        heads=28,
        kv_heads=4,
        head_dim=128,
        intermediate_size=18944,
        vocab_size=152064,
        max_positions=32768,
        rope=Rope(theta=1000000.0),
        qkv_bias=True,
        dtype="bfloat16",
        eos_token_ids=(151645, 151643),
    ),
)

BUILTIN: Final = MappingProxyType({model.name: model for model in _MODELS})
"""Every built-in model by its Hugging Face id; ``tiny-llama`` is for tests and first tries."""


def builtin_config(name: str) -> ModelConfig:
    """Return the built-in model called `name`.

    Raises
    ------
    InputError
        When there is none; the message lists those there are.
    """
    if name not in BUILTIN:
        raise InputError(
            f"must be a folder with a config.json, or one of {', '.join(BUILTIN)}", name, "model"
        )
    return BUILTIN[name]
