"""Prompt and output lengths that go together: a Gaussian copula by tables, a few nanoseconds each.

A request's two lengths come from two normal scores that correlate. The prompt is the inverse of its
distribution at a uniform number `u`, whose score is ``ndtri(u)``. The output's score is
``r * ndtri(u) + sqrt(1 - r^2) * ndtri(v)`` with `v` uniform and independent; instead of turning it back into
a uniform number, its distribution is tabulated over scores.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from capplan.compile import jit
from capplan.workload.discrete import Discrete, invert
from capplan.workload.streams import uniform

_LEVELS: Final = 2**14  # normal scores: linear between these, the outermost ones constant
_SIGMAS: Final = 6.0  # scores beyond are taken for these; a score is so large once in 1e9 draws
_LARGEST: Final = 1.0 - 2.0**-53


class Copula(NamedTuple):
    """The tables for one correlation."""

    correlation: float
    remainder: float
    """``sqrt(1 - correlation^2)``."""
    scores: NDArray[np.float64]


@lru_cache(maxsize=16)
def copula(correlation: float) -> Copula:
    """Return the tables for a correlation of normal scores, in (-1, 1)."""
    # The outermost levels stand for all beyond them: the mean score there, not infinity.
    borders = np.arange(_LEVELS + 1) / _LEVELS
    borders[0], borders[-1] = 0.25 / _LEVELS, 1.0 - 0.25 / _LEVELS
    return Copula(correlation, math.sqrt(1.0 - correlation**2), ndtri(borders))


def over_scores(cumulative: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return cumulative probabilities as normal scores, with those within reach mapped to [0, 1]."""
    return np.clip((ndtri(cumulative) + _SIGMAS) / (2 * _SIGMAS), 0.0, 1.0)


@jit
def _score(scores: NDArray[np.float64], number: float) -> float:
    at = number * _LEVELS
    cell = int(at)
    return float(scores[cell] + (at - cell) * (scores[cell + 1] - scores[cell]))


@jit
def correlated_score(tables: Copula, first: float, second: float) -> float:
    """Return a score that goes together with that of `first`, mapped as `over_scores` does, in [0, 1)."""
    score = tables.correlation * _score(tables.scores, first) + tables.remainder * _score(
        tables.scores, second
    )
    return float(min(max((score + _SIGMAS) / (2 * _SIGMAS), 0.0), _LARGEST))


@jit
def fill_pairs(
    prompts: NDArray[np.int32],
    outputs: NDArray[np.int32],
    prompt_table: Discrete,
    output_table: Discrete,
    prompts_of: NDArray[np.int32],
    outputs_of: NDArray[np.int32],
    prompt_key: np.uint64,
    output_key: np.uint64,
    tables: Copula,
) -> None:
    """Draw prompt and output lengths that go together; the table of outputs is one over scores.

    `prompts_of` and `outputs_of` give the distribution of each request; where they are shorter than the
    requests, all have the first one.
    """
    alike = prompts_of.size < prompts.size
    for i in range(prompts.size):
        first = uniform(prompt_key, i)
        second = correlated_score(tables, first, uniform(output_key, i))
        prompts[i] = invert(prompt_table, 0 if alike else prompts_of[i], first)
        outputs[i] = invert(output_table, 0 if alike else outputs_of[i], second)
