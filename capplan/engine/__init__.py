"""Reference engine: multi-LoRA inference with the scheduling rules of `capplan.serving`."""

from capplan.engine.engine import Engine
from capplan.engine.models import ModelConfig
from capplan.engine.request import Completion, SamplingParams, Timing, TokenLogprobs
from capplan.engine.settings import EngineOptions

__all__ = [
    "Completion",
    "Engine",
    "EngineOptions",
    "ModelConfig",
    "SamplingParams",
    "Timing",
    "TokenLogprobs",
]
