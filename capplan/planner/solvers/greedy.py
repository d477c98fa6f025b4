"""The greedy caching algorithm of the adapter-caching paper (section 7, Algorithms 1 and 2).

Adapters are added to the current GPU one by one, largest first. At testing points an estimator tests the GPU.
A GPU that fails keeps the adapters of the last test passed and is closed. Where the paper is silent this
follows its published program: the untested rest at the end is tested at its true size, and goes to the next
GPU if it fails. A GPU is full at the largest testing point.

With `strict`, the first testing point is 8 adapters as printed, so that a GPU whose first 8 fail stays empty,
and a rest that fails at the end is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Final

from capplan.errors import InfeasibleError
from capplan.planner.problem.evaluate import describe_failure
from capplan.planner.problem.parallel import estimate_all
from capplan.planner.problem.problem import (
    GRID,
    AdapterShare,
    Assignment,
    Estimator,
    Problem,
    distinct_adapters,
    infeasible,
)
from capplan.planner.search.shortage import broken_when_spread
from capplan.planner.solvers.base import RequiredEstimator, Solver, SolverContext
from capplan.planner.solvers.greedy_fill import GpuFill, compiled_fill

PAPER_GRID: Final = GRID[3:]
"""Testing points of the paper, 8 to 384."""


def solve_greedy(problem: Problem, estimator: Estimator, *, strict: bool = False) -> tuple[Assignment, ...]:
    """Place all shares; `strict` follows the paper to the letter.

    Raises
    ------
    InfeasibleError
        If the GPUs do not suffice.
    """
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
