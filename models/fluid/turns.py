"""Adapters that take turns in the slots: how long a turn lasts, and what share of the load it lets through.

A turn is the root of a balance equation. Surrogates learned from what 24 bisections on a logarithmic scale
make of it, the next of 2^24 steps; Newton's method finds the same step in a few evaluations, all the sooner
from the turn of a life that was nearly as long.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.models.fluid.inputs import Load
from capplan.models.fluid.slots import gamma_gaps

_STEPS = 2.0**24
_SHORTEST_TURN_S = 1e-3
_LONGEST_TURN_HORIZONS = 1e5
_LONGEST_STAY_S = 36_000.0
_LOG_LIFE_S = 30.0
_RAREST = 1e-20
_NEAR = 1e-4
"""Newton's method squares the error: after a step so short, what is left is far below one of the scale."""
_MOST_EVALUATIONS = 64


class Turn(NamedTuple):
    """What comes of adapters taking turns in the slots."""

    turn_s: float
    """From one slot for an adapter to its next one, where adapters wait; 0 where none does."""
    wait_s: float
    """Mean wait for a slot, every request counting alike."""
    share: float
    """Share of requests whose adapter had a slot before the horizon ended."""
    loads_per_s: float
    """Adapters that come to a slot per second."""


@jit
def busy_periods(load: Load, life_s: float, busy_s: NDArray[np.float64]) -> tuple[float, float]:
    """Note how long adapters stay busy when a request runs for `life_s`.

    One life, and before it all gaps between requests that were shorter; with exponential gaps that is the
    busy period of an M/G/inf queue.

    Returns
    -------
    float
        Adapters that have a request within a request's life.
    float
        Slots that are held at once where nobody waits for one.
    """
    active, wanted = 0.0, 0.0
    for i in range(load.rates_rps.size):
        gap_s, requests = load.gaps_s[i], load.rates_rps[i] * life_s
        longer, shorter = gamma_gaps(load.arrivals_cv, requests)
        stay_s = life_s + gap_s * (shorter / max(longer, _RAREST))
        held_s = min(_LONGEST_STAY_S, stay_s)
        active += load.counts[i] * (1.0 - (longer if load.arrivals_cv == 1.0 else np.exp(-requests)))
        wanted += load.counts[i] * held_s / (gap_s + held_s)
        busy_s[i] = stay_s
    return active, wanted


@jit
def taken_turns(
    load: Load, busy_s: NDArray[np.float64], backlog_s: float, turn_s: float, horizon_s: float
) -> Turn:
    """Return what comes of more adapters than slots, when turns are so long.

    An adapter keeps its slot until none of its requests runs, and comes back when its turn has come or, if
    that is later, its next request. Without a slot at the end it has waited for half of its wait so far, or,
    where waits outlast the horizon, for all of it.

    Parameters
    ----------
    load
        The workload, with any requests.
    busy_s
        As `busy_periods` notes it.
    backlog_s
        How much longer an adapter stays for each e-fold of requests that gathered.
    turn_s, horizon_s
        The turn, and how long things go on.
    """
    lost, waited, loads = 0.0, 0.0, 0.0
    for i in range(load.rates_rps.size):
        rate = load.rates_rps[i]
        stay_s = min(_LONGEST_STAY_S, busy_s[i] + backlog_s * np.log(1.0 + rate * turn_s))
        free_s = load.gaps_s[i] + stay_s
        per_s = load.counts[i] / max(turn_s, free_s)
        loads += per_s
        if turn_s > free_s:
            wait_s = turn_s - free_s
            x = wait_s / horizon_s
            waited += load.counts[i] * rate * wait_s
            lost += per_s * rate * wait_s * (0.5 * x if x <= 1.0 else 1.0 - 0.5 / x)
    return Turn(turn_s, waited / load.total_rps, 1.0 - lost / load.total_rps, loads)


