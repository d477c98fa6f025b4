"""Triton kernels for low-rank products of many adapters in one launch.

`*_tokens` kernels are for decode, where every token has its own adapter (Punica's BGMV, S-LoRA's MBGMV): one
program per token, module and tile. `*_tiles` kernels are for prefill, where many tokens share an adapter
(SGMV): one program per tile of tokens of one adapter, on tensor cores.

An expand adds to the base model's output, or `*_pairs_*` also do what follows: rotate queries and keys, or
multiply gate and up. These write the tokens of the base model, too.

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


@triton.jit
def gated(gate, up):
    """Return silu(gate) times up."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def rotated(a, b, cos, sin, place, mask, HALF: tl.constexpr):
    """Return dimensions of a head and those HALF further, rotated by angles at `place`; others as they are.

    Both halves have the same angles; the sine is that of the second half, which adds.
    """
    c = tl.load(cos + place, mask=mask, other=1.0).to(tl.float32)
    s = tl.load(sin + place + HALF, mask=mask, other=0.0).to(tl.float32)
    return a * c - b * s, b * c + a * s


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


@triton.jit
def larger(a, b):
    """Return the larger of two numbers, for a scan."""
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["number_of_token"])
def find_tiles(number_of_token, tiles, tokens, TILE_TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Fill tiles[0] with the number of tiles, and tiles[1:] with the first token of each.

    A tile has up to TILE_TOKENS tokens of one adapter, all of which follow each other. One program.
    """
    count = 0
    run = 0
    for first in range(0, tokens, BLOCK):
        token = first + tl.arange(0, BLOCK)
        known = token < tokens
        number = tl.load(number_of_token + token, mask=known, other=-1)
        before = tl.load(number_of_token + token - 1, mask=known & (token > 0), other=-1)
        begins = tl.where(number != before, token, run)
        since = token - tl.associative_scan(begins, 0, larger)
        here = (number >= 0) & (since % TILE_TOKENS == 0)
        tl.store(tiles + count + tl.cumsum(here.to(tl.int32), axis=0), token, mask=here)
        count += tl.sum(here.to(tl.int32), axis=0)
        run = tl.max(begins, axis=0)
    tl.store(tiles, count)


@triton.jit
def tile_number(number_of_token, tiles, tile, tokens, BLOCK_TOKENS: tl.constexpr):
    """Return the first token of a tile, its adapter, and whether it has more than BLOCK_TOKENS tokens."""
    start = tl.load(tiles + 1 + tile)
    number = tl.load(number_of_token + start)
    beyond = start + BLOCK_TOKENS
    return start, number, tl.load(number_of_token + beyond, mask=beyond < tokens, other=-1) == number


@triton.jit
def tile_tokens(number_of_token, start, number, tokens, BLOCK_TOKENS: tl.constexpr):
    """Return the first BLOCK_TOKENS tokens from the start of a tile, and which of them are its own."""
    token = start + tl.arange(0, BLOCK_TOKENS)
    own = tl.load(number_of_token + token, mask=token < tokens, other=-2) == number
    return token.to(tl.int64), own  # times a stride it may pass 2**31


@triton.jit
def shrink_tile(
    x, weights, row, here, number_of_token, start_token, number, tokens, h_of, parts, arrived, begin, end,
    width, split, splits, x_stride, h_token_stride, UPCAST: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Multiply a tile by a block of rows of A over the columns [begin, end).

    The last program of a tile to arrive sums the parts of all in their order: `parts` points at those of the
    first one, `arrived` at the number of those that have, which is zero before and after.
    """
    token, own = tile_tokens(number_of_token, start_token, number, tokens, BLOCK_TOKENS)
    total = tl.zeros((BLOCK_TOKENS, BLOCK_RANK), tl.float32)
    for start in range(begin, end, BLOCK_WIDTH):
        column = start + tl.arange(0, BLOCK_WIDTH)
        inside = column < width
        value = tl.load(
            x + token[:, None] * x_stride + column[None, :], mask=own[:, None] & inside[None, :], other=0.0
        )
        a = tl.load(weights + row[None, :] + column[:, None], mask=here[None, :] & inside[:, None], other=0.0)
        total = product(value, a, total, UPCAST)
    mask = own[:, None] & here[None, :]
    h_at = token[:, None] * h_token_stride + h_of[None, :]
    if splits > 1:
        block = tl.arange(0, BLOCK_TOKENS)[:, None] * BLOCK_RANK + tl.arange(0, BLOCK_RANK)[None, :]
        size: tl.constexpr = BLOCK_TOKENS * BLOCK_RANK
        tl.store(parts + split * size + block, total, mask=mask)
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1:
            total = tl.zeros((BLOCK_TOKENS, BLOCK_RANK), tl.float32)
            for each in range(splits):
                total += tl.load(parts + each * size + block, mask=mask, other=0.0)
            tl.store(h_at, total.to(h_at.dtype.element_ty), mask=mask)
            tl.store(arrived, 0)
    else:
        tl.store(h_at, total.to(h_at.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["tokens", "h_token_stride", "h_module_stride"],
    do_not_specialize_on_alignment=["rows", "ranks", "number_of_token", "tiles", "arrived"],
)
def shrink_tiles(
    x,
    weights,
    rows,
    ranks,
    number_of_token,
    tiles,
    h,
    parts,
    arrived,
    width,
    tokens,
    x_stride,
    rows_stride,
    group_stride,
    ranks_stride,
    h_token_stride,
    h_module_stride,
    UPCAST: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MODULES: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    THIN_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Fill h[token, module, :rank] for the tiles of `find_tiles`.

    The rows of A of all modules of a site, one after another, are divided into BLOCKS blocks. The width is
    split while there are more programs than tiles and blocks, up to MOST_SPLITS times.
    """
    items = tl.load(tiles) * BLOCKS
    splits = tl.minimum(tl.maximum(PARTS // tl.maximum(items, 1), 1), MOST_SPLITS)
    item = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    if item >= items:
        return
    start, number, thick = tile_number(number_of_token, tiles, item // BLOCKS, tokens, THIN_TOKENS)
    at = item % BLOCKS * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    module = tl.zeros((BLOCK_RANK,), tl.int32)
    before = tl.zeros((BLOCK_RANK,), tl.int32)
    used = 0
    for each in tl.static_range(MODULES):
        used += tl.load(ranks + number * ranks_stride + each)
        module += (at >= used).to(tl.int32)
        before = tl.where(at >= used, used, before)
    if item % BLOCKS * BLOCK_RANK >= used:
        return
    here = at < used
    row = tl.load(rows + number * rows_stride + module * group_stride + at - before, mask=here, other=0)
    row = tl.multiple_of(row, ALIGNMENT)
    part = tl.cdiv(width, splits * BLOCK_WIDTH) * BLOCK_WIDTH
    begin, end = split * part, tl.minimum(width, split * part + part)
    parts += item.to(tl.int64) * splits * TILE_TOKENS * BLOCK_RANK
    h_of = h + module * h_module_stride + at - before
    if thick:
        shrink_tile(
            x, weights, row, here, number_of_token, start, number, tokens, h_of, parts, arrived + item, begin,
            end, width, split, splits, x_stride, h_token_stride, UPCAST, TILE_TOKENS, BLOCK_RANK, BLOCK_WIDTH,
        )  # fmt: skip
    else:
        shrink_tile(
            x, weights, row, here, number_of_token, start, number, tokens, h_of, parts, arrived + item, begin,
            end, width, split, splits, x_stride, h_token_stride, UPCAST, THIN_TOKENS, BLOCK_RANK, BLOCK_WIDTH,
        )  # fmt: skip


@triton.jit
def expand_token(
    h, weights, row_of, rank, column, inside, h_split_stride, ALIGNMENT: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Return B h for a block of columns of a module, where `h` points at a token's activations."""
    split = tl.arange(0, SPLITS)
    total = tl.zeros((BLOCK_WIDTH,), tl.float32)
    for first in range(0, rank, BLOCK_RANK):
        at = first + tl.arange(0, BLOCK_RANK)
        here = at < rank
        row = tl.multiple_of(tl.load(row_of + at, mask=here, other=0), ALIGNMENT)
        place = h + split[:, None] * h_split_stride + at[None, :]
        value = tl.sum(tl.load(place, mask=here[None, :], other=0.0), axis=0)
        b = tl.load(weights + row[:, None] + column[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        total += tl.sum(b.to(tl.float32) * value[:, None], axis=0)
    return total


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
    total = expand_token(
        h + token * h_token_stride + module * h_module_stride, weights,
        rows + number * rows_stride + module * group_stride, rank, column, inside, h_split_stride, ALIGNMENT,
        SPLITS, BLOCK_RANK, BLOCK_WIDTH,
    )  # fmt: skip
    target = out + token * out_stride + start + column
    before = tl.load(target, mask=inside, other=0.0)
    tl.store(target, (before.to(tl.float32) + total).to(out.dtype.element_ty), mask=inside)


@triton.jit
def expand_tile(
    h, weights, row_of, rank, token, own, column, inside, h_token_stride, UPCAST: tl.constexpr,
    ALIGNMENT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Return B h for a block of columns of a module and the tokens of a tile."""
    total = tl.zeros((BLOCK_TOKENS, BLOCK_WIDTH), tl.float32)
    for first in range(0, rank, BLOCK_RANK):
        at = first + tl.arange(0, BLOCK_RANK)
        here = at < rank
        row = tl.multiple_of(tl.load(row_of + at, mask=here, other=0), ALIGNMENT)
        mask = own[:, None] & here[None, :]
        value = tl.load(h + token[:, None] * h_token_stride + at[None, :], mask=mask, other=0.0)
        b = tl.load(weights + row[:, None] + column[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        total = product(value, b, total, UPCAST)
    return total


@triton.jit
def add_tile(
    h, weights, row_of, rank, number_of_token, start, number, tokens, out, column, inside, h_token_stride,
    out_stride, UPCAST: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Add B h to a block of columns of a module for one tile."""
    token, own = tile_tokens(number_of_token, start, number, tokens, BLOCK_TOKENS)
    total = expand_tile(
        h, weights, row_of, rank, token, own, column, inside, h_token_stride, UPCAST, ALIGNMENT, BLOCK_TOKENS,
        BLOCK_RANK, BLOCK_WIDTH,
    )  # fmt: skip
    target = out + token[:, None] * out_stride + column[None, :]
    mask = own[:, None] & inside[None, :]
    before = tl.load(target, mask=mask, other=0.0)
    tl.store(target, (before.to(tl.float32) + total).to(out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["tokens", "blocks", "h_token_stride", "h_module_stride"],
    do_not_specialize_on_alignment=["rows", "ranks", "number_of_token", "tiles", "outputs"],
)
def expand_tiles(
    h,
    weights,
    rows,
    ranks,
    number_of_token,
    tiles,
    out,
    outputs,
    tokens,
    blocks,
    rows_stride,
    group_stride,
    ranks_stride,
    h_token_stride,
    h_module_stride,
    out_stride,
    UPCAST: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MODULES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    THIN_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Add B h to the columns of each module, rows of `outputs`: (first column, columns), for all tiles.

    The columns of a site have `blocks` blocks. A program takes several blocks of tiles, if there are more
    than programs: the grid does not depend on the number of tiles.
    """
    for item in range(tl.program_id(0), tl.load(tiles) * blocks, tl.num_programs(0)):
        start, number, thick = tile_number(number_of_token, tiles, item // blocks, tokens, THIN_TOKENS)
        block = item % blocks
        module = 0
        before = 0
        end = 0
        for each in tl.static_range(MODULES):
            end += tl.cdiv(tl.load(outputs + each * 2 + 1), BLOCK_WIDTH)
            module += (block >= end).to(tl.int32)
            before = tl.where(block >= end, end, before)
        rank = tl.load(ranks + number * ranks_stride + module)
        if rank > 0:
            width = tl.multiple_of(tl.load(outputs + module * 2 + 1), ALIGNMENT)
            column = (block - before) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
            inside = column < width
            row_of = rows + number * rows_stride + module * group_stride
            out_of = out + tl.multiple_of(tl.load(outputs + module * 2), ALIGNMENT)
            h_of = h + module * h_module_stride
            if thick:
                add_tile(
                    h_of, weights, row_of, rank, number_of_token, start, number, tokens, out_of, column,
                    inside, h_token_stride, out_stride, UPCAST, ALIGNMENT, TILE_TOKENS, BLOCK_RANK,
                    BLOCK_WIDTH,
                )  # fmt: skip
            else:
                add_tile(
                    h_of, weights, row_of, rank, number_of_token, start, number, tokens, out_of, column,
                    inside, h_token_stride, out_stride, UPCAST, ALIGNMENT, THIN_TOKENS, BLOCK_RANK,
                    BLOCK_WIDTH,
                )  # fmt: skip


@triton.jit
def pair_columns(outputs, module, pair, ALIGNMENT: tl.constexpr, HALF: tl.constexpr):
    """Return the column of the first side of pairs in a module, and which pairs it has.

    The second side is HALF further: in the same head, or at the same column of the next module if HALF is 0.
    """
    column = pair if HALF == 0 else pair + pair // HALF * HALF
    return column, column < tl.multiple_of(tl.load(outputs + module * 2 + 1), ALIGNMENT)


@triton.jit
def finish_pairs(
    a, b, token, own, module, pair, column, inside, out, outputs, target, cos, sin, pages, offsets,
    out_stride, target_stride, value_offset, slot_stride, ALIGNMENT: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Add the base model's output to both sides of pairs of columns, and store what follows.

    HALF 0: silu(gate) times up, in `target`. Otherwise sides are halves of heads: queries are rotated in
    place, and rotated keys, and values, stored in the page of each token; `target` points at a layer's keys.
    """
    mask = own & inside
    here = out + token * out_stride + column
    out_a = here + tl.multiple_of(tl.load(outputs + module * 2), ALIGNMENT)
    out_b = here + tl.multiple_of(tl.load(outputs + (module + (HALF == 0)) * 2), ALIGNMENT) + HALF
    a += tl.load(out_a, mask=mask, other=0.0).to(tl.float32)
    b += tl.load(out_b, mask=mask, other=0.0).to(tl.float32)
    if HALF == 0:
        tl.store(target + token * target_stride + pair, gated(a, b).to(out.dtype.element_ty), mask=mask)
    else:
        turns = tl.where(module < 2, mask, False)  # values do not
        a, b = rotated(a, b, cos, sin, token * (2 * HALF) + pair % HALF, turns, HALF)
        a, b = a.to(out.dtype.element_ty), b.to(out.dtype.element_ty)
        if module == 0:
            tl.store(out_a, a, mask=mask)
            tl.store(out_b, b, mask=mask)
        else:
            slot = tl.load(pages + token, mask=own, other=0) * target_stride
            slot += tl.load(offsets + token, mask=own, other=0) * slot_stride
            place = target + slot + (module - 1) * value_offset + column
            tl.store(place, a, mask=mask)
            tl.store(place + HALF, b, mask=mask)


@triton.jit(
    do_not_specialize=["limit", "h_token_stride", "h_module_stride", "h_split_stride"],
    do_not_specialize_on_alignment=["rows", "ranks", "number_of_token", "outputs", "pages", "offsets"],
)
def expand_pairs_tokens(
    h, weights, rows, ranks, number_of_token, out, outputs, target, cos, sin, pages, offsets, limit,
    rows_stride, group_stride, ranks_stride, h_token_stride, h_module_stride, h_split_stride, out_stride,
    target_stride, value_offset, slot_stride, PADDED: tl.constexpr, ALIGNMENT: tl.constexpr,
    SPLITS: tl.constexpr, HALF: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Add B h to pairs of columns, see `finish_pairs`; tokens of the base model have rank 0."""
    token = tl.program_id(0).to(tl.int64)  # times a stride it may pass 2**31
    module = tl.program_id(1)
    pair = tl.program_id(2) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    column, inside = pair_columns(outputs, module, pair, ALIGNMENT, HALF)
    if tl.max(inside.to(tl.int32), axis=0) == 0:
        return
    number = tl.load(number_of_token + token)
    h += token * h_token_stride + module * h_module_stride
    row_of = rows + number * rows_stride + module * group_stride
    rank_of = ranks + number * ranks_stride + module
    rank = tl.load(rank_of, mask=number >= 0, other=0)
    if PADDED:
        rank = tl.where(number >= 0, limit, 0)
    a = expand_token(
        h, weights, row_of, rank, column, inside, h_split_stride, ALIGNMENT, SPLITS, BLOCK_RANK, BLOCK_WIDTH
    )
    if HALF == 0:
        h += h_module_stride
        row_of += group_stride
        if not PADDED:
            rank = tl.load(rank_of + 1, mask=number >= 0, other=0)
    b = expand_token(
        h, weights, row_of, rank, column + HALF, inside, h_split_stride, ALIGNMENT, SPLITS, BLOCK_RANK,
        BLOCK_WIDTH,
    )  # fmt: skip
    token += tl.arange(0, 1)
    finish_pairs(
        a, b, token, token >= 0, module, pair, column, inside, out, outputs, target, cos, sin, pages, offsets,
        out_stride, target_stride, value_offset, slot_stride, ALIGNMENT, HALF,
    )  # fmt: skip


@triton.jit
def finish_tile(
    h, weights, rows, ranks, number_of_token, start, number, tokens, module, pair, out, outputs, target, cos,
    sin, pages, offsets, group_stride, h_token_stride, h_module_stride, out_stride, target_stride,
    value_offset, slot_stride, UPCAST: tl.constexpr, ALIGNMENT: tl.constexpr, HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Add B h to pairs of columns for one tile, see `finish_pairs`; pointers are those of the module."""
    token, own = tile_tokens(number_of_token, start, number, tokens, BLOCK_TOKENS)
    column, inside = pair_columns(outputs, module, pair, ALIGNMENT, HALF)
    rank = tl.load(ranks, mask=number >= 0, other=0)
    a = expand_tile(
        h, weights, rows, rank, token, own, column, inside, h_token_stride, UPCAST, ALIGNMENT, BLOCK_TOKENS,
        BLOCK_RANK, BLOCK_WIDTH,
    )  # fmt: skip
    if HALF == 0:
        h += h_module_stride
        rows += group_stride
        rank = tl.load(ranks + 1, mask=number >= 0, other=0)
    b = expand_tile(
        h, weights, rows, rank, token, own, column + HALF, inside, h_token_stride, UPCAST, ALIGNMENT,
        BLOCK_TOKENS, BLOCK_RANK, BLOCK_WIDTH,
    )  # fmt: skip
    finish_pairs(
        a, b, token[:, None], own[:, None], module, pair[None, :], column[None, :], inside[None, :], out,
        outputs, target, cos, sin, pages, offsets, out_stride, target_stride, value_offset, slot_stride,
        ALIGNMENT, HALF,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["tokens", "blocks", "h_token_stride", "h_module_stride"],
    do_not_specialize_on_alignment=[
        "rows",
        "ranks",
        "number_of_token",
        "tiles",
        "outputs",
        "pages",
        "offsets",
    ],
)
def expand_pairs_tiles(
    h, weights, rows, ranks, number_of_token, tiles, out, outputs, target, cos, sin, pages, offsets, tokens,
    blocks, rows_stride, group_stride, ranks_stride, h_token_stride, h_module_stride, out_stride,
    target_stride, value_offset, slot_stride, UPCAST: tl.constexpr, ALIGNMENT: tl.constexpr,
    MODULES: tl.constexpr, TILE_TOKENS: tl.constexpr, THIN_TOKENS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Add B h to pairs of columns for all tiles, as `expand_tiles`, see `finish_pairs`.

    The tiles are followed by windows of TILE_TOKENS tokens, of which those of the base model have rank 0.
    """
    count = tl.load(tiles)
    items = (count + tl.cdiv(tokens, TILE_TOKENS)) * blocks
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile = item // blocks
        block = item % blocks
        module = 0
        before = 0
        end = 0
        for each in tl.static_range(MODULES):
            end += tl.cdiv(tl.load(outputs + each * 2 + 1), BLOCK_WIDTH * (1 if HALF == 0 else 2))
            module += (block >= end).to(tl.int32)
            before = tl.where(block >= end, end, before)
        pair = (block - before) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
        tiled = tile < count
        start = tl.load(tiles + 1 + tile, mask=tiled, other=0)
        start = tl.where(tiled, start, (tile - count) * TILE_TOKENS)
        number = tl.load(number_of_token + start, mask=tiled, other=-1)
        _, own = tile_tokens(number_of_token, start, number, tokens, TILE_TOKENS)
        last = tl.max(tl.where(own, tl.arange(0, TILE_TOKENS), -1), axis=0)
        h_of = h + module * h_module_stride
        row_of = rows + number * rows_stride + module * group_stride
        rank_of = ranks + number * ranks_stride + module
        if last >= THIN_TOKENS:
            finish_tile(
                h_of, weights, row_of, rank_of, number_of_token, start, number, tokens, module, pair, out,
                outputs, target, cos, sin, pages, offsets, group_stride, h_token_stride, h_module_stride,
                out_stride, target_stride, value_offset, slot_stride, UPCAST, ALIGNMENT, HALF, TILE_TOKENS,
                BLOCK_RANK, BLOCK_WIDTH,
            )  # fmt: skip
        elif last >= 0:
            finish_tile(
                h_of, weights, row_of, rank_of, number_of_token, start, number, tokens, module, pair, out,
                outputs, target, cos, sin, pages, offsets, group_stride, h_token_stride, h_module_stride,
                out_stride, target_stride, value_offset, slot_stride, UPCAST, ALIGNMENT, HALF, THIN_TOKENS,
                BLOCK_RANK, BLOCK_WIDTH,
            )  # fmt: skip
