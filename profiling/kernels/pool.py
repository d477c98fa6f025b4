"""Weights to multiply with, never twice the same before the caches have forgotten them."""

from __future__ import annotations

import torch


class WeightPool:
    """A tensor much larger than the caches, of which matrices are taken one behind the other, in a circle.

    So the weights of a call come from memory, as those of a model's next layer do, and are large matrices in
    one piece, as in a slot. A batch larger than the pool reads some of it twice.
    """

    def __init__(self, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        # Neither zeros, which some memories compress, nor many different numbers, whose making takes long.
        self.numbers = torch.linspace(-1.0, 1.0, 1 << 12, device=device).to(dtype).repeat(-(-numbers >> 12))
        self._next = 0

    def take(self, rows: int, width: int) -> int:
        """Return where the next matrix begins.

        Raises
        ------
        ValueError
            When it is larger than the pool.
        """
        size = rows * width
        if size > self.numbers.numel():
            raise ValueError(f"a matrix of {size} numbers from a pool of {self.numbers.numel()}")
        if self._next + size > self.numbers.numel():
            self._next = 0
        at = self._next
        self._next += size
        return at

    def matrix(self, rows: int, width: int) -> torch.Tensor:
        """Return the next matrix."""
        at = self.take(rows, width)
        return self.numbers[at : at + rows * width].view(rows, width)
