"""Servers of LoRAServe's evaluation: analytic profiles, and a stand-in with its prefill ratio."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from benchmarks.common import H100_LLAMA
from capplan import Profile, load_profile
from capplan.datasets import gpu_sheet, model_arch
from capplan.models import EngineChoice, roofline_profile
from capplan.models._step_latency import GRAPH_TOKENS
from capplan.spec import Coefficient, FittedModel, Kernel, Provenance, ProvenanceKind

STAND_IN: Final = "h100-stand-in"
"""A shipped profile of one H100, with rank costs by the paper's prefill ratio."""
SETTING: Final = "a100-40g/llama-7b/tp4"
"""Llama-7B at TP 4 on A100 SXM 40 GB (sections V-A and V-B), by the roofline."""
PREFILL_RATIO: Final = 2.7
"""Prefill time of 2,000 tokens at rank 128 over that at rank 8, alone on a server (section III-A1)."""
PROMPT_TOKENS: Final = 2000
RANKS: Final = (8, 128)
BYTES_PER_S: Final = 2.0e12
"""Memory bandwidth of an H100 with 64 GB of HBM2, rounded."""
KEPT: Final = ("base_ms", "ms_per_ktoken", "ms_per_kv_ktoken", "ms_per_ktoken_beyond_graphs")


def hardware(name: str) -> Profile:
    """Return the profile of one server.

    Parameters
    ----------
    name
        `STAND_IN`, or GPU, model and degree of tensor parallelism such as `SETTING`: the roofline of S-LoRA's
        engine with a BGMV kernel.

    Raises
    ------
    InputError
        If the GPU or the model is unknown, or the model does not fit.
    """
    if name == STAND_IN:
        return standin(load_profile(H100_LLAMA))
    gpu, model, degree = name.split("/")
    engine = EngineChoice(rules="slora", kernel=Kernel.BGMV)
    return roofline_profile(gpu_sheet(gpu), model_arch(model), engine, int(degree.removeprefix("tp")))


def standin(shipped: Profile, prefill_ratio: float = PREFILL_RATIO) -> Profile:
    """Return the stand-in, with a shipped profile's costs of the base model."""
    step = shipped.step_latency
    free = [name for name in step.coefficients if name not in KEPT]
    decode_ms = decode_ms_per_krank(shipped)
    return shipped.replace(
        name="stand-in/llama-3.1-8b/s-lora-bgmv",
        engine=shipped.engine.replace(name="s-lora", version="c1ddf48", rules="slora", kernel=Kernel.BGMV),
        step_latency=with_rank_costs(step, free, prefill_ratio, decode_ms),
        provenance=Provenance(
            kind=ProvenanceKind.ROOFLINE,
            source=f"{H100_LLAMA} without its costs of slots and adapters; ranks: LoRAServe, section III-A1",
            command="python -m benchmarks.papers.loraserve",
            notes=f"Prefill of {PROMPT_TOKENS} tokens at rank 128 takes {prefill_ratio:g} x that at rank 8. "
            f"Decode reads the padded q, k, v and o weights of each request at {BYTES_PER_S:g} bytes/s.",
        ),
    )


def with_rank_costs(
    step: FittedModel, free: Iterable[str], prefill_ratio: float, decode_ms_per_krank: float
) -> FittedModel:
    """Return a step model with costs by rank, and without some others.

    Parameters
    ----------
    step
        Step model of vLLM's kernels, whose costs do not depend on ranks.
    free
        Coefficients to set to 0.
    prefill_ratio
        Prefill time of 2,000 tokens at rank 128 over that at rank 8.
    decode_ms_per_krank
        Milliseconds per 1,000 request-ranks.
    """
    low, high = (PROMPT_TOKENS * rank / 1000.0 for rank in RANKS)
    prefill_ms = base_prefill_ms(step) * (prefill_ratio - 1.0) / (high - prefill_ratio * low)
    values = {**dict.fromkeys(free, 0.0), "ms_per_decode_krank": decode_ms_per_krank}
    values["ms_per_prefill_krank"] = prefill_ms
    changed = {name: Coefficient(value=value) for name, value in values.items()}
    return step.replace(coefficients={**step.coefficients, **changed})


def base_prefill_ms(step: FittedModel, tokens: int = PROMPT_TOKENS) -> float:
    """Return the time of a prompt without an adapter, alone on a server."""
    return (
        step.value("base_ms")
        + step.value("ms_per_ktoken") * tokens / 1000.0
        + step.value("ms_per_ktoken_beyond_graphs") * max(0, tokens - GRAPH_TOKENS) / 1000.0
    )


def prefill_ms(step: FittedModel, tokens: int, rank: int) -> float:
    """Return the time of a prompt with an adapter of this rank, alone on a server."""
    return base_prefill_ms(step, tokens) + step.value("ms_per_prefill_krank") * tokens * rank / 1000.0


def decode_ms_per_krank(profile: Profile) -> float:
    """Return the cost of 1000 request-ranks of decode: the time to read as many rows of A and B."""
    arch = profile.model
    query, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    elements = 2 * (arch.hidden_size + query) + 2 * (arch.hidden_size + kv)
    return 1000.0 * arch.layers * elements * arch.dtype_bytes / BYTES_PER_S * 1000.0
