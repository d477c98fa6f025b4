"""How large a request is: one number that sorts it into a queue, and the tokens that it takes.

Source: Chameleon, section 4.3.1 (the weighted request size) and 5.4.1 (its variants).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.spec import Wrs
from capplan.spec.queue_wishes import AdapterCharge, SizeForm

A: Final = 0.4
B: Final = 0.6
"""Weights of prompt and output (Chameleon, section 4.3.1)."""
_COUNTS_AS_ONE_PERCENT: Final = 99.9
"""The paper does not say what its largest lengths are; the few longer than this percentile count as this."""


@dataclass(frozen=True, eq=False)
class RequestSample:
    """Requests that one instance serves, and what their adapters weigh.

    Attributes
    ----------
    prompt_tokens, output_tokens
        Lengths, one per request.
    adapter
        Number of each request's adapter; 0 stands for the base model.
    execution_s
        Time that each request spends in execution; NaN where unknown.
    adapter_bytes
        Weights of each adapter by number. Entry 0 is what the base model counts as: with no weights its
        requests would all be smallest, so `with_base_model` takes the smallest adapter.
    adapter_tokens
        KV tokens that take the same memory, by number; 0 for the base model.
    """

    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    adapter: NDArray[np.int64]
    execution_s: NDArray[np.float64]
    adapter_bytes: NDArray[np.int64]
    adapter_tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return self.adapter.size

    def charges(self, adapter_charge: AdapterCharge) -> NDArray[np.int64]:
        """Return the tokens that each request takes from a quota while it is in execution."""
        tokens = self.prompt_tokens + self.output_tokens
        return tokens if adapter_charge == "none" else tokens + self.adapter_tokens[self.adapter]


def with_base_model(
    adapter_bytes: NDArray[np.int64], adapter_tokens: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return weights and tokens of adapters 1, 2, ... with an entry 0 for the base model."""
    smallest = adapter_bytes.min()
    return np.concatenate([[smallest], adapter_bytes]), np.concatenate([[0], adapter_tokens])


def weighting(sample: RequestSample, form: SizeForm) -> Wrs:
    """Return how sizes are computed, with the maxima of a sample."""
    alone = form == "output_only"
    return Wrs(
        form=form,
        a=0.0 if alone else A,
        b=1.0 if alone else B,
        max_prompt_tokens=_counts_as_one(sample.prompt_tokens),
        max_output_tokens=_counts_as_one(sample.output_tokens),
        max_adapter_bytes=int(sample.adapter_bytes.max()),
    )


def request_sizes(wrs: Wrs, sample: RequestSample) -> NDArray[np.float64]:
    """Return the size of each request, from 0 to 1."""
    prompt = np.minimum(sample.prompt_tokens / wrs.max_prompt_tokens, 1.0)
    output = np.minimum(sample.output_tokens / wrs.max_output_tokens, 1.0)
    adapter = np.minimum(sample.adapter_bytes[sample.adapter] / wrs.max_adapter_bytes, 1.0)
    lengths: NDArray[np.float64] = wrs.a * prompt + wrs.b * output
    match wrs.form:
        case "degree2":
            return lengths * adapter
        case "degree1":  # the paper gives no weights for this one: lengths and adapter count alike
            return (lengths + adapter) / 2.0
        case "output_only":
            return lengths


def _counts_as_one(tokens: NDArray[np.int64]) -> int:
    return max(1, int(np.percentile(tokens, _COUNTS_AS_ONE_PERCENT, method="higher")))
