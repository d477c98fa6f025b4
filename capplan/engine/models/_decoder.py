"""Forward pass of one step: decoder layers, rotary positions and paged attention in PyTorch.

Keys and values are written to pages first, and every query reads from pages only. It makes no difference
whether a key was computed in this step, in an earlier one, or for another request with the same prefix.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch.nn import functional

from capplan.engine._input_batch import Decodes, ModelInputs, Prefill
from capplan.engine._pool import KvCache
from capplan.engine.models._config import ModelConfig, Rope
from capplan.engine.models._weights import Linear, Weights
from capplan.engine.parallel._group import Collectives

QKV: Final = 0
OUT: Final = 1
GATE_UP: Final = 2
DOWN: Final = 3
"""Sites of a layer where adapters add to a linear map: q, k and v as one, gate and up as one."""


class LoRALayers(ABC):
    """Adapters of the tokens of one step."""

    def begin(self, layer: int, site: int, x: torch.Tensor) -> None:  # noqa: B027 - most have nothing to begin
        """Begin what runs beside the base model's linear map of `x`."""

    @abstractmethod
    def add(self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the low-rank product of each token of `x` to `out`, the base model's output."""

    def add_and_rotate(
        self, layer: int, x: torch.Tensor, qkv: torch.Tensor, attention: TorchAttention
    ) -> torch.Tensor:
        """Add to queries, keys and values; then as `TorchAttention.rotate_and_store`."""
        self.add(layer, QKV, x, qkv)
        return attention.rotate_and_store(layer, qkv)

    def add_and_gate(
        self, layer: int, x: torch.Tensor, gates: torch.Tensor, pointwise: Pointwise
    ) -> torch.Tensor:
        """Add to gate and up; then as `Pointwise.gate`."""
        self.add(layer, GATE_UP, x, gates)
        return pointwise.gate(gates)


class _NoAdapters(LoRALayers):
    def add(self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        pass


class Pointwise:
    """RMS norms and activation in PyTorch."""

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the norm of `x`."""
        return functional.rms_norm(x, weight.shape, weight, self.eps)

    def add_norm(self, x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Add `more` to `x` in place and return the norm of the sum."""
        return self.norm(x.add_(more), weight)

    def gate(self, gates: torch.Tensor) -> torch.Tensor:
        """Return silu of the first half of the columns times the second half."""
        gate, up = gates.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each pair of dimensions, float32, shape (head_dim / 2,).

    Sources: Su et al. 2021, RoFormer; scaled as ``rope_type`` "linear" and "llama3" of transformers.
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
        both = torch.cat((angles, angles), dim=1)  # both halves of a head rotate by the same angles
        self._cos = both.cos().to(device, dtype)
        sine = both.sin()
        # The first half subtracts the second, the second adds the first.
        sine[:, : config.head_dim // 2] *= -1
        self._sin = sine.to(device, dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines of positions, shape (tokens, 1, head_dim) each."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return heads, shape (tokens, heads, head_dim), rotated by their positions."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), sin)


class TorchAttention:
    """Paged attention of one step, on blocks gathered into one tensor.

    Of each token, `cos` and `sin` are cosines and signed sines, and `slots` its page and its offset there.
    """

    def __init__(self, config: ModelConfig, cache: KvCache, rope: RopeTable, inputs: ModelInputs) -> None:
        self.cache = cache
        self.group = config.heads // config.kv_heads
        self.cos, self.sin = rope.at(inputs.positions)
        self.slots = inputs.pages, inputs.offsets
        self._rotated = config.heads + config.kv_heads
        self._heads = config.heads
        self._inputs = inputs
        self._mask: torch.Tensor | None = None

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Return the attention of rotated queries, whose keys are stored, shape (tokens, query_size)."""
        decodes, prefills = self._inputs.decodes, self._inputs.prefills
        if decodes is not None and not prefills and self._inputs.prompts is None:
            return self.decode(layer, q, decodes)  # `decodes.at` is 0, 1, 2, ...
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        if decodes is not None:
            out[decodes.at] = self.decode(layer, q[decodes.at], decodes)
        self.prefill(layer, q, prefills, out)
        return out

    def rotate_and_store(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Rotate queries and keys, store keys and values, and return queries, (tokens, heads, head_dim)."""
        heads = qkv.view(qkv.shape[0], -1, self.cache.head_dim)
        rotated = rotate(heads[:, : self._rotated], self.cos, self.sin)
        keys, values = rotated[:, self._heads :], heads[:, self._rotated :]
        self.cache.write(layer, keys, values, *self.slots)
        return rotated[:, : self._heads]

    def decode(self, layer: int, q: torch.Tensor, decodes: Decodes) -> torch.Tensor:
        """Attend with one query per request; queries that share a key head take the place of positions."""
        if self._mask is None:
            positions = torch.arange(decodes.pages.shape[1] * self.cache.block_size, device=q.device)
            self._mask = (positions < decodes.context[:, None])[:, None, None, :]
        k, v = self.cache.read(layer, decodes.pages)
        grouped = q.reshape(q.shape[0], self.cache.kv_heads, self.group, self.cache.head_dim)
        mixed = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=self._mask)
        return mixed.reshape(q.shape[0], -1)

    def prefill(self, layer: int, q: torch.Tensor, prefills: Sequence[Prefill], out: torch.Tensor) -> None:
        """Fill the tokens of prompts in `out`, shape (tokens, query_size)."""
        for each in prefills:
            tokens = slice(each.start, each.end)
            out[tokens] = self._prompt(layer, q[tokens], each)

    def _prompt(self, layer: int, q: torch.Tensor, prefill: Prefill) -> torch.Tensor:
        """Attend with several queries of one request, each up to its own position."""
        k, v = self.cache.read(layer, prefill.pages)
        k, v = k[None, :, : prefill.context], v[None, :, : prefill.context]
        tokens = q.shape[0]
        mask = None
        if tokens < prefill.context:
            positions = torch.arange(prefill.context, device=q.device)
            mask = positions <= positions[prefill.context - tokens :, None]
        mixed = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.group > 1
        )
        return mixed[0].transpose(0, 1).reshape(tokens, -1)


