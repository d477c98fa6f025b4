"""Slot time-sharing: more adapters than GPU slots, each in a slot for a while, then waiting for the next.

The rotation period is the root of a balance equation. The shipped surrogates were trained on the result of 24
bisections on a logarithmic scale, which is the next of 2^24 steps. Newton's method finds the same step in a
few evaluations, starting from the period of a similar request lifetime.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import inner_sum, jit
from capplan.models._vector_math import exp, log

_LEAST_CV = 0.1
_TERMS = 200
_CONVERGED = 4e-16
_STEPS = 2.0**24
_MIN_PERIOD_S = 1e-3
_MAX_PERIOD_HORIZONS = 1e5
_MAX_BUSY_S = 36_000.0
_LOG_TIME_S = 30.0
_MIN_PROBABILITY = 1e-20
_NEAR = 1e-4
"""Newton's method squares the error: after a step this short the error is far below one step of the scale."""
_MAX_EVALUATIONS = 64


class FluidLoad(NamedTuple):
    """Workload of the fluid model: adapters grouped by request rate."""

    rates_rps: NDArray[np.float64]
    """Distinct rates above 0, shape (n,)."""
    gaps_s: NDArray[np.float64]
    """Mean seconds between requests at each rate, shape (n,)."""
    counts: NDArray[np.float64]
    """Adapters with each rate, shape (n,)."""
    adapters: float
    """All adapters, including those without requests."""
    total_rps: float
    """Requests per second of all adapters."""
    prompt_tokens: float
    output_tokens: float
    kv_tokens_per_request: float
    """Mean KV tokens that a decoding request holds."""
    prefill_mpairs_per_request: float
    """Mean million pairs of a query and a key token in the prefill of a prompt."""
    output_cv: float
    mean_rank: float
    max_rank: float
    arrivals_cv: float
    """Coefficient of variation of the gaps between requests of one adapter."""


class SlotRotation(NamedTuple):
    """Result of slot time-sharing."""

    period_s: float
    """Time from one slot of an adapter to its next one; 0 without waiting."""
    wait_s: float
    """Mean wait for a slot per request."""
    share: float
    """Share of requests whose adapter had a slot before the horizon ended."""
    loads_per_s: float
    """Adapter loads into slots per second."""


@inner_sum
def running_adapters(load: FluidLoad, life_s: float) -> float:
    """Return the mean number of adapters with a request in any window of `life_s`."""
    total = 0.0
    for i in range(load.rates_rps.size):
        total += load.counts[i] * (1.0 - exp(-load.rates_rps[i] * life_s))
    return total


@jit
def busy_periods(load: FluidLoad, life_s: float, busy_s: NDArray[np.float64]) -> tuple[float, float]:
    """Write the busy period of an adapter of each rate for requests that run for `life_s`.

    A busy period is one request lifetime and all shorter gaps before it. With exponential gaps it is the busy
    period of an M/G/inf queue.

    Returns
    -------
    float
        Adapters with a request within a request lifetime.
    float
        Slots in use if no adapter waits.
    """
    if load.arrivals_cv == 1.0:
        return _poisson_busy_periods(load, life_s, busy_s)
    for i in range(load.rates_rps.size):
        longer, shorter = gamma_gaps(load.arrivals_cv, load.rates_rps[i] * life_s)
        busy_s[i] = life_s + load.gaps_s[i] * (shorter / max(longer, _MIN_PROBABILITY))
    return running_adapters(load, life_s), _slots_without_wait(load, busy_s)


@inner_sum
def _poisson_busy_periods(load: FluidLoad, life_s: float, busy_s: NDArray[np.float64]) -> tuple[float, float]:
    """Return and write what `busy_periods` does, for exponential gaps."""
    active, wanted = 0.0, 0.0
    for i in range(load.rates_rps.size):
        requests, gap_s = load.rates_rps[i] * life_s, load.gaps_s[i]
        longer = exp(-requests)
        shorter = max(0.0, 1.0 - longer * (1.0 + requests))
        active += load.counts[i] * (1.0 - longer)
        busy_s[i] = life_s + gap_s * (shorter / max(longer, _MIN_PROBABILITY))
        held_s = min(_MAX_BUSY_S, busy_s[i])
        wanted += load.counts[i] * held_s / (gap_s + held_s)
    return active, wanted


