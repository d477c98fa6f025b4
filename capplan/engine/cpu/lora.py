"""Adapters of a decode step, token by token at true ranks (MBGMV): two passes over an adapter's own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.batch import Segment
from capplan.engine.cpu.compiled import fast
from capplan.engine.kernels.tables import RowTables
from capplan.engine.lora.grouped import GroupedAdapters, Views
from capplan.engine.lora.layout import GROUPS, SITES, A, AdapterLayout, B

GEMM_FROM: Final = 24
"""Tokens of one adapter from which a matrix product is the better choice.

Measured at hidden size 384 and rank 16: with 8 tokens of each adapter the kernel takes half as long as
products by PyTorch, with 32 a little longer.
"""


class CompiledAdapters:
    """The adapters of one step: those with many tokens by matrix products, the others by the kernel below."""

    def __init__(
        self,
        layout: AdapterLayout,
        tables: RowTables,
        weights: torch.Tensor,
        segments: Sequence[Segment],
        tokens: int,
        views: Views,
    ) -> None:
        self._layout = layout
        self._rows = tables.rows.numpy()
        self._ranks = tables.ranks.numpy()
        self._weights = weights.numpy()
        self._low = np.empty(tables.max_rank, np.float32)
        self._numbers = np.full(tokens, -1, np.int64)
        many = [s for s in segments if s.adapter and s.end - s.start >= GEMM_FROM]
        few = [s for s in segments if s.adapter and s.end - s.start < GEMM_FROM]
        for segment in few:
            self._numbers[segment.start : segment.end] = tables.number_of[segment.adapter]
        self._few = bool(few)
        self._grouped = GroupedAdapters(many, views) if many else None

    def add(self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add each token's low-rank part to `out`; see `capplan.engine.models.decoder.Adapters`."""
        if self._grouped is not None:
            self._grouped.add(layer, site, x, out)
        if self._few:
            first, outputs = SITES[site][0], self._layout.site_outputs[site]
            _add_token_by_token(
                x.numpy(), out.numpy(), self._weights, self._rows, self._ranks, self._numbers, layer, first,
                GROUPS.index((first, A)), GROUPS.index((first, B)), *outputs, self._low,
            )  # fmt: skip


@fast
def _add_token_by_token(
    x: NDArray[np.float32],
    out: NDArray[np.float32],
    weights: NDArray[np.float32],
    rows: NDArray[np.int64],
    ranks: NDArray[np.int32],
    numbers: NDArray[np.int64],
    layer: int,
    first_module: int,
    group_a: int,
    group_b: int,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    low: NDArray[np.float32],
) -> None:
    """Add ``B (A x)`` to the columns of each module; `low` is room for the largest rank."""
    width = x.shape[1]
    for token in range(x.shape[0]):
        number = numbers[token]
        if number < 0:
            continue
        value = x[token]
        for i in range(sizes.size):
            rank = ranks[number, layer, first_module + i]
            for r in range(rank):
                at = rows[number, layer, group_a + i, r]
                a = weights[at : at + width]
                total = np.float32(0.0)
                for j in range(width):
                    total += a[j] * value[j]
                low[r] = total
            result = out[token, starts[i] : starts[i] + sizes[i]]
            row_of = rows[number, layer, group_b + i]
            size = sizes[i]
            r = 0
            while r + 4 <= rank:  # four rows at a time: the result is read and written less often
                b0 = weights[row_of[r] : row_of[r] + size]
                b1 = weights[row_of[r + 1] : row_of[r + 1] + size]
                b2 = weights[row_of[r + 2] : row_of[r + 2] + size]
                b3 = weights[row_of[r + 3] : row_of[r + 3] + size]
                l0, l1, l2, l3 = low[r], low[r + 1], low[r + 2], low[r + 3]
                for j in range(size):
                    result[j] += l0 * b0[j] + l1 * b1[j] + l2 * b2[j] + l3 * b3[j]
                r += 4
            while r < rank:
                b = weights[row_of[r] : row_of[r] + size]
                share = low[r]
                for j in range(size):
                    result[j] += share * b[j]
                r += 1
