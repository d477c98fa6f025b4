"""The forward pass of one step: all its tokens at once, whatever requests and adapters they belong to."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from capplan.engine.models.weights import LayerWeights, Weights

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


class Adapters(Protocol):
    """The adapters of this step's tokens."""

    def add(self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add to `out`, what the base model's linear map made of `x`, each token's own low-rank part."""
        ...


def decode(
    weights: Weights,
    tokens: torch.Tensor,
    attention: Attention,
    adapters: Adapters | None,
    norms: Norms,
) -> torch.Tensor:
    """Return the last hidden state of every token, after the final norm, shape (tokens, hidden_size)."""
    x = functional.embedding(tokens, weights.embed)
    h = norms.norm(x, weights.layers[0].input_norm)
    following = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
    for number, (layer, next_norm) in enumerate(zip(weights.layers, following, strict=True)):
        h = norms.add_norm(x, _attend(number, layer, h, attention, adapters), layer.post_norm)
        h = norms.add_norm(x, _mlp(number, layer, h, adapters), next_norm)
    return h


def _attend(
    number: int, layer: LayerWeights, h: torch.Tensor, attention: Attention, adapters: Adapters | None
) -> torch.Tensor:
    qkv = layer.qkv(h)
    if adapters is not None:
        adapters.add(number, QKV, h, qkv)
    mixed = attention(number, qkv)
    out = layer.o(mixed)
    if adapters is not None:
        adapters.add(number, OUT, mixed, out)
    return out


def _mlp(number: int, layer: LayerWeights, h: torch.Tensor, adapters: Adapters | None) -> torch.Tensor:
    gate_up = layer.gate_up(h)
    if adapters is not None:
        adapters.add(number, GATE_UP, h, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    inner = functional.silu(gate).mul_(up)
    out = layer.down(inner)
    if adapters is not None:
        adapters.add(number, DOWN, inner, out)
    return out
