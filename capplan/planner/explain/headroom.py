"""Utilization and headroom of an instance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from capplan.planner.bound import busy_gpus
from capplan.planner.evaluate import evaluate
from capplan.planner.problem import Assignment, Problem, distinct_adapters
from capplan.spec import Binds
from capplan.twin import SimulationResult
from capplan.twin.metrics import bound_value

_OVERLOAD_SEED: Final = 7
_OVERLOAD_DURATION_S: Final = 600.0
"""As long as the runs that find what binds: an overloaded instance falls behind as long as it runs."""

_OVERLOAD_STEP: Final = 1.0 / 32.0
"""How far beyond the largest load that it holds; twice the step of those runs."""


@dataclass(frozen=True)
class Headroom:
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
    uses: tuple[ResourceUse, ...]
    words: str


def find_headroom(
    problem: Problem,
    assignment: Assignment,
    binds: Binds | None,
    load_over_capacity: float | None,
    seed: int,
    duration_s: float,
) -> Headroom:
    """Return what is left on an instance.

    Parameters
    ----------
    problem, assignment
        What it serves, and how it is set.
    binds, load_over_capacity
        What `capplan.planner.evaluate` found, as it stands in the plan.
    seed, duration_s
        Of the simulation at the planned load.

    Raises
    ------
    InfeasibleError
        When the instance would not start.
    """
    now = evaluate(problem, assignment, seed, duration_s).result
    holds_until = 1.0 / load_over_capacity if load_over_capacity else None
    if holds_until is None or binds is None:
        return Headroom(
            holds_until, None, (), uses(problem, assignment, now, None, None), _nothing_binds(holds_until)
        )
    fails_at = holds_until + _OVERLOAD_STEP * max(1.0, holds_until)
    beyond = evaluate(problem, assignment, _OVERLOAD_SEED, _OVERLOAD_DURATION_S, fails_at)
    rows = uses(problem, assignment, now, beyond.result, fails_at)
    fault = f"it breaks {beyond.violations[0]}" if beyond.violations else f"what is full: {binds.note}"
    words = f"holds {holds_until:.2f} x the planned load; at {fails_at:.2f} x {fault}"
    return Headroom(holds_until, fails_at, beyond.violations, rows, words + _fullest(rows, binds))


def _fullest(rows: tuple[ResourceUse, ...], binds: Binds) -> str:
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


Measure = Callable[[SimulationResult], float]


@dataclass(frozen=True)
class ResourceUse:
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
) -> tuple[ResourceUse, ...]:
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
        *(
            _bound_use(name, most, now, beyond)
            for name, most in problem.workload.slo.latency_bounds().items()
        ),
    ]
    return tuple(row for row in rows if row is not None)


def _kv(now: SimulationResult, beyond: SimulationResult | None) -> ResourceUse:
    detail = f"{now.kv_tokens_mean:,.0f} of {now.kv_tokens:,} tokens"
    shares = _shares(lambda result: result.kv_tokens_mean / result.kv_tokens, now, beyond)
    return ResourceUse("kv", "KV-cache memory", *shares, detail)


def _slots(assignment: Assignment, now: SimulationResult, beyond: SimulationResult | None) -> ResourceUse:
    all_have_one = assignment.a_max >= distinct_adapters(assignment.shares)
    detail = f"{now.adapters_mean:.1f} of {assignment.a_max}" + (
        ", one for each adapter" if all_have_one else ""
    )
    shares = _shares(lambda result: result.adapters_mean / assignment.a_max, now, beyond)
    return ResourceUse("slots", "adapter slots", *shares, detail, limits=not all_have_one)


def _requests(most: int, now: SimulationResult, beyond: SimulationResult | None) -> ResourceUse:
    detail = f"{now.running_mean:.0f} of {most} (max_num_seqs), at most {now.running_max}"
    shares = _shares(lambda result: result.running_mean / most, now, beyond)
    return ResourceUse("requests", "running requests", *shares, detail)


def _compute(problem: Problem, assignment: Assignment, scale: float | None) -> ResourceUse | None:
    """Return the least share of the time that the load takes, in full batches; None where not known."""
    share = problem.subworkload(assignment.shares)
    everything = share.slo.model_copy(update={"served_fraction": 1.0})
    alone = share.model_copy(update={"headroom": 0.0, "slo": everything})
    least = busy_gpus(replace(problem, workload=alone, pools=(problem.pools[assignment.pool],)))
    if least == 0.0:
        return None
    then = None if scale is None else least * scale
    return ResourceUse("compute", "compute, at least", least, then, "of the time, if all batches were full")


def _busy(now: SimulationResult, beyond: SimulationResult | None) -> ResourceUse:
    detail = "no limit by itself: fuller batches do more in it"
    shares = _shares(lambda result: result.busy_fraction, now, beyond)
    return ResourceUse("busy", "time in steps", *shares, detail, limits=False)


def _unserved(asked: float, now: SimulationResult, beyond: SimulationResult | None) -> ResourceUse | None:
    """Return how much is unserved of what may be; None where nothing may."""
    if asked == 1.0:
        return None
    detail = f"{100.0 * now.served_fraction:.1f} % served, {100.0 * asked:g} % asked for"
    shares = _shares(lambda result: (1.0 - result.served_fraction) / (1.0 - asked), now, beyond)
    return ResourceUse("served_fraction", "unserved tokens", *shares, detail)


def _bound_use(name: str, most: float, now: SimulationResult, beyond: SimulationResult | None) -> ResourceUse:
    value = bound_value(now, name)
    detail = "no request" if math.isnan(value) else f"{value:.3g} of {most:g}"
    return ResourceUse(
        name, name, *_shares(lambda result: bound_value(result, name) / most, now, beyond), detail
    )


def _shares(
    measure: Measure, now: SimulationResult, beyond: SimulationResult | None
) -> tuple[float | None, float | None]:
    values = (measure(now), math.nan if beyond is None else measure(beyond))
    first, second = (None if math.isnan(value) else float(value) for value in values)
    return first, second
