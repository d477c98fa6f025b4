"""Utilization and headroom of an instance."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from capplan.planner.problem._bound import busy_gpus
from capplan.planner.problem._evaluate import evaluate, known_value, kv_share
from capplan.planner.problem._problem import Assignment, KnobSearch, Problem, distinct_adapters
from capplan.spec import Binds
from capplan.twin import SimulationResult
from capplan.twin.instance import bound_value

_OVERLOAD_STEP: Final = 1.0 / 32.0
"""Relative excess over the largest load that holds, at which a failing instance is simulated; twice the
resolution of that load."""


@dataclass(frozen=True)
class Headroom:
    """Headroom of an instance."""

    holds_until: float | None
    """Largest multiple of the planned load that holds; None without load."""
    fails_at: float | None
    """Multiple at which `beyond` of the uses was simulated; None without a bottleneck."""
    broken: tuple[str, ...]
    """Bounds that break there, as text."""
    uses: tuple[ResourceUse, ...]
    """Utilization of every resource and every bound."""
    words: str
    """Summary with the bottleneck and the resource in fullest use beside it."""


@dataclass(frozen=True)
class ResourceUse:
    """Utilization of a resource or a bound."""

    resource: str
    """``kv``, ``slots``, ``requests``, ``compute``, ``busy``, ``served_fraction``, or a latency bound."""
    name: str
    """Name for users."""
    now: float | None
    beyond: float | None
    """Share in use at the planned load, and where the instance fails; 1 is all, or the bound itself. None if
    unknown."""
    detail: str
    """Use at the planned load, in units."""
    limits: bool = True
    """Whether the instance is saturated when everything is in use."""


def find_headroom(
    problem: Problem,
    assignment: Assignment,
    binds: Binds | None,
    load_over_capacity: float | None,
    seed: int,
    bottleneck_seed: int,
) -> Headroom:
    """Return the headroom of an instance, from its bottleneck in the plan, which was found on another seed.

    Raises
    ------
    InfeasibleError
        If the instance does not start.
    """
    now = evaluate(problem, assignment, seed).result
    holds_until = 1.0 / load_over_capacity if load_over_capacity else None
    if holds_until is None or binds is None:
        words = "no load at all, so nothing binds"
        if holds_until is not None:
            words = f"holds {holds_until:.0f} x the planned load, and more was not tried"
        return Headroom(holds_until, None, (), _uses(problem, assignment, now, None, None), words)
    fails_at = holds_until + _OVERLOAD_STEP * max(1.0, holds_until)
    beyond = evaluate(problem, assignment, bottleneck_seed, fails_at)
    uses = _uses(problem, assignment, now, beyond.result, fails_at)
    fault = f"it breaks {beyond.violations[0]}" if beyond.violations else f"what is full: {binds.note}"
    words = f"holds {holds_until:.2f} x the planned load; at {fails_at:.2f} x {fault}"
    others = [
        (use.beyond, use.name)
        for use in uses
        if use.limits and use.beyond is not None and use.beyond <= 1.0 and use.resource != binds.resource
    ]
    if others:
        share, name = max(others, key=lambda other: other[0])
        words += f"; fullest beside that: {name}, {100.0 * share:.0f} %"
    return Headroom(holds_until, fails_at, beyond.violations, uses, words)


def _uses(
    problem: Problem,
    assignment: Assignment,
    now: SimulationResult,
    beyond: SimulationResult | None,
    fails_at: float | None,
) -> tuple[ResourceUse, ...]:
    """Return the use of every resource and every bound, at the planned load and at `fails_at` times it."""
    slo, a_max, seqs = problem.workload.slo, assignment.a_max, problem.engine_limits(assignment).max_num_seqs
    runs = [now] if beyond is None else [now, beyond]
    uses: list[ResourceUse] = []

    def add(resource: str, name: str, shares: Iterable[float], detail: str, limits: bool = True) -> None:
        share, there = (*map(known_value, shares), None)[:2]
        uses.append(ResourceUse(resource, name, share, there, detail, limits))

    detail = f"{kv_share(problem, assignment, now) * now.kv_tokens:,.0f} of {now.kv_tokens:,} tokens"
    add("kv", "KV-cache memory", [kv_share(problem, assignment, r) for r in runs], detail)
    if a_max and problem.has_slots:
        scarce = a_max < distinct_adapters(assignment.shares)
        detail = f"{now.adapters_mean:.1f} of {a_max}{'' if scarce else ', one for each adapter'}"
        add("slots", "adapter slots", [r.adapters_mean / a_max for r in runs], detail, scarce)
    detail = f"{now.running_mean:.0f} of {seqs} (max_num_seqs), at most {now.running_max}"
    add("requests", "running requests", [r.running_mean / seqs for r in runs], detail)
    compute = _min_busy(problem, assignment)
    if compute > 0.0:
        factors = (1.0,) if fails_at is None else (1.0, fails_at)
        detail = "of the time, if all batches were full"
        add("compute", "compute, at least", [compute * factor for factor in factors], detail)
    detail = "no limit by itself: fuller batches do more in it"
    add("busy", "time in steps", [r.busy_fraction for r in runs], detail, limits=False)
    if slo.served_fraction < 1.0:
        allowed = 1.0 - slo.served_fraction
        detail = f"{100.0 * now.served_fraction:.1f} % served, {100.0 * slo.served_fraction:g} % asked for"
        shares = [(1.0 - r.served_fraction) / allowed for r in runs]
        add("served_fraction", "unserved tokens", shares, detail)
    for name, bound in slo.latency_limits().items():
        values = [bound_value(r, name) for r in runs]
        detail = "no request" if math.isnan(values[0]) else f"{values[0]:.3g} of {bound:g}"
        add(name, name, [value / bound for value in values], detail)
    return tuple(uses)


def _min_busy(problem: Problem, assignment: Assignment) -> float:
    """Return the least share of the time that the load takes in full batches; 0 if unknown."""
    workload = problem.subworkload(assignment.shares)
    slo = workload.slo.model_copy(update={"served_fraction": 1.0})
    alone = workload.model_copy(update={"headroom": 0.0, "slo": slo})
    pools = (problem.pools[assignment.pool],)
    return busy_gpus(replace(problem, workload=alone, pools=pools, knobs=KnobSearch.DEFAULT))
