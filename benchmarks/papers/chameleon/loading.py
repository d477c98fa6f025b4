"""Times of a prompt on an idle engine: prefill, and the share of its adapter's load (Fig. 5)."""

from __future__ import annotations

from typing import Final

from benchmarks.papers.chameleon.setting import (
    A40,
    LARGEST_RANK,
    Platform,
    medium_ktokens,
    physics_of,
    profile,
)
from capplan.models import (
    StepFeatures,
    StepRanks,
    coefficient_array,
    gpu_load_ms,
    latency_code,
    rank_ms,
    step_ms,
)

_GPU: Final = "a100-80g"
_MODEL: Final = "llama-3.1-70b"
"""Its adapter of rank 32 on q, k, v and o has the 250 MiB that the paper gives (256 MB)."""


def prefill_ms(platform: Platform, tokens: float, rank: float) -> float:
    """Return the prefill of one prompt with an adapter."""
    served = profile(platform)
    form = latency_code(served.step_latency.form, served.engine.kernel)
    coefficients = coefficient_array(served.step_latency)
    features = StepFeatures(tokens, 1.0, 0.0, 1.0, 1.0, LARGEST_RANK, 0.0, 1.0, 1.0)
    ranks = StepRanks(0.0, 1.0, 0.0, 1.0, tokens, rank, 0.0, rank, tokens * rank)
    return step_ms(form, coefficients, features) + rank_ms(form, coefficients, LARGEST_RANK, ranks)


def load_share(rank: int, tp: int) -> float:
    """Return the share of a medium prompt, the one of Fig. 2."""
    platform = Platform(_GPU, _MODEL, tp)
    prompt_ms = prefill_ms(platform, 1e3 * medium_ktokens(physics_of(A40)), rank)
    load_ms = gpu_load_ms(profile(platform).loading, rank, LARGEST_RANK)
    return load_ms / (load_ms + prompt_ms)
