"""Engine knobs that the planner chooses beside the slots: tokens per step and running requests.

A smaller token budget shortens the steps that carry prefills, and with them TPOT and ITL; a larger one
prefills sooner, which shortens TTFT. Fewer running requests shorten every step and leave more KV memory;
more take waiting requests. Without a latency bound none of this matters, and the defaults are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from capplan.planner.problem._problem import KnobSearch, estimate_all
from capplan.spec import EngineArgs, EngineConfig, Profile
from capplan.twin.instance import MODELS, SLACK

if TYPE_CHECKING:
    from capplan.planner.problem._problem import Assignment, Estimate, Estimator, Problem

TOKEN_BUDGETS: Final = (256, 512, 1024, 2048, 4096, 8192, 16384)
"""Values of max_num_batched_tokens to try."""
RUNNING_REQUESTS: Final = (64, 128, 256, 512, 1024)
"""Values of max_num_seqs to try."""
_FALLBACKS: Final = (128, 512)
"""Values of max_num_seqs to try before an instance is refused."""
KNOBS: Final = ("max_num_batched_tokens", "max_num_seqs")
_ROUNDS: Final = 2
"""Passes over both knobs."""


KnobGrid: TypeAlias = Mapping[str, tuple[int, ...]]
"""Values of each knob to try, ascending; one value if the knob is fixed."""


def has_open_knobs(problem: Problem, pool: int) -> bool:
    """Return whether a knob of instances of a pool has several values to try."""
    return any(len(values) > 1 for values in knob_grid(problem, pool).values())


def knobs_of(args: EngineArgs) -> EngineConfig:
    """Return the knobs of engine settings."""
    return EngineConfig(**{name: getattr(args, name) for name in KNOBS})


def knob_grid(problem: Problem, pool: int) -> KnobGrid:
    """Return the values of the knobs that instances of a pool may have."""
    fixed, engine = problem.workload.engine, problem.engine
    tokens, seqs = engine.max_num_batched_tokens, engine.max_num_seqs
    if problem.knobs is KnobSearch.DEFAULT or not problem.bounds_latency:
        return {"max_num_batched_tokens": (tokens,), "max_num_seqs": (seqs,)}
    most_tokens, most_seqs = float(TOKEN_BUDGETS[-1]), float(RUNNING_REQUESTS[-1])
    if problem.knobs is KnobSearch.FITTED:
        profile = problem.pools[pool].profile
        most_tokens = _fitted_limit(profile, ("max_num_batched_tokens", "tokens"), tokens)
        most_seqs = _fitted_limit(profile, ("max_num_seqs", "requests"), seqs)
    budgets, requests = _up_to(TOKEN_BUDGETS, most_tokens, tokens), _up_to(RUNNING_REQUESTS, most_seqs, seqs)
    return {
        "max_num_batched_tokens": budgets if fixed.max_num_batched_tokens is None else (tokens,),
        "max_num_seqs": requests if fixed.max_num_seqs is None else (seqs,),
    }


def fallback_running_requests(problem: Problem) -> tuple[int, ...]:
    """Return other values of max_num_seqs to try before an instance is refused, also without a grid."""
    if problem.workload.engine.max_num_seqs is not None or problem.knobs is KnobSearch.DEFAULT:
        return ()
    return tuple(value for value in _FALLBACKS if value <= problem.engine.max_num_batched_tokens)


def max_running_requests(problem: Problem, pool: int) -> int:
    """Return the largest max_num_seqs that an instance of a pool may get."""
    return max(*knob_grid(problem, pool)["max_num_seqs"], *fallback_running_requests(problem), 1)


def _up_to(grid: Sequence[int], most: float, default: int) -> tuple[int, ...]:
    return tuple(sorted({value for value in grid if value <= most} | {default}))


def _fitted_limit(profile: Profile, quantities: tuple[str, ...], default: int) -> float:
    """Return the largest value of a knob inside the fitted ranges of quantities that it limits.

    Smaller values need no measurement of their own: they only make steps with fewer tokens and requests. A
    profile without such a range was measured at the default.
    """
    ranges = [getattr(profile, model).fitted_range for model in MODELS]
    ends = [fitted[quantity][1] for fitted in ranges for quantity in quantities if quantity in fitted]
    return (1.0 + SLACK) * min(ends, default=default)


class TunedInstance(NamedTuple):
    """Instance with the values of its knobs, and its estimate."""

    assignment: Assignment
    estimate: Estimate


def tune_knobs(
    problem: Problem, assignment: Assignment, estimator: Estimator, *, until_it_holds: bool = False
) -> TunedInstance:
    """Return an instance with the knobs of the least utilization, one knob after the other.

    All values of a knob are tried, side by side, since the utilization is flat where steps do not reach the
    token budget. Among equal values the current one stays. With `until_it_holds`, knobs are tuned only while
    the instance does not hold.
    """
    best = TunedInstance(assignment, estimator(assignment))
    for _ in range(_ROUNDS):
        before = best
        for knob in KNOBS:
            if not (until_it_holds and not best.estimate.starved):
                others = knob_variants(problem, best.assignment, knob)
                tried = map(TunedInstance, others, estimate_all(estimator, others))
                best = min((best, *tried), key=lambda each: each.estimate.utilization)
        if best is before:
            break
    return best


def knob_variants(problem: Problem, assignment: Assignment, knob: str) -> list[Assignment]:
    """Return the instance with each other value of a knob, ascending, as far as it starts with them."""
    current = getattr(problem.engine_args(assignment), knob)
    others = (value for value in knob_grid(problem, assignment.pool)[knob] if value != current)
    variants = (with_knob(assignment, knob, value) for value in others)
    return [each for each in variants if _starts(problem, each)]


def with_knob(assignment: Assignment, knob: str, value: int) -> Assignment:
    """Return an instance with another value of a knob, with which it may not start."""
    return replace(assignment, knobs=assignment.knobs.model_copy(update={knob: value}))


def _starts(problem: Problem, assignment: Assignment) -> bool:
    args = problem.engine_args(assignment)
    return args.max_num_seqs <= args.max_num_batched_tokens and problem.fits_in_memory(assignment)
