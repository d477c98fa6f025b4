"""A server for LoRAServe's setting: the shipped H100 profile of Llama-3.1-8B, made to pay for ranks.

LoRAServe's servers are four A100s each (Llama-7B, tensor parallelism 4) under S-LoRA. Neither is at hand, and
the shipped profiles are vLLM's, whose LoRA kernels cost by slots. The stand-in keeps what was measured of the
base model on the H100, drops vLLM's costs of slots and adapters, and charges ranks as a padded kernel does:
every token of a step pays for the largest rank in it (LoRAServe, section III-A5).
"""

from __future__ import annotations

from typing import Final

from capplan.models.step_latency import GRAPH_TOKENS
from capplan.spec import Coefficient, FittedModel, Kernel, Profile, Provenance, ProvenanceKind

SHIPPED: Final = "h100-64g/llama-3.1-8b/vllm-0.8.5"
NAME: Final = "stand-in/llama-3.1-8b/s-lora-bgmv"
PREFILL_RATIO: Final = 2.7
"""Prefill of 2,000 tokens at rank 128 over the same at rank 8, alone on a server (section III-A1)."""
PROMPT_TOKENS: Final = 2000
RANKS: Final = (8, 128)
BYTES_PER_S: Final = 2.0e12
"""Memory bandwidth of an H100 with 64 GB of HBM2, rounded."""
KEPT: Final = ("base_ms", "ms_per_ktoken", "ms_per_kv_ktoken", "ms_per_ktoken_beyond_graphs")


def standin(shipped: Profile, prefill_ratio: float = PREFILL_RATIO) -> Profile:
    """Return the stand-in.

    Parameters
    ----------
    shipped
        Profile whose costs of the base model are kept.
    prefill_ratio
        What prefill at rank 128 takes over prefill at rank 8.
    """
    step = shipped.step_latency
    coefficients = {
        name: coefficient if name in KEPT else Coefficient(value=0.0)
        for name, coefficient in step.coefficients.items()
    }
    coefficients["ms_per_prefill_krank"] = Coefficient(value=prefill_ms_per_krank(step, prefill_ratio))
    coefficients["ms_per_decode_krank"] = Coefficient(value=decode_ms_per_krank(shipped))
    return shipped.replace(
        name=NAME,
        engine=shipped.engine.replace(name="s-lora", version="c1ddf48", rules="slora", kernel=Kernel.BGMV),
        step_latency=step.replace(coefficients=coefficients),
        provenance=Provenance(
            kind=ProvenanceKind.ROOFLINE,
            source=f"{SHIPPED} without its costs of slots and adapters; ranks: LoRAServe, section III-A1",
            command="python -m benchmarks.loraserve_setting",
            notes=f"Prefill of {PROMPT_TOKENS} tokens at rank 128 takes {prefill_ratio:g} x that at rank 8. "
            f"Decode reads the padded q, k, v and o weights of each request at {BYTES_PER_S:g} bytes/s.",
        ),
    )


def base_prefill_ms(step: FittedModel) -> float:
    """Return what prefill of one prompt takes without any adapter."""
    return (
        step.value("base_ms")
        + step.value("ms_per_ktoken") * PROMPT_TOKENS / 1000.0
        + step.value("ms_per_ktoken_beyond_graphs") * (PROMPT_TOKENS - GRAPH_TOKENS) / 1000.0
    )


def prefill_ms_per_krank(step: FittedModel, ratio: float) -> float:
    """Return the cost of 1000 token-ranks of prefill with which the two ranks have this ratio."""
    low, high = (PROMPT_TOKENS * rank / 1000.0 for rank in RANKS)
    return base_prefill_ms(step) * (ratio - 1.0) / (high - ratio * low)


def decode_ms_per_krank(profile: Profile) -> float:
    """Return the cost of 1000 request-ranks of decode: the time to read as many rows of A and B."""
    arch = profile.model
    query, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    elements = 2 * (arch.hidden_size + query) + 2 * (arch.hidden_size + kv)
    return 1000.0 * arch.layers * elements * arch.dtype_bytes / BYTES_PER_S * 1000.0
