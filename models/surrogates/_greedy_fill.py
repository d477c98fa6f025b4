"""Greedy fill of one GPU: all testing points of the adapter-caching paper's algorithm in one compiled call.

Algorithms 1 and 2 of section 7 with a surrogate. The planner's `solve_greedy` makes the same decisions with
any estimator, point by point.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import jit
from capplan.models.surrogates._compiled import (
    PREDICTED,
    STARVED_PROBABILITY,
    PackedTrees,
    fill_predictions,
)
from capplan.models.surrogates._features import FEATURES, CommonInputs, fill_vectors

Floats = NDArray[np.float64]

_THROUGHPUT: Final = PREDICTED.index("throughput_tok_s")
_STARVATION: Final = PREDICTED.index("starvation_probability")
_OFFERED: Final = FEATURES.index("offered_tok_s")
_IN_RANGE: Final = PREDICTED.index("in_range")
_IS_LIGHTER: Final = PREDICTED.index("is_lighter")
_FAILS, _UNKNOWN = -1, -2


class AdapterQueue(NamedTuple):
    """Adapters in the order of placement; shape (adapters,) each."""

    rates_rps: Floats
    ranks: Floats
    by_rate: NDArray[np.int64]
    """Positions in the queue, by ascending rate."""


class SlotNumbers(NamedTuple):
    """Numbers of slots to try, ascending."""

    limits: Floats
    """`gpu_limits` of each, shape (numbers, 5)."""
    fits: NDArray[np.bool_]
    """Whether they fit in memory."""
    host: int
    """Adapters that fit on the host."""


class Scratch(NamedTuple):
    """Work arrays; made by `scratch_arrays`."""

    ascending_rps: Floats
    load: Floats
    vectors: NDArray[np.float32]
    predictions: Floats
    feature: Floats


class FillRules(NamedTuple):
    """Predictions that count, and those that hold."""

    extrapolates: bool
    """Whether predictions outside the training range count."""
    least_throughput: float
    """Least throughput over offered load of a GPU that holds; 0: starvation alone decides."""


def scratch_arrays(adapters: int) -> Scratch:
    """Return the work arrays for a queue of adapters."""
    return Scratch(
        ascending_rps=np.empty(adapters),
        load=np.empty((4, adapters)),
        vectors=np.empty((2, len(FEATURES)), np.float32),
        predictions=np.empty((len(PREDICTED), 2)),
        feature=np.empty((2, len(FEATURES))),
    )


@jit
def fill_gpu(
    packed: PackedTrees,
    common: CommonInputs,
    queue: AdapterQueue,
    start: int,
    grid: NDArray[np.int64],
    slots: SlotNumbers,
    rules: FillRules,
    scratch: Scratch,
) -> tuple[int, int, bool, bool]:
    """Fill a GPU from a position of the queue until a test fails or the grid ends.

    Parameters
    ----------
    packed, common, queue, start
        Surrogate, its inputs that all GPUs share, and the adapters from position `start`.
    grid
        Testing points, ascending.
    slots
        Numbers of slots; the grid, or a fixed one.
    rules
        Which predictions count, and when they hold.
    scratch
        Work arrays.

    Returns
    -------
    int
        Adapters on the GPU.
    int
        Index of their number of slots, -1 without adapters.
    bool
        Whether the test of a rest smaller than its testing point failed.
    bool
        Whether every prediction that decided was in range.
    """
    waiting = queue.rates_rps.size - start
    count, at, point = 0, -1, 0
    while count < waiting and count < grid[grid.size - 1]:
        while grid[point] <= count:
            point += 1
        tested = min(grid[point], waiting)
        best = _test(packed, common, queue, (start, start + tested), at, slots, rules, scratch)
        if best < 0:
            return count, at, best == _FAILS and tested < grid[point], best == _FAILS
        count, at = tested, best
    return count, at, False, True


@jit
def _test(
    packed: PackedTrees,
    common: CommonInputs,
    queue: AdapterQueue,
    tested: tuple[int, int],
    at: int,
    slots: SlotNumbers,
    rules: FillRules,
    scratch: Scratch,
) -> int:
    """Return the better of the current and the next number of slots, by index; `_FAILS` or `_UNKNOWN`."""
    begin, end = tested
    size = 0
    for position in queue.by_rate:
        if begin <= position < end:
            scratch.ascending_rps[size] = queue.rates_rps[position]
            size += 1
    first = last = max(at, 0)
    while last < min(at + 2, slots.fits.size) and slots.fits[last]:
        if slots.host < min(slots.limits[last, 0], size):
            break
        last += 1
    candidates = last - first
    if candidates == 0:
        return _FAILS
    vectors, limits = scratch.vectors[:candidates], slots.limits[first:last]
    rates_rps, ranks = queue.rates_rps[begin:end], queue.ranks[begin:end]
    ascending_rps = scratch.ascending_rps[:size]
    fill_vectors(vectors, common, limits, rates_rps, ranks, ascending_rps, scratch.load)
    answers = scratch.predictions
    fill_predictions(answers, packed, vectors, scratch.feature)
    best, best_holds = 0, False
    for number in range(candidates):
        enough = answers[_THROUGHPUT, number] >= rules.least_throughput * vectors[number, _OFFERED]
        holds = enough and answers[_STARVATION, number] < STARVED_PROBABILITY
        in_range = answers[_IN_RANGE, number] > 0.0 or (answers[_IS_LIGHTER, number] > 0.0 and holds)
        if not (in_range or rules.extrapolates):
            return _UNKNOWN
        if answers[_THROUGHPUT, number] >= answers[_THROUGHPUT, best]:
            best, best_holds = number, holds
    return first + best if best_holds else _FAILS
