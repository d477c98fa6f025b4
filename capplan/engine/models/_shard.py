"""Shards of a model under tensor parallelism, cut as vLLM cuts them.

The linear maps before attention and inside the MLP (q, k, v, gate, up) are cut by output, those after them
(o, down) by input, so that a layer needs two sums over all ranks. Embedding and head are cut by token. Ranks
share a KV head if there are fewer KV heads than ranks. Source: Shoeybi et al. 2019, Megatron-LM, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from capplan.engine.models._config import ModelConfig
from capplan.errors import InputError


class ShardParts(NamedTuple):
    """Dimensions of the model that one rank computes."""

    query: slice
    """Of all query heads."""
    kv: slice
    """Of all key heads, and of all value heads."""
    inner: slice
    """Of the MLP."""


@dataclass(frozen=True)
class ModelShard:
    """Part of a model.

    Attributes
    ----------
    rank
        From 0.
    size
        Number of ranks: GPUs of one instance.
    """

    rank: int = 0
    size: int = 1

    def config(self, config: ModelConfig) -> ModelConfig:
        """Return the architecture of the part: its heads and its width of the MLP."""
        if self.size == 1:
            return config
        return config.replace(
            heads=config.heads // self.size,
            kv_heads=max(1, config.kv_heads // self.size),
            intermediate_size=config.intermediate_size // self.size,
        )

    def parts(self, config: ModelConfig) -> ShardParts:
        """Return the dimensions of the part."""
        first_kv_head = self.rank * config.kv_heads // self.size
        kv_heads = max(1, config.kv_heads // self.size)
        kv = slice(first_kv_head * config.head_dim, (first_kv_head + kv_heads) * config.head_dim)
        return ShardParts(self._part(config.query_size), kv, self._part(config.intermediate_size))

    def tokens(self, config: ModelConfig) -> slice:
        """Return the tokens of the vocabulary whose rows of embedding and head the part holds.

        The last ranks have fewer if the ranks do not divide the vocabulary.
        """
        rows = self.token_rows(config)
        return slice(min(self.rank * rows, config.vocab_size), min((self.rank + 1) * rows, config.vocab_size))

    def token_rows(self, config: ModelConfig) -> int:
        """Return the rows of embedding and head on each rank; rows without a token are zeros."""
        return -(-config.vocab_size // self.size)

    def _part(self, whole: int) -> slice:
        size = whole // self.size
        return slice(self.rank * size, (self.rank + 1) * size)


WHOLE: Final = ModelShard()


def require_shardable(config: ModelConfig, size: int) -> None:
    """Check that a model can be cut into equal parts.

    Raises
    ------
    InputError
        If heads or MLP cannot be divided by the number of ranks, or KV heads neither divided nor shared
        equally.
    """
    for name, whole in (("heads", config.heads), ("MLP dimensions", config.intermediate_size)):
        if whole % size:
            raise InputError(f"must divide the {whole} {name} of {config.name}", size, "tensor_parallel_size")
    if config.kv_heads % size and size % config.kv_heads:
        rule = f"must divide the {config.kv_heads} KV heads of {config.name}, or be a multiple of them"
        raise InputError(rule, size, "tensor_parallel_size")
