"""The second product, ``out += B h``: from each adapter's rank up to the width of a linear map's output.

`expand_tokens` for decode and `expand_tiles` for prefill, as in `capplan.engine.kernels.shrink`. What lies
behind an adapter's rank in `h` was never written and is never read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from capplan.engine.kernels.product import product


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
