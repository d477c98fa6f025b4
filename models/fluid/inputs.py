"""What the fluid estimate is told of an engine and of a workload."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit


class Gpu(NamedTuple):
    """The engine, as the estimate sees it."""

    form: int
    k: NDArray[np.float64]
    """Step-latency model: its number and coefficients."""
    a_max: float
    s_max: float
    max_num_seqs: float
    kv_requests: float
    """Requests that the KV cache holds at once."""
    token_budget: float
    """Most tokens in a step."""
    load_s: float
    """Seconds that an adapter takes to a slot."""
    max_waiting: float
    """Requests that the front end holds."""


class Load(NamedTuple):
    """The workload, as the estimate sees it."""

    rates_rps: NDArray[np.float64]
    """Distinct rates above 0, shape (n,)."""
    gaps_s: NDArray[np.float64]
    """Mean seconds between requests at each rate, shape (n,)."""
    counts: NDArray[np.float64]
    """Adapters with each rate, shape (n,)."""
    adapters: float
    """Adapters in all, those that nobody asks for among them."""
    total_rps: float
    """Requests per second of all adapters."""
    prompt: float
    output: float
    """Mean lengths in tokens."""
    held: float
    """KV tokens that a decoding request holds, on average."""
    output_cv: float
    mean_rank: float
    max_rank: float
    arrivals_cv: float
    """Standard deviation over mean of the gaps between requests of one adapter."""


@jit
def running_adapters(load: Load, life_s: float) -> float:
    """Return how many adapters have a request within a request's life."""
    total = 0.0
    for i in range(load.rates_rps.size):
        total += load.counts[i] * (1.0 - np.exp(-load.rates_rps[i] * life_s))
    return total
