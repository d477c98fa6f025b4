"""The large matrix products of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

_PACK_FROM: Final = 2**17
"""Numbers in a matrix from which oneDNN's product, reordered once, is faster than a plain one on a CPU."""
_ROWS_IN_MIND: Final = 64
"""Rows of activations that the order is chosen for; decode steps have fewer, prompts more."""


@dataclass(frozen=True)
class Linear:
    """A linear map; `weight` has the shape (out, in), or oneDNN's own order where it is packed."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    packed: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` for x of shape (tokens, in)."""
        if self.packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return out
        return functional.linear(x, self.weight, self.bias)

    def pack(self) -> Linear:
        """Return the same map in the order that is fastest here."""
        weight = self.weight
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.numel() < _PACK_FROM:
            return self
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return self
        return Linear(torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_IN_MIND), self.bias, packed=True)
