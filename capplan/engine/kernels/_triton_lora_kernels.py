"""Triton kernels for low-rank products of many adapters in one launch.

`*_tokens` kernels are for decode, where every token has its own adapter (Punica's BGMV, S-LoRA's MBGMV): one
program per token, module and tile. `*_tiles` kernels are for prefill, where many tokens share an adapter
(SGMV): one program per tile of tokens of one adapter, on tensor cores.

Rows of weights begin at multiples of ALIGNMENT elements, so that they are read 16 bytes at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction


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


@triton.jit(do_not_specialize=["limit"], do_not_specialize_on_alignment=["rows", "ranks", "number_of_token"])
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
    h_split_stride,
    PADDED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Fill h[token, module, split, :rank] with float32: the product over one of SPLITS parts of the width.

    `rows` and `ranks` point to this layer and the first module of the site, of adapter 0. PADDED computes
    `limit` rows, the largest rank in the batch. Otherwise programs beyond the adapter's rank return at once.
    Tokens of the base model have the number -1.
    """
    token = tl.program_id(0).to(tl.int64)  # times a stride it may pass 2**31
    module = tl.program_id(1)
    split = tl.program_id(2) % SPLITS
    number = tl.load(number_of_token + token)
    if number < 0:
        return
    rank = limit
    if not PADDED:
        rank = tl.load(ranks + number * ranks_stride + module)
    first = tl.program_id(2) // SPLITS * BLOCK_RANK
    if first >= rank:
        return
    at = first + tl.arange(0, BLOCK_RANK)
    here = at < rank
    row = tl.load(rows + number * rows_stride + module * group_stride + at, mask=here, other=0)
    row = tl.multiple_of(row, ALIGNMENT)
    part = tl.cdiv(width, SPLITS * BLOCK_WIDTH) * BLOCK_WIDTH
    end = tl.minimum(width, (split + 1) * part)
    total = tl.zeros((BLOCK_RANK,), tl.float32)
    for start in tl.range(split * part, end, BLOCK_WIDTH, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_WIDTH)
        inside = column < width
        a = tl.load(weights + row[:, None] + column[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        value = tl.load(x + token * x_stride + column, mask=inside, other=0.0)
        total += tl.sum(a.to(tl.float32) * value.to(tl.float32)[None, :], axis=1)
    place = h + token * h_token_stride + module * h_module_stride + split * h_split_stride
    tl.store(place + at, total, mask=here)


@triton.jit(
    do_not_specialize=["h_token_stride", "h_module_stride"],
    do_not_specialize_on_alignment=["rows", "ranks", "tiles"],
)
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
    ALIGNMENT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Fill h[token, module, 0, :rank] for tiles of tokens, rows of `tiles`: (adapter, start, end)."""
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
    row = tl.multiple_of(row, ALIGNMENT)
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


@triton.jit(
    do_not_specialize=["limit", "h_token_stride", "h_module_stride", "h_split_stride"],
    do_not_specialize_on_alignment=["rows", "ranks", "number_of_token", "outputs"],
)
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
    h_split_stride,
    out_stride,
    PADDED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Add B h to the columns of each module, rows of `outputs`: (first column, columns)."""
    token = tl.program_id(0).to(tl.int64)  # times a stride it may pass 2**31
    module = tl.program_id(1)
    number = tl.load(number_of_token + token)
    if number < 0:
        return
    start = tl.multiple_of(tl.load(outputs + module * 2), ALIGNMENT)
    width = tl.multiple_of(tl.load(outputs + module * 2 + 1), ALIGNMENT)
    column = tl.program_id(2) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    if tl.program_id(2) * BLOCK_WIDTH >= width:
        return
    rank = limit
    if not PADDED:
        rank = tl.load(ranks + number * ranks_stride + module)
    inside = column < width
    split = tl.arange(0, SPLITS)
    total = tl.zeros((BLOCK_WIDTH,), tl.float32)
    for first in range(0, rank, BLOCK_RANK):
        at = first + tl.arange(0, BLOCK_RANK)
        here = at < rank
        row = tl.load(rows + number * rows_stride + module * group_stride + at, mask=here, other=0)
        row = tl.multiple_of(row, ALIGNMENT)
        place = h + token * h_token_stride + module * h_module_stride + split[:, None] * h_split_stride
        value = tl.sum(tl.load(place + at[None, :], mask=here[None, :], other=0.0), axis=0)
        b = tl.load(weights + row[:, None] + column[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        total += tl.sum(b.to(tl.float32) * value[:, None], axis=0)
    target = out + token * out_stride + start + column
    before = tl.load(target, mask=inside, other=0.0)
    tl.store(target, (before.to(tl.float32) + total).to(out.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["h_token_stride", "h_module_stride"],
    do_not_specialize_on_alignment=["rows", "ranks", "tiles", "outputs"],
)
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
    ALIGNMENT: tl.constexpr,
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
    start = tl.multiple_of(tl.load(outputs + module * 2), ALIGNMENT)
    width = tl.multiple_of(tl.load(outputs + module * 2 + 1), ALIGNMENT)
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
        row = tl.multiple_of(row, ALIGNMENT)
        value = tl.load(
            h + token[:, None] * h_token_stride + module * h_module_stride + at[None, :],
            mask=in_tile[:, None] & here[None, :],
            other=0.0,
        )
        b = tl.load(weights + row[:, None] + column[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        total = product(value.to(b.dtype), b, total, UPCAST)
    target = out + token[:, None] * out_stride + start + column[None, :]
    mask = in_tile[:, None] & inside[None, :]
    before = tl.load(target, mask=mask, other=0.0)
    tl.store(target, (before.to(tl.float32) + total).to(out.dtype.element_ty), mask=mask)
