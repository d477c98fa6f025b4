from ._config import ModelConfig, builtin_models, model_config, read_config
from ._shard import ModelShard, require_shardable
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
