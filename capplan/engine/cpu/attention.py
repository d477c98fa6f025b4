"""Attention of decode steps over pages on the CPU: no keys gathered, no scores of padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.attention import KvCache, TorchAttention
from capplan.engine.batch import Batch, Decodes
from capplan.engine.cpu.compiled import fast
from capplan.engine.models.config import ModelConfig
from capplan.engine.models.rope import RopeTable


class CompiledAttention(TorchAttention):
    """One step's attention: positions, cache and decodes by the kernels below, prompts by PyTorch."""

    def __init__(self, config: ModelConfig, cache: KvCache, rope: RopeTable, batch: Batch) -> None:
        super().__init__(config, cache, rope, batch)
        self._kv: NDArray[np.float32] = cache.pool.tensor.view(-1).numpy()
        self._places = batch.pages.numpy(), batch.places.numpy()
        self._turn = self.cos.view(-1, config.head_dim).numpy(), self.sin.view(-1, config.head_dim).numpy()
        most = 0 if batch.decodes is None else batch.decodes.pages.shape[1] * cache.block_size
        self._scores = np.empty((self.group, most), np.float32)

    def place(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Turn queries and keys in place and store keys and values."""
        heads = qkv.view(qkv.shape[0], -1, self.cache.head_dim)
        query_heads = heads.shape[1] - 2 * self.cache.kv_heads
        _turn_and_store(
            heads.numpy(), *self._turn, self._kv, *self._places, query_heads, layer, self.cache.layers,
            self.cache.block_size,
        )  # fmt: skip
        return heads[:, :query_heads]

    def decode(self, layer: int, q: torch.Tensor, decodes: Decodes) -> torch.Tensor:
        """Attend with one query per request."""
        out = torch.empty(q.shape)
        cache = self.cache
        _attend(
            q.numpy(), self._kv, decodes.pages.numpy(), decodes.context.numpy(), layer, cache.layers,
            cache.block_size, cache.kv_heads, np.float32(cache.head_dim**-0.5), self._scores, out.numpy(),
        )  # fmt: skip
        return out.view(q.shape[0], -1)


@fast
def _turn_and_store(
    heads: NDArray[np.float32],
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    kv: NDArray[np.float32],
    pages: NDArray[np.int64],
    places: NDArray[np.int64],
    query_heads: int,
    layer: int,
    layers: int,
    block_size: int,
) -> None:
    """Turn queries and keys by their positions; keys and values of each token go to its page."""
    tokens, all_heads, dim = heads.shape
    kv_heads = (all_heads - query_heads) // 2
    half = dim // 2
    for token in range(tokens):
        c, s = cos[token], sin[token]
        for head in range(query_heads + kv_heads):
            low, high = heads[token, head, :half], heads[token, head, half:]
            for j in range(half):
                a, b = low[j], high[j]
                low[j] = a * c[j] + b * s[j]
                high[j] = b * c[half + j] + a * s[half + j]
        first = ((pages[token] * layers + layer) * 2 * block_size + places[token]) * kv_heads * dim
        for head in range(kv_heads):
            for side in range(2):
                at = first + (side * block_size * kv_heads + head) * dim
                kv[at : at + dim] = heads[token, query_heads + side * kv_heads + head]


@fast
def _attend(
    q: NDArray[np.float32],
    kv: NDArray[np.float32],
    tables: NDArray[np.int64],
    context: NDArray[np.int64],
    layer: int,
    layers: int,
    block_size: int,
    kv_heads: int,
    scale: Any,
    scores: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Fill `out` with what each request's queries, shape (requests, heads, head_dim), read from its pages.

    `scores` is room for the queries that share a key head, shape (heads, longest context).
    """
    requests, heads, dim = q.shape
    group = heads // kv_heads
    for request in range(requests):
        length = context[request]
        for kv_head in range(kv_heads):
            for t in range(length):
                page = tables[request, t // block_size] * layers + layer
                at = ((page * 2 * block_size + t % block_size) * kv_heads + kv_head) * dim
                key = kv[at : at + dim]
                for g in range(group):
                    query = q[request, kv_head * group + g]
                    total = np.float32(0.0)
                    for d in range(dim):
                        total += query[d] * key[d]
                    scores[g, t] = total * scale
            for g in range(group):
                row = scores[g, :length]
                highest = row[0]
                for t in range(length):
                    highest = max(highest, row[t])
                # e^x as 2^i 2^f: a polynomial in f below 1 (relative error 2e-7), i into the exponent's bits.
                weight = np.float32(0.0)
                for t in range(length):
                    x = max((row[t] - highest) * np.float32(1.44269504), np.float32(-126.0))
                    whole = np.floor(x)
                    f = x - whole
                    p = np.float32(1.535336188e-4)
                    p = p * f + np.float32(1.339887440e-3)
                    p = p * f + np.float32(9.618437357e-3)
                    p = p * f + np.float32(5.550332471e-2)
                    p = p * f + np.float32(2.402264791e-1)
                    p = p * f + np.float32(6.931472028e-1)
                    p = p * f + np.float32(1.0)
                    bits = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23))
                    row[t] = p * bits.view(np.float32)
                    weight += row[t]
                for t in range(length):
                    row[t] /= weight
                result = out[request, kv_head * group + g]
                for d in range(dim):
                    result[d] = np.float32(0.0)
            for t in range(length):
                page = tables[request, t // block_size] * layers + layer
                at = (((page * 2 + 1) * block_size + t % block_size) * kv_heads + kv_head) * dim
                value = kv[at : at + dim]
                for g in range(group):
                    result = out[request, kv_head * group + g]
                    share = scores[g, t]
                    for d in range(dim):
                        result[d] += share * value[d]
