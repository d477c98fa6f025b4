"""Time scales of arrivals: the windows and the simulated time in which bounds are decided."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from capplan.errors import InputError
from capplan.spec import (
    ArrivalProcess,
    Burst,
    Diurnal,
    Renewal,
    ShiftingSkew,
    Steps,
    Trace,
    Unpredictable,
    Workload,
)

_LEAST_REQUESTS: Final = 20
_LEAST_BURSTS: Final = 20
_LEAST_REDRAWS: Final = 8
"""Requests, bursts, and changes of rates that a simulation must contain to decide."""


class DecidingTime(NamedTuple):
    """Simulated time that decides on a workload, by the slowest part of its arrivals."""

    duration_s: float
    reason: str
    """The slowest part, as text."""


def deciding_time(workload: Workload) -> DecidingTime:
    """Return the simulated time in which the slowest random part of the arrivals shows.

    A trace decides by itself, and so does a rate that moves by a rule: its busiest window is simulated.
    Renewals whose gaps have a coefficient of variation c come in bursts of about c^2 requests. Unpredictable
    rates walk at random between their limits.
    """
    rate_rps = workload.total_rate_rps
    if workload.trace is not None or rate_rps == 0.0:
        return DecidingTime(0.0, "")
    found = [DecidingTime(_LEAST_REQUESTS / rate_rps, f"{3600.0 * rate_rps:.3g} requests arrive per hour")]
    adapters_rps = rate_rps - workload.base_rate_rps
    base = None if workload.base is None else workload.base.arrivals
    for arrivals, own_rps in ((workload.arrivals, adapters_rps), (base, workload.base_rate_rps)):
        if isinstance(arrivals, Unpredictable) and own_rps > 0.0:
            steps = _LEAST_REDRAWS
            if arrivals.factor > 1.0:
                steps = max(steps, math.ceil((math.log(arrivals.clip) / math.log(arrivals.factor)) ** 2))
            words = f"rates change every {arrivals.every_s:g} s"
            found.append(DecidingTime(steps * arrivals.every_s, words))
        elif isinstance(arrivals, Renewal) and arrivals.cv is not None and own_rps > 0.0:
            words = f"requests come in bursts (cv {arrivals.cv:g})"
            found.append(DecidingTime(_LEAST_BURSTS * arrivals.cv**2 / own_rps, words))
    return max(found)


def is_modulated(workload: Workload) -> bool:
    """Tell whether the rate of any traffic moves over time by a rule."""
    base = None if workload.base is None else workload.base.arrivals
    return any(
        isinstance(each, Renewal) and each.modulation is not None for each in (workload.arrivals, base)
    )


class TraceWindow(NamedTuple):
    """Part of a trace in which bounds hold."""

    start_s: float
    workload: Workload
    """Workload whose trace is this part, with its rates."""


def trace_windows(workload: Workload, trace: Trace, window_s: float) -> Iterator[TraceWindow]:
    """Yield the windows of a trace that hold requests; the last one is half to one and a half as long."""
    count = max(1, math.ceil(trace.duration_s / window_s - 0.5))
    for number in range(count):
        start_s = number * window_s
        end_s = trace.duration_s if number == count - 1 else start_s + window_s
        part = trace if count == 1 else trace.window(start_s, end_s)
        if len(part):
            yield TraceWindow(start_s, _with_trace(workload, part))


def _with_trace(workload: Workload, trace: Trace) -> Workload:
    """Return the workload with another trace of the same adapters, and its rates."""
    counts = np.bincount(trace.adapter, minlength=len(trace.names)) / trace.duration_s
    rate_rps = dict(zip(trace.names, counts.tolist(), strict=True))
    adapters = tuple(
        each.model_copy(update={"rate_rps": rate_rps.get(each.name, 0.0)}) for each in workload.adapters
    )
    base = workload.base
    if base is not None:
        base = base.model_copy(update={"rate_rps": rate_rps.get(workload.base_model, 0.0)})
    return workload.model_copy(update={"adapters": adapters, "base": base, "trace": trace})


def busiest_window(workload: Workload, window_s: float) -> Workload:
    """Return the workload with its arrivals moved, so that the first `window_s` seconds are the busiest.

    A rate that repeats within the window is left as it is. A shift of popularity is made as short as the
    window, so that both of its ends are in it.

    Raises
    ------
    InputError
        For steps that begin after the window and do not repeat: their busiest part is not defined.
    """
    if workload.trace is not None:
        return workload
    arrivals, base = _busiest(workload.arrivals, window_s), workload.base
    if base is not None and base.arrivals is not None:
        own = _busiest(base.arrivals, window_s)
        base = base if own is base.arrivals else base.model_copy(update={"arrivals": own})
    if arrivals is workload.arrivals and base is workload.base:
        return workload
    return workload.model_copy(update={"arrivals": arrivals, "base": base})


def _busiest(arrivals: ArrivalProcess, window_s: float) -> ArrivalProcess:
    if not isinstance(arrivals, Renewal):
        return arrivals
    match arrivals.modulation:
        case Diurnal() as swing if swing.period_s > window_s:
            phase = (0.25 - window_s / (2.0 * swing.period_s)) % 1.0
            moved: Diurnal | Burst | Steps | ShiftingSkew = swing.model_copy(update={"phase": phase})
        case Burst() as burst if burst.every_s > window_s:
            moved = burst.model_copy(update={"at_s": 0.0})
        case ShiftingSkew() as skew if skew.over_s is not None and skew.over_s > window_s:
            moved = skew.model_copy(update={"over_s": window_s})
        case Steps() as steps if max(steps.period_s or 0.0, steps.steps[-1][0]) > window_s:
            moved = _busiest_steps(steps, window_s)
        case _:
            return arrivals
    return arrivals.model_copy(update={"modulation": moved})


def _busiest_steps(steps: Steps, window_s: float) -> Steps:
    """Return the cycle begun where the window after it has most load: at a step, or a window before one."""
    period_s = steps.period_s
    if period_s is None:
        rule = f"is required for steps after the {window_s:g} s that a plan simulates"
        raise InputError(rule, location="arrivals.modulation.period_s")
    times, factors = np.array(steps.steps).T
    knots_s = np.concatenate([times, times + period_s, [2.0 * period_s]])
    amount = np.concatenate([[0.0], np.cumsum(np.tile(factors, 2) * np.diff(knots_s))])
    starts_s = np.unique(np.concatenate([times, (times - window_s) % period_s]))
    load = np.interp(starts_s + window_s, knots_s, amount) - np.interp(starts_s, knots_s, amount)
    start_s = float(starts_s[np.argmax(load)])
    begun = factors[np.searchsorted(times, start_s, side="right") - 1]
    cycle = {0.0: float(begun)} | {
        float((t - start_s) % period_s): float(f) for t, f in zip(times, factors, strict=True)
    }
    return steps.model_copy(update={"steps": tuple(sorted(cycle.items()))})
