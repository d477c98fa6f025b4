"""Length distributions, clipped to what the engine takes, ready to draw from."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.spec import Lengths
from capplan.workload.copula import over_scores
from capplan.workload.discrete import Discrete, discrete, fill_inverted
from capplan.workload.gamma import gamma_probabilities

_CONSTANT_STD: Final = 0.5  # tokens; with less spread, rounding decides everything
_NEVER: Final = 1e-15  # probability of lengths left out of the table, to keep it small


class LengthTable(NamedTuple):
    """A distribution of whole-number lengths."""

    tokens: NDArray[np.int32]
    """Lengths that occur, ascending."""
    probabilities: NDArray[np.float64]
    """Probability of each; they sum to 1."""

    @property
    def mean_tokens(self) -> float:
        """Mean in tokens, after rounding and the clip."""
        return float(self.probabilities @ self.tokens)

    @property
    def std_tokens(self) -> float:
        """Standard deviation in tokens, after rounding and the clip."""
        return math.sqrt(float(self.probabilities @ (self.tokens - self.mean_tokens) ** 2))

    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.int32]:
        """Return the length at each number of [0, 1) of the inverse distribution."""
        drawn = np.empty(len(uniform), np.int32)
        only = np.zeros(len(uniform), np.int32)
        fill_inverted(drawn, discrete([(self.tokens, self.probabilities)]), only, uniform)
        return drawn


@lru_cache(maxsize=1024)
def length_table(lengths: Lengths, max_model_len: int) -> LengthTable:
    """Return the distribution of ``lengths`` on [1, ``max_model_len``] tokens.

    ``Lengths(mean)`` and ``Lengths(mean, std)`` keep their mean under the clip; a histogram's longer values
    become ``max_model_len``.

    Raises
    ------
    InputError
        When no distribution on this range has the mean.
    """
    if max_model_len < 1:
        raise InputError("must be a whole number >= 1", max_model_len, "max_model_len")
    tokens, weights = _weights(lengths, max_model_len)
    tokens = np.minimum(tokens, max_model_len)
    last = int(np.searchsorted(tokens, max_model_len))  # the first of those the clip made equal
    if last < len(tokens):
        tokens, weights = tokens[: last + 1], np.append(weights[:last], weights[last:].sum())
    kept = weights > _NEVER * weights.sum()
    tokens, probabilities = tokens[kept], weights[kept] / weights[kept].sum()
    return LengthTable(tokens.astype(np.int32), probabilities)


@lru_cache(maxsize=64)
def length_draws(lengths: tuple[Lengths, ...], max_model_len: int, longest: int) -> Discrete:
    """Return these distributions on [1, ``max_model_len``], then cut to ``longest``, ready to draw from."""
    tables = [length_table(each, max_model_len) for each in lengths]
    return discrete([(np.minimum(table.tokens, np.int32(longest)), table.probabilities) for table in tables])


@lru_cache(maxsize=64)
def length_draws_over_scores(lengths: tuple[Lengths, ...], max_model_len: int) -> Discrete:
    """Return these distributions on [1, ``max_model_len``], ready to draw from at normal scores."""
    tables = [length_table(each, max_model_len) for each in lengths]
    return discrete([(table.tokens, table.probabilities) for table in tables], over_scores)


def _weights(lengths: Lengths, limit: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return ascending lengths and their weights, before the clip."""
    counts = np.array(lengths.counts or (), dtype=np.float64)
    if lengths.values is not None:
        return np.array(lengths.values, dtype=np.int64), counts
    if lengths.edges is not None:
        widths = [high - low for low, high in pairwise(lengths.edges)]
        return np.arange(lengths.edges[0], lengths.edges[-1]), np.repeat(counts / widths, widths)
    return _around_mean(lengths.mean_tokens, lengths.std_tokens, limit)


def _around_mean(mean: float, std: float, limit: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    constant = std < _CONSTANT_STD
    if mean > limit or (not constant and not 1 < mean < limit):
        bounds = f"[1, {limit}]" if constant else f"1 to {limit}, ends excluded"
        raise InputError(f"must be within {bounds}: lengths end at max_model_len", mean, "Lengths.mean")
    if constant:
        below = math.floor(mean)
        part = mean - below
        return np.array([below, below + 1]), np.array([1 - part, part])
    return np.arange(1, limit + 1), gamma_probabilities(mean, std, limit)