@inner_sum
def _slots_without_wait(load: FluidLoad, busy_s: NDArray[np.float64]) -> float:
    """Return the slots in use if no adapter waits."""
    wanted = 0.0
    for i in range(load.rates_rps.size):
        held_s = min(_MAX_BUSY_S, busy_s[i])
        wanted += load.counts[i] * held_s / (load.gaps_s[i] + held_s)
    return wanted


@jit
def slot_rotation(
    load: FluidLoad, busy_s: NDArray[np.float64], backlog_s: float, period_s: float, horizon_s: float
) -> SlotRotation:
    """Return waits and served share for a rotation period.

    An adapter keeps its slot until none of its requests runs. It returns after the period or with its next
    request, whichever is later. An adapter without a slot at the end of the horizon has waited half of its
    wait, or all of it if waits exceed the horizon.

    Parameters
    ----------
    load
        Workload with a total rate above 0.
    busy_s
        Busy periods by `busy_periods`.
    backlog_s
        Extension of a busy period per e-fold of waiting requests.
    period_s, horizon_s
        Rotation period and simulated time.
    """
    lost, waited, loads = _rotation_sums(load, busy_s, backlog_s, period_s, horizon_s)
    return SlotRotation(period_s, waited / load.total_rps, 1.0 - lost / load.total_rps, loads)


@inner_sum
def _rotation_sums(
    load: FluidLoad, busy_s: NDArray[np.float64], backlog_s: float, period_s: float, horizon_s: float
) -> tuple[float, float, float]:
    """Return lost requests per second, waiting requests, and adapter loads per second."""
    lost, waited, loads, half_per_s = 0.0, 0.0, 0.0, 0.5 / horizon_s
    within = period_s <= horizon_s  # and so is every wait
    for i in range(load.rates_rps.size):
        stay_s = min(_MAX_BUSY_S, busy_s[i] + backlog_s * log(1.0 + load.rates_rps[i] * period_s))
        free_s = load.gaps_s[i] + stay_s
        per_s = load.counts[i] / max(period_s, free_s)
        wait_s = max(0.0, period_s - free_s)
        half = wait_s * half_per_s
        waiting = load.rates_rps[i] * wait_s
        loads += per_s
        waited += load.counts[i] * waiting
        lost += per_s * waiting * (half if within or half <= 0.5 else 1.0 - 0.25 / half)
    return lost, waited, loads


@jit
def rotation_period_s(
    load: FluidLoad,
    busy_s: NDArray[np.float64],
    backlog_s: float,
    a_max: float,
    horizon_s: float,
    guess_s: float,
) -> float:
    """Return the period at which the slots in use equal `a_max`; the search starts at `guess_s`."""
    shortest, longest = np.log(_MIN_PERIOD_S), np.log(_MAX_PERIOD_HORIZONS * horizon_s)
    low, high = shortest, longest
    period = _between(low, high, np.log(guess_s))
    for _ in range(_MAX_EVALUATIONS):
        wanted, slope = _slots_in_use(load, busy_s, backlog_s, np.exp(period))
        if wanted > a_max:
            low = period
        else:
            high = period
        step = np.log(a_max / wanted) * wanted / slope if slope < 0.0 else np.inf
        if abs(step) < _NEAR:
            period += step
            break
        period = _between(low, high, period + step)
    return float(np.exp(_next_step(shortest, longest, period)))


@jit
def first_share(load: FluidLoad, a_max: float) -> float:
    """Return the share of the load on the `a_max` adapters that receive requests first.

    Where the period exceeds the horizon, these adapters may keep their slots throughout.
    """
    low, high = -_LOG_TIME_S, _LOG_TIME_S
    time = _between(low, high, np.log(a_max / load.total_rps))
    for _ in range(_MAX_EVALUATIONS):
        requested, slope = _requested_adapters(load, np.exp(time))
        if requested < a_max:
            low = time
        else:
            high = time
        step = np.log(a_max / requested) * requested / slope if slope > 0.0 else np.inf
        if abs(step) < _NEAR:
            time += step
            break
        time = _between(low, high, time + step)
    time_s = np.exp(_next_step(-_LOG_TIME_S, _LOG_TIME_S, time))
    return _requested_rps(load, time_s) / max(load.total_rps, 1e-12)


