"""Runs the model on one step and returns the logits that are to be sampled from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from capplan.engine.attention import KvCache
from capplan.engine.batch import Batch
from capplan.engine.models.config import ModelConfig
from capplan.engine.models.decoder import Adapters, Attention, decode
from capplan.engine.models.rope import RopeTable
from capplan.engine.models.weights import Weights


class ModelRunner:
    """A model with its KV cache.

    `run` is the one place that launches the model. CUDA graphs of decode steps belong here, one per padded
    number of requests: a batch has no shapes that depend on lengths but the width of its page tables.

    Parameters
    ----------
    attention, adapters
        Make a step's attention and adapters: the choice of kernels.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: KvCache,
        max_model_len: int,
        attention: Callable[[Batch], Attention],
        adapters: Callable[[Batch], Adapters],
    ) -> None:
        self._config = config
        self._weights = weights
        self._cache = cache
        self._attention = attention
        self._adapters = adapters
        self._rope = RopeTable(config, max_model_len, weights.embed.dtype, weights.embed.device)

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Return the logits of the tokens `batch.sampled`, shape (requests, vocabulary).

        Keys and values of all tokens of the batch are in the cache afterwards.
        """
        if batch.new_pages.numel():
            self._cache.pool.clear(batch.new_pages)
        uses_adapters = any(segment.adapter for segment in batch.segments)
        hidden = decode(
            self._config,
            self._weights,
            self._rope,
            batch.tokens,
            batch.positions,
            self._attention(batch),
            self._adapters(batch) if uses_adapters else None,
        )
        return functional.linear(hidden[batch.sampled], self._weights.head)
