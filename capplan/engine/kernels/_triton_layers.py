"""Triton kernels beside the matrix products of a layer: norms, rotation with KV writes, activation, sharing.

The first three each replace two to thirteen kernels of PyTorch, whose launches cost more than their bytes in
decode steps. Sums are in float32; every result is rounded once.

`share_rows` writes activations to memory shared with CPU cores, and tells them so. The launching thread waits
for nothing: the last program to end raises the counter that the cores poll. Its release at the scope of the
system makes the stores of all programs visible to a core that sees the counter (PTX ISA, memory consistency
model: barriers of a block and releases are cumulative).
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from capplan.engine._pool import KvCache
from capplan.engine.kernels._triton_lora import Launch
from capplan.engine.kernels._triton_lora_kernels import gated, rotated
from capplan.engine.models._decoder import Pointwise

_BLOCK_HEADS: Final = 8
_BLOCK_GATES: Final = 1024
_BLOCK_SHARED: Final = 2048


@triton.jit(do_not_specialize=["eps"])
def norm_rows(
    x, more, weight, out, width, eps, x_stride, more_stride, out_stride, ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill out[token] with the RMS norm of x[token]; ADD: of its sum with more[token], which replaces it."""
    token = tl.program_id(0).to(tl.int64)  # times a stride it may pass 2**31
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + token * x_stride + column, mask=inside, other=0.0)
    if ADD:
        other = tl.load(more + token * more_stride + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        tl.store(x + token * x_stride + column, value, mask=inside)
    value = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + token * out_stride + column, (value * factor * scale).to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def gate_rows(gates, out, width, gates_stride, out_stride, BLOCK: tl.constexpr):
    """Fill out[token] with silu(gates[token, :width]) times gates[token, width:]."""
    token = tl.program_id(0).to(tl.int64)  # times a stride it may pass 2**31
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gates + token * gates_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + token * gates_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + column, gated(gate, up).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["pages", "offsets"])
def rotate_heads(
    heads,
    cos,
    sin,
    kv,
    pages,
    offsets,
    heads_stride,
    page_stride,
    value_offset,
    token_stride,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotate queries in place, and store rotated keys, and values, in the page of each token.

    `heads` has queries, keys and values, shape (tokens, heads, HEAD_DIM); `kv` points at the keys of one
    layer.
    """
    token = tl.program_id(0).to(tl.int64)  # times a stride it may pass 2**31
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    low = tl.arange(0, BLOCK_HALF)[None, :]
    high = low + HEAD_DIM // 2
    known = (head < QUERIES + 2 * KEYS) & (low < HEAD_DIM // 2)
    turns = known & (head < QUERIES + KEYS)
    here = heads + token * heads_stride + head * HEAD_DIM
    a = tl.load(here + low, mask=known, other=0.0).to(tl.float32)
    b = tl.load(here + high, mask=known, other=0.0).to(tl.float32)
    a, b = rotated(a, b, cos, sin, token * HEAD_DIM + low, turns, HEAD_DIM // 2)
    new_a, new_b = a.to(heads.dtype.element_ty), b.to(heads.dtype.element_ty)
    query = known & (head < QUERIES)
    tl.store(here + low, new_a, mask=query)
    tl.store(here + high, new_b, mask=query)
    of_values = head >= QUERIES + KEYS
    kv_head = head - QUERIES - tl.where(of_values, KEYS, 0)
    slot = tl.load(pages + token) * page_stride + tl.load(offsets + token) * token_stride
    place = kv + slot + tl.where(of_values, value_offset, 0) + kv_head * HEAD_DIM
    stored = known & (head >= QUERIES)
    tl.store(place + low, new_a, mask=stored)
    tl.store(place + high, new_b, mask=stored)


def norm_launch(
    x: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> Launch:
    """Return the launch of the norm of `x`, or of its sum with `more`, which is stored in `x`."""
    tokens, width = x.shape
    strides = (x.stride(0), 0 if more is None else more.stride(0), out.stride(0))
    block = int(triton.next_power_of_2(width))
    config = {"ADD": more is not None, "BLOCK": block, "num_warps": min(16, max(1, block // 512))}
    return Launch(norm_rows, (tokens,), (x, more, weight, out, width, eps, *strides), config)


def gate_launch(gates: torch.Tensor, out: torch.Tensor) -> Launch:
    """Return the launch of the activation, from gate and up side by side."""
    tokens, width = out.shape
    grid = (tokens, triton.cdiv(width, _BLOCK_GATES))
    arguments = (gates, out, width, gates.stride(0), out.stride(0))
    return Launch(gate_rows, grid, arguments, {"BLOCK": _BLOCK_GATES, "num_warps": 4})


def rotate_launch(
    cache: KvCache,
    layer: int,
    heads: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    slots: tuple[torch.Tensor, torch.Tensor],
) -> Launch:
    """Return the launch that rotates queries, and rotates and stores keys.

    `heads` are queries, keys and values, shape (tokens, heads, head_dim). Of each token, `angles` are cosines
    and signed sines, and `slots` its page and its offset there.
    """
    tokens, number, head_dim = heads.shape
    keys = cache.pages[:, layer]
    config = {
        "QUERIES": number - 2 * cache.kv_heads,
        "KEYS": cache.kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_HEADS": _BLOCK_HEADS,
        "BLOCK_HALF": int(triton.next_power_of_2(head_dim // 2)),
        "num_warps": 2,
    }
    arguments = (heads, *angles, keys, *slots, heads.stride(0), *keys.stride()[:3])
    return Launch(rotate_heads, (tokens, triton.cdiv(number, _BLOCK_HEADS)), arguments, config)


class TritonPointwise(Pointwise):
    """Norms and activation in Triton, a launch each."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the norm of `x`."""
        out = torch.empty_like(x)
        norm_launch(x, None, weight, self.eps, out).run()
        return out

    def add_norm(self, x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Add `more` to `x` in place and return the norm of the sum."""
        out = torch.empty_like(x)
        norm_launch(x, more, weight, self.eps, out).run()
        return out

    def gate(self, gates: torch.Tensor) -> torch.Tensor:
        """Return silu of the first half of the columns times the second half."""
        out = gates.new_empty(gates.shape[0], gates.shape[1] // 2)
        gate_launch(gates, out).run()
        return out


@triton.jit(do_not_specialize=["number"])
def share_rows(x, shared, arrived, counter, number, elements, BLOCK: tl.constexpr):
    """Copy x to shared memory; the last program sets the counter to a number above 0.

    `arrived` counts programs on the device, and is 0 before and after.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(shared + at, tl.load(x + at, mask=at < elements), mask=at < elements)
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.atomic_xchg(arrived, 0, sem="relaxed", scope="gpu")
        if number > 0:
            tl.atomic_xchg(counter, number.to(tl.int64), sem="release", scope="sys")


def share_launch(
    x: torch.Tensor, shared: torch.Tensor, arrived: torch.Tensor, counter: torch.Tensor, number: int
) -> Launch:
    """Return the launch that shares contiguous activations.

    `shared` has as many elements, in host memory that the GPU can write; `arrived` is one zero of int32 on
    the device, `counter` one int64 in host memory. The counter is set to `number`; 0: it stays, as more
    activations follow.
    """
    return Launch(
        share_rows,
        (triton.cdiv(x.numel(), _BLOCK_SHARED),),
        (x, shared, arrived, counter, number, x.numel()),
        {"BLOCK": _BLOCK_SHARED, "num_warps": 4},
    )
