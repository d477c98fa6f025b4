"""Launching the low-rank kernels: which kernel for which tokens, and in tiles of what size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import torch
import triton

from capplan.engine.batch import Segment
from capplan.engine.kernels.expand import expand_tiles, expand_tokens
from capplan.engine.kernels.product import must_upcast
from capplan.engine.kernels.shrink import shrink_tiles, shrink_tokens
from capplan.engine.kernels.tables import RowTables
from capplan.engine.lora.layout import GROUPS, SITES, A, AdapterLayout, B

Kind = Literal["bgmv", "mbgmv", "sgmv"]

TILE_TOKENS: Final = 16
"""Tokens of one tile of SGMV: the fewest that tensor cores take."""
_SGMV_FROM: Final = 8
"""Mean tokens per adapter from which tiles are the better choice; to be measured (docs/gpu.md)."""


class TokenAdapters:
    """Adapters of tokens by number, token by token: nothing here depends on who is in the batch.

    Parameters
    ----------
    layout, tables, weights
        The adapters in memory; `weights` is the flat tensor that the tables point into.
    numbers
        Each token's number in the tables, -1 for the base model.
    limit
        The largest rank that may occur.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        tables: RowTables,
        weights: torch.Tensor,
        numbers: torch.Tensor,
        limit: int,
    ) -> None:
        device = weights.device
        self._tables = tables
        self._weights = weights
        self._numbers = numbers
        self._tokens = numbers.shape[0]
        self._limit = limit
        self._kind: Kind = "mbgmv"
        self._tiles = torch.zeros((0, 3), dtype=torch.int32, device=device)
        self._outputs = tables.outputs
        self._widest = [max(layout.sizes[m][B] for m in site) for site in SITES]
        # Float32 between the two products; what no adapter writes is never read.
        shape = (self._tokens, max(map(len, SITES)), limit)
        self._h = torch.empty(shape, dtype=torch.float32, device=device)

    def add(self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add each token's low-rank part to `out`; see `capplan.engine.models.decoder.Adapters`."""
        self.shrink(layer, site, x)
        self.expand(layer, site, out)

    def shrink(self, layer: int, site: int, x: torch.Tensor) -> None:
        """Compute the low-rank activations, which stay here: the first half of `add`."""
        modules, block, h = len(SITES[site]), _block(self._limit), self._h
        rows, ranks = self._rows(layer, SITES[site][0], A)
        strides = (*self._strides(), h.stride(0), h.stride(1))
        blocks = triton.cdiv(self._limit, block)
        if self._kind == "sgmv":
            shrink_tiles[(self._tiles.shape[0], modules, blocks)](
                x, self._weights, rows, ranks, self._tiles, h, x.shape[1], x.stride(0), *strides,
                UPCAST=must_upcast(x.dtype), BLOCK_TOKENS=TILE_TOKENS, BLOCK_RANK=block, BLOCK_WIDTH=64,
            )  # fmt: skip
            return
        shrink_tokens[(self._tokens, modules, blocks)](
            x, self._weights, rows, ranks, self._numbers, h, x.shape[1], self._limit, x.stride(0), *strides,
            PADDED=self._kind == "bgmv", BLOCK_RANK=block, BLOCK_WIDTH=256,
        )  # fmt: skip

    def expand(self, layer: int, site: int, out: torch.Tensor) -> None:
        """Add what `shrink` computed, times B, to `out`: the second half of `add`."""
        modules, block, h = len(SITES[site]), _block(self._limit), self._h
        rows, ranks = self._rows(layer, SITES[site][0], B)
        outputs, widest = self._outputs[site], self._widest[site]
        strides = (*self._strides(), h.stride(0), h.stride(1))
        if self._kind == "sgmv":
            expand_tiles[(self._tiles.shape[0], modules, triton.cdiv(widest, 64))](
                h, self._weights, rows, ranks, self._tiles, out, outputs, *strides, out.stride(0),
                UPCAST=must_upcast(out.dtype), BLOCK_TOKENS=TILE_TOKENS, BLOCK_RANK=block, BLOCK_WIDTH=64,
            )  # fmt: skip
            return
        expand_tokens[(self._tokens, modules, triton.cdiv(widest, 128))](
            h, self._weights, rows, ranks, self._numbers, out, outputs, self._limit, *strides, out.stride(0),
            PADDED=self._kind == "bgmv", BLOCK_RANK=block, BLOCK_WIDTH=128,
        )  # fmt: skip

    def _rows(self, layer: int, module: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the tables begin for a module: its rows of A or B, and its ranks."""
        rows = self._tables.rows[0, layer][GROUPS.index((module, side))]
        return rows, self._tables.ranks[0, layer, module:]

    def _strides(self) -> tuple[int, int, int]:
        return self._tables.rows.stride(0), self._tables.rows.stride(2), self._tables.ranks.stride(0)


class TritonAdapters(TokenAdapters):
    """The adapters of one step on a GPU.

    Parameters
    ----------
    layout, tables, weights
        The adapters in memory; `weights` is the flat tensor that the tables point into.
    segments
        Tokens by adapter.
    tokens
        Tokens of the step.
    kind
        ``bgmv``: padded to the largest rank in the batch; ``mbgmv``: true ranks, token by token; ``sgmv``:
        true ranks, in tiles of tokens of one adapter. None: what suits the step.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        tables: RowTables,
        weights: torch.Tensor,
        segments: Sequence[Segment],
        tokens: int,
        kind: Kind | None = None,
    ) -> None:
        used = [(tables.number_of[s.adapter], s.start, s.end) for s in segments if s.adapter != 0]
        numbers = torch.full((tokens,), -1, dtype=torch.int32)
        for number, start, end in used:
            numbers[start:end] = number
        tiles = [
            (number, at, min(at + TILE_TOKENS, end))
            for number, start, end in used
            for at in range(start, end, TILE_TOKENS)
        ]
        limit = max(tables.max_rank_of[number] for number, _, _ in used)
        super().__init__(layout, tables, weights, numbers.to(weights.device), limit)
        lora_tokens = sum(end - start for _, start, end in used)
        self._kind = kind or ("sgmv" if lora_tokens >= _SGMV_FROM * len(used) else "mbgmv")
        self._tiles = torch.tensor(tiles, dtype=torch.int32).to(weights.device)


def _block(rank: int) -> int:
    """Return the tile of ranks: what tensor cores need at least, and no more than registers hold."""
    return min(64, max(16, 1 << (rank - 1).bit_length()))
