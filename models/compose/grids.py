"""Step tables of a forward pass: its times on a grid of tokens, requests and KV tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from capplan.models.compose.forward import StepTimes
from capplan.models.step_latency import GRAPH_TOKENS
from capplan.spec import StepTable

Floats = NDArray[np.float64]

CAPTURED: Final = (1, 2, 4, *range(8, 257, 8), *range(272, GRAPH_TOKENS + 1, 16))
"""Sizes of vLLM's CUDA graphs: a step runs at the next one from its tokens up (VLLM_RULES 2)."""

LONGEST_CONTEXT: Final = 32_768

MAX_TOKENS: Final = 16_384
_LARGE_STEPS: Final = tuple(int(each) for each in np.geomspace(GRAPH_TOKENS + 1, MAX_TOKENS, 28))

_REQUESTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_KV_TOKENS: Final = (0, *(int(2.0 ** (exponent / 2.0)) for exponent in range(14, 43)))
"""Factors of the square root of 2, from 128 to 2 million."""


def step_tables(times: StepTimes) -> dict[str, StepTable]:
    """Return the tables of the step form ``table`` for a forward pass.

    A step runs at the size of the CUDA graph that holds its tokens, so the table has both ends of every size.
    The sum over a step's operators is made monotone by isotonic regression of its log, since single measured
    products scatter.
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
    run_at = np.array([*CAPTURED, *_LARGE_STEPS], dtype=float)
    ms = np.exp(isotonic_regression(np.log(times.tokens_ms(run_at))).x)
    points = dict(zip(run_at.tolist(), ms.tolist(), strict=True))
    for smaller, size in pairwise(CAPTURED):
        points.setdefault(smaller + 1.0, points[size])
    tokens = sorted(points)
    return tokens, np.array([points[each] for each in tokens])


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
