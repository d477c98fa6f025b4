"""Step tables of a forward pass: its times on a grid of tokens, requests and KV tokens."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from capplan.models.compose.forward import StepTimes
from capplan.spec import StepTable

Floats = NDArray[np.float64]

CAPTURED: Final = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Sizes of vLLM's CUDA graphs: a step runs at the next one from its tokens up (VLLM_RULES 2)."""

LONGEST_CONTEXT: Final = 32_768

MAX_TOKENS: Final = 16_384
_LARGE_STEPS: Final = tuple(int(each) for each in np.geomspace(513, MAX_TOKENS, 28))

_REQUESTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_KV_TOKENS: Final = (0, *(int(2.0 ** (exponent / 2.0)) for exponent in range(14, 43)))
"""Factors of the square root of 2, from 128 to 2 million."""


def step_tables(times: StepTimes) -> dict[str, StepTable]:
    """Return the tables of the step form ``table`` for a forward pass.

    Times between the captured sizes are those of the mean size that steps in between run at. Single measured
    products scatter, so the sum over a step's products is made monotone by isotonic regression of its log.
    """
    tokens, ms = _tokens_ms(times)
    requests, kv_tokens = np.meshgrid(np.array(_REQUESTS, float), np.array(_KV_TOKENS, float), indexing="ij")
    requests_ms = times.requests_ms(requests, np.maximum(kv_tokens, requests))
    requests_ms = _monotone(np.where(kv_tokens > LONGEST_CONTEXT * requests, np.nan, requests_ms))
    return {
        "tokens_ms": StepTable.of({"tokens": tokens}, np.round(ms, 5)),
        "requests_ms": StepTable.of(
            {"requests": _REQUESTS, "kv_tokens": _KV_TOKENS}, np.round(requests_ms, 5)
        ),
    }


def _tokens_ms(times: StepTimes) -> tuple[list[float], Floats]:
    """Return grid values and milliseconds of steps by tokens."""
    tokens = np.array([*CAPTURED, *_LARGE_STEPS], dtype=float)
    gap = np.diff(np.array(CAPTURED, dtype=float), append=CAPTURED[-1])
    run_at = tokens.copy()
    run_at[: len(CAPTURED)] += np.where(tokens[: len(CAPTURED)] >= 8, gap / 2.0, 0.0)
    ms = times.tokens_ms(run_at)
    return tokens.tolist(), np.exp(isotonic_regression(np.log(ms)).x)


def _monotone(times: Floats) -> Floats:
    """Return times that do not decrease along either axis, between the nearest such bounds.

    One long context takes longer than many short ones of the same sum, which are split more evenly. Cells
    that are NaN take the least of those with more requests.
    """
    lower = np.where(np.isnan(times), np.inf, times)
    for axis in (0, 1):
        lower = np.flip(np.minimum.accumulate(np.flip(lower, axis), axis), axis)
    upper = np.where(np.isnan(times), lower, times)
    for axis in (0, 1):
        upper = np.maximum.accumulate(upper, axis)
    return np.asarray(np.sqrt(lower * upper))
