"""Fast draws from a distribution over positions 0 .. n - 1."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_MAX_BUCKETS: Final = 2**16


class Discrete(NamedTuple):
    """A distribution ready for inversion.

    The unit interval is cut into equal buckets. Where the cumulative distribution does not jump inside a
    bucket, its answer is looked up; only draws in the other buckets search, which is a small part of them.
    """

    cumulative: NDArray[np.float64]
    """Probability of positions up to this one; ends in 1."""
    answer: NDArray[np.int32]
    """Position for each bucket, or -1 where the draw has to be searched for."""


def discrete(weights: NDArray[np.float64]) -> Discrete:
    """Return the distribution proportional to ``weights``, which are non-negative with a positive sum."""
    cumulative = np.cumsum(weights / weights.max())
    cumulative /= cumulative[-1]
    # Behind the last positive weight rounding must not leave a gap that a draw could fall into.
    cumulative[np.flatnonzero(weights)[-1] :] = 1.0
    buckets = min(_MAX_BUCKETS, 1 << (4 * len(weights)).bit_length())
    edges = np.arange(buckets + 1) / buckets
    first = np.searchsorted(cumulative, edges[:-1], side="right")
    last = np.searchsorted(cumulative, edges[1:], side="left")
    return Discrete(cumulative, np.where(first == last, first, -1).astype(np.int32))


def invert(table: Discrete, uniform: NDArray[np.float64]) -> NDArray[np.int32]:
    """Return the position of each number of [0, 1) under the inverse cumulative distribution."""
    position = table.answer[(uniform * len(table.answer)).astype(np.int32)]
    unsure = np.flatnonzero(position < 0)
    position[unsure] = np.searchsorted(table.cumulative, uniform[unsure], side="right")
    return position
