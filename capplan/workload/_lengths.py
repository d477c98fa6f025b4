"""Length distributions on [1, limit] tokens, and sampling of prompt and output lengths."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammainc, gammaincc, ndtri

from capplan._jit import jit
from capplan.errors import InputError
from capplan.spec import Lengths
from capplan.workload._sampling import DiscreteTable, discrete_table, invert, sample_at, uniform

_EXACT: Final = 128  # integers summed one by one; beyond, the sum is an integral to within 0.003 tokens
_SHAPE_RANGE: Final = 4.0
_MIN_SHAPE: Final = 0.05  # std = 4.5 mean; below, the scale that reaches a mean outgrows floating point
_MAX_SCALE: Final = 1e140


def gamma_probabilities(mean: float, std: float, limit: int) -> NDArray[np.float64]:
    """Return the probabilities of 1, 2, ... ``limit`` tokens.

    Parameters
    ----------
    mean, std : float
        Wanted moments in tokens; 1 < mean < limit and std >= 0.5.
    limit : int
        Largest length in tokens.

    Returns
    -------
    ndarray of float64, shape (limit,)
        Their mean is ``mean``; their standard deviation is ``std`` where the clip allows it.

    Raises
    ------
    InputError
        When no gamma has this mean after the clip.
    """
    shape = _solve_shape(mean, std, limit)
    upper = np.arange(1, limit) + 0.5
    survival = np.asarray(gammaincc(shape, upper / _solve_scale(shape, mean, limit)), dtype=np.float64)
    return -np.diff(survival, prepend=1.0, append=0.0)


def _solve_shape(mean: float, std: float, limit: int) -> float:
    """Return the shape whose realised standard deviation is ``std``, or the nearest in range."""
    plain = (mean / std) ** 2
    low = max(plain / _SHAPE_RANGE, _MIN_SHAPE)
    high = max(plain * _SHAPE_RANGE, low)

    def excess(shape: float) -> float:
        first, second = _moments(shape, _solve_scale(shape, mean, limit), limit)
        return second - first**2 - std**2

    if excess(low) <= 0:
        return low
    if excess(high) >= 0:
        return high
    return float(brentq(excess, low, high, rtol=1e-5))


def _solve_scale(shape: float, mean: float, limit: int) -> float:
    """Return the scale whose realised mean is ``mean``: the mean grows with the scale from 1 to ``limit``."""

    def excess(scale: float) -> float:
        return _moments(shape, scale, limit)[0] - mean

    low = high = mean / shape
    while excess(low) > 0:
        low /= 2
    while excess(high) < 0:
        high *= 2
        if high > _MAX_SCALE:
            raise InputError(
                f"mean cannot be reached with lengths clipped to [1, {limit}]", mean, "Lengths.mean"
            )
    return float(brentq(excess, low, high, xtol=1e-300, rtol=1e-13)) if low < high else low


def _moments(shape: float, scale: float, limit: int) -> tuple[float, float]:
    """Return mean and mean square of the rounded, clipped variable.

    With S(x) the gamma's survival function, P(X > j) = S(j + 1/2) for 1 <= j < limit, so that
    E[X] = 1 + sum S(j + 1/2) and E[X^2] = 1 + sum 2 (j + 1/2) S(j + 1/2).
    """
    middles = np.arange(1, min(_EXACT, limit)) + 0.5
    survival = gammaincc(shape, middles / scale)
    first, second = 1 + survival.sum(), 1 + (2 * middles * survival).sum()
    if limit > _EXACT:  # midpoint rule backwards: the rest of each sum is an integral, which is known
        a, b = float(_EXACT), float(limit)
        at_a, at_b = gammaincc(shape, a / scale), gammaincc(shape, b / scale)
        inside_1 = gammainc(shape + 1, b / scale) - gammainc(shape + 1, a / scale)
        inside_2 = gammainc(shape + 2, b / scale) - gammainc(shape + 2, a / scale)
        first += b * at_b - a * at_a + shape * scale * inside_1
        second += b * b * at_b - a * a * at_a + shape * (shape + 1) * scale**2 * inside_2
    return float(first), float(second)


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


def to_scores(cumulative: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return cumulative probabilities as normal scores, with those within reach mapped to [0, 1]."""
    return np.clip((ndtri(cumulative) + _SIGMAS) / (2 * _SIGMAS), 0.0, 1.0)


@jit
def _score(scores: NDArray[np.float64], number: float) -> float:
    at = number * _LEVELS
    cell = int(at)
    return float(scores[cell] + (at - cell) * (scores[cell + 1] - scores[cell]))


@jit
def correlated_score(tables: Copula, first: float, second: float) -> float:
    """Return a score that goes together with that of `first`, mapped as `to_scores` does, in [0, 1)."""
    score = tables.correlation * _score(tables.scores, first) + tables.remainder * _score(
        tables.scores, second
    )
    return float(min(max((score + _SIGMAS) / (2 * _SIGMAS), 0.0), _LARGEST))


@jit
def sample_pairs(
    prompts: NDArray[np.int32],
    outputs: NDArray[np.int32],
    prompt_table: DiscreteTable,
    output_table: DiscreteTable,
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
        sample_at(drawn, discrete_table([(self.tokens, self.probabilities)]), only, uniform)
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
def length_sampler(lengths: tuple[Lengths, ...], max_model_len: int, longest: int) -> DiscreteTable:
    """Return these distributions on [1, ``max_model_len``], then cut to ``longest``, ready to draw from."""
    tables = [length_table(each, max_model_len) for each in lengths]
    return discrete_table(
        [(np.minimum(table.tokens, np.int32(longest)), table.probabilities) for table in tables]
    )


@lru_cache(maxsize=64)
def length_score_sampler(lengths: tuple[Lengths, ...], max_model_len: int) -> DiscreteTable:
    """Return these distributions on [1, ``max_model_len``], ready to draw from at normal scores."""
    tables = [length_table(each, max_model_len) for each in lengths]
    return discrete_table([(table.tokens, table.probabilities) for table in tables], to_scores)


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
