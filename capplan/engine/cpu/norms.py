"""Norms of a step on the CPU, together with the addition before them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.cpu.compiled import fast


class CompiledNorms:
    """See `capplan.engine.models.decoder.Norms`."""

    def __init__(self, eps: float) -> None:
        self._eps = np.float32(eps)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `Norms`."""
        out = torch.empty_like(x)
        _norm(x.numpy(), weight.numpy(), self._eps, out.numpy())
        return out

    def add_norm(self, x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `Norms`."""
        out = torch.empty_like(x)
        _add_norm(x.numpy(), more.numpy(), weight.numpy(), self._eps, out.numpy())
        return out


@fast
def _norm(
    x: NDArray[np.float32], weight: NDArray[np.float32], eps: np.float32, out: NDArray[np.float32]
) -> None:
    for i in range(x.shape[0]):
        row, result = x[i], out[i]
        total = np.float32(0.0)
        for j in range(row.size):
            total += row[j] * row[j]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(row.size) + eps)
        for j in range(row.size):
            result[j] = row[j] * factor * weight[j]


@fast
def _add_norm(
    x: NDArray[np.float32],
    more: NDArray[np.float32],
    weight: NDArray[np.float32],
    eps: np.float32,
    out: NDArray[np.float32],
) -> None:
    for i in range(x.shape[0]):
        row, other, result = x[i], more[i], out[i]
        total = np.float32(0.0)
        for j in range(row.size):
            row[j] += other[j]
            total += row[j] * row[j]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(row.size) + eps)
        for j in range(row.size):
            result[j] = row[j] * factor * weight[j]
