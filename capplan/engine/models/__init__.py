"""Models of the engine: Llama and Qwen2, from a Hugging Face folder or a config alone."""

from capplan.engine.models._config import ModelConfig, Rope, builtin_models, model_config, read_config
from capplan.engine.models._weights import Weights, load_weights, packed, random_weights

__all__ = [
    "ModelConfig",
    "Rope",
    "Weights",
    "builtin_models",
    "load_weights",
    "model_config",
    "packed",
    "random_weights",
    "read_config",
]
