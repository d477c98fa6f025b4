"""Triton kernels for low-rank products of many adapters in one launch.

`*_tokens` kernels are for decode, where every token has its own adapter (Punica's BGMV, S-LoRA's MBGMV): one
program per token, module and tile. `*_tiles` kernels are for prefill, where many tokens share an adapter
(SGMV): one program per tile of tokens of one adapter, on tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction

from capplan.engine.input_batch import Segment
from capplan.engine.lora.adapter import GROUPS, SITES, A, AdapterLayout, B
from capplan.engine.lora.memory import RowTables


@triton.jit
def product(a, b, total, UPCAST: tl.constexpr):
    """Return ``total + a @ b``, accumulated in float32, without TF32."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


def must_upcast(dtype: torch.dtype) -> bool:
    """Return whether factors must be converted to float32.

    Triton's interpreter multiplies the bit patterns of bfloat16 as integers (seen with 3.9).
    """
    return dtype == torch.bfloat16 and not isinstance(product, JITFunction)


@triton.jit
def shrink_tokens(
    x,
    weights,
    rows,
    ranks,
    number_of_token,
    h,
    width,
    limit,
    x_stride,
    rows_stride,
    group_stride,
    ranks_stride,
    h_token_stride,
    h_module_stride,
    PADDED: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Fill h[token, module, :rank] with float32.

    `rows` and `ranks` point to this layer and the first module of the site, of adapter 0. PADDED computes
    `limit` rows, the largest rank in the batch. Otherwise programs beyond the adapter's rank return at once.
    Tokens of the base model have the number -1.
    """
    token = tl.program_id(0).to(tl.int64)  # times a stride it may pass 2**31
    module = tl.program_id(1)
    number = tl.load(number_of_token + token)
    if number < 0:
        return
    rank = limit
    if not PADDED:
        rank = tl.load(ranks + number * ranks_stride + module)
    first = tl.program_id(2) * BLOCK_RANK
    if first >= rank:
        return
    at = first + tl.arange(0, BLOCK_RANK)
    here = at < rank
    row = tl.load(rows + number * rows_stride + module * group_stride + at, mask=here, other=0)
    total = tl.zeros((BLOCK_RANK,), tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        column = start + tl.arange(0, BLOCK_WIDTH)
        inside = column < width
        a = tl.load(weights + row[:, None] + column[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        value = tl.load(x + token * x_stride + column, mask=inside, other=0.0)
        total += tl.sum(a.to(tl.float32) * value.to(tl.float32)[None, :], axis=1)
    tl.store(h + token * h_token_stride + module * h_module_stride + at, total, mask=here)


@triton.jit
def shrink_tiles(
    x,
    weights,
    rows,
    ranks,
    tiles,
    h,
    width,
    x_stride,
    rows_stride,
    group_stride,
    ranks_stride,
    h_token_stride,
    h_module_stride,
    UPCAST: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Fill h[token, module, :rank] for tiles of tokens, rows of `tiles`: (adapter, start, end)."""
    tile = tl.program_id(0)
    module = tl.program_id(1)
    number = tl.load(tiles + tile * 3)
    token = (tl.load(tiles + tile * 3 + 1) + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    in_tile = token < tl.load(tiles + tile * 3 + 2)
    rank = tl.load(ranks + number * ranks_stride + module)
    first = tl.program_id(2) * BLOCK_RANK
    if first >= rank:
        return
    at = first + tl.arange(0, BLOCK_RANK)
    here = at < rank
    row = tl.load(rows + number * rows_stride + module * group_stride + at, mask=here, other=0)
    total = tl.zeros((BLOCK_TOKENS, BLOCK_RANK), tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        column = start + tl.arange(0, BLOCK_WIDTH)
        inside = column < width
        value = tl.load(
            x + token[:, None] * x_stride + column[None, :],
            mask=in_tile[:, None] & inside[None, :],
            other=0.0,
        )
        a = tl.load(weights + row[None, :] + column[:, None], mask=here[None, :] & inside[:, None], other=0.0)
        total = product(value, a, total, UPCAST)
    tl.store(
        h + token[:, None] * h_token_stride + module * h_module_stride + at[None, :],
        total,
        mask=in_tile[:, None] & here[None, :],
    )


@triton.jit
def expand_tokens(
    h,
    weights,
    rows,
    ranks,
    number_of_token,
    out,
    outputs,
    limit,
    rows_stride,
    group_stride,
    ranks_stride,
    h_token_stride,
    h_module_stride,
    out_stride,
    PADDED: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Add B h to the columns of each module, rows of `outputs`: (first column, columns)."""
    token = tl.program_id(0).to(tl.int64)  # times a stride it may pass 2**31
    module = tl.program_id(1)
    number = tl.load(number_of_token + token)
    if number < 0:
        return
    start = tl.load(outputs + module * 2)
    width = tl.load(outputs + module * 2 + 1)
    column = tl.program_id(2) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    if tl.program_id(2) * BLOCK_WIDTH >= width:
        return
    rank = limit
    if not PADDED:
        rank = tl.load(ranks + number * ranks_stride + module)
    inside = column < width
    total = tl.zeros((BLOCK_WIDTH,), tl.float32)
    for first in range(0, rank, BLOCK_RANK):
        at = first + tl.arange(0, BLOCK_RANK)
        here = at < rank
        row = tl.load(rows + number * rows_stride + module * group_stride + at, mask=here, other=0)
        value = tl.load(h + token * h_token_stride + module * h_module_stride + at, mask=here, other=0.0)
        b = tl.load(weights + row[:, None] + column[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        total += tl.sum(b.to(tl.float32) * value[:, None], axis=0)
    place = out + token * out_stride + start + column
    before = tl.load(place, mask=inside, other=0.0)
    tl.store(place, (before.to(tl.float32) + total).to(out.dtype.element_ty), mask=inside)


@triton.jit
def expand_tiles(
    h,
    weights,
    rows,
    ranks,
    tiles,
    out,
    outputs,
    rows_stride,
    group_stride,
    ranks_stride,
    h_token_stride,
    h_module_stride,
    out_stride,
    UPCAST: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Add B h to the columns of each module for tiles of tokens, rows of `tiles`: (adapter, start, end)."""
    tile = tl.program_id(0)
    module = tl.program_id(1)
    number = tl.load(tiles + tile * 3)
    token = (tl.load(tiles + tile * 3 + 1) + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    in_tile = token < tl.load(tiles + tile * 3 + 2)
    start = tl.load(outputs + module * 2)
    width = tl.load(outputs + module * 2 + 1)
    column = tl.program_id(2) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    if tl.program_id(2) * BLOCK_WIDTH >= width:
        return
    rank = tl.load(ranks + number * ranks_stride + module)
    inside = column < width
    total = tl.zeros((BLOCK_TOKENS, BLOCK_WIDTH), tl.float32)
    for first in range(0, rank, BLOCK_RANK):
        at = first + tl.arange(0, BLOCK_RANK)
        here = at < rank
        row = tl.load(rows + number * rows_stride + module * group_stride + at, mask=here, other=0)
        value = tl.load(
            h + token[:, None] * h_token_stride + module * h_module_stride + at[None, :],
            mask=in_tile[:, None] & here[None, :],
            other=0.0,
        )
        b = tl.load(weights + row[:, None] + column[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        total = product(value.to(b.dtype), b, total, UPCAST)
    place = out + token[:, None] * out_stride + start + column[None, :]
    mask = in_tile[:, None] & inside[None, :]
    before = tl.load(place, mask=mask, other=0.0)
    tl.store(place, (before.to(tl.float32) + total).to(out.dtype.element_ty), mask=mask)


Kind = Literal["bgmv", "mbgmv", "sgmv"]

TILE_TOKENS: Final = 16
"""Tokens of one tile of SGMV: the fewest that tensor cores take."""

_SGMV_FROM: Final = 8
"""Mean tokens per adapter from which tiles are used; to be measured (docs/gpu.md)."""


class TokenLoRA:
    """MBGMV, token by token. Launches do not depend on the adapters in the batch, as CUDA graphs require.

    Parameters
    ----------
    weights
        Flat tensor that the tables point into.
    numbers
        Index of each token's adapter in the tables, -1 for the base model.
    limit
        Largest rank.
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
        # Float32 between the two products. Elements beyond an adapter's rank are neither written nor read.
        shape = (self._tokens, max(map(len, SITES)), limit)
        self._h = torch.empty(shape, dtype=torch.float32, device=device)

    def add(self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the low-rank product of each token of `x` to `out`."""
        self.shrink(layer, site, x)
        self.expand(layer, site, out)

    def shrink(self, layer: int, site: int, x: torch.Tensor) -> None:
        """Compute the low-rank activations: the first half of `add`."""
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
        """Add the product of the activations and B to `out`: the second half of `add`."""
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
        """Return the table of a module's rows of A or B, and of its ranks."""
        rows = self._tables.rows[0, layer][GROUPS.index((module, side))]
        return rows, self._tables.ranks[0, layer, module:]

    def _strides(self) -> tuple[int, int, int]:
        return self._tables.rows.stride(0), self._tables.rows.stride(2), self._tables.ranks.stride(0)


class TritonLoRA(TokenLoRA):
    """LoRA products of one step.

    Parameters
    ----------
    kind
        ``bgmv``: padded to the largest rank in the batch; ``mbgmv``: true ranks, token by token; ``sgmv``:
        true ranks, in tiles of tokens of one adapter. None: chosen by tokens per adapter.
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
    """Return the tile of ranks, from the minimum of tensor cores to what registers hold."""
    return min(64, max(16, 1 << (rank - 1).bit_length()))
