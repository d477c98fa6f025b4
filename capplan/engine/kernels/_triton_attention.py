"""Triton kernels of paged attention: decodes, and all prompts of a step in one launch.

The queries that share a key head are the rows of one matrix: each key is read once. Softmax is accumulated
block by block (Milakov and Gimelshein 2018; FlashAttention).

A decode has one program per request, key head and part of the context. Long contexts, and those of small
batches, are split among programs, whose results `merge_splits` combines by their sums of exponentials
(Flash-Decoding, Dao et al. 2023). The grid depends on the shapes of the inputs only, as CUDA graphs require;
parts beyond a request's context return at once. A prompt has one program per key head and tile of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from capplan.engine._input_batch import Decodes, ModelInputs, Prefill
from capplan.engine._pool import KvCache
from capplan.engine.kernels._triton_layers import rotate_launch
from capplan.engine.kernels._triton_lora import Launch, multiprocessors
from capplan.engine.kernels._triton_lora_kernels import must_upcast, product
from capplan.engine.models._config import ModelConfig
from capplan.engine.models._decoder import RopeTable, TorchAttention


@triton.jit
def split_tokens(length, splits, LEAST_TOKENS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Return the tokens of each part of a context: whole blocks, and at least LEAST_TOKENS."""
    return tl.maximum(tl.cdiv(length, splits * BLOCK_TOKENS) * BLOCK_TOKENS, LEAST_TOKENS)


