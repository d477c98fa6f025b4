"""Forward pass of one step: decoder layers, rotary positions and paged attention in PyTorch."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch.nn import functional

from capplan.engine.input_batch import Decodes, ModelInputs, Prefill
from capplan.engine.models.config import ModelConfig, Rope
from capplan.engine.models.weights import LayerWeights, Weights
from capplan.engine.pool import PagePool


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each pair of dimensions, float32, shape (head_dim / 2,).

    Sources: Su et al. 2021, RoFormer; stretched as ``rope_type`` "linear" and "llama3" of transformers.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "default":
        return plain
    wave = 2 * math.pi / plain
    longest_kept = rope.original_positions / rope.high_freq_factor
    shortest_stretched = rope.original_positions / rope.low_freq_factor
    share_kept = (rope.original_positions / wave - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - share_kept) * plain / rope.factor + share_kept * plain
    stretched = torch.where(wave > shortest_stretched, plain / rope.factor, between)
    return torch.where(wave < longest_kept, plain, stretched)


class RopeTable:
    """Cosines and sines of every position, in the dtype of the model."""

    def __init__(self, config: ModelConfig, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(positions).float(), frequencies(config.rope, config.head_dim))
        # Both halves of a head turn by the same angles.
        both = torch.cat((angles, angles), dim=1)
        self._cos = both.cos().to(device, dtype)
        sine = both.sin()
        sine[
            :, : config.head_dim // 2
        ] *= -1  # the first half takes minus the second, the second plus the first
        self._sin = sine.to(device, dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines of some positions, shape (tokens, 1, head_dim) each."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return heads, shape (tokens, heads, head_dim), turned by their positions."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), sin)


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

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: ModelInputs) -> None:
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

    def __init__(self, config: ModelConfig, cache: KvCache, rope: RopeTable, batch: ModelInputs) -> None:
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
        turned = rotate(heads[:, : self._turned], self.cos, self.sin)
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


QKV, OUT, GATE_UP, DOWN = range(4)

"""The places of a layer where adapters add to a linear map: q, k and v as one, gate and up as one."""


class Attention(Protocol):
    """Lets this step's tokens read those of their requests."""

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Turn queries and keys, store keys and values, and return what the queries read.

        From shape (tokens, query_size + 2 * kv_size) to shape (tokens, query_size).
        """
        ...


class Norms(Protocol):
    """RMS norms."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return `x` normed."""
        ...

    def add_norm(self, x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Add `more` to `x`, in place, and return the sum normed."""
        ...


class TorchNorms:
    """See `Norms`."""

    def __init__(self, eps: float) -> None:
        self._eps = eps

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `Norms`."""
        return functional.rms_norm(x, weight.shape, weight, self._eps)

    def add_norm(self, x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `Norms`."""
        return self.norm(x.add_(more), weight)


class LoRALayers(Protocol):
    """The adapters of this step's tokens."""

    def add(self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add to `out`, what the base model's linear map made of `x`, each token's own low-rank part."""
        ...


def forward(
    weights: Weights,
    tokens: torch.Tensor,
    attention: Attention,
    adapters: LoRALayers | None,
    norms: Norms,
) -> torch.Tensor:
    """Return the last hidden state of every token, after the final norm, shape (tokens, hidden_size)."""
    x = functional.embedding(tokens, weights.embed)
    h = norms.norm(x, weights.layers[0].input_norm)
    following = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
    for number, (layer, next_norm) in enumerate(zip(weights.layers, following, strict=True)):
        h = norms.add_norm(x, _attention_block(number, layer, h, attention, adapters), layer.post_norm)
        h = norms.add_norm(x, _mlp_block(number, layer, h, adapters), next_norm)
    return h


def _attention_block(
    number: int, layer: LayerWeights, h: torch.Tensor, attention: Attention, adapters: LoRALayers | None
) -> torch.Tensor:
    qkv = layer.qkv(h)
    if adapters is not None:
        adapters.add(number, QKV, h, qkv)
    mixed = attention(number, qkv)
    out = layer.o(mixed)
    if adapters is not None:
        adapters.add(number, OUT, mixed, out)
    return out


def _mlp_block(
    number: int, layer: LayerWeights, h: torch.Tensor, adapters: LoRALayers | None
) -> torch.Tensor:
    gate_up = layer.gate_up(h)
    if adapters is not None:
        adapters.add(number, GATE_UP, h, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    inner = functional.silu(gate).mul_(up)
    out = layer.down(inner)
    if adapters is not None:
        adapters.add(number, DOWN, inner, out)
    return out
