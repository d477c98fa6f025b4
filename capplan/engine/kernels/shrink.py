"""The first product, ``h = A x``: from the width of the model down to the rank of each token's adapter.

Two kernels. `shrink_tokens` is for decode, where every token has an adapter of its own (Punica's BGMV,
S-LoRA's MBGMV): one program per token, module and tile of ranks. `shrink_tiles` is for prefill, where many
tokens share one (SGMV): one program per tile of tokens of one adapter, a matrix product on tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from capplan.engine.kernels.product import product


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

    `rows` and `ranks` point at this layer and at the first module of the place, of adapter 0. PADDED computes
    `limit` rows, the largest rank in the batch, whatever the adapter's own; else programs beyond the
    adapter's rank end at once. Tokens of the base model have the number -1.
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
