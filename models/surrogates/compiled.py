"""Compiled surrogate predictions for GPUs given as arrays of rates and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.models.memory import KvBudget, kv_budget
from capplan.models.surrogates.features import (
    FEATURES,
    CommonInputs,
    common_inputs,
    fill_vectors,
    unsupported_workload,
)
from capplan.models.surrogates.outputs import (
    LEAST_PROBABILITY,
    LOG_ODDS,
    LOG_SERVED,
    OVER_EXPECTED,
    OVER_OFFERED,
    PROBABILITY,
    Forest,
    forest_answer,
)
from capplan.models.surrogates.surrogate import Surrogate, SurrogateAnswers
from capplan.spec import STARVED_BELOW, Workload

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

"""What falls with the load, all else being equal."""

_THROUGHPUT: Final = (OVER_EXPECTED, OVER_OFFERED)

_STARVATION: Final = (PROBABILITY, LOG_ODDS, LOG_SERVED)

_OFFERED: Final = FEATURES.index("offered_tok_s")

_EXPECTED: Final = FEATURES.index("expected_share")

_SLOT_WAIT: Final = FEATURES.index("slot_wait_s")

_LIFE: Final = FEATURES.index("request_life_s")

_COLUMNS: Final = 7


@dataclass(frozen=True)
class Predictions(SurrogateAnswers):
    """Answers, and whether what is out of range is so for want of load only; shape (n,) each."""

    is_lighter: NDArray[np.bool_]
    """Whether it would be in range, had training gone down to no load at all."""
    request_s: NDArray[np.float64]
    """Time from arrival to last token by the fluid estimate: the wait for a slot, and a request's life."""


class PackedTrees(NamedTuple):
    """What a surrogate learned, in few arrays: compiled code takes each of them from Python anew."""

    trees: Forest
    """The trees of throughput, those of starvation, and one for each end of the intervals."""
    throughput_trees: int
    starvation_trees: int
    throughput_form: int
    """Number in `_THROUGHPUT`."""
    starvation_form: int
    """Number in `_STARVATION`."""
    slope: float
    offset: float
    bounds: Vectors
    """Lowest features, the same without those of load, and highest; shape (3, features)."""
    centre: Floats
    whitening: Floats
    farthest: float


def pack_trees(surrogate: Surrogate) -> PackedTrees | None:
    """Return what a surrogate learned; None where its answers take more than a forest each."""
    throughput, starvation, domain = surrogate.throughput, surrogate.starvation, surrogate.domain
    if throughput.form not in _THROUGHPUT or starvation.form not in _STARVATION:
        return None
    forests = (*throughput.forests, *starvation.forests)
    intervals = (surrogate.intervals.low.flat, surrogate.intervals.high.flat)
    ends = tuple(Forest(np.zeros(1, np.int32), *map(np.asarray, tree)) for tree in intervals)
    return PackedTrees(
        trees=_joined((*forests, *ends)),
        throughput_trees=forests[0].roots.size,
        starvation_trees=forests[1].roots.size,
        throughput_form=_THROUGHPUT.index(throughput.form),
        starvation_form=_STARVATION.index(starvation.form),
        slope=surrogate.calibration.slope,
        offset=surrogate.calibration.offset,
        bounds=np.array([domain.low, _without_load(domain.low), domain.high]),
        centre=domain.centre,
        whitening=domain.whitening,
        farthest=domain.farthest,
    )


def _joined(forests: Sequence[Forest]) -> Forest:
    """Return the trees of several forests as one; a leaf is told by its feature, whatever its children."""
    starts = np.cumsum([0, *(forest.feature.size for forest in forests[:-1])])

    def joined(name: str, shifted: bool = False) -> NDArray[Any]:
        columns = [getattr(forest, name) for forest in forests]
        return np.concatenate([c + start if shifted else c for c, start in zip(columns, starts, strict=True)])

    return Forest(
        roots=joined("roots", shifted=True).astype(np.int32),
        feature=joined("feature"),
        threshold=joined("threshold"),
        left=joined("left", shifted=True).astype(np.int32),
        right=joined("right", shifted=True).astype(np.int32),
        value=joined("value"),
    )


def predict_compiled(what: PackedTrees, vectors: Vectors) -> Predictions:
    """Answer vectors in the order of `FEATURES`, shape (n, features)."""
    answers = np.empty((_COLUMNS, len(vectors)))
    _fill_answers(answers, what, vectors, np.empty(vectors.shape[1]))
    return Predictions(
        throughput_tok_s=answers[0],
        low_tok_s=answers[1],
        high_tok_s=answers[2],
        starvation_probability=answers[3],
        novelty=answers[4],
        in_range=answers[5] > 0.0,
        is_lighter=answers[6] > 0.0,
        request_s=_request_s(vectors),
    )


def predict_numpy(surrogate: Surrogate, vectors: Vectors) -> Predictions:
    """Answer vectors in NumPy, whatever the surrogate is made of."""
    answers = surrogate.answers(vectors)
    down_to_nothing = replace(surrogate.domain, low=_without_load(surrogate.domain.low))
    is_lighter = down_to_nothing.contains(vectors)
    return Predictions(**vars(answers), is_lighter=is_lighter, request_s=_request_s(vectors))


def _request_s(vectors: Vectors) -> Floats:
    return vectors[:, _SLOT_WAIT].astype(np.float64) + vectors[:, _LIFE]


