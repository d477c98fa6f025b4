"""The yardstick for small cases: the fewest GPUs, by integer programming (HiGHS, through scipy).

For one GPU, then two, and so on, a program places every share once. It knows of a GPU what adds up, load and
adapters, by its largest rank (`milp_capacity`). What does not add up (slots, latency bounds) it learns from
refusals: the twin judges each GPU of its answer, with the best number of slots, and a set that fails is
shrunk to its core. From then on, no GPU may have all of the core, nor as many heavier shares.
A number of GPUs is given up when the program has no answer left.

So every GPU of the answer holds as the twin sees it, and no answer with fewer GPUs exists if
(a) a GPU that fails also fails with more shares, and with hotter ones or larger ranks in place of some; and
(b) no GPU holds more than what was measured to add up, with 5 % to spare.

Among answers with as many GPUs it takes one whose fullest GPU is as light as can be, within 5 %.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InfeasibleError, InputError
from capplan.planner.bound import busy_gpus
from capplan.planner.problem import AdapterShare, Assignment, Problem
from capplan.planner.slots import choose_slots
from capplan.planner.solvers.base import RequiredEstimator, Solver, SolverContext

MOST_PARTS: Final = 24
MOST_GPUS: Final = 4

Cut = tuple[NDArray[np.int64], int]
"""Parts of which at most so many may meet on a GPU."""


def _place(problem: Problem, context: SolverContext) -> tuple[Assignment, ...]:
    shares = sorted(problem.shares, key=lambda p: (-problem.offered_tok_s(p), -p.rank, p.name, p.number))
    if len(shares) > MOST_PARTS or problem.gpus > MOST_GPUS:
        rule = f"milp solves at most {MOST_PARTS} adapters and shares on {MOST_GPUS} instances"
        raise InputError(rule, f"{len(shares)} on {problem.gpus}", "solver")
    deadline_s = time.monotonic() + context.time_limit_s
    slots = _slot_chooser(problem, context)
    program = _program(problem, shares, slots)
    cuts: list[Cut] = []
    for gpus in range(_fewest(program), min(problem.gpus, len(shares)) + 1):
        try:
            placed = _confirm(problem, shares, program, gpus, cuts, slots, deadline_s)
        except SolverTimeout:
            words = (
                f"time: milp neither finds a placement on {gpus} instance(s) nor proves that there is none"
            )
            raise InfeasibleError(f"{words} within {context.time_limit_s:g} s", reason="time") from None
        if placed is not None:
            return placed
    bounds = problem.workload.slo.latency_bounds()
    raise InfeasibleError(
        f"{'slo' if bounds else 'gpus'}: no placement of {len(shares)} adapters and shares on "
        f"{problem.gpus} instance(s) holds with headroom {problem.workload.headroom:g}, by exhaustion",
        reason="slo" if bounds else "gpus",
    )


def _slot_chooser(problem: Problem, context: SolverContext) -> SlotChooser:
    """Return the function that gives the best slots for a set of shares, None if none holds; it remembers."""
    known: dict[frozenset[AdapterShare], int | None] = {}

    def slots(shares: Sequence[AdapterShare]) -> int | None:
        key = frozenset(shares)
        if key not in known:
            known[key] = choose_slots(problem, shares, context.estimator, context.twin)
        return known[key]

    return slots


def _program(problem: Problem, shares: Sequence[AdapterShare], slots: SlotChooser) -> PlacementProgram:
    load = share_loads(problem, shares)
    return PlacementProgram(
        ranks=np.array([share.rank for share in shares]),
        loads=load / max(load.sum(), 1e-9),
        capacity=measure_capacity(shares, load, slots),
        apart=[(i, j) for i, share in enumerate(shares) for j in range(i) if shares[j].name == share.name],
    )


def _fewest(program: PlacementProgram) -> int:
    """Return a number of GPUs below which the shares cannot fit, whatever ranks GPUs have."""
    possible = np.array(program.capacity.ranks)[:, None] >= program.ranks
    least = np.where(possible, program.capacity.weights, np.inf).min(axis=0)
    return max(1, math.ceil(float(least.sum()) - 1e-6))


def _confirm(
    problem: Problem,
    shares: Sequence[AdapterShare],
    program: PlacementProgram,
    gpus: int,
    cuts: list[Cut],
    slots: SlotChooser,
    deadline_s: float,
) -> tuple[Assignment, ...] | None:
    """Return a placement on that many GPUs that the twin confirms, None if there is none; add to the cuts."""
    while True:
        where = program.solve(gpus, cuts, deadline_s)
        if where is None:
            return None
        sets = [
            [share for share, gpu in zip(shares, where, strict=True) if gpu == at]
            for at in sorted(set(where))
        ]
        answers = [(tuple(each), slots(each)) for each in sets]
        failing = [each for each, number in answers if number is None]
        if not failing:
            return tuple(Assignment(each, number) for each, number in answers if number is not None)
        cuts += [_cut(problem, shares, _minimal_failing_set(problem, each, slots)) for each in failing]


def _minimal_failing_set(
    problem: Problem, failing: Sequence[AdapterShare], slots: SlotChooser
) -> list[AdapterShare]:
    """Return shares of a failing set that fail, and hold without any one of them."""
    core = list(failing)
    for share in sorted(failing, key=problem.offered_tok_s):
        without = [other for other in core if other != share]
        if without and slots(without) is None:
            core = without
    return core


def _cut(problem: Problem, shares: Sequence[AdapterShare], core: Sequence[AdapterShare]) -> Cut:
    """Return the rule that a failing set teaches.

    A share that is nowhere lighter than any of the set can stand for any of them.
    """
    lengths = {a.name: problem.workload.lengths_of(a) for a in problem.workload.adapters}
    kinds = {lengths[share.name] for share in core}
    comparable = len(kinds) == 1 and problem.workload.trace is None
    rate_rps, rank = max(share.rate_rps for share in core), max(share.rank for share in core)

    def heavier(share: AdapterShare) -> bool:
        return (
            comparable and lengths[share.name] in kinds and share.rate_rps >= rate_rps and share.rank >= rank
        )

    members = [i for i, share in enumerate(shares) if share in core or heavier(share)]
    return np.array(members, dtype=np.int64), len(core) - 1


MILP = Solver(
    name="milp",
    summary=f"the fewest GPUs, proved; at most {MOST_PARTS} adapters on {MOST_GPUS} instances",
    source="ours, a yardstick: integer programming by HiGHS",
    place=_place,
    required_estimator=RequiredEstimator.TWIN,
    splits_hot=True,
    confirms=True,
)

_CAPACITY_TOLERANCE: Final = 1.05
_BISECTIONS: Final = 5

SlotChooser = Callable[[Sequence[AdapterShare]], int | None]
"""Gives the best number of slots for the shares of one GPU, None when it fails with any."""


@dataclass(frozen=True)
class GpuCapacity:
    """Shares of a GPU that shares take.

    Attributes
    ----------
    ranks
        Largest ranks that a GPU may have, ascending.
    weights
        Of each rank and share, shape (ranks, shares); the sum is at most 1. 0 if one GPU holds all.
    """

    ranks: tuple[int, ...]
    weights: NDArray[np.float64]


def share_loads(problem: Problem, shares: Sequence[AdapterShare]) -> NDArray[np.float64]:
    """Return what every share asks of a GPU: busy time by its lengths, or tokens where that is not known."""
    lengths = {a.name: problem.workload.lengths_of(a) for a in problem.workload.adapters}
    busy = {lengths[share.name]: _busy_per_rps(problem, share.name) for share in shares}
    if all(busy.values()):
        return np.array([share.rate_rps * busy[lengths[share.name]] for share in shares])
    return np.array([problem.offered_tok_s(share) for share in shares])


def measure_capacity(
    shares: Sequence[AdapterShare], load: NDArray[np.float64], slots: SlotChooser
) -> GpuCapacity:
    """Return the capacity of a GPU for these shares."""
    ranks = sorted({share.rank for share in shares})
    weights = np.zeros((len(ranks), len(shares)))
    for row, rank in enumerate(ranks):
        hot = sorted(
            (i for i, share in enumerate(shares) if share.rank <= rank),
            key=lambda i: (-load[i], shares[i].name, shares[i].number),
        )
        line = _line(
            [
                _boundary(_with_rank_first(order, shares, rank), shares, load, slots)
                for order in (hot, hot[::-1])
            ]
        )
        if line is not None:
            per_adapter, most = line
            weights[row] = (load + per_adapter) / (_CAPACITY_TOLERANCE * most)
    return GpuCapacity(tuple(ranks), weights)


def _with_rank_first(order: Sequence[int], shares: Sequence[AdapterShare], rank: int) -> list[int]:
    """Return the order with the first share of this rank before all others."""
    first = next(i for i in order if shares[i].rank == rank)
    return [first, *(i for i in order if i != first)]


def _boundary(
    order: Sequence[int], shares: Sequence[AdapterShare], load: NDArray[np.float64], slots: SlotChooser
) -> tuple[int, float] | None:
    """Return adapters and load with which a GPU just fails; None when it holds all of them."""
    chosen = [shares[i] for i in order]
    if slots(chosen) is not None:
        return None
    holds, fails = 0, len(chosen)
    while fails - holds > 1:
        middle = (holds + fails) // 2
        holds, fails = (holds, middle) if slots(chosen[:middle]) is None else (middle, fails)
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        fraction = (low + high) / 2.0
        last = chosen[holds]
        partly = replace(last, rate_rps=last.rate_rps * fraction, fraction=last.fraction * fraction)
        low, high = (low, fraction) if slots([*chosen[:holds], partly]) is None else (fraction, high)
    return fails, float(load[list(order[:holds])].sum() + high * load[order[holds]])


def _line(boundaries: Sequence[tuple[int, float] | None]) -> tuple[float, float] | None:
    """Return the load that an adapter costs by being there, and the most load and such cost together."""
    if any(each is None for each in boundaries):
        return None
    (few, much), (many, little) = (each for each in boundaries if each is not None)
    per_adapter = max(0.0, (much - little) / (many - few)) if many > few else 0.0
    most = max(much + per_adapter * few, little + per_adapter * many)
    return (per_adapter, most) if most > 0.0 else None


def _busy_per_rps(problem: Problem, name: str) -> float:
    """Return the least busy time per request; 0 where it is not known."""
    if problem.workload.trace is not None:
        return 0.0
    alone = problem.workload.subset([name])
    once = alone.model_copy(update={"adapters": (alone.adapters[0].model_copy(update={"rate_rps": 1.0}),)})
    return busy_gpus(replace(problem, workload=once))


_MIP_GAP: Final = 0.05
"""How far the fullest GPU may be from as light as can be, relatively; whether there is an answer is exact."""

_INFEASIBLE: Final = 2

LinearRow = tuple[NDArray[np.int64], NDArray[np.float64], float, float]
"""Columns, their coefficients, and the least and the most that they may sum to."""


class SolverTimeout(Exception):  # noqa: N818  (nobody's error)
    """The deadline came before a placement, or the proof that there is none."""


@dataclass(frozen=True)
class PlacementProgram:
    """What to place.

    Attributes
    ----------
    ranks
        Of the shares, shape (n,).
    loads
        Share of the whole load that each share is, shape (n,); of these the fullest GPU has few.
    capacity
        What a GPU holds.
    apart
        Pairs of shares that must not meet.
    """

    ranks: NDArray[np.int64]
    loads: NDArray[np.float64]
    capacity: GpuCapacity
    apart: Sequence[tuple[int, int]]

    def solve(
        self, gpus: int, cuts: Sequence[tuple[NDArray[np.int64], int]], deadline_s: float
    ) -> list[int] | None:
        """Return the GPU of every share, or None where there is no placement.

        Parameters
        ----------
        gpus
            How many there are.
        cuts
            Parts of which at most so many may meet.
        deadline_s
            When to stop, by `time.monotonic`.

        Raises
        ------
        SolverTimeout
            At the deadline.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        rows = [row for gpu in range(gpus) for row in self._rows_of_gpu(gpu, gpus, cuts)]
        n, columns = self.loads.size, self._columns(gpus)
        rows += [(share * gpus + np.arange(gpus), np.ones(gpus), 1.0, 1.0) for share in range(n)]
        at = np.repeat(np.arange(len(rows)), [row[0].size for row in rows])
        entries = np.concatenate([row[1] for row in rows])
        matrix = csr_array(
            (entries, (at, np.concatenate([row[0] for row in rows]))), shape=(len(rows), columns)
        )
        largest = np.ones(columns)
        for share in range(min(n, gpus)):
            largest[share * gpus + share + 1 : (share + 1) * gpus] = 0.0  # GPUs are alike: share i is on 0..i
        left_s = deadline_s - time.monotonic()
        if left_s <= 0.0:
            raise SolverTimeout
        result = milp(
            np.append(np.zeros(columns - 1), 1.0),
            integrality=np.append(np.ones(columns - 1), 0.0),
            bounds=Bounds(np.zeros(columns), largest),
            constraints=LinearConstraint(
                matrix, np.array([row[2] for row in rows]), np.array([row[3] for row in rows])
            ),
            options={"time_limit": left_s, "mip_rel_gap": _MIP_GAP},
        )
        if result.x is not None:
            chosen: list[int] = np.argmax(result.x[: n * gpus].reshape(n, gpus), axis=1).tolist()
            return chosen
        if result.status == _INFEASIBLE:
            return None
        raise SolverTimeout

    def _columns(self, gpus: int) -> int:
        """Return how many columns there are.

        Part i on GPU g is column i * gpus + g; GPU g of the r-th largest rank comes after all these; the
        load of the fullest GPU is the last one.
        """
        return (self.loads.size + len(self.capacity.ranks)) * gpus + 1

    def _rows_of_gpu(
        self, gpu: int, gpus: int, cuts: Sequence[tuple[NDArray[np.int64], int]]
    ) -> Iterator[LinearRow]:
        n, ranks = self.loads.size, self.capacity.ranks
        mine = np.arange(n) * gpus + gpu
        largest = (n + np.arange(len(ranks))) * gpus + gpu
        yield largest, np.ones(len(ranks)), 1.0, 1.0
        for share in range(n):  # a GPU of a share has its rank at least
            enough = largest[np.array(ranks) >= self.ranks[share]]
            yield np.append(enough, mine[share]), np.append(np.ones(enough.size), -1.0), 0.0, np.inf
        for row, weights in enumerate(self.capacity.weights):  # binds only where this is the largest rank
            beyond = max(0.0, float(weights.sum()) - 1.0)
            yield np.append(mine, largest[row]), np.append(weights, beyond), -np.inf, 1.0 + beyond
        yield np.append(mine, self._columns(gpus) - 1), np.append(self.loads, -1.0), -np.inf, 0.0
        for i, j in self.apart:
            yield mine[[i, j]], np.ones(2), 0.0, 1.0
        for members, most in cuts:
            yield mine[members], np.ones(members.size), 0.0, float(most)
