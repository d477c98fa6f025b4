"""Compiled surrogate predictions for GPUs given as arrays of rates and ranks.

The results equal `Surrogate.predict_many`. For a few vectors at a time NumPy is much slower: 100 microseconds
where compiled small trees take one.

`fill_gpu` visits all testing points of the adapter-caching paper's algorithm in one compiled call: algorithms
1 and 2 of section 7 with a surrogate. The planner's `solve_greedy` makes the same decisions with any
estimator, point by point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import jit
from capplan.models._memory import KvBudget, kv_budget
from capplan.models._vector_math import asinh
from capplan.models.surrogates._features import (
    FEATURES,
    CommonInputs,
    common_inputs,
    feature_vectors,
    fill_vectors,
    gpu_limits,
    unsupported_workload,
    vectors_alone,
)
from capplan.models.surrogates._outputs import (
    LEAST_PROBABILITY,
    LOG_SERVED,
    OVER_EXPECTED,
    PROBABILITY,
    STARVATION,
    Forest,
    forest_value,
    joined,
)
from capplan.models.surrogates._surrogate import Surrogate, SurrogateAnswers
from capplan.spec import STARVED_BELOW, EngineArgs, EngineLimits, Workload

Floats = NDArray[np.float64]
Vectors = NDArray[np.float32]

LOAD_FEATURES: Final = (
    "adapters",
    "rate_sum_rps",
    "rate_std_rps",
    "rate_max_rps",
    "offered_tok_s",
    "load_over_capacity",
    "batch_over_limit",
    "slot_wait_s",
    "active_adapters",
    "active_adapters_over_slots",
    "hottest_requests_in_flight",
    "step_ms",
    "loading_share",
    "request_life_s",
)
"""Features that fall with the load, all else being equal."""

STARVED_PROBABILITY: Final = 0.5
"""Probability of starvation from which a GPU counts as starved."""

_STARVATION: Final = tuple(STARVATION)
_GIVES_PROBABILITY: Final = _STARVATION.index(PROBABILITY)
_GIVES_LOG_SERVED: Final = _STARVATION.index(LOG_SERVED)
_OFFERED: Final = FEATURES.index("offered_tok_s")
_EXPECTED: Final = FEATURES.index("expected_share")
_SLOT_WAIT: Final = FEATURES.index("slot_wait_s")
_LIFE: Final = FEATURES.index("request_life_s")

_LOWEST, _LOWEST_BUT_LOAD, _HIGHEST = range(3)


PREDICTED: Final = (
    "throughput_tok_s",
    "low_tok_s",
    "high_tok_s",
    "starvation_probability",
    "novelty",
    "in_range",
    "is_lighter",
)
"""Rows that `fill_predictions` writes."""


@dataclass(frozen=True)
class Predictions(SurrogateAnswers):
    """Predictions of several GPUs; shape (n,) each."""

    is_lighter: NDArray[np.bool_]
    """Whether the scenario would be in range if training had gone down to no load."""
    request_s: NDArray[np.float64]
    """Time from arrival to last token by the fluid model: slot wait and request lifetime."""


class PackedTrees(NamedTuple):
    """Surrogate in few arrays, since each is converted on every call of compiled code."""

    trees: Forest
    """Trees of throughput, of starvation, and one for each end of the intervals."""
    throughput_trees: int
    starvation_trees: int
    starvation_form: int
    """Index into `_STARVATION`."""
    slope: float
    offset: float
    bounds: Vectors
    """Lowest features, the same without load features, and highest; shape (3, features)."""
    centre: Floats
    whitening: Floats
    farthest: float


@dataclass(frozen=True)
class CompiledSurrogate:
    """Surrogate with the inputs that all predictions share; made by `compile_surrogate`."""

    surrogate: Surrogate
    common: CommonInputs
    kv_budget: KvBudget
    packed: PackedTrees | None
    """Trees for compiled code; None if an output needs two forests."""

    def predict(
        self, rates_rps: Floats, ranks: Floats, engines: Sequence[EngineArgs | EngineLimits]
    ) -> Predictions:
        """Predict GPUs that serve the same adapters under different engine settings.

        Parameters
        ----------
        rates_rps, ranks
            Of each adapter, at least one; shape (adapters,).
        engines
            At least one. gpu_memory_utilization is that of `compile_surrogate`.

        Returns
        -------
        Predictions
            As `Surrogate.predict` for each setting; arrays of shape (engines,).
        """
        limits = [gpu_limits(self.kv_budget, engine) for engine in engines]
        return self._predict(feature_vectors(self.common, limits, rates_rps, ranks))

    def predict_alone(
        self, rates_rps: Floats, ranks: Floats, engines: Sequence[EngineArgs | EngineLimits]
    ) -> Predictions:
        """Predict GPUs that serve one adapter each, with its own engine settings; shape (adapters,)."""
        limits = [gpu_limits(self.kv_budget, engine) for engine in engines]
        return self._predict(vectors_alone(self.common, limits, rates_rps, ranks))

    def _predict(self, vectors: Vectors) -> Predictions:
        request_s = vectors[:, _SLOT_WAIT].astype(np.float64) + vectors[:, _LIFE]
        if self.packed is None:  # in NumPy, for any form of output
            answers, domain = self.surrogate.predict_many(vectors), self.surrogate.domain
            lighter = replace(domain, low=_without_load(domain.low)).contains(vectors)
            return Predictions(**vars(answers), is_lighter=lighter, request_s=request_s)
        rows = np.empty((len(PREDICTED), len(vectors)))
        fill_predictions(rows, self.packed, vectors, np.empty((2, vectors.shape[1])))
        throughput, low, high, probability, novelty, in_range, is_lighter = rows
        return Predictions(
            throughput_tok_s=throughput,
            low_tok_s=low,
            high_tok_s=high,
            starvation_probability=probability,
            novelty=novelty,
            in_range=in_range > 0.0,
            is_lighter=is_lighter > 0.0,
            request_s=request_s,
        )


def compile_surrogate(
    surrogate: Surrogate, workload: Workload, engine: EngineArgs
) -> CompiledSurrogate | None:
    """Return the surrogate for GPUs that serve any adapters with the requests of a workload.

    None if the surrogate was not trained on such workloads.
    """
    profile = surrogate.profile
    if unsupported_workload(workload, profile):
        return None
    common = common_inputs(workload, profile)
    budget = kv_budget(profile, engine.gpu_memory_utilization)
    return CompiledSurrogate(surrogate, common, budget, pack_trees(surrogate))


def pack_trees(surrogate: Surrogate) -> PackedTrees | None:
    """Return the arrays of a surrogate; None if an output needs more than one forest."""
    throughput, starvation, domain = surrogate.throughput, surrogate.starvation, surrogate.domain
    if throughput.form != OVER_EXPECTED:
        return None
    forests = (*throughput.forests, *starvation.forests)
    ends = (surrogate.intervals.low.forest, surrogate.intervals.high.forest)
    return PackedTrees(
        trees=joined((*forests, *ends)),
        throughput_trees=forests[0].roots.size,
        starvation_trees=forests[1].roots.size,
        starvation_form=_STARVATION.index(starvation.form),
        slope=surrogate.calibration.slope,
        offset=surrogate.calibration.offset,
        bounds=np.array([domain.low, _without_load(domain.low), domain.high]),
        centre=domain.centre,
        whitening=domain.whitening,
        farthest=domain.farthest,
    )


def _without_load(lowest: Vectors) -> Vectors:
    is_load = np.array([name in LOAD_FEATURES for name in FEATURES])
    return np.where(is_load, np.float32(-np.inf), lowest)


@jit
def fill_predictions(rows: Floats, packed: PackedTrees, vectors: Vectors, scratch: Floats) -> None:
    """Write the rows of `PREDICTED`, with a column per vector; `scratch` has shape (2, features)."""
    starvation_begins = packed.throughput_trees
    ends_begin = packed.throughput_trees + packed.starvation_trees
    bounds = packed.bounds
    for i in range(vectors.shape[0]):
        x = vectors[i]
        expected = np.float64(x[_OFFERED]) * max(np.float64(x[_EXPECTED]), 1e-6)
        throughput = expected * np.exp(_mean_leaf(packed.trees, x, 0, starvation_begins))
        low = _mean_leaf(packed.trees, x, ends_begin, ends_begin + 1)
        high = _mean_leaf(packed.trees, x, ends_begin + 1, ends_begin + 2)
        starvation = _mean_leaf(packed.trees, x, starvation_begins, ends_begin)
        novelty = _novelty(packed, x, scratch)
        rows[0, i] = throughput
        rows[1, i] = throughput * np.exp(min(0.0, low))
        rows[2, i] = throughput * np.exp(max(0.0, high))
        rows[3, i] = _probability(packed, starvation)
        rows[4, i] = novelty
        rows[5, i] = novelty <= 1.0 and _within(bounds[_LOWEST], x, bounds[_HIGHEST])
        rows[6, i] = novelty <= 1.0 and _within(bounds[_LOWEST_BUT_LOAD], x, bounds[_HIGHEST])


@jit
def _mean_leaf(trees: Forest, x: Vectors, begin: int, end: int) -> float:
    _, feature, threshold, left, right, value = trees
    return forest_value(Forest(trees.roots[begin:end], feature, threshold, left, right, value), x)


@jit
def _probability(packed: PackedTrees, score: float) -> float:
    if packed.starvation_form == _GIVES_PROBABILITY:
        chance = min(max(score, LEAST_PROBABILITY), 1.0 - LEAST_PROBABILITY)
        score = np.log(chance / (1.0 - chance))
    elif packed.starvation_form == _GIVES_LOG_SERVED:
        score = np.log(STARVED_BELOW) - score
    return float(0.5 * (1.0 + np.tanh(0.5 * (packed.slope * score + packed.offset))))


@jit
def _novelty(packed: PackedTrees, x: Vectors, scratch: Floats) -> float:
    scaled, mixed = scratch[0], scratch[1]
    for row in range(x.size):
        scaled[row] = asinh(np.float64(x[row])) - packed.centre[row]
    mixed[:] = 0.0
    for row in range(x.size):
        value, weights = scaled[row], packed.whitening[row]
        for column in range(mixed.size):
            mixed[column] += value * weights[column]
    squared = 0.0
    for column in range(x.size):
        squared += mixed[column] ** 2
    return float(np.sqrt(squared) / packed.farthest)


@jit
def _within(low: Vectors, x: Vectors, high: Vectors) -> bool:
    inside = True
    for i in range(x.size):
        inside = inside and low[i] <= x[i] <= high[i]
    return inside


_THROUGHPUT: Final = PREDICTED.index("throughput_tok_s")
_STARVATION_PROBABILITY: Final = PREDICTED.index("starvation_probability")
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
        holds = enough and answers[_STARVATION_PROBABILITY, number] < STARVED_PROBABILITY
        in_range = answers[_IN_RANGE, number] > 0.0 or (answers[_IS_LIGHTER, number] > 0.0 and holds)
        if not (in_range or rules.extrapolates):
            return _UNKNOWN
        if answers[_THROUGHPUT, number] >= answers[_THROUGHPUT, best]:
            best, best_holds = number, holds
    return first + best if best_holds else _FAILS