def _without_load(lowest: Vectors) -> Vectors:
    is_load = np.array([name in LOAD_FEATURES for name in FEATURES])
    return np.where(is_load, np.float32(-np.inf), lowest)


@jit
def _fill_answers(answers: Floats, what: PackedTrees, vectors: Vectors, room: Floats) -> None:
    starvation_begins = what.throughput_trees
    ends_begin = what.throughput_trees + what.starvation_trees
    for row in range(vectors.shape[0]):
        x = vectors[row]
        throughput = _throughput_tok_s(what, x, _mean_leaf(what.trees, x, 0, starvation_begins))
        low = _mean_leaf(what.trees, x, ends_begin, ends_begin + 1)
        high = _mean_leaf(what.trees, x, ends_begin + 1, ends_begin + 2)
        novelty = _novelty(what, x, room)
        answers[0, row] = throughput
        answers[1, row] = throughput * np.exp(min(0.0, low))
        answers[2, row] = throughput * np.exp(max(0.0, high))
        answers[3, row] = _probability(what, _mean_leaf(what.trees, x, starvation_begins, ends_begin))
        answers[4, row] = novelty
        answers[5, row] = novelty <= 1.0 and _within(what.bounds[0], x, what.bounds[2])
        answers[6, row] = novelty <= 1.0 and _within(what.bounds[1], x, what.bounds[2])


@jit
def _mean_leaf(trees: Forest, x: Vectors, begin: int, end: int) -> float:
    _, feature, threshold, left, right, value = trees
    return forest_answer(Forest(trees.roots[begin:end], feature, threshold, left, right, value), x)


@jit
def _throughput_tok_s(what: PackedTrees, x: Vectors, log_ratio: float) -> float:
    base = np.float64(x[_OFFERED])
    if what.throughput_form == 0:
        base *= max(np.float64(x[_EXPECTED]), 1e-6)
    return float(base * np.exp(log_ratio))


@jit
def _probability(what: PackedTrees, score: float) -> float:
    if what.starvation_form == 0:
        chance = min(max(score, LEAST_PROBABILITY), 1.0 - LEAST_PROBABILITY)
        score = np.log(chance / (1.0 - chance))
    elif what.starvation_form == 2:
        score = np.log(STARVED_BELOW) - score
    return float(0.5 * (1.0 + np.tanh(0.5 * (what.slope * score + what.offset))))


@jit
def _novelty(what: PackedTrees, x: Vectors, away: Floats) -> float:
    away[:] = 0.0
    for row in range(x.size):
        scaled = np.arcsinh(np.float64(x[row])) - what.centre[row]
        for column in range(x.size):
            away[column] += scaled * what.whitening[row, column]
    squared = 0.0
    for column in range(x.size):
        squared += away[column] ** 2
    return float(np.sqrt(squared) / what.farthest)


@jit
def _within(low: Vectors, x: Vectors, high: Vectors) -> bool:
    inside = True
    for i in range(x.size):
        inside = inside and low[i] <= x[i] <= high[i]
    return inside


class EngineLimits(NamedTuple):
    """Engine settings that planners vary, as in `Surrogate.predict`."""

    a_max: int
    s_max: int
    max_num_seqs: int


@dataclass(frozen=True)
class CompiledSurrogate:
    """A surrogate, and what all questions have in common; made by `compile_surrogate`.

    Attributes
    ----------
    surrogate
        Who is asked.
    common
        Requests and engine.
    gpu_memory_utilization
        Share of the GPU's memory that the engine may take.
    learned
        The surrogate for compiled code, where it can be had.
    """

    surrogate: Surrogate
    common: CommonInputs
    gpu_memory_utilization: float
    learned: PackedTrees | None

    def ask(
        self, rates_rps: NDArray[np.float64], ranks: NDArray[np.float64], settings: Sequence[EngineLimits]
    ) -> Predictions:
        """Answer for GPUs that all serve the same adapters, each under settings of its own.

        Parameters
        ----------
        rates_rps, ranks
            Of each adapter, at least one; shape (adapters,).
        settings
            At least one.

        Returns
        -------
        Replies
            What `Surrogate.predict` says of such workloads; arrays of shape (settings,).
        """
        rows = [(*setting, self._kv_budget.tokens(*setting)) for setting in settings]
        vectors = np.empty((len(rows), len(FEATURES)), np.float32)
        room = np.empty((4, rates_rps.size))
        fill_vectors(vectors, self.common, np.array(rows, float), rates_rps, ranks, np.sort(rates_rps), room)
        if self.learned is None:
            return predict_numpy(self.surrogate, vectors)
        return predict_compiled(self.learned, vectors)

    @cached_property
    def _kv_budget(self) -> KvBudget:
        return kv_budget(self.surrogate.profile, self.gpu_memory_utilization)


def compile_surrogate(
    surrogate: Surrogate,
    workload: Workload,
    *,
    max_num_batched_tokens: int = 2048,
    gpu_memory_utilization: float = 0.9,
) -> CompiledSurrogate | None:
    """Return who asks about GPUs that serve any adapters with the requests of a workload.

    None where the surrogate was not trained on such workloads: adapters with lengths of their own among them.
    """
    if unsupported_workload(workload, surrogate.profile):
        return None
    common = common_inputs(workload, surrogate.profile, max_num_batched_tokens)
    return CompiledSurrogate(surrogate, common, gpu_memory_utilization, pack_trees(surrogate))
