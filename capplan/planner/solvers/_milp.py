"""Exact reference solver for small cases: the fewest GPUs by integer programming (HiGHS, through scipy).

For one GPU, then two, and so on, an integer program places every share once. Its constraints are the additive
ones: load and number of adapters, by the largest rank of a GPU. The other effects (slots, latency bounds) are
learned from the twin, which tests each GPU of a solution with the best number of slots. A failing set of
shares is reduced to a minimal one, and a cut excludes it, and sets with heavier shares, from all GPUs. A
number of GPUs is infeasible once the program has no solution.

Every GPU of the answer holds in the twin, and no answer with fewer GPUs exists if
(a) a GPU that fails also fails with more shares, and with hotter ones or larger ranks in place of some; and
(b) no GPU holds more than the measured additive capacity, with a tolerance of 5 %.

Among answers with as many GPUs the fullest GPU is as light as possible, within 5 %.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InfeasibleReason, InputError
from capplan.planner.problem._bound import busy_gpus
from capplan.planner.problem._problem import AdapterShare, Assignment, Problem, infeasible
from capplan.planner.problem._settings import choose_slots
from capplan.planner.solvers._base import RequiredEstimator, Solver, SolverContext, broken_when_spread

MOST_PARTS: Final = 24
MOST_GPUS: Final = 4
_CAPACITY_TOLERANCE: Final = 1.05
_BISECTIONS: Final = 5
_MIP_GAP: Final = 0.05
"""Relative tolerance of the load of the fullest GPU; feasibility is exact."""
_INFEASIBLE: Final = 2

Cut = tuple[NDArray[np.int64], int]
"""Shares, and the maximum number of them on one GPU."""
LinearRow = tuple[NDArray[np.int64], NDArray[np.float64], float, float]
"""Columns, their coefficients, and the lower and upper bound on the sum."""
SlotChooser = Callable[[Sequence[AdapterShare]], int | None]
"""Returns the best number of slots for the shares of one GPU; None if it fails."""


def _place(problem: Problem, context: SolverContext) -> tuple[Assignment, ...]:
    shares = sorted(problem.shares, key=lambda p: (-problem.offered_tok_s(p), -p.rank, p.name, p.number))
    available = min(problem.gpus, MOST_GPUS) if problem.pools[0].is_open else problem.gpus
    if len(shares) > MOST_PARTS or available > MOST_GPUS:
        rule = f"milp solves at most {MOST_PARTS} adapters and shares on {MOST_GPUS} instances"
        raise InputError(rule, f"{len(shares)} on {available}", "solver")
    deadline_s = time.monotonic() + context.time_limit_s
    known: dict[frozenset[AdapterShare], int | None] = {}

    def slots(shares: Sequence[AdapterShare]) -> int | None:
        key = frozenset(shares)
        if key not in known:
            known[key] = choose_slots(problem, shares, context.estimator, context.twin)
        return known[key]

    program = _program(problem, shares, slots)
    cuts: list[Cut] = []
    for gpus in range(program.min_gpus(), min(available, len(shares)) + 1):
        try:
            placed = _confirm(problem, shares, program, gpus, cuts, slots, deadline_s)
        except SolverTimeout:
            raise infeasible(
                "time",
                f"milp neither finds a placement on {gpus} instance(s) nor proves that there is none within "
                f"{context.time_limit_s:g} s",
            ) from None
        if placed is not None:
            return placed
    words = (
        f"no placement of {len(shares)} adapters and shares on {available} instance(s) holds with headroom "
        f"{problem.workload.headroom:g}, by exhaustion"
    )
    reason: InfeasibleReason = "slo" if problem.bounds_latency else "gpus"
    raise infeasible(reason, "; ".join(filter(None, (words, broken_when_spread(problem)))))


def _confirm(
    problem: Problem,
    shares: Sequence[AdapterShare],
    program: PlacementProgram,
    gpus: int,
    cuts: list[Cut],
    slots: SlotChooser,
    deadline_s: float,
) -> tuple[Assignment, ...] | None:
    """Return a placement that the twin confirms, or None; add a cut for every failing set."""
    while True:
        where = program.solve(gpus, cuts, deadline_s)
        if where is None:
            return None
        sets = [
            tuple(share for share, gpu in zip(shares, where, strict=True) if gpu == at)
            for at in sorted(set(where))
        ]
        answers = [(each, slots(each)) for each in sets]
        failing = [each for each, number in answers if number is None]
        if not failing:
            return tuple(Assignment(each, number) for each, number in answers if number is not None)
        cuts += [_cut(problem, shares, _minimal_failing_set(problem, each, slots)) for each in failing]


def _minimal_failing_set(
    problem: Problem, failing: Sequence[AdapterShare], slots: SlotChooser
) -> list[AdapterShare]:
    """Return a failing subset that holds without any one of its shares."""
    core = list(failing)
    for share in sorted(failing, key=problem.offered_tok_s):
        without = [other for other in core if other != share]
        if without and slots(without) is None:
            core = without
    return core


def _cut(problem: Problem, shares: Sequence[AdapterShare], core: Sequence[AdapterShare]) -> Cut:
    """Return the cut of a failing set, in which shares at least as heavy as all of the set replace any."""
    lengths = problem.lengths
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


def _program(problem: Problem, shares: Sequence[AdapterShare], slots: SlotChooser) -> PlacementProgram:
    load = _share_loads(problem, shares)
    ranks = sorted({share.rank for share in shares})
    return PlacementProgram(
        ranks=np.array([share.rank for share in shares]),
        loads=load / max(load.sum(), 1e-9),
        gpu_ranks=np.array(ranks),
        weights=np.array([_weights(shares, load, rank, slots) for rank in ranks]),
        apart=[(i, j) for i, share in enumerate(shares) for j in range(i) if shares[j].name == share.name],
    )


def _share_loads(problem: Problem, shares: Sequence[AdapterShare]) -> NDArray[np.float64]:
    """Return the load of every share: the least busy time of a GPU, or tokens if that is unknown."""
    lengths = problem.lengths
    busy = {lengths[share.name]: _busy_per_rps(problem, share.name) for share in shares}
    if all(busy.values()):
        return np.array([share.rate_rps * busy[lengths[share.name]] for share in shares])
    return np.array([problem.offered_tok_s(share) for share in shares])


def _busy_per_rps(problem: Problem, name: str) -> float:
    """Return the least busy time per request; 0 if unknown."""
    if problem.workload.trace is not None:
        return 0.0
    alone = problem.workload.subset([name])
    once = alone.model_copy(
        update={
            "adapters": tuple(a.model_copy(update={"rate_rps": 1.0}) for a in alone.adapters),
            "base": alone.base and alone.base.model_copy(update={"rate_rps": 1.0}),
        }
    )
    return busy_gpus(replace(problem, workload=once))


def _weights(
    shares: Sequence[AdapterShare], load: NDArray[np.float64], rank: int, slots: SlotChooser
) -> NDArray[np.float64]:
    """Return the part of a GPU of this largest rank that each share takes; 0 if one GPU holds all.

    An adapter takes its load and a constant. Both limits follow from the sets at which a GPU begins to fail:
    the fewest hot adapters, and the most cold ones.
    """
    hot = sorted(
        (i for i, share in enumerate(shares) if share.rank <= rank),
        key=lambda i: (-load[i], shares[i].name, shares[i].number),
    )
    limits = []
    for order in (hot, hot[::-1]):
        first = next(i for i in order if shares[i].rank == rank)
        ordered = [first, *(i for i in order if i != first)]
        limit = _failure_limit([shares[i] for i in ordered], load[ordered], slots)
        if limit is None:
            return np.zeros(len(shares))
        limits.append(limit)
    (few, much), (many, little) = limits
    per_adapter = max(0.0, (much - little) / (many - few)) if many > few else 0.0
    most = max(much + per_adapter * few, little + per_adapter * many)
    if most <= 0.0:
        return np.zeros(len(shares))
    weights: NDArray[np.float64] = (load + per_adapter) / (_CAPACITY_TOLERANCE * most)
    return weights


def _failure_limit(
    shares: Sequence[AdapterShare], load: NDArray[np.float64], slots: SlotChooser
) -> tuple[int, float] | None:
    """Return the number and load of the first shares with which a GPU fails; None if it holds all."""
    if slots(shares) is not None:
        return None
    holds, fails = 0, len(shares)
    while fails - holds > 1:
        middle = (holds + fails) // 2
        holds, fails = (holds, middle) if slots(shares[:middle]) is None else (middle, fails)
    low, high = 0.0, 1.0
    last = shares[holds]
    for _ in range(_BISECTIONS):
        fraction = (low + high) / 2.0
        partly = replace(last, rate_rps=last.rate_rps * fraction, fraction=last.fraction * fraction)
        low, high = (low, fraction) if slots([*shares[:holds], partly]) is None else (fraction, high)
    return fails, float(load[:holds].sum() + high * load[holds])


class SolverTimeout(Exception):  # noqa: N818  (not an error)
    """The deadline passed before a solution or a proof that there is none."""


@dataclass(frozen=True)
class PlacementProgram:
    """Integer program of a placement.

    Share i on GPU g is column i * gpus + g, followed by the columns for GPU g with the r-th largest rank, and
    the load of the fullest GPU.
    """

    ranks: NDArray[np.int64]
    """Rank of each share, shape (shares,)."""
    loads: NDArray[np.float64]
    """Load of each share relative to the total, shape (shares,)."""
    gpu_ranks: NDArray[np.int64]
    """Largest ranks of a GPU, ascending."""
    weights: NDArray[np.float64]
    """Part of a GPU of each largest rank that each share takes, shape (ranks, shares)."""
    apart: Sequence[tuple[int, int]]
    """Pairs of shares that must not be on one GPU."""

    def min_gpus(self) -> int:
        """Return a lower bound on the number of GPUs, whatever their ranks."""
        possible = self.gpu_ranks[:, None] >= self.ranks
        least = np.where(possible, self.weights, np.inf).min(axis=0)
        return max(1, math.ceil(float(least.sum()) - 1e-6))

    def solve(self, gpus: int, cuts: Sequence[Cut], deadline_s: float) -> list[int] | None:
        """Return the GPU of every share, or None if there is no placement.

        Raises `SolverTimeout` at the deadline, by `time.monotonic`.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        n, columns = self.loads.size, self._columns(gpus)
        rows = [row for gpu in range(gpus) for row in self._rows_of_gpu(gpu, gpus, cuts)]
        rows += [(share * gpus + np.arange(gpus), np.ones(gpus), 1.0, 1.0) for share in range(n)]
        used, entries, lower, upper = zip(*rows, strict=True)
        at = np.repeat(np.arange(len(rows)), [each.size for each in used])
        shape = (len(rows), columns)
        matrix = csr_array((np.concatenate(entries), (at, np.concatenate(used))), shape=shape)
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
            constraints=LinearConstraint(matrix, np.array(lower), np.array(upper)),
            options={"time_limit": left_s, "mip_rel_gap": _MIP_GAP},
        )
        if result.x is not None:
            chosen: list[int] = np.argmax(result.x[: n * gpus].reshape(n, gpus), axis=1).tolist()
            return chosen
        if result.status == _INFEASIBLE:
            return None
        raise SolverTimeout

    def _columns(self, gpus: int) -> int:
        return (self.loads.size + self.gpu_ranks.size) * gpus + 1

    def _rows_of_gpu(self, gpu: int, gpus: int, cuts: Sequence[Cut]) -> Iterator[LinearRow]:
        n, ranks = self.loads.size, self.gpu_ranks
        mine = np.arange(n) * gpus + gpu
        largest = (n + np.arange(ranks.size)) * gpus + gpu
        yield largest, np.ones(ranks.size), 1.0, 1.0
        for share in range(n):  # the rank of a GPU is at least that of its shares
            enough = largest[ranks >= self.ranks[share]]
            yield np.append(enough, mine[share]), np.append(np.ones(enough.size), -1.0), 0.0, np.inf
        for row, weights in enumerate(self.weights):  # binding only if this is the largest rank
            beyond = max(0.0, float(weights.sum()) - 1.0)
            yield np.append(mine, largest[row]), np.append(weights, beyond), -np.inf, 1.0 + beyond
        yield np.append(mine, self._columns(gpus) - 1), np.append(self.loads, -1.0), -np.inf, 0.0
        for i, j in self.apart:
            yield mine[[i, j]], np.ones(2), 0.0, 1.0
        for members, most in cuts:
            yield mine[members], np.ones(members.size), 0.0, float(most)
