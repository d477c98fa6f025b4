"""Greedy fill of GPUs by a surrogate, in one compiled call per GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.models.surrogates import greedy_fill
from capplan.models.surrogates.compiled import CompiledSurrogate, PackedTrees
from capplan.models.surrogates.greedy_fill import (
    AdapterQueue,
    FillRules,
    Scratch,
    SlotNumbers,
    scratch_arrays,
)
from capplan.planner.problem.estimate import SurrogateEstimator
from capplan.planner.problem.problem import AdapterShare, Estimator, Problem

_NO_LIMIT: Final = 2**31


class GpuFill(NamedTuple):
    """Adapters of one GPU, taken from the head of the queue."""

    adapters: int
    a_max: int
    failed_with_rest: bool
    """Whether it was closed by the test of the rest at the end."""


@dataclass(frozen=True)
class CompiledFill:
    """Fills GPUs from one queue with one surrogate."""

    problem: Problem
    surrogate: CompiledSurrogate
    packed: PackedTrees
    rules: FillRules
    shares: Sequence[AdapterShare]
    queue: AdapterQueue
    grid: Sequence[int]
    """Numbers of slots."""
    points: NDArray[np.int64]
    """Testing points, the same numbers."""
    scratch: Scratch
    _slots: dict[int, SlotNumbers] = field(default_factory=dict)

    def __call__(self, start: int) -> GpuFill | None:
        """Fill a GPU from a position of the queue; None if a test is outside the surrogate's range."""
        slots = self._slots_of_rank(self.problem.s_max(self.shares[start : start + 1]))
        surrogate = self.packed, self.surrogate.common
        count, at, failed_with_rest, known = greedy_fill.fill_gpu(
            *surrogate, self.queue, start, self.points, slots, self.rules, self.scratch
        )
        return GpuFill(count, int(slots.limits[at, 0]) if count else 0, failed_with_rest) if known else None

    def _slots_of_rank(self, s_max: int) -> SlotNumbers:
        """Return the slots of a GPU whose first adapter, that of the largest rank, needs slots of a rank."""
        if s_max not in self._slots:
            engine, fixed = self.problem.engine, self.problem.fixed_a_max
            host = self.problem.workload.engine.max_cpu_loras
            seqs, budget = engine.max_num_seqs, self.surrogate.kv_budget
            values = self.grid if fixed is None else (fixed,)
            limits = np.empty((len(values), 5))
            limits[:, 0] = values
            limits[:, 1:] = s_max, seqs, 0, engine.max_num_batched_tokens
            limits[:, 3] = budget.tokens_beside(limits[:, 0], s_max, seqs, engine.max_num_batched_tokens)
            fits = limits[:, 3] >= engine.max_model_len
            self._slots[s_max] = SlotNumbers(limits, fits, _NO_LIMIT if host is None else host)
        return self._slots[s_max]


def compiled_fill(
    problem: Problem, estimator: Estimator, shares: Sequence[AdapterShare], grid: Sequence[int]
) -> CompiledFill | None:
    """Return the compiled fill of a queue of shares in order of falling rank.

    None for other estimators than a surrogate of one forest per output, and for adapters in several shares.
    """
    if not isinstance(estimator, SurrogateEstimator):
        return None
    if len(shares) != len(problem.traffic):
        return None
    inputs = estimator.inputs(shares, merge=False)
    if inputs is None:
        return None
    surrogate, rates_rps, ranks = inputs
    packed = surrogate.packed
    if packed is None:
        return None
    queue = AdapterQueue(rates_rps, ranks, np.argsort(rates_rps, kind="stable"))
    scratch = scratch_arrays(len(shares))
    rules = FillRules(estimator.extrapolates, estimator.least_throughput)
    return CompiledFill(problem, surrogate, packed, rules, shares, queue, grid, np.array(grid), scratch)
