"""Prompt tokens come in lumps: what the mean over a window says of the single steps within it.

Step times bend at some numbers of tokens, and the mean of a bent function is not the function of the mean.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import gamma

NODES: Final = 8
"""Equally likely amounts of prompt tokens that stand for all the steps of a window that hold a prompt."""


def prompt_lumps(
    prefills: NDArray[np.float64], std_per_mean: NDArray[np.float64], single: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return how many times their mean the prompt tokens of steps with a prompt are, shape (rows, NODES).

    Prompts in a step are taken to be Poisson in number, and their tokens to add up to a gamma distribution
    with the mean and the variance of that compound sum, given that there is a prompt.

    Parameters
    ----------
    prefills
        Mean number of prompts in a step, shape (rows,).
    std_per_mean
        Standard deviation over mean of the tokens that one prompt has in a step, same shape.
    single
        Rows that are one step, whose tokens are known, same shape.
    """
    number = np.maximum(prefills, 1e-9)
    share = -np.expm1(-number)
    mean = number / share
    variance = (number * (1.0 + std_per_mean**2) + number**2) / share - mean**2
    spread = np.where(single | (prefills <= 0.0), 0.0, np.maximum(variance, 0.0) / mean**2)
    lumps = np.ones((prefills.size, NODES))
    wide = spread > 1e-6
    at = (np.arange(NODES) + 0.5) / NODES
    shape = 1.0 / spread[wide, None]
    drawn: NDArray[np.float64] = np.asarray(gamma.ppf(at, shape, scale=1.0 / shape))
    lumps[wide] = drawn / drawn.mean(axis=1, keepdims=True)
    return lumps