@jit
def full_loads_per_step(load: FluidLoad, batch: float, slots: float) -> float:
    """Return adapter loads per step while the batch is full and requests queue.

    Batch places go to the oldest requests, so an adapter with a new slot fills the free places with its
    backlog while others finish within a request lifetime. The constants were fitted to twin runs with 4 to
    150 slots.
    """
    per_slot = batch / slots
    missing = np.sqrt(max(0.0, 1.0 - slots / load.adapters))
    return float(slots / load.output_tokens * missing * min(0.65, per_slot) / (1.0 + per_slot / 8.0))


@jit
def gamma_gaps(cv: float, length: float) -> tuple[float, float]:
    """Return P(gap > length) and E[gap; gap <= length] for gamma-distributed gaps of mean 1.

    Parameters
    ----------
    cv
        Coefficient of variation of the gaps.
    length
        In units of the mean gap.
    """
    shape = 1.0 / max(cv, _LEAST_CV) ** 2
    x = shape * length
    if x <= 0.0:
        return 1.0, 0.0
    density = np.exp(-x + shape * np.log(x) - math.lgamma(shape))
    if x < shape + 1.0:  # series of the lower incomplete gamma function
        term = total = 1.0 / shape
        for n in range(1, _TERMS):
            term *= x / (shape + n)
            total += term
            if term < _CONVERGED * total:
                break
        longer = 1.0 - total * density
    else:  # continued fraction of the upper one, by Lentz's method
        b = x + 1.0 - shape
        c = 1e30
        d = 1.0 / b
        fraction = d
        for n in range(1, _TERMS):
            a = -n * (n - shape)
            b += 2.0
            d = 1.0 / (a * d + b)
            c = b + a / c
            fraction *= d * c
            if abs(d * c - 1.0) < _CONVERGED:
                break
        longer = density * fraction
    longer = min(1.0, max(0.0, longer))
    return longer, max(0.0, 1.0 - longer - density / shape)


@inner_sum
def _slots_in_use(
    load: FluidLoad, busy_s: NDArray[np.float64], backlog_s: float, period_s: float
) -> tuple[float, float]:
    """Return the slots in use at a period, and their derivative by the logarithm of the period."""
    wanted, slope = 0.0, 0.0
    for i in range(load.rates_rps.size):
        gap_s, growth = load.gaps_s[i], 1.0 + load.rates_rps[i] * period_s
        unbounded_s = busy_s[i] + backlog_s * log(growth)
        stay_s = min(_MAX_BUSY_S, unbounded_s)
        longer_s = backlog_s - backlog_s / growth if unbounded_s <= _MAX_BUSY_S else 0.0
        per_s = 1.0 / max(period_s, gap_s + stay_s)
        share = load.counts[i] * per_s
        wanted += share * stay_s
        slope += share * (longer_s - stay_s if period_s > gap_s + stay_s else longer_s * gap_s * per_s)
    return wanted, slope


@inner_sum
def _requested_adapters(load: FluidLoad, time_s: float) -> tuple[float, float]:
    """Return the adapters with a request within `time_s`, and the derivative by the logarithm of time."""
    requested, slope = 0.0, 0.0
    for i in range(load.rates_rps.size):
        x = load.rates_rps[i] * time_s
        none = exp(-x)
        requested += load.counts[i] * (1.0 - none)
        slope += load.counts[i] * x * none
    return requested, slope


@inner_sum
def _requested_rps(load: FluidLoad, time_s: float) -> float:
    """Return the requests per second of the adapters with a request within `time_s`."""
    total_rps = 0.0
    for i in range(load.rates_rps.size):
        rate_rps = load.rates_rps[i]
        total_rps += load.counts[i] * rate_rps * (1.0 - exp(-rate_rps * time_s))
    return total_rps


@jit
def _between(low: float, high: float, value: float) -> float:
    return value if low < value < high else 0.5 * (low + high)


@jit
def _next_step(low: float, high: float, value: float) -> float:
    """Return the next of the `_STEPS` equal steps from `low` to `high`, at least the first."""
    step = (high - low) / _STEPS
    return float(low + step * min(_STEPS, max(1.0, np.ceil((value - low) / step))))
