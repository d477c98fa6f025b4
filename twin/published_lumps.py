"""Prompt tokens come in lumps: what a mean over ten seconds says of the single steps within it.

Prompts that arrive in a step are counted by a Poisson law and gamma-distributed in length, so their tokens
are a compound sum. Step times bend at some numbers of tokens, and the mean of a bent function is not the
function of the mean.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainc, gammaln

from capplan.models.step_latency import GRAPH_TOKENS, SPLIT_TOKENS
from capplan.spec import Lengths

_MOST_PROMPTS = 60  # in one step; their share of the law is nil at the largest budget


def share_of_small_steps(
    requests: NDArray[np.float64], prompt_tokens: NDArray[np.float64], prompts: Lengths
) -> NDArray[np.float64]:
    """Return the share of steps with fewer than `SPLIT_TOKENS` tokens.

    Parameters
    ----------
    requests
        Mean number of running requests, each of one token, shape (windows,).
    prompt_tokens
        Mean prompt tokens per step, same shape.
    prompts
        Lengths of prompts.
    """
    weights, shapes, scale = _compound(prompt_tokens, prompts)
    room = SPLIT_TOKENS - requests
    below = np.ones_like(weights)
    below[:, 1:] = gammainc(shapes[1:], np.maximum(room, 0.0)[:, None] / scale)
    return np.where(room > 0.0, (weights * below).sum(axis=1), 0.0)


def tokens_beyond_graphs(
    requests: NDArray[np.float64], prompt_tokens: NDArray[np.float64], prompts: Lengths, budget: int
) -> NDArray[np.float64]:
    """Return the mean number of tokens beyond `GRAPH_TOKENS`, of at most `budget` in a step.

    Parameters
    ----------
    requests, prompt_tokens, prompts
        As for `share_of_small_steps`.
    budget
        Token budget of a step.
    """
    law = _compound(prompt_tokens, prompts)
    beyond: NDArray[np.float64] = _mean_excess(law, GRAPH_TOKENS - requests) - _mean_excess(
        law, budget - requests
    )
    return beyond


_Law = tuple[NDArray[np.float64], NDArray[np.float64], float]


def _compound(prompt_tokens: NDArray[np.float64], prompts: Lengths) -> _Law:
    """Return the weight of each number of prompts, the gamma shape of their sum, and its scale."""
    mean, std = prompts.mean_tokens, prompts.std_tokens
    number = np.arange(_MOST_PROMPTS + 1, dtype=np.float64)
    expected = np.maximum(prompt_tokens, 1e-9)[:, None] / mean
    weights: NDArray[np.float64] = np.exp(number * np.log(expected) - expected - gammaln(number + 1))
    weights /= weights.sum(axis=1, keepdims=True)
    shapes: NDArray[np.float64] = number * (mean / std) ** 2
    return weights, shapes, std**2 / mean


def _mean_excess(law: _Law, above: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of what the sum has above a number of tokens, which may be negative."""
    weights, shapes, scale = law
    at = np.maximum(above, 0.0)[:, None] / scale
    excess = np.zeros_like(weights)
    excess[:, 0] = np.maximum(-above, 0.0)
    mean_over = shapes[1:] * scale * (1.0 - gammainc(shapes[1:] + 1.0, at))
    excess[:, 1:] = mean_over - above[:, None] * (1.0 - gammainc(shapes[1:], at))
    result: NDArray[np.float64] = (weights * excess).sum(axis=1)
    return result
