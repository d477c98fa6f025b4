"""The busiest part of arrivals whose rate moves more slowly than a simulation lasts."""

from __future__ import annotations

import numpy as np

from capplan.errors import InputError
from capplan.spec import ArrivalProcess, Burst, Diurnal, Renewal, ShiftingSkew, Steps, Workload


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
