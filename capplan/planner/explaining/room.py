"""The room that is left on an instance: up to which load it holds, and what is full then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from capplan.planner.explaining.use import Use, uses
from capplan.planner.judging import judge
from capplan.planner.problem import Assignment, Problem
from capplan.spec import Binds

_SEED: Final = 7
_OVERLOADED_S: Final = 600.0
"""As long as the runs that find what binds: an overloaded instance falls behind as long as it runs."""
_BEYOND: Final = 1.0 / 32.0
"""How far beyond the largest load that it holds; twice the step of those runs."""


@dataclass(frozen=True)
class Room:
    """What is left on an instance.

    Attributes
    ----------
    holds_until
        Largest multiple of the planned load that it holds; None where there is no load.
    fails_at
        Multiple at which `beyond` of the uses was measured; None where nothing was found to bind.
    broken
        What breaks there, in words.
    uses
        Of every resource and every bound.
    words
        All of that in a sentence, with what is fullest beside what binds.
    """

    holds_until: float | None
    fails_at: float | None
    broken: tuple[str, ...]
    uses: tuple[Use, ...]
    words: str


def find_room(
    problem: Problem,
    assignment: Assignment,
    binds: Binds | None,
    load_over_capacity: float | None,
    seed: int,
    duration_s: float,
) -> Room:
    """Return what is left on an instance.

    Parameters
    ----------
    problem, assignment
        What it serves, and how it is set.
    binds, load_over_capacity
        What `capplan.planner.binding` found, as it stands in the plan.
    seed, duration_s
        Of the simulation at the planned load.

    Raises
    ------
    InfeasibleError
        When the instance would not start.
    """
    now = judge(problem, assignment, seed, duration_s).result
    holds_until = 1.0 / load_over_capacity if load_over_capacity else None
    if holds_until is None or binds is None:
        return Room(
            holds_until, None, (), uses(problem, assignment, now, None, None), _nothing_binds(holds_until)
        )
    fails_at = holds_until + _BEYOND * max(1.0, holds_until)
    beyond = judge(problem, assignment, _SEED, _OVERLOADED_S, fails_at)
    rows = uses(problem, assignment, now, beyond.result, fails_at)
    fault = f"it breaks {beyond.broken[0]}" if beyond.broken else f"what is full: {binds.note}"
    words = f"holds {holds_until:.2f} x the planned load; at {fails_at:.2f} x {fault}"
    return Room(holds_until, fails_at, beyond.broken, rows, words + _fullest(rows, binds))


def _fullest(rows: tuple[Use, ...], binds: Binds) -> str:
    """Return what is fullest beside what binds and the bounds that are broken."""
    others = [
        row
        for row in rows
        if row.limits and row.beyond is not None and row.beyond <= 1.0 and row.resource != binds.resource
    ]
    fullest = max(others, key=lambda row: row.beyond or 0.0, default=None)
    if fullest is None:
        return ""
    return f"; fullest beside that: {fullest.name}, {100.0 * (fullest.beyond or 0.0):.0f} %"


def _nothing_binds(holds_until: float | None) -> str:
    if holds_until is None:
        return "no load at all, so nothing binds"
    return f"holds {holds_until:.0f} x the planned load, and more was not tried"
