"""Steps without adapters by the shipped profiles of the H100 64 GB, instead of measured ones.

Beside them: the composed profile of the H100 80 GB, its times multiplied by the ratio of the bandwidths.
"""

from __future__ import annotations

import itertools
from typing import Final

from benchmarks.measured.case import Deployment
from benchmarks.measured.step_times import StepCase, model_ms
from capplan import load_profile
from capplan.datasets import gpu_sheet

_SHIPPED: Final = ("h100-64g/llama-3.1-8b/vllm-0.8.5", "h100-64g/qwen2.5-7b/vllm-0.8.5")
_MEASURED_GPU: Final = "h100-64g"
_COMPOSED_GPU: Final = "h100-80g"
_BATCHES: Final = (1, 8, 32, 128, 256)
_CONTEXTS: Final = (250, 1000)


def read() -> list[StepCase]:
    """Return decode steps of both shipped models."""
    slower = gpu_sheet(_COMPOSED_GPU).bytes_per_s / gpu_sheet(_MEASURED_GPU).bytes_per_s
    steps = []
    for profile in _SHIPPED:
        shipped = load_profile(profile)
        deployment = Deployment(_COMPOSED_GPU, shipped.model.hf_ids[0], 1, "0.8.5")
        for requests, context in itertools.product(_BATCHES, _CONTEXTS):
            measured = {"step_ms": model_ms(shipped, 0, requests, context)}
            name = f"decode {requests} x {context}"
            steps.append(StepCase(name, deployment, 0, requests, context, measured, slower))
    return steps
