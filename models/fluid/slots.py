"""Adapter slots: what loads cost, what slots let through of a full queue, and the gaps in which they free."""

from __future__ import annotations

import math

import numpy as np

from capplan.compile import jit
from capplan.models.fluid.inputs import Gpu, Load

_LEAST_CV = 0.1
_TERMS = 200
_CONVERGED = 4e-16


@jit
def flow_when_full_rps(gpu: Gpu, load: Load, limit: float, life_s: float) -> float:
    """Return the requests per second that leave the slots while the front end is full.

    It takes in one request for each that leaves, so the adapters in slots soon run dry and make room for
    others, each of which has gathered twice its mean share of what waits.
    """
    gathered = 2.0 * gpu.max_waiting / load.adapters
    refilled = min(0.9, gpu.a_max / load.adapters)
    lives = 1.0 + max(min(1.0, load.output_cv), -1.0 / np.log(refilled)) * np.log1p(min(gathered, limit))
    return float(gpu.a_max * gathered / (lives * life_s) / (1.0 - refilled))


@jit
def full_loads_per_step(load: Load, batch: float, slots: float) -> float:
    """Return how many adapters a step loads while every seat is taken and requests queue.

    Seats go to the oldest requests, so an adapter that gets a slot takes the free seats with its backlog, and
    others run dry within a request's life. The two constants describe runs of the twin with 4 to 150 slots.
    """
    per_slot = batch / slots
    missing = np.sqrt(max(0.0, 1.0 - slots / load.adapters))
    return float(slots / load.output * missing * min(0.65, per_slot) / (1.0 + per_slot / 8.0))


@jit
def load_s(gpu: Gpu, running: float) -> float:
    """Return the seconds of a load; with every slot in use it brings about others (twin/clock.py)."""
    in_use = min(1.0, max(0.0, (running / gpu.a_max - 0.8) / 0.2))
    return gpu.load_s * (1.0 + in_use * running / 6.0)


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
