"""Adapter slots: how long adapters keep and await them, and what share of the load they let through."""

from __future__ import annotations

import numpy as np

from capplan.compile import jit
from capplan.models.fluid.inputs import Gpu, Load, adapter_count, running_adapters, total_rps

_BISECTIONS = 24
_LONGEST_EXPONENT = 50.0
_LONGEST_STAY_S = 36_000.0


@jit
def slot_wait_s(load: Load, life_s: float, a_max: float, horizon_s: float) -> float:
    """Return the wait at which as many slots are wanted as there are."""
    if adapter_count(load) <= a_max or _slots_wanted(load, 1.0, life_s, 0.0) <= a_max:
        return 0.0
    low, high = np.log(1e-3), np.log(1e5 * horizon_s)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if _slots_wanted(load, 1.0, life_s, np.exp(middle)) > a_max:
            low = middle
        else:
            high = middle
    return float(np.exp(high))


@jit
def served_share(load: Load, life_s: float, wait_s: float, a_max: float, horizon_s: float) -> float:
    """Return the share of requests that had a slot before the horizon ended.

    An adapter without a slot at the end has waited for half of the wait so far, or, where waits outlast the
    horizon, for all of it; those that came first may then have kept their slots throughout.
    """
    if wait_s == 0.0:
        return 1.0
    x = wait_s / horizon_s
    missed = 0.5 * x if x <= 1.0 else 1.0 - 0.5 / x
    offered = served = 0.0
    for i in range(load.rates_rps.size):
        rate = load.rates_rps[i]
        if rate > 0.0:
            stay_s = _stay_s(load, rate, life_s, wait_s)
            waiting = wait_s / (1.0 / rate + wait_s + stay_s)
            offered += load.counts[i] * rate
            served += load.counts[i] * rate * (1.0 - waiting * missed)
    return max(served / offered, _first_share(load, a_max) if x > 1.0 else 0.0)


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
def loads_per_s(load: Load, life_s: float, wait_s: float) -> float:
    """Return how many adapters come to a slot per second when they wait that long for one."""
    total = 0.0
    for i in range(load.rates_rps.size):
        if load.rates_rps[i] > 0.0:
            total += load.counts[i] / (
                1.0 / load.rates_rps[i] + wait_s + _stay_s(load, load.rates_rps[i], life_s, wait_s)
            )
    return total


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
def _slots_wanted(load: Load, scale: float, life_s: float, wait_s: float) -> float:
    """Return how many slots are held at once when adapters wait that long, at rates times `scale`."""
    total = 0.0
    for i in range(load.rates_rps.size):
        rate = load.rates_rps[i] * scale
        if rate > 0.0:
            stay_s = _stay_s(load, rate, life_s, wait_s)
            total += load.counts[i] * stay_s / (1.0 / rate + wait_s + stay_s)
    return total


@jit
def _stay_s(load: Load, rate_rps: float, life_s: float, wait_s: float) -> float:
    """Return how long an adapter keeps its slot: the busy period of an M/G/inf queue, and its backlog's."""
    busy_s = np.expm1(min(_LONGEST_EXPONENT, rate_rps * life_s)) / rate_rps
    backlog_s = life_s * min(1.0, load.output_cv) * np.log1p(rate_rps * wait_s)
    return float(min(_LONGEST_STAY_S, busy_s + backlog_s))
