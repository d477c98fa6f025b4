"""Our solver: the fewest GPUs on which an even spread holds, by trying from the lower bound upwards.

GPUs of one kind that share the load evenly leave each the same slack. Two spreads are tried for every number
of GPUs: adapters of one rank together, so that small ranks do not pay for slots of the largest one, and all
ranks mixed. Where an even spread needs more than the lower bound, the greedy algorithm gets a chance to need
fewer: GPUs of different ranks may have to be filled unevenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from capplan.errors import InfeasibleError
from capplan.planner.bound import lower_bound_gpus
from capplan.planner.problem import Assignment, Estimator, Part, Problem, distinct_adapters
from capplan.planner.slots import choose_slots
from capplan.planner.solvers.description import Asks, Solver, Tools
from capplan.planner.solvers.greedy import solve_greedy

Spread = Callable[[Problem, int], list[list[Part]]]


def solve_balanced(problem: Problem, quick: Estimator, exact: Estimator) -> tuple[Assignment, ...]:
    """Place all parts on the fewest GPUs found.

    Parameters
    ----------
    problem
        The problem.
    quick
        Ranks numbers of slots.
    exact
        Decides whether a GPU holds.

    Raises
    ------
    InfeasibleError
        When not even all GPUs suffice.
    """
    bound = lower_bound_gpus(problem)
    most = min(problem.gpus, len(problem.parts))
    fewest = min(most, max(bound, *(part.number + 1 for part in problem.parts)))
    even = _fewest_even(problem, range(fewest, most + 1), quick, exact)
    if even is not None and len(even) <= fewest:
        return even
    uneven = _greedy(problem, most if even is None else len(even) - 1, quick, exact)
    if uneven is not None:
        return uneven
    if even is not None:
        return even
    raise InfeasibleError(
        f"gpus: {problem.gpus} instance(s) cannot hold {len(problem.workload.adapters)} adapters at "
        f"{problem.workload.total_rate_rps:g} req/s with headroom {problem.workload.headroom:g}; the lower "
        f"bound is {bound}",
        reason="slo" if problem.workload.slo.latency_bounds() else "gpus",
    )


def _fewest_even(
    problem: Problem, numbers: range, quick: Estimator, exact: Estimator
) -> tuple[Assignment, ...] | None:
    for gpus in numbers:
        for spread in (spread_by_rank, spread_mixed):
            assignments = _try(problem, spread(problem, gpus), quick, exact)
            if assignments is not None:
                return assignments
    return None


def _greedy(problem: Problem, gpus: int, quick: Estimator, exact: Estimator) -> tuple[Assignment, ...] | None:
    """Return what the greedy algorithm makes of that many GPUs, where the exact estimator agrees.

    None, too, when shares of one adapter meet on a GPU.
    """
    if gpus < 1:
        return None
    try:
        assignments = solve_greedy(replace(problem, gpus=gpus), quick)
    except InfeasibleError:
        return None
    apart = all(distinct_adapters(a.parts) == len(a.parts) for a in assignments)
    return assignments if apart and not any(exact(a.parts, a.a_max).starved for a in assignments) else None


def _try(
    problem: Problem, loads: Sequence[list[Part]], quick: Estimator, exact: Estimator
) -> tuple[Assignment, ...] | None:
    assignments = []
    for parts in loads:
        a_max = choose_slots(problem, parts, quick, exact)
        if a_max is None:
            return None
        assignments.append(Assignment(tuple(parts), a_max))
    return tuple(assignments)


def spread_by_rank(problem: Problem, gpus: int) -> list[list[Part]]:
    """Return parts sorted by rank and cut into runs of equal load; shares of one adapter never meet."""
    ordered = sorted(problem.parts, key=lambda p: (-p.rank, -problem.offered_tok_s(p), p.name, p.number))
    loads = _Loads(problem, gpus)
    rest = sum(problem.offered_tok_s(part) for part in ordered)
    at = 0
    for position, part in enumerate(ordered):
        goal = rest / (gpus - at)
        parts_left = len(ordered) - position
        crosses = loads.tok_s[at] + problem.offered_tok_s(part) / 2 > goal
        if loads.parts[at] and at < gpus - 1 and crosses and parts_left >= gpus - at - 1:
            rest -= loads.tok_s[at]
            at += 1
        loads.add(at if loads.free_of(part, at) else loads.lightest(part), part)
    return loads.used()


def spread_mixed(problem: Problem, gpus: int) -> list[list[Part]]:
    """Return parts dealt from the heaviest down, each to the GPU with the least load so far."""
    loads = _Loads(problem, gpus)
    for part in sorted(problem.parts, key=lambda p: (-problem.offered_tok_s(p), -p.rank, p.name, p.number)):
        loads.add(loads.lightest(part), part)
    return loads.used()


class _Loads:
    """GPUs that are being filled."""

    def __init__(self, problem: Problem, gpus: int) -> None:
        self.problem = problem
        self.parts: list[list[Part]] = [[] for _ in range(gpus)]
        self.tok_s = [0.0] * gpus
        self.names: list[set[str]] = [set() for _ in range(gpus)]

    def add(self, gpu: int, part: Part) -> None:
        self.parts[gpu].append(part)
        self.tok_s[gpu] += self.problem.offered_tok_s(part)
        self.names[gpu].add(part.name)

    def free_of(self, part: Part, gpu: int) -> bool:
        """Tell whether the GPU has no share of this part's adapter."""
        return part.name not in self.names[gpu]

    def lightest(self, part: Part) -> int:
        """Return the GPU with the least load, then the fewest parts, that has no share of this adapter."""
        free = [gpu for gpu in range(len(self.parts)) if self.free_of(part, gpu)]
        return min(
            free or range(len(self.parts)), key=lambda gpu: (self.tok_s[gpu], len(self.parts[gpu]), gpu)
        )

    def used(self) -> list[list[Part]]:
        return [parts for parts in self.parts if parts]


def _place(problem: Problem, tools: Tools) -> tuple[Assignment, ...]:
    return solve_balanced(problem, tools.quick, tools.exact)


CAPPLAN = Solver(
    name="capplan",
    summary="the fewest GPUs on which an even spread of the load holds, as the twin sees it",
    source="ours",
    place=_place,
    asks=Asks.TWIN,
    splits_hot=True,
    confirms=True,
)
