"""Triton kernel of paged decode attention: one program per request and key head.

The queries that share a key head are the rows of one matrix: each key is read once. Softmax is accumulated
block by block (Milakov and Gimelshein 2018; FlashAttention).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from capplan.engine.input_batch import Decodes
from capplan.engine.kernels.triton_lora import must_upcast, product
from capplan.engine.models.decoder import TorchAttention
from capplan.engine.pool import KvCache


@triton.jit
def attend_pages(
    q,
    kv,
    tables,
    context,
    out,
    scale,
    q_stride,
    q_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    page_stride,
    value_offset,
    token_stride,
    block_size,
    group,
    head_dim,
    UPCAST: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Fill out[request, head] for the query heads of one key head; `kv` points at the keys of one layer."""
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    head = tl.arange(0, BLOCK_GROUP)
    dim = tl.arange(0, BLOCK_DIM)
    q_mask = (head < group)[:, None] & (dim < head_dim)[None, :]
    q_at = request * q_stride + (kv_head * group + head)[:, None] * q_head_stride + dim[None, :]
    queries = tl.load(q + q_at, mask=q_mask, other=0.0)
    length = tl.load(context + request)

    nothing = tl.zeros((BLOCK_GROUP, BLOCK_TOKENS), tl.float32)
    highest = tl.full((BLOCK_GROUP,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_GROUP,), tl.float32)
    total = tl.zeros((BLOCK_GROUP, BLOCK_DIM), tl.float32)
    for start in range(0, length, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        known = token < length
        page = tl.load(tables + request * table_stride + token // block_size, mask=known, other=0)
        place = page * page_stride + (token % block_size) * token_stride + kv_head * head_dim
        mask = known[:, None] & (dim < head_dim)[None, :]
        keys = tl.load(kv + place[:, None] + dim[None, :], mask=mask, other=0.0)
        scores = product(queries, tl.trans(keys), nothing, UPCAST) * scale
        scores = tl.where(known[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        shares = tl.exp(scores - new_highest[:, None])
        fade = tl.exp(highest - new_highest)
        values = tl.load(kv + value_offset + place[:, None] + dim[None, :], mask=mask, other=0.0)
        total = product(shares.to(values.dtype), values, total * fade[:, None], UPCAST)
        weight = weight * fade + tl.sum(shares, axis=1)
        highest = new_highest
    out_at = request * out_stride + (kv_head * group + head)[:, None] * out_head_stride + dim[None, :]
    tl.store(out + out_at, (total / weight[:, None]).to(out.dtype.element_ty), mask=q_mask)


def paged_decode(
    cache: KvCache, layer: int, q: torch.Tensor, tables: torch.Tensor, context: torch.Tensor
) -> torch.Tensor:
    """Return the attention of one query per request, shape (requests, heads, head_dim) as `q`.

    Parameters
    ----------
    tables
        Pages of each request, shape (requests, blocks).
    context
        Tokens that each request reads, at least one, shape (requests,).
    """
    heads, head_dim = q.shape[1], cache.head_dim
    group = heads // cache.kv_heads
    pages = cache.pages[:, layer]
    out = torch.empty_like(q)
    attend_pages[(q.shape[0], cache.kv_heads)](
        q, pages, tables, context, out, head_dim**-0.5,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), tables.stride(0),
        pages.stride(0), pages.stride(1), pages.stride(2), cache.block_size, group, head_dim,
        UPCAST=must_upcast(q.dtype),
        BLOCK_GROUP=max(16, triton.next_power_of_2(group)),
        BLOCK_TOKENS=64,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
    )  # fmt: skip
    return out


class TritonAttention(TorchAttention):
    """Paged attention with decodes in Triton; prompts run in PyTorch."""

    def decode(self, layer: int, q: torch.Tensor, decodes: Decodes) -> torch.Tensor:
        """Attend with one query per request."""
        return paged_decode(self.cache, layer, q, decodes.pages, decodes.context).flatten(1)
