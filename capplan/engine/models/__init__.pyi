from ._config import (
    ModelConfig,
    ModelShard,
    builtin_models,
    model_config,
    read_config,
    require_shardable,
)
from ._weights import Weights, load_weights, packed, random_weights

__all__ = [
    "ModelConfig",
    "ModelShard",
    "Weights",
    "builtin_models",
    "load_weights",
    "model_config",
    "packed",
    "random_weights",
    "read_config",
    "require_shardable",
]
