"""Curves over the engine knobs: one simulation per value of the token budget and of the running requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from capplan.planner.estimate import SEARCH_DURATION_S
from capplan.planner.evaluate import evaluate, known_value
from capplan.planner.knobs import KNOBS, knob_variants
from capplan.planner.parallel import parallel_map
from capplan.planner.problem import Assignment, Problem


@dataclass(frozen=True)
class KnobPoint:
    """An instance with a value of a knob; latencies are None if no request was served."""

    value: int
    """Value of the knob."""
    throughput_tok_s: float
    served_fraction: float
    ttft_p99_s: float | None
    tpot_p99_ms: float | None
    itl_p99_ms: float | None
    """As in `capplan.twin.SimulationResult`."""
    broken: tuple[str, ...]
    """Broken bounds of the workload, as text."""


@dataclass(frozen=True)
class KnobCurve:
    """An instance with different values of one engine knob, all else equal."""

    knob: str
    """Name of the engine setting."""
    points: tuple[KnobPoint, ...]
    """By ascending value."""
    chosen: int
    """Value in the plan."""
    scale: float
    """Simulated multiple of the planned load: 1 / (1 - headroom), as in the search."""


def knob_curves(
    problem: Problem,
    assignment: Assignment,
    *,
    seed: int = 0,
    duration_s: float = SEARCH_DURATION_S,
    answered: Callable[[int], None] | None = None,
) -> tuple[KnobCurve, ...]:
    """Return the curve of each knob that the planner may choose, by the twin.

    `answered` is called with the number of simulations done.
    """
    variants = _variants(problem, assignment)
    scale = 1.0 / (1.0 - problem.workload.headroom)
    points = parallel_map(
        lambda variant: _point(problem, assignment, variant, (seed, duration_s, scale)), variants, answered
    )
    args = problem.engine_args(assignment)
    return tuple(
        KnobCurve(
            knob,
            tuple(point for point, (name, _) in zip(points, variants, strict=True) if name == knob),
            getattr(args, knob),
            scale,
        )
        for knob in dict.fromkeys(name for name, _ in variants)
    )


def knob_curves_size(problem: Problem, assignment: Assignment) -> int:
    """Return the number of simulations of the curves."""
    return len(_variants(problem, assignment))


def _variants(problem: Problem, assignment: Assignment) -> Sequence[tuple[str, int]]:
    """Return the knobs and values to simulate: those of open knobs with which the instance starts."""
    found: list[tuple[str, int]] = []
    for knob in KNOBS:
        variants = knob_variants(problem, assignment, knob)
        values = {getattr(problem.engine_args(each), knob) for each in (assignment, *variants)}
        found += [(knob, value) for value in sorted(values) if variants]
    return found


def _point(
    problem: Problem, assignment: Assignment, variant: tuple[str, int], run: tuple[int, float, float]
) -> KnobPoint:
    knob, value = variant
    setting: dict[str, Any] = {knob: value}
    evaluation = evaluate(problem, replace(assignment, **setting), *run)
    result = evaluation.result
    return KnobPoint(
        value=value,
        throughput_tok_s=result.throughput_tok_s,
        served_fraction=result.served_fraction,
        ttft_p99_s=known_value(result.ttft_s_p99),
        tpot_p99_ms=known_value(result.tpot_ms_p99),
        itl_p99_ms=known_value(result.itl_ms_p99),
        broken=evaluation.violations,
    )
