"""What adds up on a GPU: its load and its adapters, measured for every largest rank.

Two boundaries are measured for a largest rank: parts are put on one GPU, once the hottest first and once the
coldest first, until it fails; what fits of the last one is found by bisection. A line through both (few
adapters with much load, many with little) is the capacity, with 5 % to spare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.planner.bound import busy_gpus
from capplan.planner.problem import Part, Problem

_SPARE: Final = 1.05
_BISECTIONS: Final = 5

Slots = Callable[[Sequence[Part]], int | None]
"""Gives the best number of slots for the parts of one GPU, None when it fails with any."""


@dataclass(frozen=True)
class Capacity:
    """Shares of a GPU that parts take.

    Attributes
    ----------
    ranks
        Largest ranks that a GPU may have, ascending.
    shares
        Of each rank and part, shape (ranks, parts); they sum to at most 1. 0 where one GPU holds all parts.
    """

    ranks: tuple[int, ...]
    shares: NDArray[np.float64]


def loads(problem: Problem, parts: Sequence[Part]) -> NDArray[np.float64]:
    """Return what every part asks of a GPU: busy time by its lengths, or tokens where that is not known."""
    lengths = {a.name: problem.workload.lengths_of(a) for a in problem.workload.adapters}
    busy = {lengths[part.name]: _busy_per_rps(problem, part.name) for part in parts}
    if all(busy.values()):
        return np.array([part.rate_rps * busy[lengths[part.name]] for part in parts])
    return np.array([problem.offered_tok_s(part) for part in parts])


def measure(parts: Sequence[Part], load: NDArray[np.float64], slots: Slots) -> Capacity:
    """Return the capacity of a GPU for these parts."""
    ranks = sorted({part.rank for part in parts})
    shares = np.zeros((len(ranks), len(parts)))
    for row, rank in enumerate(ranks):
        hot = sorted(
            (i for i, part in enumerate(parts) if part.rank <= rank),
            key=lambda i: (-load[i], parts[i].name, parts[i].number),
        )
        line = _line([_boundary(_led(order, parts, rank), parts, load, slots) for order in (hot, hot[::-1])])
        if line is not None:
            per_adapter, most = line
            shares[row] = (load + per_adapter) / (_SPARE * most)
    return Capacity(tuple(ranks), shares)


def _led(order: Sequence[int], parts: Sequence[Part], rank: int) -> list[int]:
    """Return the order with the first part of this rank before all others."""
    first = next(i for i in order if parts[i].rank == rank)
    return [first, *(i for i in order if i != first)]


def _boundary(
    order: Sequence[int], parts: Sequence[Part], load: NDArray[np.float64], slots: Slots
) -> tuple[int, float] | None:
    """Return adapters and load with which a GPU just fails; None when it holds all of them."""
    chosen = [parts[i] for i in order]
    if slots(chosen) is not None:
        return None
    holds, fails = 0, len(chosen)
    while fails - holds > 1:
        middle = (holds + fails) // 2
        holds, fails = (holds, middle) if slots(chosen[:middle]) is None else (middle, fails)
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        share = (low + high) / 2.0
        last = chosen[holds]
        partly = replace(last, rate_rps=last.rate_rps * share, share=last.share * share)
        low, high = (low, share) if slots([*chosen[:holds], partly]) is None else (share, high)
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
