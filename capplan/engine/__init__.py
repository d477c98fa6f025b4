"""Reference engine: multi-LoRA inference with the scheduling rules of `capplan.serving`."""

from capplan.engine._engine import Engine
from capplan.engine._request import Completion, SamplingParams, Timing, TokenLogprobs
from capplan.engine._settings import EngineOptions
from capplan.engine.models import ModelConfig

__all__ = [
    "Completion",
    "Engine",
    "EngineOptions",
    "ModelConfig",
    "SamplingParams",
    "Timing",
    "TokenLogprobs",
]
