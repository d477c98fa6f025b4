"""Contents of every step of a simulation, so that step models are compared without simulating again.

`StepLog.itl_ms` weighs each step by the requests that wait for its token. It is linear in the milliseconds of
the steps, hence in every linear coefficient of a step model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.twin import Scenario
from capplan.twin.core import run
from capplan.twin.trace import NEVER

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_FIRST_BUCKET_NS: Final = 2_000_000
_SMALLEST_BUCKET_NS: Final = 50_000


class StepLog(NamedTuple):
    """Steps of one simulation in order; arrays of shape (steps,)."""

    ms: Floats
    """Simulated duration."""
    tokens: Floats
    """Tokens computed, prefill and decode."""
    requests: Floats
    """Requests that run."""
    decodes: Floats
    """Requests that get a token other than their first: the weight of the step in the mean ITL."""
    prefills: Floats
    """Requests in prefill."""
    kv_tokens: Floats
    """KV tokens held by the requests that run."""
    prefill_mpairs: Floats
    """Million pairs of query and key token in prefill chunks: ``n * (before + (n + 1) / 2) / 1e6``."""

    def itl_ms(self, ms: Floats | float | None = None) -> float:
        """Return the mean gap between tokens for milliseconds per step, shape (steps,); None: as simulated.

        With a column of the log in place of milliseconds: its mean as decoding requests see it.
        """
        each = self.ms if ms is None else np.broadcast_to(np.asarray(ms, np.float64), self.ms.shape)
        return float(np.average(each, weights=self.decodes))

    def means(self) -> Mapping[str, float]:
        """Return the mean of every column over steps, and the number of steps."""
        return {name: float(np.mean(getattr(self, name))) for name in self._fields} | {
            "steps": float(self.ms.size)
        }


def log_steps(scenario: Scenario) -> StepLog:
    """Simulate a scenario and return its steps.

    The time series of a detailed run has buckets shorter than any step here, so that each holds one step or
    none. A prompt that takes several steps adds the same number of pairs to each of them. Prefills after a
    preemption count as decodes.
    """
    bucket_ns = _FIRST_BUCKET_NS
    while True:
        buckets = -(-scenario.horizon_ns // bucket_ns)
        trace = run(scenario._replace(buckets=buckets))
        if trace.series.steps.max(initial=0) <= 1 or bucket_ns <= _SMALLEST_BUCKET_NS:
            break
        bucket_ns //= 2
    series = trace.series
    bucket_ns = int(trace.counts.bucket_ns)
    full = np.flatnonzero(series.steps)
    number = np.cumsum(series.steps > 0)  # steps up to the end of each bucket
    busy_ns = series.busy_ns[full].astype(np.float64)
    requests = series.running_ns[full] / busy_ns

    seen = np.flatnonzero((trace.first_ns != NEVER) & (trace.first_ns <= scenario.horizon_ns))
    begin = np.minimum(trace.admitted_ns[seen] // bucket_ns, buckets - 1)
    end = np.minimum((trace.first_ns[seen] - 1) // bucket_ns, buckets - 1)
    last = number[end] - 1  # the step of the first token
    first = np.minimum(np.where(trace.admitted_ns[seen] > 0, number[begin], 0), last)
    prefills = _spread(first, last, np.ones(seen.size), full.size)
    mpairs = _prompt_mpairs(scenario, seen) / (last - first + 1)
    return StepLog(
        ms=busy_ns / series.steps[full] / 1e6,
        tokens=series.tokens[full].astype(np.float64),
        requests=requests,
        decodes=np.maximum(requests - prefills, 0.0),
        prefills=prefills,
        kv_tokens=series.kv_token_ns[full] / busy_ns,
        prefill_mpairs=_spread(first, last, mpairs, full.size),
    )


def _spread(first: Integers, last: Integers, amount: Floats, steps: int) -> Floats:
    """Return the sum of the amounts over the steps from `first` to `last` each, shape (steps,)."""
    changes = np.zeros(steps + 1)
    np.add.at(changes, first, amount)
    np.add.at(changes, last + 1, -amount)
    return np.cumsum(changes)[:-1]


def _prompt_mpairs(scenario: Scenario, rows: Integers) -> Floats:
    """Return the pairs of query and key token of prompts that find the shared prefix in the cache."""
    prompt = scenario.requests.prompt_tokens[rows].astype(np.float64)
    block = scenario.limits.block_size
    cached = 0
    if scenario.limits.prefix_caching:
        cached = scenario.shared_prefix_tokens // block * block
    before = np.minimum(cached, (prompt - 1) // block * block)
    computed = prompt - before
    return np.asarray(computed * (before + (computed + 1.0) / 2.0) / 1e6)
