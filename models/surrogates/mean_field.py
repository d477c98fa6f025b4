"""A mean-field estimate of one GPU: the batch size at which requests leave as fast as they come.

No queue and no randomness: the batch B and the step time t solve ``B = rate * output * t(B)`` (Little's law),
where the step holds ``B * (1 + prompt / output)`` tokens and the adapters that ask within a request's life.
Good enough to tell a surrogate where saturation lies; the twin knows the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.models.step_latency import StepFeatures, StepRanks, rank_ms, step_ms

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
def _ranks_ms(
    form: int,
    k: NDArray[np.float64],
    batch: float,
    s_max: float,
    prompt: float,
    output: float,
    mean_rank: float,
    max_rank: float,
) -> float:
    # A request is prefilled once in `output` steps: below that batch, only some steps hold a prefill.
    prefills = max(1.0, batch / output)
    decoding = StepRanks(
        decodes=batch,
        prefills=0.0,
        lora_decodes=batch,
        lora_prefills=0.0,
        lora_prefill_tokens=0.0,
        max_rank=max_rank,
        decode_rank_sum=batch * mean_rank,
        prefill_rank_sum=0.0,
        prefill_rank_tokens=0.0,
    )
    prefilling = StepRanks(
        decodes=0.0,
        prefills=prefills,
        lora_decodes=0.0,
        lora_prefills=prefills,
        lora_prefill_tokens=prefills * prompt,
        max_rank=max_rank,
        decode_rank_sum=0.0,
        prefill_rank_sum=prefills * mean_rank,
        prefill_rank_tokens=prefills * prompt * mean_rank,
    )
    share = min(1.0, batch / output)
    return rank_ms(form, k, s_max, decoding) + share * rank_ms(form, k, s_max, prefilling)


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
    mean_rank: float,
    max_rank: float,
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
    ranks_ms = _ranks_ms(form, k, batch, s_max, prompt, output, mean_rank, max_rank)
    return (step_ms(form, k, step) + ranks_ms) / 1000.0


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
    mean_rank: float,
    max_rank: float,
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
    mean_rank, max_rank
        Of the adapters: the mean over requests, and the largest.
    """
    limit = max(1.0, min(requests_limit, token_budget / (1.0 + prompt / output)))
    total = rates.sum()
    batch = 1.0
    active = 1.0
    for _ in range(_ROUNDS):
        shown = min(active, a_max, batch)
        step_s = _step_s(form, k, batch, shown, a_max, s_max, prompt, output, mean_rank, max_rank)
        active = 0.0
        for rate in rates:
            active += 1.0 - np.exp(-rate * output * step_s)
        batch = 0.5 * (batch + min(4.0 * limit, total * output * step_s))
    shown = min(float(rates.size), a_max, limit)
    full = _step_s(form, k, limit, shown, a_max, s_max, prompt, output, mean_rank, max_rank)
    return MeanField(limit / (output * full), batch / limit, active)
