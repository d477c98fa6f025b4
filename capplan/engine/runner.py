"""Runs the model on one step and returns the logits that are to be sampled from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from capplan.engine.attention import KvCache
from capplan.engine.batch import Batch
from capplan.engine.graphs import DecodeGraphs
from capplan.engine.models.decoder import Adapters, Attention, Norms, decode
from capplan.engine.models.weights import Weights


class ModelRunner:
    """A model with its KV cache.

    Parameters
    ----------
    attention, adapters, norms
        The choice of kernels; the first two are made for every step.

    Attributes
    ----------
    graphs
        Runs decode steps, where there is such.
    """

    def __init__(
        self,
        weights: Weights,
        cache: KvCache,
        attention: Callable[[Batch], Attention],
        adapters: Callable[[Batch], Adapters],
        norms: Norms,
    ) -> None:
        self._weights = weights
        self._cache = cache
        self._attention = attention
        self._adapters = adapters
        self._norms = norms
        self.graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Return the logits of the tokens `batch.sampled`, shape (requests, vocabulary).

        Keys and values of all tokens of the batch are in the cache afterwards.
        """
        with self._on_device():
            if batch.new_pages.numel():
                self._cache.pool.clear(batch.new_pages)
            if self.graphs is not None and self.graphs.take(batch):
                hidden = self.graphs.run(batch)
            else:
                uses_adapters = any(segment.adapter for segment in batch.segments)
                hidden = self.hidden(batch, self._adapters(batch) if uses_adapters else None)
            return self._weights.head(hidden[batch.sampled])

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture all graphs there are to be, rather than in the middle of serving."""
        if self.graphs is not None:
            with self._on_device():
                self.graphs.prepare()

    def _on_device(self) -> AbstractContextManager[object]:
        """Make the model's GPU the current one of this thread, which Triton and graphs go by."""
        device = self._cache.pool.tensor.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def hidden(self, batch: Batch, adapters: Adapters | None) -> torch.Tensor:
        """Return the last hidden state of every token."""
        return decode(self._weights, batch.tokens, self._attention(batch), adapters, self._norms)
