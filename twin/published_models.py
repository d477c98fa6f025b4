"""GPU, engine and models of the published H100 measurements (Agullo et al., arXiv 2508.08343)."""

from __future__ import annotations

from dataclasses import dataclass

from capplan.spec import Gpu, ModelArch, ProfileEngine

GPU = Gpu(name="NVIDIA H100 64GB HBM2", memory_bytes=64 * 2**30)
UTILIZATION = 0.9
ENGINE = ProfileEngine(
    name="vllm", version="0.8.5", rules="vllm-0.8", lora_extra_vocab=256, prefix_caching=False
)


@dataclass(frozen=True)
class PublishedModel:
    """One of the two models that were measured."""

    key: str
    """Its name in the tables."""
    profile: str
    arch: ModelArch


PUBLISHED = (
    PublishedModel(
        key="llama-3.1-8b-instruct",
        profile="h100-64g/llama-3.1-8b/vllm-0.8.5",
        arch=ModelArch(
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
    ),
    PublishedModel(
        key="qwen-2.5-7b-instruct",
        profile="h100-64g/qwen2.5-7b/vllm-0.8.5",
        arch=ModelArch(
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
    ),
)
