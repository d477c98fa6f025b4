"""Paged attention in PyTorch: keys and values go into pages first, and every query reads from pages only.

So it makes no difference whether a key was computed in this step, in an earlier one, or for another request
with the same prefix, even one in the same step.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from capplan.engine.batch import Batch, Decodes, Prefill
from capplan.engine.models.config import ModelConfig
from capplan.engine.models.rope import RopeTable, turn
from capplan.engine.pages import PagePool


class KvCache:
    """The pool's pages seen as keys and values.

    Attributes
    ----------
    pages
        Shape (pages, layers, keys or values, block size, heads, head_dim).
    """

    def __init__(self, config: ModelConfig, pool: PagePool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.layers = config.layers
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_dim
        self.pages = pool.tensor.view(-1, config.layers, 2, block_size, config.kv_heads, config.head_dim)
        self._blocks = pool.tensor.view(-1, block_size * config.kv_size)
        self._tokens = pool.tensor.view(-1, config.kv_size)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> None:
        """Store the keys and values of a step, shape (tokens, heads, head_dim) each."""
        first = ((batch.pages * self.layers + layer) * 2) * self.block_size + batch.places
        self._tokens.index_copy_(0, first, k.reshape(k.shape[0], -1))
        self._tokens.index_copy_(0, first + self.block_size, v.reshape(v.shape[0], -1))

    def read(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of pages, shape (..., blocks), as (..., heads, tokens, head_dim)."""
        first = (pages.reshape(-1) * self.layers + layer) * 2
        shape = (*pages.shape[:-1], pages.shape[-1] * self.block_size, self.kv_heads, self.head_dim)
        k = self._blocks.index_select(0, first).view(shape)
        v = self._blocks.index_select(0, first + 1).view(shape)
        return k.transpose(-3, -2), v.transpose(-3, -2)


class TorchAttention:
    """One step's attention with PyTorch's own kernels, on blocks gathered into one piece."""

    def __init__(self, config: ModelConfig, cache: KvCache, rope: RopeTable, batch: Batch) -> None:
        self.cache = cache
        self.group = config.heads // config.kv_heads
        self.cos, self.sin = rope.at(batch.positions)
        self._turned = config.heads + config.kv_heads
        self._heads = config.heads
        self._batch = batch
        self._mask: torch.Tensor | None = None

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Return what each token's query reads; see `capplan.engine.models.decoder.Attention`."""
        q = self.place(layer, qkv)
        decodes, prefills = self._batch.decodes, self._batch.prefills
        if not prefills and decodes is not None:  # in the order of `at`, which then counts 0, 1, 2, ...
            return self.decode(layer, q, decodes)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        if decodes is not None:
            out[decodes.at] = self.decode(layer, q[decodes.at], decodes)
        for part in prefills:
            out[part.start : part.end] = self._prefill(layer, q[part.start : part.end], part)
        return out

    def place(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Turn queries and keys, store keys and values, and return queries, (tokens, heads, head_dim)."""
        heads = qkv.view(qkv.shape[0], -1, self.cache.head_dim)
        turned = turn(heads[:, : self._turned], self.cos, self.sin)
        self.cache.write(layer, turned[:, self._heads :], heads[:, self._turned :], self._batch)
        return turned[:, : self._heads]

    def decode(self, layer: int, q: torch.Tensor, decodes: Decodes) -> torch.Tensor:
        """Attend with one query per request; the queries that share a key head stand in for positions."""
        if self._mask is None:
            self._mask = _decode_mask(decodes, self.cache.block_size)
        k, v = self.cache.read(layer, decodes.pages)
        grouped = q.reshape(q.shape[0], self.cache.kv_heads, self.group, self.cache.head_dim)
        mixed = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=self._mask)
        return mixed.reshape(q.shape[0], -1)

    def _prefill(self, layer: int, q: torch.Tensor, part: Prefill) -> torch.Tensor:
        """Attend with several queries of one request, each up to its own position."""
        k, v = self.cache.read(layer, part.pages)
        k, v = k[None, :, : part.context], v[None, :, : part.context]
        tokens = q.shape[0]
        mask = None
        if tokens < part.context:
            positions = torch.arange(part.context, device=q.device)
            mask = positions <= positions[part.context - tokens :, None]
        mixed = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.group > 1
        )
        return mixed[0].transpose(0, 1).reshape(tokens, -1)


def _decode_mask(decodes: Decodes, block_size: int) -> torch.Tensor:
    """Return which keys each request reads, shape (requests, 1, 1, tokens)."""
    positions = torch.arange(decodes.pages.shape[1] * block_size, device=decodes.context.device)
    return (positions < decodes.context[:, None])[:, None, None, :]