@triton.jit
def split_range(length, split, splits, LEAST_TOKENS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Return the first token of a part of a context, and its end; it is empty beyond the context."""
    part = split_tokens(length, splits, LEAST_TOKENS, BLOCK_TOKENS)
    return split * part, tl.minimum(split * part + part, length)


@triton.jit
def softmax_block(scores, highest, weight):
    """Return exponentials of a block of scores, the decay of earlier ones, and the new maximum and sum."""
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    shares = tl.exp(scores - new_highest[:, None])
    fade = tl.exp(highest - new_highest)
    return shares, fade, new_highest, weight * fade + tl.sum(shares, axis=1)


@triton.jit
def attend_block(
    queries, kv, value_offset, place, mask, visible, scale, highest, weight, total, UPCAST: tl.constexpr
):
    """Add a block of keys and values to a softmax over earlier ones; return its maximum, sum and total.

    `place` are the offsets of the elements of the keys, of which `mask` are read; `visible` tells for each
    query which keys count.
    """
    keys = tl.load(kv + place, mask=mask, other=0.0)
    scores = product(queries, tl.trans(keys), tl.zeros(visible.shape, tl.float32), UPCAST) * scale
    scores = tl.where(visible, scores, float("-inf"))
    shares, fade, highest, weight = softmax_block(scores, highest, weight)
    values = tl.load(kv + value_offset + place, mask=mask, other=0.0)
    total = product(shares.to(values.dtype), values, total * fade[:, None], UPCAST)
    return highest, weight, total


@triton.jit(do_not_specialize=["table_stride"])  # the longest context of a batch
def attend_pages(
    q,
    kv,
    tables,
    context,
    out,
    sums,
    scale,
    q_stride,
    q_head_stride,
    out_stride,
    out_head_stride,
    out_split_stride,
    table_stride,
    page_stride,
    value_offset,
    token_stride,
    UPCAST: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    LEAST_TOKENS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Fill out[request, head, split] for the query heads of one key head and one part of the context.

    `kv` points at the keys of one layer. SPLIT: there are several parts, and `sums`, shape (requests, heads,
    parts), receives the logarithm of each part's sum of exponentials.
    """
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(context + request).to(tl.int32)
    begin, end = split_range(length, split, tl.num_programs(2), LEAST_TOKENS, BLOCK_TOKENS)
    if begin >= end:
        return
    member = tl.arange(0, BLOCK_GROUP)
    head = kv_head * GROUP + member
    dim = tl.arange(0, BLOCK_DIM)
    q_mask = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q_at = request * q_stride + head[:, None] * q_head_stride + dim[None, :]
    queries = tl.load(q + q_at, mask=q_mask, other=0.0)

    highest = tl.full((BLOCK_GROUP,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_GROUP,), tl.float32)
    total = tl.zeros((BLOCK_GROUP, BLOCK_DIM), tl.float32)
    for start in range(begin, end, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        known = token < end
        page = tl.load(tables + request * table_stride + token // PAGE_TOKENS, mask=known, other=0)
        place = page * page_stride + (token % PAGE_TOKENS) * token_stride + kv_head * HEAD_DIM
        mask = known[:, None] & (dim < HEAD_DIM)[None, :]
        visible = tl.broadcast_to(known[None, :], (BLOCK_GROUP, BLOCK_TOKENS))
        elements = place[:, None] + dim[None, :]
        highest, weight, total = attend_block(
            queries, kv, value_offset, elements, mask, visible, scale, highest, weight, total, UPCAST
        )
    out_at = request * out_stride + head[:, None] * out_head_stride + split * out_split_stride + dim[None, :]
    tl.store(out + out_at, (total / weight[:, None]).to(out.dtype.element_ty), mask=q_mask)
    if SPLIT:
        first = (request * tl.num_programs(1) * GROUP + head) * tl.num_programs(2)
        tl.store(sums + first + split, highest + tl.log(weight), mask=member < GROUP)


@triton.jit(do_not_specialize=["splits"])
def merge_splits(
    parts,
    sums,
    context,
    out,
    splits,
    out_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    LEAST_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Fill out[request, head] with the weighted mean of its parts.

    `parts` has shape (requests, heads, splits, HEAD_DIM), `sums` is as in `attend_pages`.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(context + request).to(tl.int32)
    used = tl.cdiv(length, split_tokens(length, splits, LEAST_TOKENS, BLOCK_TOKENS))
    first = (request * tl.num_programs(1) + head) * splits
    dim = tl.arange(0, BLOCK_DIM)
    highest = float("-inf")
    weight = 0.0
    total = tl.zeros((BLOCK_DIM,), tl.float32)
    for start in range(0, used, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        known = split < used
        logs = tl.load(sums + first + split, mask=known, other=float("-inf"))
        mask = known[:, None] & (dim < HEAD_DIM)[None, :]
        values = tl.load(parts + (first + split)[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        new_highest = tl.maximum(highest, tl.max(logs, axis=0))
        shares = tl.exp(logs - new_highest)
        fade = tl.exp(highest - new_highest)
        total = total * fade + tl.sum(values * shares[:, None], axis=0)
        weight = weight * fade + tl.sum(shares, axis=0)
        highest = new_highest
    place = out + request * out_stride + head * out_head_stride + dim
    tl.store(place, (total / weight).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit
def attend_prompts(
    q,
    kv,
    pages,
    tiles,
    out,
    scale,
    q_stride,
    q_head_stride,
    out_stride,
    out_head_stride,
    page_stride,
    value_offset,
    token_stride,
    UPCAST: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Fill out[token, head] for the query heads of one key head and the tokens of one tile.

    A row is a token of the tile and a query head. `tiles` are those of `prompt_tiles`, `pages` the pages of
    all prompts, `kv` points at the keys of one layer. Tiles without tokens pad those of a CUDA graph.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    first_page = tl.load(tiles + tile * 4)
    first_token = tl.load(tiles + tile * 4 + 1)
    tokens = tl.load(tiles + tile * 4 + 2)
    if tokens == 0:
        return
    first_position = tl.load(tiles + tile * 4 + 3)
    row = tl.arange(0, BLOCK_ROWS)
    at = row // GROUP
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_DIM)
    q_mask = (at < tokens)[:, None] & (dim < HEAD_DIM)[None, :]
    token_at = (first_token + at).to(tl.int64)
    q_at = (token_at * q_stride + head * q_head_stride)[:, None] + dim[None, :]
    queries = tl.load(q + q_at, mask=q_mask, other=0.0)

    highest = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_ROWS,), tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    end = first_position + tokens
    for start in range(0, end, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        known = token < end
        page = tl.load(pages + first_page + token // PAGE_TOKENS, mask=known, other=0)
        place = page * page_stride + (token % PAGE_TOKENS) * token_stride + kv_head * HEAD_DIM
        mask = known[:, None] & (dim < HEAD_DIM)[None, :]
        visible = token[None, :] <= (first_position + at)[:, None]
        elements = place[:, None] + dim[None, :]
        highest, weight, total = attend_block(
            queries, kv, value_offset, elements, mask, visible, scale, highest, weight, total, UPCAST
        )
    out_at = (token_at * out_stride + head * out_head_stride)[:, None] + dim[None, :]
    tl.store(out + out_at, (total / weight[:, None]).to(out.dtype.element_ty), mask=q_mask)


_BLOCK_TOKENS: Final = 64
_PROMPT_ROWS: Final = 64
"""Rows of a tile of a prompt: four times as many as tensor cores take, so that keys are read less often."""
_PROMPT_BLOCK_TOKENS: Final = 32
"""Half of a decode's, by which registers keep a quarter of the warps resident."""
_LEAST_TOKENS: Final = 256
"""Least tokens of a part, so that its float32 result, written and read, is under a hundredth of its reads."""
_MOST_TOKENS: Final = 8192
"""Tokens per program from which a context is split even if the batch fills the GPU, so that one long context
does not keep one multiprocessor busy alone; vLLM's paged attention splits from here, too.
"""
_MOST_SPLITS: Final = 128
_PROGRAMS_PER_MULTIPROCESSOR: Final = 2


def attention_splits(programs: int, most_tokens: int, device: torch.device) -> int:
    """Return the parts that contexts of up to `most_tokens` are split into; 1 is no split.

    As many as fill the GPU, if requests times key heads are `programs`, and at least one per 8192 tokens.
    """
    to_fill = triton.cdiv(_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device), programs)
    wanted = max(to_fill, triton.cdiv(most_tokens, _MOST_TOKENS))
    return int(min(wanted, max(1, most_tokens // _LEAST_TOKENS), _MOST_SPLITS))


def paged_decode(
    cache: KvCache,
    layer: int,
    q: torch.Tensor,
    tables: torch.Tensor,
    context: torch.Tensor,
    splits: int | None = None,
) -> torch.Tensor:
    """Return the attention of one query per request, shape (requests, heads, head_dim) as `q`.

    `tables` are the pages of each request, shape (requests, blocks), and `context` the tokens that it reads,
    at least one, shape (requests,). `splits` are the parts of each context; None: see `attention_splits`.
    """
    out = torch.empty_like(q)
    for launch in decode_launches(cache, layer, q, tables, context, out, splits):
        launch.run()
    return out


def decode_launches(
    cache: KvCache,
    layer: int,
    q: torch.Tensor,
    tables: torch.Tensor,
    context: torch.Tensor,
    out: torch.Tensor,
    splits: int | None = None,
) -> list[Launch]:
    """Return the launches of `paged_decode`: one, or two if contexts are split."""
    requests, heads, head_dim = q.shape
    most_tokens = tables.shape[1] * cache.block_size
    splits = splits or attention_splits(requests * cache.kv_heads, most_tokens, q.device)
    pages = cache.pages[:, layer]
    sizes = (head_dim**-0.5, *q.stride()[:2])
    paging = (tables.stride(0), *pages.stride()[:3])
    group = heads // cache.kv_heads
    config = {
        "UPCAST": must_upcast(q.dtype),
        "PAGE_TOKENS": cache.block_size,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "SPLIT": splits > 1,
        "LEAST_TOKENS": _LEAST_TOKENS,
        "BLOCK_GROUP": max(16, _power_of_2(group)),
        "BLOCK_TOKENS": _BLOCK_TOKENS,
        "BLOCK_DIM": max(16, _power_of_2(head_dim)),
        "num_warps": 4,
        "num_stages": 3,
    }
    grid = (requests, cache.kv_heads, splits)
    if splits == 1:
        alone = (q, pages, tables, context, out, None, *sizes, *out.stride()[:2], 0, *paging)
        return [Launch(attend_pages, grid, alone, config)]
    parts = q.new_empty((requests, heads, splits, head_dim), dtype=torch.float32)
    sums = q.new_empty((requests, heads, splits), dtype=torch.float32)
    attend = (q, pages, tables, context, parts, sums, *sizes, *parts.stride()[:3], *paging)
    merge = (parts, sums, context, out, splits, *out.stride()[:2])
    merge_config = {
        "HEAD_DIM": head_dim,
        "LEAST_TOKENS": _LEAST_TOKENS,
        "BLOCK_TOKENS": _BLOCK_TOKENS,
        "BLOCK_SPLITS": 16,
        "BLOCK_DIM": _power_of_2(head_dim),
        "num_warps": 4,
    }
    return [
        Launch(attend_pages, grid, attend, config),
        Launch(merge_splits, (requests, heads), merge, merge_config),
    ]


def prompt_tiles(prefills: Sequence[Prefill], group: int) -> torch.Tensor:
    """Return the tiles of prompts for `group` queries per key head, int32 of shape (tiles, 4), on the host.

    A tile is the index of its prompt's first page among those of all prompts, its first token in the step,
    its number of tokens, and the position of the first one.
    """
    most = prompt_rows(group) // group
    tiles, first_page = [], 0
    for each in prefills:
        position = each.context - (each.end - each.start)
        tiles += [
            (first_page, start, min(most, each.end - start), position + start - each.start)
            for start in range(each.start, each.end, most)
        ]
        first_page += each.pages.shape[0]
    return torch.tensor(tiles, dtype=torch.int32)


def prompt_rows(group: int) -> int:
    """Return the rows of a tile, a power of 2."""
    return max(_PROMPT_ROWS, _power_of_2(group))


def prompt_launch(
    cache: KvCache, layer: int, q: torch.Tensor, pages: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor
) -> Launch:
    """Return the launch that fills the tokens of `tiles` in `out`, shape (tokens, heads, head_dim) as `q`."""
    heads, head_dim = q.shape[1:]
    keys = cache.pages[:, layer]
    group = heads // cache.kv_heads
    sizes = (head_dim**-0.5, *q.stride()[:2], *out.stride()[:2], *keys.stride()[:3])
    config = {
        "UPCAST": must_upcast(q.dtype),
        "PAGE_TOKENS": cache.block_size,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_ROWS": prompt_rows(group),
        "BLOCK_TOKENS": _PROMPT_BLOCK_TOKENS,
        "BLOCK_DIM": max(16, _power_of_2(head_dim)),
        "num_warps": 8,
        "num_stages": 2,
    }
    grid = (tiles.shape[0], cache.kv_heads)
    return Launch(attend_prompts, grid, (q, keys, pages, tiles, out, *sizes), config)


def _power_of_2(value: int) -> int:
    return int(triton.next_power_of_2(value))


class TritonAttention(TorchAttention):
    """Paged attention in Triton, with rotation and cache writes in one launch."""

    def __init__(self, config: ModelConfig, cache: KvCache, rope: RopeTable, inputs: ModelInputs) -> None:
        super().__init__(config, cache, rope, inputs)
        self._prompts = inputs.prompts

    def rotate_and_store(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Rotate queries and keys, store keys and values, and return queries, (tokens, heads, head_dim)."""
        heads = qkv.view(qkv.shape[0], -1, self.cache.head_dim)
        rotate_launch(self.cache, layer, heads, (self.cos, self.sin), self.slots).run()
        return heads[:, : self._heads]

    def decode(self, layer: int, q: torch.Tensor, decodes: Decodes) -> torch.Tensor:
        """Attend with one query per request."""
        return paged_decode(self.cache, layer, q, decodes.pages, decodes.context).flatten(1)

    def prefill(self, layer: int, q: torch.Tensor, prefills: Sequence[Prefill], out: torch.Tensor) -> None:
        """Attend with all tokens of prompts in one launch."""
        if self._prompts is None:
            tiles = prompt_tiles(prefills, self.group).to(q.device, non_blocking=True)
            self._prompts = torch.cat([each.pages for each in prefills]), tiles
        prompt_launch(self.cache, layer, q, *self._prompts, out.view(q.shape)).run()