def forward(
    weights: Weights,
    tokens: torch.Tensor,
    attention: TorchAttention,
    adapters: LoRALayers | None,
    pointwise: Pointwise,
    ranks: Collectives,
) -> torch.Tensor:
    """Return the last hidden state of every token, after the final norm, shape (tokens, hidden_size)."""
    adapters = adapters or _NoAdapters()
    x = _embed(weights, tokens, ranks)
    h = pointwise.norm(x, weights.layers[0].input_norm)
    following = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
    for number, (layer, next_norm) in enumerate(zip(weights.layers, following, strict=True)):
        qkv = _linear(layer.qkv, h, adapters, number, QKV)
        mixed = attention(number, adapters.add_and_rotate(number, h, qkv, attention))
        out = _linear(layer.o, mixed, adapters, number, OUT)
        adapters.add(number, OUT, mixed, out)
        h = pointwise.add_norm(x, ranks.all_reduce(out), layer.post_norm)
        gates = _linear(layer.gate_up, h, adapters, number, GATE_UP)
        inner = adapters.add_and_gate(number, h, gates, pointwise)
        out = _linear(layer.down, inner, adapters, number, DOWN)
        adapters.add(number, DOWN, inner, out)
        h = pointwise.add_norm(x, ranks.all_reduce(out), next_norm)
    return h


def _embed(weights: Weights, tokens: torch.Tensor, ranks: Collectives) -> torch.Tensor:
    """Return the embeddings of tokens; those of other ranks' tokens are in their terms of the sum."""
    if ranks.size == 1:
        return functional.embedding(tokens, weights.embed)
    rows = tokens - weights.first_token
    absent = (rows < 0) | (rows >= weights.embed.shape[0])
    own = functional.embedding(rows.masked_fill(absent, 0), weights.embed)
    return ranks.all_reduce(own.masked_fill_(absent.unsqueeze(1), 0.0))


def _linear(linear: Linear, x: torch.Tensor, adapters: LoRALayers, layer: int, site: int) -> torch.Tensor:
    """Apply a linear map of the base model, beside what its adapters begin."""
    adapters.begin(layer, site, x)
    return linear(x)
