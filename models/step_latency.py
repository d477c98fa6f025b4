"""The family of step-latency models: milliseconds of one engine step from what the step holds.

Every form is an entry of `FORMS`: the names of its coefficients and, compiled, its formula. Inside the twin a
form is a number and its coefficients an array, since functions passed as arguments defeat numba's disk cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.serving.compile import jit
from capplan.spec import FittedModel


class StepFeatures(NamedTuple):
    """What one step holds."""

    tokens: float
    """Tokens computed, prefill and decode."""
    requests: float
    """Requests that run."""
    kv_tokens: float
    """Tokens whose keys and values are held for running requests."""
    adapters: float
    """Distinct adapters of running requests."""
    a_max: float
    s_max: float
    waiting: float
    slots_per_adapter: float
    """a_max over adapters served, at most 1: the share of waiting requests that find their adapter."""


@dataclass(frozen=True)
class LatencyForm:
    """One form of the model."""

    name: str
    code: int
    coefficients: tuple[str, ...]


ADDITIVE = LatencyForm(
    "additive",
    0,
    (
        "base_ms",
        "ms_per_ktoken",
        "ms_per_kv_ktoken",
        "ms_per_slot",
        "ms_per_slot_ktoken",
        "ms_per_slot_rank16",
        "ms_per_adapter",
        "ms_per_adapter_ktoken",
        "ms_per_adapter_krequest",
        "ms_per_adapter_queued",
        "ms_per_waiting_krequest",
        "ms_beyond_graphs",
    ),
)
"""Ours: a sum of what a step reads and computes. Empty slots cost, too: vLLM launches blocks for them."""

DIGITAL_TWIN = LatencyForm("digital-twin", 1, ("k1", "k2", "k3", "k4", "k5", "k6", "k7"))
"""The adapter-caching paper's eq. 1, scheduler first:
``k1*B + k2*W + k3*W*A_max/adapters + (k4*B + k5) * (k6*A + k7)``.
"""

FORMS = (ADDITIVE, DIGITAL_TWIN)

_GRAPH_TOKENS = 512
"""vLLM's largest captured CUDA graph; larger steps launch every kernel from the host."""


def latency_form(name: str) -> LatencyForm:
    """Return the form called `name`.

    Raises
    ------
    InputError
        When there is none; the message lists the names.
    """
    for form in FORMS:
        if form.name == name:
            return form
    raise InputError(f"must be one of {', '.join(f.name for f in FORMS)}", name, "step_latency.form")


def coefficient_array(model: FittedModel) -> NDArray[np.float64]:
    """Return the coefficients of `model` in the order of its form."""
    return np.array([model.value(name) for name in latency_form(model.form).coefficients])


@jit
def step_ms(form: int, k: NDArray[np.float64], step: StepFeatures) -> float:
    """Return the milliseconds of a step, adapter loads left out.

    Parameters
    ----------
    form
        Code of the form.
    k
        Its coefficients in order, shape (n,).
    step
        What the step holds.
    """
    if form == 1:
        scheduler = k[0] * step.requests + step.waiting * (k[1] + k[2] * step.slots_per_adapter)
        milliseconds = scheduler + (k[3] * step.requests + k[4]) * (k[5] * step.adapters + k[6])
    else:
        ktokens = step.tokens / 1000.0
        milliseconds = (
            k[0]
            + k[1] * ktokens
            + k[2] * step.kv_tokens / 1000.0
            + step.a_max * (k[3] + k[4] * ktokens + k[5] * step.s_max / 16.0)
            + step.adapters * (k[6] + k[7] * ktokens + k[8] * step.requests / 1000.0)
            + (k[9] * step.adapters if step.waiting > 0 else 0.0)
            + k[10] * step.waiting / 1000.0 * (1.0 - step.slots_per_adapter)
            + (k[11] if step.tokens > _GRAPH_TOKENS else 0.0)
        )
    return max(0.0, milliseconds)  # a coefficient that is free in sign must not turn the clock back
