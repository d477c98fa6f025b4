"""Steps without adapters by the shipped profiles of the H100 64 GB, instead of measured ones.

Beside them: the composed profile of the H100 80 GB, its times multiplied by the ratio of the bandwidths.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.measured.case import Deployment
from benchmarks.measured.step_times import model_ms
from capplan import Profile, load_profile
from capplan.datasets.catalog import gpu_sheet

_SHIPPED: Final = ("h100-64g/llama-3.1-8b/vllm-0.8.5", "h100-64g/qwen2.5-7b/vllm-0.8.5")
_MEASURED_GPU: Final = "h100-64g"
_COMPOSED_GPU: Final = "h100-80g"
_BATCHES: Final = (1, 8, 32, 128, 256)
_CONTEXTS: Final = (250, 1000)


@dataclass(frozen=True)
class ShippedStep:
    """A batch of decodes."""

    name: str
    deployment: Deployment
    requests: int
    context: int
    measured: Mapping[str, float]
    """By the shipped profile."""

    def predict(self, profile: Profile) -> Mapping[str, float]:
        """Return the milliseconds of the step, scaled by bandwidth."""
        slower = gpu_sheet(_COMPOSED_GPU).bytes_per_s / gpu_sheet(_MEASURED_GPU).bytes_per_s
        return {"step_ms": slower * model_ms(profile, 0, self.requests, self.context)}


def read() -> list[ShippedStep]:
    """Return decode steps of both shipped models."""
    steps = []
    for name in _SHIPPED:
        shipped = load_profile(name)
        deployment = Deployment(_COMPOSED_GPU, shipped.model.hf_ids[0], 1, "0.8.5")
        for requests, context in itertools.product(_BATCHES, _CONTEXTS):
            measured = {"step_ms": model_ms(shipped, 0, requests, context)}
            steps.append(
                ShippedStep(f"decode {requests} x {context}", deployment, requests, context, measured)
            )
    return steps
