"""How prompt and output lengths of the published runs go together, inferred from the KV memory they held."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import gamma, norm, qmc

from capplan.spec import Lengths
from capplan.twin.published_models import ENGINE, PublishedModel
from capplan.twin.published_runs import GROUPS, LENGTHS

WARM_UP_S = 120.0
_STEEPEST = 0.95
_LOG2_POINTS = 14


def fit_length_correlation(reference: Path, model: PublishedModel, groups: tuple[str, ...] = GROUPS) -> float:
    """Return the correlation of normal scores at which running requests hold as many KV tokens as measured.

    The tables have mean and spread of both lengths, but not how they go together. A request that decodes
    holds its prompt and on average half of its output, and long outputs decode longest: the more KV tokens
    running requests hold each, the more prompt comes with much output.

    Parameters
    ----------
    reference, model
        Tables and model.
    groups
        Groups of runs whose windows are used.
    """
    windows = pd.read_parquet(reference / "step_windows.parquet")
    windows = windows[
        (windows.model == model.key) & windows.group.isin(groups) & (windows.t_since_start_s > WARM_UP_S)
    ]
    measured = float(windows.kv_ktokens.sum() * 1000 / windows.running_mean.sum())
    scores = norm.ppf(qmc.Sobol(2, rng=np.random.default_rng(0)).random_base2(_LOG2_POINTS))
    prompts, outputs = LENGTHS[model.key]

    def excess(correlation: float) -> float:
        return held_kv_tokens(prompts, outputs, correlation, scores, ENGINE.block_size) - measured

    if excess(-_STEEPEST) > 0.0:
        return -_STEEPEST
    if excess(_STEEPEST) < 0.0:
        return _STEEPEST
    return round(float(brentq(excess, -_STEEPEST, _STEEPEST, xtol=1e-4)), 3)


def held_kv_tokens(
    prompts: Lengths, outputs: Lengths, correlation: float, scores: NDArray[np.float64], block_size: int
) -> float:
    """Return the KV tokens that a decoding request holds on average, in whole blocks.

    Parameters
    ----------
    prompts, outputs
        Gamma-distributed lengths.
    correlation
        Of their normal scores.
    scores
        Independent normal scores, shape (n, 2).
    block_size
        Tokens of a block.
    """
    first = scores[:, 0]
    second = correlation * first + np.sqrt(1.0 - correlation**2) * scores[:, 1]
    prompt, output = _gamma(prompts, first), _gamma(outputs, second)
    held = prompt + output / 2.0 + block_size / 2.0
    return float((output * held).sum() / output.sum())


def _gamma(lengths: Lengths, score: NDArray[np.float64]) -> NDArray[np.float64]:
    mean, std = lengths.mean_tokens, lengths.std_tokens
    values: NDArray[np.float64] = gamma.ppf(norm.cdf(score), (mean / std) ** 2, scale=std**2 / mean)
    return np.maximum(values, 1.0)
