"""Solver interface: description of a solver and its context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from capplan.planner.problem import Assignment, Estimator, Problem
from capplan.spec import Plan

DEFAULT_TIME_LIMIT_S = 60.0


class Requirement(StrEnum):
    """What a workload may ask for beyond the fewest of equal GPUs; the value is the key that says so."""

    POOLS = "pools"
    OBJECTIVE = "objective"
    APART = "adapters: apart_from"
    TOGETHER = "adapters: together_with"
    MAX_REPLICAS = "adapters: max_replicas"
    PREVIOUS_PLAN = "previous_plan"


class RequiredEstimator(StrEnum):
    """Whom a solver asks about single GPUs."""

    NOTHING = "nobody"
    ESTIMATOR = "the estimator"
    TWIN = "the estimator and the twin"


@dataclass(frozen=True)
class SolverContext:
    """What a solver may use.

    Attributes
    ----------
    quick
        The estimator that was asked for, such as a surrogate.
    exact
        The twin, or what a test puts in its place.
    seed
        Of whatever is drawn at random.
    time_limit_s
        When a solver that may take long gives up, or answers with the best so far, in seconds.
    hint
        A quick guess at what an instance serves, whatever the latency bounds; None: ask `quick`.
    previous
        The plan in force, whose groups keep adapters that are there; None without.
    """

    quick: Estimator
    exact: Estimator
    seed: int = 0
    time_limit_s: float = DEFAULT_TIME_LIMIT_S
    hint: Estimator | None = None
    careful: Estimator | None = None
    """The twin that takes nothing which holds only just; None: ask `exact`."""
    previous: Plan | None = None
    renew: Callable[[Problem], SolverContext] | None = None
    """Returns the same tools for another load on the same instances; None: these do for it, too."""

    def asking_about(self, problem: Problem) -> SolverContext:
        """Return tools that answer for another load on the same instances."""
        return self if self.renew is None else self.renew(problem)


@dataclass(frozen=True)
class Solver:
    """A way to place adapters, with its name.

    Attributes
    ----------
    name
        How users ask for it.
    summary
        What it does, in one line.
    source
        Paper and section, or where else it comes from.
    place
        Called with the problem and the tools; returns one assignment per GPU used, or raises
        `InfeasibleError`. The same problem, seed and answers of the estimators give the same assignments.
    asks
        Whom it asks; the twin then also decides which adapters are too hot for one GPU.
    splits_hot
        Whether adapters too hot for one GPU come to it in shares; otherwise as they are.
    confirms
        Whether it answers only with GPUs that hold by whom it asks, memory included. Other answers are raw:
        their GPUs may starve, or not even start.
    divides
        Whether it divides adapters itself, into shares of its own.
    fixed_a_max
        Whether it keeps a number of slots that the workload fixes.
    estimator
        The estimator that belongs to it; "auto": the user's choice.
    honours
        Wishes that it grants. A workload with any other is refused, rather than answered as if without.
    """

    name: str
    summary: str
    source: str
    place: Callable[[Problem, SolverContext], Sequence[Assignment]]
    asks: RequiredEstimator
    splits_hot: bool = False
    confirms: bool = False
    divides: bool = False
    fixed_a_max: bool = True
    estimator: str = "auto"
    honours: frozenset[Requirement] = frozenset({Requirement.MAX_REPLICAS})
