"""Adapter slots: how long adapters keep and await them, and what share of the load they let through."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from capplan.compile import jit
from capplan.models.fluid.inputs import Gpu, Load, adapter_count, running_adapters, total_rps

_BISECTIONS = 24
_RAREST = 1e-20
_LEAST_CV = 0.1
_TERMS = 200
_CONVERGED = 4e-16
_LONGEST_STAY_S = 36_000.0


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
def taken_turns(load: Load, life_s: float, a_max: float, horizon_s: float) -> Turn:
    """Return what comes of more adapters than slots, when a request runs for `life_s`.

    An adapter keeps its slot until none of its requests runs, and comes back when its turn has come or, if
    that is later, its next request. Without a slot at the end it has waited for half of its wait so far, or,
    where waits outlast the horizon, for all of it.
    """
    turn_s = _turn_s(load, life_s, a_max, horizon_s)
    offered, served, waited, loads = 0.0, 0.0, 0.0, 0.0
    for i in range(load.rates_rps.size):
        rate = load.rates_rps[i]
        if rate > 0.0:
            stay_s = _stay_s(load, rate, life_s, turn_s)
            cycle_s = max(turn_s, 1.0 / rate + stay_s)
            wait_s = max(0.0, turn_s - 1.0 / rate - stay_s)
            x = wait_s / horizon_s
            missed = 0.5 * x if x <= 1.0 else 1.0 - 0.5 / x
            offered += load.counts[i] * rate
            waited += load.counts[i] * rate * wait_s
            served += load.counts[i] * rate * (1.0 - wait_s / cycle_s * missed)
            loads += load.counts[i] / cycle_s
    if offered == 0.0:
        return Turn(0.0, 0.0, 1.0, 0.0)
    # Where turns outlast the horizon, those that came first may have kept their slots throughout.
    first = _first_share(load, a_max) if turn_s > horizon_s else 0.0
    return Turn(turn_s, waited / offered, max(served / offered, first), loads)


@jit
def _turn_s(load: Load, life_s: float, a_max: float, horizon_s: float) -> float:
    """Return the turn at which as many slots are wanted as there are."""
    if adapter_count(load) <= a_max or _slots_wanted(load, life_s, 0.0) <= a_max:
        return 0.0
    low, high = np.log(1e-3), np.log(1e5 * horizon_s)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if _slots_wanted(load, life_s, np.exp(middle)) > a_max:
            low = middle
        else:
            high = middle
    return float(np.exp(high))


@jit
def _first_share(load: Load, a_max: float) -> float:
    """Return the share of the load that the adapters have that are asked for first, as many as slots."""
    low, high = -30.0, 30.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if running_adapters(load, np.exp(middle)) < a_max:
            low = middle
        else:
            high = middle
    first = 0.0
    for i in range(load.rates_rps.size):
        rate = load.rates_rps[i]
        first -= load.counts[i] * rate * np.expm1(-rate * np.exp(high))
    return first / max(total_rps(load), 1e-12)


@jit
def flow_when_full_rps(gpu: Gpu, load: Load, limit: float, life_s: float) -> float:
    """Return the requests per second that leave the slots while the front end is full.

    It takes in one request for each that leaves, so the adapters in slots soon run dry and make room for
    others, each of which has gathered twice its mean share of what waits.
    """
    adapters = adapter_count(load)
    gathered = 2.0 * gpu.max_waiting / adapters
    refilled = min(0.9, gpu.a_max / adapters)
    lives = 1.0 + max(min(1.0, load.output_cv), -1.0 / np.log(refilled)) * np.log1p(min(gathered, limit))
    return float(gpu.a_max * gathered / (lives * life_s) / (1.0 - refilled))


@jit
def full_loads_per_step(load: Load, batch: float, slots: float) -> float:
    """Return how many adapters a step loads while every seat is taken and requests queue.

    Seats go to the oldest requests, so an adapter that gets a slot takes the free seats with its backlog, and
    others run dry within a request's life. The two constants describe runs of the twin with 4 to 150 slots.
    """
    per_slot = batch / slots
    missing = np.sqrt(max(0.0, 1.0 - slots / adapter_count(load)))
    return float(slots / load.output * missing * min(0.65, per_slot) / (1.0 + per_slot / 8.0))


@jit
def load_s(gpu: Gpu, running: float) -> float:
    """Return the seconds of a load; with every slot in use it brings about others (twin/clock.py)."""
    in_use = min(1.0, max(0.0, (running / gpu.a_max - 0.8) / 0.2))
    return gpu.load_s * (1.0 + in_use * running / 6.0)


@jit
def _slots_wanted(load: Load, life_s: float, turn_s: float) -> float:
    """Return how many slots are held at once when a turn takes that long."""
    total = 0.0
    for i in range(load.rates_rps.size):
        rate = load.rates_rps[i]
        if rate > 0.0:
            stay_s = _stay_s(load, rate, life_s, turn_s)
            total += load.counts[i] * stay_s / max(turn_s, 1.0 / rate + stay_s)
    return total


@jit
def _stay_s(load: Load, rate_rps: float, life_s: float, turn_s: float) -> float:
    """Return how long an adapter keeps its slot: until a gap between requests outlasts a request.

    One life, and before it all gaps that were shorter; with exponential gaps that is the busy period of an
    M/G/inf queue. A backlog with outputs of different lengths takes longer than one life.
    """
    longer, shorter = gamma_gaps(load.arrivals_cv, rate_rps * life_s)
    busy_s = life_s + shorter / max(longer, _RAREST) / rate_rps
    backlog_s = life_s * min(1.0, load.output_cv) * np.log1p(rate_rps * turn_s)
    return float(min(_LONGEST_STAY_S, busy_s + backlog_s))


@jit
def gamma_gaps(cv: float, length: float) -> tuple[float, float]:
    """Return the chance of a gap longer than `length`, and the mean of gaps with longer ones counted as none.

    Gaps have mean 1 and a gamma distribution of that coefficient of variation.
    """
    shape = 1.0 / max(cv, _LEAST_CV) ** 2
    x = shape * length
    if x <= 0.0:
        return 1.0, 0.0
    if cv == 1.0:  # exponential gaps, and most workloads
        longer = np.exp(-x)
        return longer, max(0.0, 1.0 - longer * (1.0 + x))
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
