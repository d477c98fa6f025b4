"""Steps of random size by the operator tables' own estimator of whole models, instead of measured ones.

The estimator is that of the package ``aiconfigurator-core`` (Apache-2.0), by its Python API. It holds no
host terms, so neither do the profiles beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from benchmarks.measured.case import Deployment
from benchmarks.measured.step_times import StepCase
from capplan import InputError
from capplan.datasets import gpu_sheet, model_arch
from capplan.models.compose import SYSTEMS
from capplan.models.compose._operators import system_of
from capplan.serving import weight_bytes

POINTS: Final = 200
_SEED: Final = 0
_VERSION: Final = "0.15.1"
"""Of no influence on a step without the host."""
MODELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "meta-llama/Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
        "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
        "Qwen/Qwen3-8B": "Qwen/Qwen3-8B",
        "Qwen/Qwen3-32B": "Qwen/Qwen3-32B",
    }
)
"""Models by the names that the package knows them by."""
_TPS: Final = (1, 2, 4, 8)
_MOST_REQUESTS: Final = 256
_CONTEXTS: Final = (128, 8192)
_PROMPTS: Final = (64, 8192)
_WEIGHTS: Final = 0.85
"""Largest share of the memory that weights may take."""


def read(points: int = POINTS) -> list[StepCase]:
    """Return steps of random deployments and sizes with their estimates.

    Raises
    ------
    InputError
        If the package is not installed.
    """
    draw = np.random.default_rng(_SEED)
    fitting = [
        (system, model, tp)
        for system in SYSTEMS
        for model in MODELS
        for tp in _TPS
        if weight_bytes(model_arch(model), tp) < _WEIGHTS * gpu_sheet(system.sheet_key).memory_bytes
    ]
    steps = []
    for number in range(points):
        system, model, tp = fitting[draw.integers(len(fitting))]
        engine = engine_of(MODELS[model], system.sheet_key, tp)
        deployment = Deployment(system.sheet_key, model, tp, _VERSION)
        if number % 2:
            prompt = _log_uniform(draw, *_PROMPTS)
            estimate = {"prefill_ms": float(engine.predict_prefill_latency(1, prompt))}
            steps.append(StepCase(f"prefill {prompt}", deployment, prompt, 0, 0, estimate))
        else:
            requests, context = _log_uniform(draw, 1, _MOST_REQUESTS), _log_uniform(draw, *_CONTEXTS)
            estimate = {"decode_ms": float(engine.decode_step_latency(requests, context, 2))}
            name = f"decode {requests} x {context}"
            steps.append(StepCase(name, deployment, 0, requests, context, estimate))
    return sorted(steps, key=lambda step: (step.deployment.gpu, step.deployment.tp, step.name))


def _log_uniform(draw: np.random.Generator, low: int, high: int) -> int:
    return round(float(np.exp(draw.uniform(np.log(low), np.log(high)))))


@functools.cache
def engine_of(model: str, gpu: str, tp: int, expert_parallel: bool = False) -> Any:
    """Return the estimator of a model by the package's name, on GPUs by the name of their data sheet."""
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError:
        rule = "needs the operator tables: pip install '.[measured]', in the checkout"
        raise InputError(rule, location="estimator") from None
    experts = {"moe_ep_size" if expert_parallel else "moe_tp_size": tp}
    return EngineHandle.compile(model, system_of(gpu).key, "vllm", tp_size=tp, **experts)
