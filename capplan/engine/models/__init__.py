"""The transformer that the engine runs: Llama and Qwen2, from a Hugging Face folder or a config alone."""

from capplan.engine.models.config import BUILTIN, ModelConfig, Rope, builtin_config, read_config
from capplan.engine.models.weights import Weights, load_weights, packed, random_weights

__all__ = [
    "BUILTIN",
    "ModelConfig",
    "Rope",
    "Weights",
    "builtin_config",
    "load_weights",
    "packed",
    "random_weights",
    "read_config",
]
