"""Rates that move: a clock that runs faster where the rate is high, and at speed 1 on average.

A process of steady rate on this clock is one of moving rate on ours, with the same mean and, where the rate
is steady for long, the same variability.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import numpy as np

from capplan.errors import InputError
from capplan.spec import Burst, Diurnal, ShiftingSkew, Steps, Workload
from capplan.workload.renewal import Floats, Owners

_KNOTS_PER_SWING: Final = 256  # a sine's clock is exact at these, and linear between them


class Clock(Protocol):
    """Time as the processes count it, in seconds of mean rate."""

    def passed(self, until_s: float) -> Floats:
        """Return how much time passes for each adapter in our first ``until_s`` seconds."""
        ...

    def seconds(self, passed: Floats, adapter: Owners) -> Floats:
        """Return our time when so much has passed for these adapters."""
        ...


class Steady(NamedTuple):
    """The clock that shows our time."""

    adapters: int

    def passed(self, until_s: float) -> Floats:
        """Return our time."""
        return np.full(self.adapters, until_s)

    def seconds(self, passed: Floats, adapter: Owners) -> Floats:
        """Return the time as it is."""
        return passed


class Cycle(NamedTuple):
    """The same cycle again and again, for all adapters; linear between its knots."""

    adapters: int
    knots_s: Floats
    """From 0 to the period."""
    knots_passed: Floats
    """From 0 to the period, never descending."""

    def passed(self, until_s: float) -> Floats:
        """Return whole cycles and what passes in the part that is left."""
        period_s = float(self.knots_s[-1])
        whole, rest = divmod(until_s, period_s)
        return np.full(self.adapters, whole * period_s + np.interp(rest, self.knots_s, self.knots_passed))

    def seconds(self, passed: Floats, adapter: Owners) -> Floats:
        """Return whole cycles and the time within the last one."""
        period_s = float(self.knots_s[-1])
        whole = np.floor(passed / period_s) * period_s
        within: Floats = np.interp(passed - whole, self.knots_passed, self.knots_s)
        return whole + within


class Slide(NamedTuple):
    """Rates that move linearly from (1 + bend) to (1 - bend) times their mean, then stay."""

    bend: Floats
    """Of each adapter, from -1 to 1."""
    over_s: float

    def passed(self, until_s: float) -> Floats:
        """Return the integral of the rate."""
        moving_s = min(until_s, self.over_s)
        moved: Floats = moving_s + self.bend * (moving_s - moving_s**2 / self.over_s)
        return moved + (1 - self.bend) * (until_s - moving_s)

    def seconds(self, passed: Floats, adapter: Owners) -> Floats:
        """Return the root of the quadratic in the form that also holds for a bend of 0."""
        bend = self.bend[adapter]
        start = 1 + bend
        moving = np.minimum(passed, self.over_s)
        root = np.sqrt(np.maximum(start**2 - 4 * bend * moving / self.over_s, 0.0))
        slid = 2 * moving / np.maximum(start + root, np.finfo(float).tiny)
        beyond = np.maximum(passed - self.over_s, 0.0) / np.maximum(1 - bend, np.finfo(float).tiny)
        result: Floats = slid + beyond
        return result


def clock(
    modulation: Steps | Diurnal | Burst | ShiftingSkew | None, workload: Workload, duration_s: float
) -> Clock:
    """Return the clock of a modulation.

    Raises
    ------
    InputError
        When steps without a period have no positive factor in the first ``duration_s`` seconds.
    """
    adapters = len(workload.adapters)
    match modulation:
        case None:
            return Steady(adapters)
        case Steps():
            return _steps(modulation, adapters, duration_s)
        case Diurnal():
            turns = np.linspace(0.0, 1.0, _KNOTS_PER_SWING + 1)
            angle = 2 * np.pi * (turns + modulation.phase)
            swing = (np.cos(angle[0]) - np.cos(angle)) * modulation.amplitude / (2 * np.pi)
            return _cycle(adapters, turns * modulation.period_s, turns + swing)
        case Burst():
            return _burst(modulation, adapters)
        case ShiftingSkew():
            ranks = np.array([adapter.rank for adapter in workload.adapters])
            falls, rises = ranks >= modulation.from_rank, ranks <= modulation.to_rank
            bend = modulation.swing * (falls.astype(np.float64) - rises)
            return Slide(bend, modulation.over_s or duration_s)


def _cycle(adapters: int, knots_s: Floats, amount: Floats) -> Cycle:
    """Return a cycle that passes in proportion to ``amount`` at the knots, speed 1 on average."""
    rising = np.maximum.accumulate(amount)  # rounding must not let time go back
    return Cycle(adapters, knots_s, rising * (knots_s[-1] / rising[-1]))


def _steps(steps: Steps, adapters: int, duration_s: float) -> Cycle:
    end_s = steps.period_s or duration_s
    times, factors = np.array(steps.steps).T
    seen = times < end_s
    knots_s = np.append(times[seen], end_s)
    amount = np.concatenate(([0.0], np.cumsum(factors[seen] * np.diff(knots_s))))
    if amount[-1] == 0:
        raise InputError(
            "must have a factor above 0 within the duration", duration_s, "arrivals.modulation.steps"
        )
    return _cycle(adapters, knots_s, amount)


def _burst(burst: Burst, adapters: int) -> Cycle:
    begin_s, end_s = burst.at_s, burst.at_s + burst.length_s
    knots_s = np.array([0.0, begin_s, min(end_s, burst.every_s), burst.every_s])
    speed = np.array([1.0, burst.factor, 1.0])
    return _cycle(adapters, knots_s, np.concatenate(([0.0], np.cumsum(speed * np.diff(knots_s)))))
