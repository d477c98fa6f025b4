"""A mean-field estimate of one GPU: the batch size at which requests leave as fast as they come.

No queue and no randomness: the batch B and the step time t solve ``B = rate * output * t(B)`` (Little's law),
where the step holds ``B * (1 + prompt / output)`` tokens and the adapters that ask within a request's life.
Good enough to tell a surrogate where saturation lies; the twin knows the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.models.step_latency import StepFeatures, step_ms
from capplan.serving.compile import jit

_ROUNDS = 60


class MeanField(NamedTuple):
    """The estimate."""

    saturation_rps: float
    """Requests per second that a full batch completes."""
    batch_over_limit: float
    """Batch that carries the load, over the largest batch that memory, tokens and max_num_seqs allow."""
    adapters: float
    """Adapters that ask within a request's life."""


@jit
def _step_s(
    form: int,
    k: NDArray[np.float64],
    batch: float,
    adapters: float,
    slots: float,
    s_max: float,
    prompt: float,
    output: float,
) -> float:
    step = StepFeatures(
        tokens=batch * (1.0 + prompt / output),
        requests=batch,
        kv_tokens=batch * (prompt + output / 2.0),
        adapters=adapters,
        a_max=slots,
        s_max=s_max,
        waiting=0.0,
        slots_per_adapter=1.0,
    )
    return step_ms(form, k, step) / 1000.0


@jit
def mean_field(
    form: int,
    k: NDArray[np.float64],
    rates: NDArray[np.float64],
    a_max: float,
    s_max: float,
    prompt: float,
    output: float,
    requests_limit: float,
    token_budget: float,
) -> MeanField:
    """Return the estimate.

    Parameters
    ----------
    form, k
        Step-latency model.
    rates
        Requests per second of each adapter, shape (adapters,).
    a_max, s_max
        Slots and their rank.
    prompt, output
        Mean lengths in tokens.
    requests_limit
        Most requests in a batch: max_num_seqs, or what the KV cache holds.
    token_budget
        Most tokens in a step.
    """
    limit = max(1.0, min(requests_limit, token_budget / (1.0 + prompt / output)))
    total = rates.sum()
    batch = 1.0
    active = 1.0
    for _ in range(_ROUNDS):
        step_s = _step_s(form, k, batch, min(active, a_max, batch), a_max, s_max, prompt, output)
        active = 0.0
        for rate in rates:
            active += 1.0 - np.exp(-rate * output * step_s)
        batch = 0.5 * (batch + min(4.0 * limit, total * output * step_s))
    full = _step_s(form, k, limit, min(float(rates.size), a_max, limit), a_max, s_max, prompt, output)
    return MeanField(limit / (output * full), batch / limit, active)