@jit
def balanced_turn_s(
    load: Load, busy_s: NDArray[np.float64], backlog_s: float, a_max: float, horizon_s: float, guess_s: float
) -> float:
    """Return the turn at which as many slots are wanted as there are; the search begins at `guess_s`."""
    shortest, longest = np.log(_SHORTEST_TURN_S), np.log(_LONGEST_TURN_HORIZONS * horizon_s)
    low, high = shortest, longest
    turn = _between(low, high, np.log(guess_s))
    for _ in range(_MOST_EVALUATIONS):
        wanted, rise = _slots_wanted(load, busy_s, backlog_s, np.exp(turn))
        if wanted > a_max:
            low = turn
        else:
            high = turn
        step = np.log(a_max / wanted) * wanted / rise if rise < 0.0 else np.inf
        if abs(step) < _NEAR:
            turn += step
            break
        turn = _between(low, high, turn + step)
    return float(np.exp(_next_step(shortest, longest, turn)))


@jit
def first_share(load: Load, a_max: float) -> float:
    """Return the share of the load that the adapters have that are asked for first, as many as slots.

    Where turns outlast the horizon, they may keep their slots throughout.
    """
    low, high = -_LOG_LIFE_S, _LOG_LIFE_S
    time = _between(low, high, np.log(a_max / load.total_rps))
    for _ in range(_MOST_EVALUATIONS):
        asked, rise = _asked_for(load, np.exp(time))
        if asked < a_max:
            low = time
        else:
            high = time
        step = np.log(a_max / asked) * asked / rise if rise > 0.0 else np.inf
        if abs(step) < _NEAR:
            time += step
            break
        time = _between(low, high, time + step)
    time_s = np.exp(_next_step(-_LOG_LIFE_S, _LOG_LIFE_S, time))
    first = 0.0
    for i in range(load.rates_rps.size):
        rate = load.rates_rps[i]
        first += load.counts[i] * rate * (1.0 - np.exp(-rate * time_s))
    return first / max(load.total_rps, 1e-12)


@jit
def _slots_wanted(
    load: Load, busy_s: NDArray[np.float64], backlog_s: float, turn_s: float
) -> tuple[float, float]:
    """Return how many slots are held at once when a turn takes that long, and by how many more per e-fold."""
    wanted, rise = 0.0, 0.0
    for i in range(load.rates_rps.size):
        gap_s, gathered = load.gaps_s[i], load.rates_rps[i] * turn_s
        stay_s = busy_s[i] + backlog_s * np.log(1.0 + gathered)
        longer_s = backlog_s * gathered / (1.0 + gathered)
        if stay_s > _LONGEST_STAY_S:
            stay_s, longer_s = _LONGEST_STAY_S, 0.0
        share = load.counts[i] / max(turn_s, gap_s + stay_s)
        wanted += share * stay_s
        if turn_s > gap_s + stay_s:
            rise += share * (longer_s - stay_s)
        else:
            rise += share * longer_s * gap_s / (gap_s + stay_s)
    return wanted, rise


@jit
def _asked_for(load: Load, time_s: float) -> tuple[float, float]:
    """Return how many adapters are asked for within that time, and by how many more per e-fold."""
    asked, rise = 0.0, 0.0
    for i in range(load.rates_rps.size):
        x = load.rates_rps[i] * time_s
        none = np.exp(-x)
        asked += load.counts[i] * (1.0 - none)
        rise += load.counts[i] * x * none
    return asked, rise


@jit
def _between(low: float, high: float, value: float) -> float:
    """Return a value that lies between two others; the middle instead of one that does not."""
    return value if low < value < high else 0.5 * (low + high)


@jit
def _next_step(low: float, high: float, value: float) -> float:
    """Return the next of the steps into which bisections cut a scale, the first at the earliest."""
    step = (high - low) / _STEPS
    return float(low + step * min(_STEPS, max(1.0, np.ceil((value - low) / step))))
