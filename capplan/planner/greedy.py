"""The greedy caching algorithm of the adapter-caching paper (section 7, Algorithms 1 and 2).

Adapters go to the current GPU one by one, largest first; at testing points an estimator judges what was added
since the last one. A GPU that fails a test keeps what was committed before and is closed. Where the paper is
silent this follows its published program: an untested rest, when the adapters end, is tested at its true size
and goes to the next GPU when it fails. A GPU is full at the largest testing point.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from capplan.errors import InfeasibleError
from capplan.planner.parallel import in_parallel
from capplan.planner.problem import GRID, Assignment, Estimator, Part, Problem, distinct_adapters


@dataclass
class _OpenGpu:
    """The GPU that is being filled."""

    committed: list[Part] = field(default_factory=list)
    provisional: list[Part] = field(default_factory=list)
    a_max: int = 0

    @property
    def parts(self) -> list[Part]:
        return self.committed + self.provisional


def solve_greedy(problem: Problem, estimator: Estimator) -> tuple[Assignment, ...]:
    """Place all parts, or raise.

    Raises
    ------
    InfeasibleError
        When the GPUs do not suffice; the message tells how far the algorithm came.
    """
    waiting = deque(priority_order(problem.parts))
    closed: list[Assignment] = []
    while waiting:
        if len(closed) == problem.gpus:
            raise _too_few(problem, closed, waiting)
        gpu = _fill(problem, estimator, waiting)
        if gpu.committed:
            a_max = problem.fixed_a_max or min(gpu.a_max, distinct_adapters(gpu.committed))
            closed.append(Assignment(tuple(gpu.committed), a_max))
        else:
            raise _fits_nowhere(problem, waiting[0])
    return tuple(closed)


def _fill(problem: Problem, estimator: Estimator, waiting: deque[Part]) -> _OpenGpu:
    """Move adapters from the queue to a new GPU until a test fails, the grid ends, or none are left."""
    gpu = _OpenGpu()
    while waiting and len(gpu.committed) < GRID[-1]:
        gpu.provisional.append(waiting.popleft())
        if len(gpu.parts) in GRID or not waiting:
            best = test_allocation(problem, estimator, gpu.parts, gpu.a_max)
            if best is None:
                waiting.extendleft(reversed(gpu.provisional))
                gpu.provisional.clear()
                break
            gpu.committed, gpu.provisional, gpu.a_max = gpu.parts, [], best
    return gpu


def test_allocation(problem: Problem, estimator: Estimator, parts: Sequence[Part], a_max: int) -> int | None:
    """Return the better of the present and the next number of slots (Algorithm 2).

    None when the GPU would starve with it, or when neither fits in memory.
    """
    candidates = _candidates(problem, parts, a_max)
    if not candidates:
        return None
    estimates = dict(zip(candidates, in_parallel(partial(estimator, parts), candidates), strict=True))
    best = max(candidates, key=lambda candidate: (estimates[candidate].throughput_tok_s, candidate))
    return None if estimates[best].starved else best


def _candidates(problem: Problem, parts: Sequence[Part], a_max: int) -> list[int]:
    if problem.fixed_a_max is not None:
        candidates = [problem.fixed_a_max]
    else:
        above = next((value for value in GRID if value > a_max), None)
        candidates = [value for value in (a_max, above) if value]
    return [value for value in candidates if problem.fits_in_memory(parts, value)]


def priority_order(parts: Iterable[Part]) -> list[Part]:
    """Return the parts by rank, largest first; within a rank highest, lowest, second highest, ... rate."""
    by_rank = sorted(parts, key=lambda part: (-part.rank, -part.rate_rps, part.name, part.number))
    ordered: list[Part] = []
    for _, group in groupby(by_rank, key=lambda part: part.rank):
        ends = deque(group)
        while ends:
            ordered.append(ends.popleft())
            if ends:
                ordered.append(ends.pop())
    return ordered


def _too_few(problem: Problem, closed: Sequence[Assignment], waiting: deque[Part]) -> InfeasibleError:
    placed = sum(len(assignment.parts) for assignment in closed)
    return InfeasibleError(
        f"gpus: the greedy algorithm fits {placed} of {placed + len(waiting)} adapters (shares of split ones "
        f"counted) on {problem.gpus} instance(s) with headroom {problem.workload.headroom:g}",
        reason="gpus",
    )


def _fits_nowhere(problem: Problem, part: Part) -> InfeasibleError:
    if not problem.fits_in_memory([part], problem.fixed_a_max or 1):
        return InfeasibleError(
            f"memory: the slots for adapter {part.name} (rank {part.rank}) leave no room for one request of "
            f"max_model_len {problem.engine.max_model_len} on {problem.profile.gpu.name}",
            reason="memory",
        )
    return InfeasibleError(
        f"starvation: adapter {part.name} at {part.rate_rps:g} req/s breaks served_fraction or a latency "
        f"bound even alone on a {problem.profile.gpu.name} with headroom {problem.workload.headroom:g}",
        reason="slo" if problem.workload.slo.latency_bounds() else "starvation",
    )
