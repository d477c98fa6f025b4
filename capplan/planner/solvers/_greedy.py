"""The greedy caching algorithm of the adapter-caching paper (section 7, Algorithms 1 and 2).

Adapters are added to the current GPU one by one, largest first. At testing points an estimator tests the GPU.
A GPU that fails keeps the adapters of the last test passed and is closed. Where the paper is silent this
follows its published program: the untested rest at the end is tested at its true size, and goes to the next
GPU if it fails. A GPU is full at the largest testing point.

With `strict`, the first testing point is 8 adapters as printed, so that a GPU whose first 8 fail stays empty,
and a rest that fails at the end is an error.

Greedy fill of GPUs by a surrogate, in one compiled call per GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InfeasibleError
from capplan.models.surrogates import (
    AdapterQueue,
    CompiledSurrogate,
    FillRules,
    PackedTrees,
    Scratch,
    SlotNumbers,
    scratch_arrays,
)
from capplan.models.surrogates import fill_gpu as fill_gpu_compiled
from capplan.planner.problem._estimate import SurrogateEstimator
from capplan.planner.problem._evaluate import describe_failure
from capplan.planner.problem._problem import (
    GRID,
    AdapterShare,
    Assignment,
    Estimator,
    Problem,
    distinct_adapters,
    estimate_all,
    infeasible,
)
from capplan.planner.solvers._base import RequiredEstimator, Solver, SolverContext, broken_when_spread
from capplan.spec import EngineLimits

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
        count, at, failed_with_rest, known = fill_gpu_compiled(
            *surrogate, self.queue, start, self.points, slots, self.rules, self.scratch
        )
        return GpuFill(count, int(slots.limits[at, 0]) if count else 0, failed_with_rest) if known else None

    def _slots_of_rank(self, s_max: int) -> SlotNumbers:
        """Return the slots of a GPU whose first adapter, that of the largest rank, needs slots of a rank."""
        if s_max not in self._slots:
            engine, fixed = self.problem.engine, self.problem.fixed_a_max
            host = self.problem.workload.engine.max_cpu_loras
            values = self.grid if fixed is None else (fixed,)
            limits = np.empty((len(values), 5))
            limits[:, 0] = values
            of_rank = EngineLimits(0, s_max, engine.max_num_seqs, engine.max_num_batched_tokens)
            limits[:, 1:] = s_max, engine.max_num_seqs, 0, engine.max_num_batched_tokens
            limits[:, 3] = self.surrogate.kv_budget.tokens_beside(limits[:, 0], of_rank)
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


PAPER_GRID: Final = GRID[3:]
"""Testing points of the paper, 8 to 384."""


def solve_greedy(problem: Problem, estimator: Estimator, *, strict: bool = False) -> tuple[Assignment, ...]:
    """Place all shares; `strict` follows the paper to the letter."""
    grid = PAPER_GRID if strict else GRID
    queue = priority_order(problem.shares)
    compiled = compiled_fill(problem, estimator, queue, grid)
    placed: list[Assignment] = []
    start = used = 0
    while start < len(queue):
        waiting = len(queue) - start
        if used == problem.gpus:
            raise _too_few(problem, waiting, used - len(placed), strict)
        gpu = None if compiled is None else compiled(start)
        if gpu is None:
            gpu = fill_gpu(problem, estimator, queue[start:], grid)
        if not gpu.adapters and not strict:
            raise _fits_nowhere(problem, queue[start])
        if strict and gpu.failed_with_rest:
            raise infeasible(
                "starvation",
                f"the last {waiting - gpu.adapters} adapters fail on the GPU that has room for them, "
                f"with headroom {problem.workload.headroom:g}; to the letter, the greedy algorithm then "
                "tries no other",
            )
        shares = tuple(queue[start : start + gpu.adapters])
        used, start = used + 1, start + gpu.adapters
        if shares:
            distinct = len(shares) if compiled is not None else distinct_adapters(shares)
            placed.append(Assignment(shares, problem.fixed_a_max or min(gpu.a_max, distinct)))
    return tuple(placed)


def fill_gpu(
    problem: Problem, estimator: Estimator, waiting: Sequence[AdapterShare], grid: Sequence[int]
) -> GpuFill:
    """Fill a new GPU from the head of the queue until a test fails or the grid ends."""
    count = a_max = 0
    while count < min(len(waiting), grid[-1]):
        point = next(value for value in grid if value > count)
        shares = tuple(waiting[:point])
        best = test_allocation(problem, estimator, shares, a_max, grid)
        if best is None:
            return GpuFill(count, a_max, failed_with_rest=len(shares) < point)
        count, a_max = len(shares), best
    return GpuFill(count, a_max, failed_with_rest=False)


def test_allocation(
    problem: Problem, estimator: Estimator, shares: tuple[AdapterShare, ...], a_max: int, grid: Sequence[int]
) -> int | None:
    """Return the better of the current and the next number of slots (Algorithm 2).

    None if the GPU starves with it, or neither fits in memory.
    """
    if problem.fixed_a_max is not None:
        slots = [problem.fixed_a_max]
    else:
        above = next((value for value in grid if value > a_max), None)
        slots = [value for value in (a_max, above) if value]
    candidates = [each for value in slots if problem.fits_in_memory(each := Assignment(shares, value))]
    if not candidates:
        return None
    estimates = estimate_all(estimator, candidates)
    # Ties go to the larger number of slots, which is the later one.
    best = max(range(len(candidates)), key=lambda number: (estimates[number].throughput_tok_s, number))
    return None if estimates[best].starved else candidates[best].a_max


def priority_order(shares: Iterable[AdapterShare]) -> list[AdapterShare]:
    """Return the shares by descending rank; within a rank by highest, lowest, second highest, ... rate."""
    by_rank = sorted(shares, key=attrgetter("number"))
    by_rank.sort(key=attrgetter("name"))
    for key in ("rate_rps", "rank"):
        by_rank.sort(key=attrgetter(key), reverse=True)
    ordered: list[AdapterShare] = []
    for _, group in groupby(by_rank, key=attrgetter("rank")):
        falling = list(group)
        zigzag = falling.copy()
        half = (len(falling) + 1) // 2
        zigzag[0::2], zigzag[1::2] = falling[:half], falling[: half - 1 : -1]
        ordered += zigzag
    return ordered


def _too_few(problem: Problem, waiting: int, empty: int, strict: bool) -> InfeasibleError:
    placed = len(problem.shares) - waiting
    reason = f"; {empty} stay empty, since the first {PAPER_GRID[0]} adapters fail there" if empty else ""
    return infeasible(
        "gpus",
        f"the greedy algorithm{' to the letter' if strict else ''} fits {placed} of {len(problem.shares)} "
        f"adapters (shares of split ones counted) on {problem.gpus} instance(s) with headroom "
        f"{problem.workload.headroom:g}{reason}",
    )


def _fits_nowhere(problem: Problem, share: AdapterShare) -> InfeasibleError:
    gpu = problem.profile.gpu.name
    if not problem.fits_in_memory(Assignment((share,), problem.fixed_a_max or 1)):
        return infeasible(
            "memory",
            f"the slots for adapter {share.name} (rank {share.rank}) leave no room for one request of "
            f"max_model_len {problem.engine.max_model_len} on {gpu}",
        )
    alone = Assignment((share,), problem.fixed_a_max or 1)
    return infeasible(
        "slo" if problem.bounds_latency else "starvation",
        f"adapter {share.name} at {share.rate_rps:g} req/s fails even alone on a {gpu} with headroom "
        f"{problem.workload.headroom:g}: {describe_failure(problem, alone)}",
    )


def _place(problem: Problem, context: SolverContext, *, strict: bool = False) -> tuple[Assignment, ...]:
    try:
        return solve_greedy(problem, context.estimator, strict=strict)
    except InfeasibleError as error:
        if error.reason != "gpus":
            raise
        words = "; ".join(filter(None, (error.message, broken_when_spread(problem))))
        raise InfeasibleError(words, error.reason) from None


GREEDY = Solver(
    name="greedy",
    summary="fills GPUs one by one, largest ranks first, testing as it goes",
    source="adapter-caching paper, section 7, Algorithms 1 and 2",
    place=_place,
    required_estimator=RequiredEstimator.ESTIMATOR,
    splits_hot=True,
    confirms=True,
)
GREEDY_STRICT = replace(
    GREEDY,
    name="greedy-strict",
    summary="greedy to the letter: tests from 8 adapters on, a rest that fails is an error, nothing is split",
    place=partial(_place, strict=True),
    splits_hot=False,
)
GREEDY_FAST = replace(
    GREEDY,
    name="greedy-fast",
    summary="greedy that asks the small compiled tree (ProposedFast)",
    source="adapter-caching paper, sections 6.1 and 8.4.2",
    estimator="tree",
)
