"""Draws from distributions over whole numbers, by inversion in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.workload.streams import uniform

Distributions: TypeAlias = Sequence[tuple[NDArray[np.int32], NDArray[np.float64]]]

_BUCKETS_PER_VALUE: Final = 16
_MOST_BUCKETS: Final = 2**16  # of all distributions of a table together, if that leaves one per value


class Discrete(NamedTuple):
    """Distributions over positive whole numbers, one behind the other, ready for inversion.

    For each distribution the unit interval is cut into equal buckets. Where the cumulative distribution does
    not jump inside a bucket, its answer is looked up; only draws in the other buckets search, which is a
    small part of them. What is drawn does not depend on how many buckets there are.
    """

    values: NDArray[np.int32]
    """What can be drawn; ascending within each distribution, or in the order of the weights given."""
    cumulative: NDArray[np.float64]
    """Share of numbers that stand for the values up to this one; ends in 1 for each distribution."""
    answer: NDArray[np.int32]
    """Value for each bucket, or -1 - (position in `values` where the search begins)."""
    first_bucket: NDArray[np.int64]
    """Where the buckets of each distribution begin, and where those of the last one end."""


def discrete(
    distributions: Distributions,
    over: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None = None,
) -> Discrete:
    """Return the table of these distributions.

    Parameters
    ----------
    distributions : sequence of (values, weights)
        Values are at least 1; weights are non-negative with a positive sum, one per value.
    over : callable, optional
        Maps cumulative probabilities, 0 to 1, to what the table is to be inverted at instead, again 0 to 1
        and ascending.
    """
    sizes = np.array([values.size for values, _ in distributions])
    share = _MOST_BUCKETS // len(sizes)
    buckets = [_power_of_two(max(n, min(share, _BUCKETS_PER_VALUE * n))) for n in sizes.tolist()]
    first_bucket = np.concatenate(([0], np.cumsum(buckets)))
    cumulative = np.concatenate([_cumulative(weights) for _, weights in distributions])
    table = Discrete(
        values=np.concatenate([values for values, _ in distributions], dtype=np.int32),
        cumulative=cumulative if over is None else over(cumulative),
        answer=np.empty(first_bucket[-1], np.int32),
        first_bucket=first_bucket,
    )
    _fill_answers(table, np.cumsum(sizes) - sizes)
    return table


def _power_of_two(least: int) -> int:
    """Return the power of two not below `least`: with it the borders of buckets are exact."""
    return 1 << (least - 1).bit_length()


def _cumulative(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    cumulative = np.cumsum(weights / weights.max())
    cumulative /= cumulative[-1]
    # Behind the last positive weight rounding must not leave a gap that a draw could fall into.
    cumulative[np.flatnonzero(weights)[-1] :] = 1.0
    return cumulative


@jit
def _fill_answers(table: Discrete, first_value: NDArray[np.int64]) -> None:
    """Look every bucket up, in one walk over buckets and values."""
    for which in range(first_value.size):
        first = table.first_bucket[which]
        buckets = table.first_bucket[which + 1] - first
        at = first_value[which]
        for bucket in range(buckets):
            while table.cumulative[at] * buckets <= bucket:
                at += 1
            sure = table.cumulative[at] * buckets >= bucket + 1
            table.answer[first + bucket] = table.values[at] if sure else -1 - at


@jit
def invert(table: Discrete, which: int, number: float) -> int:
    """Return what a distribution has at this number of [0, 1): where its cumulative first exceeds it."""
    first = table.first_bucket[which]
    found: int = table.answer[first + int(number * (table.first_bucket[which + 1] - first))]
    if found < 0:
        at = -1 - found
        while table.cumulative[at] <= number:
            at += 1
        found = table.values[at]
    return found


@jit
def fill_drawn(drawn: NDArray[np.int32], table: Discrete, key: np.uint64) -> None:
    """Draw from the only distribution of a table, each at its own number of a stream."""
    for i in range(drawn.size):
        drawn[i] = invert(table, 0, uniform(key, i))


@jit
def fill_inverted(
    drawn: NDArray[np.int32], table: Discrete, which: NDArray[np.int32], numbers: NDArray[np.float64]
) -> None:
    """Invert numbers of [0, 1), each under the distribution that `which` gives for it."""
    for i in range(drawn.size):
        drawn[i] = invert(table, which[i], numbers[i])
