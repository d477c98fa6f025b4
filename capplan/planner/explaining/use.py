"""How much of every resource and every bound an instance has in use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from capplan.planner.bound import busy_gpus
from capplan.planner.problem import Assignment, Problem, distinct_adapters
from capplan.twin import SimulationResult
from capplan.twin.result import bound_value

Measure = Callable[[SimulationResult], float]


@dataclass(frozen=True)
class Use:
    """How much of something is in use.

    Attributes
    ----------
    resource
        ``kv``, ``slots``, ``requests`` (running at once), ``compute``, ``busy``, or a bound of the workload.
    name
        The same in words.
    now, beyond
        Share in use at the planned load, and where the instance fails; 1 is all of it, or the bound itself.
        None where nothing is known.
    detail
        What is in use at the planned load, in units.
    limits
        Whether the instance can do no more once all of it is in use.
    """

    resource: str
    name: str
    now: float | None
    beyond: float | None
    detail: str
    limits: bool = True


def uses(
    problem: Problem,
    assignment: Assignment,
    now: SimulationResult,
    beyond: SimulationResult | None,
    scale: float | None,
) -> tuple[Use, ...]:
    """Return the use of every resource, then of every bound.

    Parameters
    ----------
    problem, assignment
        What the instance serves, and how it is set.
    now, beyond
        What it does at the planned load, and at that times `scale`, where it fails; None: it never did.
    """
    rows = [
        _kv(now, beyond),
        _slots(assignment, now, beyond),
        _requests(problem.max_num_seqs(assignment), now, beyond),
        _compute(problem, assignment, scale),
        _busy(now, beyond),
        _unserved(problem.workload.slo.served_fraction, now, beyond),
        *(_bound(name, most, now, beyond) for name, most in problem.workload.slo.latency_bounds().items()),
    ]
    return tuple(row for row in rows if row is not None)


def _kv(now: SimulationResult, beyond: SimulationResult | None) -> Use:
    detail = f"{now.kv_tokens_mean:,.0f} of {now.kv_tokens:,} tokens"
    shares = _shares(lambda result: result.kv_tokens_mean / result.kv_tokens, now, beyond)
    return Use("kv", "KV-cache memory", *shares, detail)


def _slots(assignment: Assignment, now: SimulationResult, beyond: SimulationResult | None) -> Use:
    all_have_one = assignment.a_max >= distinct_adapters(assignment.parts)
    detail = f"{now.adapters_mean:.1f} of {assignment.a_max}" + (
        ", one for each adapter" if all_have_one else ""
    )
    shares = _shares(lambda result: result.adapters_mean / assignment.a_max, now, beyond)
    return Use("slots", "adapter slots", *shares, detail, limits=not all_have_one)


def _requests(most: int, now: SimulationResult, beyond: SimulationResult | None) -> Use:
    detail = f"{now.running_mean:.0f} of {most} (max_num_seqs), at most {now.running_max}"
    shares = _shares(lambda result: result.running_mean / most, now, beyond)
    return Use("requests", "running requests", *shares, detail)


def _compute(problem: Problem, assignment: Assignment, scale: float | None) -> Use | None:
    """Return the least share of the time that the load takes, in full batches; None where not known."""
    part = problem.subworkload(assignment.parts)
    everything = part.slo.model_copy(update={"served_fraction": 1.0})
    alone = part.model_copy(update={"headroom": 0.0, "slo": everything})
    least = busy_gpus(replace(problem, workload=alone, pools=(problem.pools[assignment.pool],)))
    if least == 0.0:
        return None
    then = None if scale is None else least * scale
    return Use("compute", "compute, at least", least, then, "of the time, if all batches were full")


def _busy(now: SimulationResult, beyond: SimulationResult | None) -> Use:
    detail = "no limit by itself: fuller batches do more in it"
    shares = _shares(lambda result: result.busy_fraction, now, beyond)
    return Use("busy", "time in steps", *shares, detail, limits=False)


def _unserved(asked: float, now: SimulationResult, beyond: SimulationResult | None) -> Use | None:
    """Return how much is unserved of what may be; None where nothing may."""
    if asked == 1.0:
        return None
    detail = f"{100.0 * now.served_fraction:.1f} % served, {100.0 * asked:g} % asked for"
    shares = _shares(lambda result: (1.0 - result.served_fraction) / (1.0 - asked), now, beyond)
    return Use("served_fraction", "unserved tokens", *shares, detail)


def _bound(name: str, most: float, now: SimulationResult, beyond: SimulationResult | None) -> Use:
    value = bound_value(now, name)
    detail = "no request" if math.isnan(value) else f"{value:.3g} of {most:g}"
    return Use(name, name, *_shares(lambda result: bound_value(result, name) / most, now, beyond), detail)


def _shares(
    measure: Measure, now: SimulationResult, beyond: SimulationResult | None
) -> tuple[float | None, float | None]:
    values = (measure(now), math.nan if beyond is None else measure(beyond))
    first, second = (None if math.isnan(value) else float(value) for value in values)
    return first, second
