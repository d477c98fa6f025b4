"""Triton kernel that writes activations to memory shared with CPU cores, and tells them so.

The launching thread waits for nothing: the last program to end raises the counter that the cores poll. Its
release at the scope of the system makes the stores of all programs visible to a core that sees the counter
(PTX ISA, memory consistency model: barriers of a block and releases are cumulative).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from capplan.engine.kernels._triton_lora import Launch

_BLOCK = 2048


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

    Parameters
    ----------
    shared
        In host memory that the GPU can write, as many elements.
    arrived
        One zero of int32 on the device.
    counter
        One int64 in host memory.
    number
        What the counter is set to afterwards; 0: it stays, as more activations follow.
    """
    return Launch(
        share_rows,
        (triton.cdiv(x.numel(), _BLOCK),),
        (x, shared, arrived, counter, number, x.numel()),
        {"BLOCK": _BLOCK, "num_warps": 4},
    )
