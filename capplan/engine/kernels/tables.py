"""What kernels must know of adapters: where each row begins, and how many there are.

One address per row of rank is all that a kernel needs, so static slots and scattered pages look the same.
Rows from an adapter's rank up to the largest one are there for padded kernels, and hold zeros.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.lora.layout import GROUPS, MODULES, AdapterLayout
from capplan.engine.lora.placement import Placement


class RowTables:
    """Tables of all adapters in memory, by their number in the tables.

    Attributes
    ----------
    rows
        First element of each row, shape (adapters, layers, groups, largest rank).
    ranks
        Shape (adapters, layers, modules).
    number_of
        Adapter to its number in the tables.
    max_rank_of
        Number in the tables to the adapter's largest rank.
    outputs
        First column and width of each module's output, one tensor per place of a layer.
    """

    def __init__(self, layout: AdapterLayout, adapters: int, max_rank: int, device: torch.device) -> None:
        self.rows = torch.zeros(
            (adapters, layout.layers, len(GROUPS), max_rank), dtype=torch.int64, device=device
        )
        self.ranks = torch.zeros((adapters, layout.layers, len(MODULES)), dtype=torch.int32, device=device)
        self.outputs = [
            torch.from_numpy(np.stack(outputs, axis=1).astype(np.int32)).to(device)
            for outputs in layout.site_outputs
        ]
        self.number_of: dict[int, int] = {}
        self.max_rank_of: dict[int, int] = {}
        self.max_rank = max_rank
        self._layout = layout
        self._free = list(range(adapters - 1, -1, -1))

    def add(self, adapter: int, placement: Placement, padding: NDArray[np.int64]) -> None:
        """Enter an adapter; rows beyond its rank may be read at `padding`, shape (layers * groups, rank)."""
        number = self.number_of[adapter] = self._free.pop()
        rows = padding.copy()
        counts = self._layout.group_rows(placement.ranks)
        rows[np.arange(self.max_rank) < counts[:, None]] = placement.offsets
        self.rows[number].copy_(torch.from_numpy(rows).view(self.rows.shape[1:]))
        self.max_rank_of[number] = int(placement.ranks.max(initial=0))
        self.ranks[number].copy_(torch.from_numpy(placement.ranks.astype(np.int32)))

    def remove(self, adapter: int) -> None:
        """Take an adapter out."""
        self._free.append(self.number_of.pop(adapter))
