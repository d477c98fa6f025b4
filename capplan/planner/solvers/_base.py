"""Solver interface: description of a solver and its context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from capplan.planner.problem._execution import NEVER, Deadline, no_progress
from capplan.planner.problem._problem import Assignment, Estimator, Problem
from capplan.spec import Plan

DEFAULT_TIME_LIMIT_S = 60.0


class Requirement(StrEnum):
    """Workload feature beyond the fewest of equal GPUs; the value is its key in the workload file."""

    POOLS = "pools"
    OBJECTIVE = "objective"
    APART = "adapters: apart_from"
    TOGETHER = "adapters: together_with"
    MAX_REPLICAS = "adapters: max_replicas"
    PREVIOUS_PLAN = "previous_plan"


class RequiredEstimator(StrEnum):
    """Estimator that a solver requires."""

    NONE = "none"
    ESTIMATOR = "estimator"
    TWIN = "estimator and twin"


@dataclass(frozen=True)
class SolverContext:
    """Estimators and limits of a solver run."""

    estimator: Estimator
    """Estimator selected by the user, such as a surrogate."""
    twin: Estimator
    """Digital twin."""
    seed: int = 0
    """Seed of every random choice."""
    time_limit_s: float = DEFAULT_TIME_LIMIT_S
    """Time after which a slow solver raises, or returns its best placement."""
    surrogate: Estimator | None = None
    """Surrogate that ignores latency bounds; None: use `estimator`."""
    conservative_twin: Estimator | None = None
    """Twin with a larger margin to the served fraction; None: use `twin`."""
    previous: Plan | None = None
    """Plan in force, from which adapters are moved as little as possible."""
    insufficient_gpus: int = 0
    """Number of GPUs that is known not to suffice."""
    deadline: Deadline = NEVER
    """Time at which estimates raise `OutOfTimeError`."""
    on_answer: Callable[[Sequence[Assignment]], None] = no_progress
    """Called with each answer that is found during the search, which is used if the deadline ends it."""
    on_alternative: Callable[[Sequence[Assignment]], None] = no_progress
    """Called with each confirmed placement that moves fewer adapters than the answer, at a higher cost."""
    on_cut: Callable[[], None] = no_progress
    """Called if the time limit ends the search, so that the answer is the best by then."""
    renew: Callable[[Problem], SolverContext] | None = None
    """Returns the context for another load on the same instances; None: this one."""

    def for_problem(self, problem: Problem) -> SolverContext:
        """Return the context for another load on the same instances."""
        return self if self.renew is None else self.renew(problem)


@dataclass(frozen=True)
class Solver:
    """A named placement algorithm."""

    name: str
    """Name for users."""
    summary: str
    """One line about the algorithm."""
    source: str
    """Paper and section, or other origin."""
    place: Callable[[Problem, SolverContext], Sequence[Assignment]]
    """Called with problem and context. Returns one assignment per GPU used, or raises `InfeasibleError`. The
    same problem, seed and estimates give the same assignments."""
    required_estimator: RequiredEstimator = RequiredEstimator.NONE
    """Estimator that it calls. With the twin, the twin also decides which adapters are split."""
    splits_hot: bool = False
    """Whether adapters too hot for one GPU are split before `place` is called."""
    confirms: bool = False
    """Whether every GPU of an answer fits in memory and holds by its estimator. Other answers are raw."""
    divides: bool = False
    """Whether it divides adapters into shares of its own."""
    fixed_a_max: bool = True
    """Whether it supports a number of slots fixed by the workload."""
    uses_all_gpus: bool = False
    """Whether it places on all GPUs, also for a small load. Their number must then be given."""
    estimator: str = "auto"
    """Name of its own estimator; "auto": the user's choice."""
    supports: frozenset[Requirement] = frozenset({Requirement.MAX_REPLICAS})
    """Supported requirements. A workload with any other is refused."""
