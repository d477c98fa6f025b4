"""What queues give to requests of each size: one instance with its queues and in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from capplan.planner.problem._evaluate import evaluate
from capplan.planner.problem._execution import parallel_map
from capplan.planner.problem._problem import Assignment, Problem
from capplan.spec import Scheduler

_OVERLOAD: Final = 1.1
"""Load over capacity at which queues must decide who waits."""


@dataclass(frozen=True)
class SizeGain:
    """TTFT of the requests of one size class, with queues and in order of arrival, in seconds."""

    size: str
    planned_s: tuple[float, float]
    """99th percentiles at the planned load."""
    overloaded_s: tuple[float, float]
    """99th percentiles at `overload` times the planned load."""
    overload: float


def size_gains(
    problem: Problem, assignment: Assignment, load_over_capacity: float | None, seed: int
) -> tuple[SizeGain, ...]:
    """Return the gain of each size class; none without queues, or if an instance serves too few requests.

    The same requests are simulated with the same cache under the scheduler ``fifo``. Overload is a tenth more
    than the capacity, or than the planned load where the capacity is not known.
    """
    pair = problem.workload.scheduling
    if pair is None or not pair[0].has_queues or assignment.queues is None:
        return ()
    changes = {"scheduler": Scheduler(policy="fifo"), "queues": None, "cache": pair[1]}
    in_order = replace(problem, workload=problem.workload.model_copy(update=changes))
    kinds = ((problem, assignment), (in_order, replace(assignment, queues=None)))
    overload = _OVERLOAD / (load_over_capacity or 1.0)
    runs = [(*kind, scale) for scale in (1.0, overload) for kind in kinds]
    results = parallel_map(lambda run: evaluate(run[0], run[1], seed, run[2]).result, runs)
    pools = [result.pool for result in results if result.pool is not None]
    if len(pools) < len(runs) or len({len(pool.sizes) for pool in pools}) != 1:
        return ()
    return tuple(
        SizeGain(
            size=sizes[0].name,
            planned_s=(sizes[0].ttft_s.p99, sizes[1].ttft_s.p99),
            overloaded_s=(sizes[2].ttft_s.p99, sizes[3].ttft_s.p99),
            overload=overload,
        )
        for sizes in zip(*(pool.sizes for pool in pools), strict=True)
    )
