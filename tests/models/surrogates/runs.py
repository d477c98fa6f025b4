"""Runs of the twin for comparison: idle, busy, short of slots, of KV, of batch places."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from capplan import Lengths, SimulationResult, Workload, simulate
from capplan.models.surrogates import MAX_IN_FLIGHT, feature_vector
from capplan.twin.instance import engine_args
from tests.models.surrogates.making import SETTINGS, asked, profile

CASES: dict[str, Callable[[], tuple[Workload, dict[str, Any]]]] = {
    "idle": lambda: (asked(rate_rps=0.05), {}),
    "busy": lambda: (asked(rate_rps=0.4), {}),
    "near the edge": lambda: (asked(rate_rps=0.85), {}),
    "over capacity": lambda: (asked(rate_rps=1.5), {}),
    "few slots": lambda: (asked(adapters=96, rate_rps=0.15), {"a_max": 8}),
    "few seats": lambda: (asked(rate_rps=0.4), {"max_num_seqs": 16}),
    "little memory": lambda: (asked(rate_rps=0.6), {"gpu_memory_utilization": 0.4}),
    "long outputs": lambda: (asked(rate_rps=0.05, output_tokens=Lengths(mean=900, std=900)), {}),
    "long prompts": lambda: (asked(rate_rps=0.2, prompt_tokens=Lengths(mean=2500, std=1500)), {}),
}


class Run(NamedTuple):
    """Features of a run and its result."""

    features: np.ndarray
    result: SimulationResult

    @property
    def step_ms(self) -> float:
        """Mean time of a step."""
        return 1e3 * self.result.busy_fraction * self.result.duration_s / self.result.steps

    @property
    def share_of_declared(self) -> float:
        """Throughput over the load drawn, which differs from the declared load by chance."""
        return self.result.throughput_tok_s / self.result.offered_tok_s


@functools.cache
def run(name: str) -> Run:
    """Return one of `CASES`."""
    workload, changes = CASES[name]()
    settings = SETTINGS | changes
    result = simulate(workload, profile(), **settings, max_in_flight=MAX_IN_FLIGHT, seed=1)
    return Run(feature_vector(workload, profile(), engine_args(workload, settings)), result)
