"""The forward pass of one step: all its tokens at once, whatever requests and adapters they belong to."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from capplan.engine.models.config import ModelConfig
from capplan.engine.models.rope import RopeTable, turn
from capplan.engine.models.weights import LayerWeights, Weights

QKV, OUT, GATE_UP, DOWN = range(4)
"""The places of a layer where adapters add to a linear map: q, k and v as one, gate and up as one."""


class Attention(Protocol):
    """Writes keys and values of this step's tokens and lets its queries read those of their requests."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the attention's output, shape (tokens, heads * head_dim)."""
        ...


class Adapters(Protocol):
    """The adapters of this step's tokens."""

    def add(self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add to `out`, what the base model's linear map made of `x`, each token's own low-rank part."""
        ...


def decode(
    config: ModelConfig,
    weights: Weights,
    rope: RopeTable,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    attention: Attention,
    adapters: Adapters | None,
) -> torch.Tensor:
    """Return the last hidden state of every token, after the final norm, shape (tokens, hidden_size)."""
    x = functional.embedding(tokens, weights.embed)
    cos, sin = rope.at(positions)
    for number, layer in enumerate(weights.layers):
        h = functional.rms_norm(x, (config.hidden_size,), layer.input_norm, config.rms_eps)
        x = x + _attend(config, number, layer, h, cos, sin, attention, adapters)
        h = functional.rms_norm(x, (config.hidden_size,), layer.post_norm, config.rms_eps)
        x = x + _mlp(number, layer, h, adapters)
    return functional.rms_norm(x, (config.hidden_size,), weights.norm, config.rms_eps)


def _attend(
    config: ModelConfig,
    number: int,
    layer: LayerWeights,
    h: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    attention: Attention,
    adapters: Adapters | None,
) -> torch.Tensor:
    qkv = functional.linear(h, layer.qkv, layer.qkv_bias)
    if adapters is not None:
        adapters.add(number, QKV, h, qkv)
    heads = qkv.view(h.shape[0], -1, config.head_dim)
    turned = turn(heads[:, : config.heads + config.kv_heads], cos, sin)
    q, k = turned[:, : config.heads], turned[:, config.heads :]
    mixed = attention(number, q, k, heads[:, config.heads + config.kv_heads :])
    out = functional.linear(mixed, layer.o, layer.o_bias)
    if adapters is not None:
        adapters.add(number, OUT, mixed, out)
    return out


def _mlp(number: int, layer: LayerWeights, h: torch.Tensor, adapters: Adapters | None) -> torch.Tensor:
    gate_up = functional.linear(h, layer.gate_up, layer.gate_up_bias)
    if adapters is not None:
        adapters.add(number, GATE_UP, h, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    inner = functional.silu(gate) * up
    out = functional.linear(inner, layer.down, layer.down_bias)
    if adapters is not None:
        adapters.add(number, DOWN, inner, out)
    return out
