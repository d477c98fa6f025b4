"""The yardstick for small cases: the fewest GPUs, by integer programming (HiGHS, through scipy).

For one GPU, then two, and so on, a program places every part once. It knows of a GPU what adds up, load and
adapters, by its largest rank (`milp_capacity`). What does not add up (slots, latency bounds) it learns from
refusals: the twin judges each GPU of its answer, with the best number of slots, and a set that fails is
shrunk to its core. From then on, no GPU may have all of the core, nor as many parts that are nowhere lighter.
A number of GPUs is given up when the program has no answer left.

So every GPU of the answer holds as the twin sees it, and no answer with fewer GPUs exists if
(a) a GPU that fails also fails with more parts, and with hotter ones or larger ranks in place of some; and
(b) no GPU holds more than what was measured to add up, with 5 % to spare.

Among answers with as many GPUs it takes one whose fullest GPU is as light as can be, within 5 %.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InfeasibleError, InputError
from capplan.planner.problem import Assignment, Part, Problem
from capplan.planner.slots import choose_slots
from capplan.planner.solvers.description import Asks, Solver, Tools
from capplan.planner.solvers.milp_capacity import Slots, loads, measure
from capplan.planner.solvers.milp_program import Program, TimeIsOver

MOST_PARTS: Final = 24
MOST_GPUS: Final = 4

Cut = tuple[NDArray[np.int64], int]
"""Parts of which at most so many may meet on a GPU."""


def _place(problem: Problem, tools: Tools) -> tuple[Assignment, ...]:
    parts = sorted(problem.parts, key=lambda p: (-problem.offered_tok_s(p), -p.rank, p.name, p.number))
    if len(parts) > MOST_PARTS or problem.gpus > MOST_GPUS:
        rule = f"milp solves at most {MOST_PARTS} adapters and shares on {MOST_GPUS} instances"
        raise InputError(rule, f"{len(parts)} on {problem.gpus}", "solver")
    deadline_s = time.monotonic() + tools.time_limit_s
    slots = _slots(problem, tools)
    program = _program(problem, parts, slots)
    cuts: list[Cut] = []
    for gpus in range(_fewest(program), min(problem.gpus, len(parts)) + 1):
        try:
            placed = _confirmed(problem, parts, program, gpus, cuts, slots, deadline_s)
        except TimeIsOver:
            words = (
                f"time: milp neither finds a placement on {gpus} instance(s) nor proves that there is none"
            )
            raise InfeasibleError(f"{words} within {tools.time_limit_s:g} s", reason="time") from None
        if placed is not None:
            return placed
    bounds = problem.workload.slo.latency_bounds()
    raise InfeasibleError(
        f"{'slo' if bounds else 'gpus'}: no placement of {len(parts)} adapters and shares on "
        f"{problem.gpus} instance(s) holds with headroom {problem.workload.headroom:g}, by exhaustion",
        reason="slo" if bounds else "gpus",
    )


def _slots(problem: Problem, tools: Tools) -> Slots:
    """Return the function that gives the best slots for a set of parts, None if none holds; it remembers."""
    known: dict[frozenset[Part], int | None] = {}

    def slots(parts: Sequence[Part]) -> int | None:
        key = frozenset(parts)
        if key not in known:
            known[key] = choose_slots(problem, parts, tools.quick, tools.exact)
        return known[key]

    return slots


def _program(problem: Problem, parts: Sequence[Part], slots: Slots) -> Program:
    load = loads(problem, parts)
    return Program(
        ranks=np.array([part.rank for part in parts]),
        loads=load / max(load.sum(), 1e-9),
        capacity=measure(parts, load, slots),
        apart=[(i, j) for i, part in enumerate(parts) for j in range(i) if parts[j].name == part.name],
    )


def _fewest(program: Program) -> int:
    """Return a number of GPUs below which the shares cannot fit, whatever ranks GPUs have."""
    possible = np.array(program.capacity.ranks)[:, None] >= program.ranks
    least = np.where(possible, program.capacity.shares, np.inf).min(axis=0)
    return max(1, math.ceil(float(least.sum()) - 1e-6))


def _confirmed(
    problem: Problem,
    parts: Sequence[Part],
    program: Program,
    gpus: int,
    cuts: list[Cut],
    slots: Slots,
    deadline_s: float,
) -> tuple[Assignment, ...] | None:
    """Return a placement on that many GPUs that the twin confirms, None if there is none; add to the cuts."""
    while True:
        where = program.solve(gpus, cuts, deadline_s)
        if where is None:
            return None
        sets = [
            [part for part, gpu in zip(parts, where, strict=True) if gpu == at] for at in sorted(set(where))
        ]
        answers = [(tuple(each), slots(each)) for each in sets]
        failing = [each for each, number in answers if number is None]
        if not failing:
            return tuple(Assignment(each, number) for each, number in answers if number is not None)
        cuts += [_cut(problem, parts, _core(problem, each, slots)) for each in failing]


def _core(problem: Problem, failing: Sequence[Part], slots: Slots) -> list[Part]:
    """Return parts of a failing set that fail, and hold without any one of them."""
    core = list(failing)
    for part in sorted(failing, key=problem.offered_tok_s):
        without = [other for other in core if other != part]
        if without and slots(without) is None:
            core = without
    return core


def _cut(problem: Problem, parts: Sequence[Part], core: Sequence[Part]) -> Cut:
    """Return the rule that a failing set teaches.

    A part that is nowhere lighter than any of the set can stand for any of them.
    """
    lengths = {a.name: problem.workload.lengths_of(a) for a in problem.workload.adapters}
    kinds = {lengths[part.name] for part in core}
    comparable = len(kinds) == 1 and problem.workload.trace is None
    rate_rps, rank = max(part.rate_rps for part in core), max(part.rank for part in core)

    def heavier(part: Part) -> bool:
        return comparable and lengths[part.name] in kinds and part.rate_rps >= rate_rps and part.rank >= rank

    members = [i for i, part in enumerate(parts) if part in core or heavier(part)]
    return np.array(members, dtype=np.int64), len(core) - 1


MILP = Solver(
    name="milp",
    summary=f"the fewest GPUs, proved; at most {MOST_PARTS} adapters on {MOST_GPUS} instances",
    source="ours, a yardstick: integer programming by HiGHS",
    place=_place,
    asks=Asks.TWIN,
    splits_hot=True,
    confirms=True,
)
