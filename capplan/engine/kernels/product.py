"""The matrix product inside kernels: on tensor cores in the dtype of the model, accumulated in float32.

Triton's interpreter multiplies the bit patterns of bfloat16 as if they were integers (seen with 3.9), so
there the factors are made float32 first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction


@triton.jit
def product(a, b, total, UPCAST: tl.constexpr):
    """Return ``total + a @ b``; no TF32, which would lose what float32 models have."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


def must_upcast(dtype: torch.dtype) -> bool:
    """Tell whether factors of this dtype have to be made float32 here."""
    return dtype == torch.bfloat16 and not isinstance(product, JITFunction)
