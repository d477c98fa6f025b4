"""Decode kernels for the CPU, compiled by numba, in float32.

Each kernel replaces several small PyTorch operations, whose launch costs more than their arithmetic. Prompts
and other dtypes run in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from capplan._jit import cache_on_disk
from capplan.engine._input_batch import Decodes, ModelInputs, Segment
from capplan.engine._pool import KvCache
from capplan.engine.kernels._torch_lora import GroupedLoRA, Views
from capplan.engine.lora._adapter import GROUPS, SITES, A, AdapterLayout, B
from capplan.engine.lora._memory import RowTables
from capplan.engine.models._config import ModelConfig
from capplan.engine.models._decoder import LoRALayers, Pointwise, RopeTable, TorchAttention

F = TypeVar("F", bound=Callable[..., object])


def fast(function: F) -> F:
    """Compile with fast math; only functions of this file may be called, as numba's cache requires."""
    compiled: Any = numba.njit(nogil=True, error_model="numpy", fastmath=True)(function)
    cache_on_disk(compiled)
    return cast("F", compiled)


class CompiledAttention(TorchAttention):
    """Paged attention with compiled rotation, cache writes and decodes; prompts run in PyTorch."""

    def __init__(self, config: ModelConfig, cache: KvCache, rope: RopeTable, inputs: ModelInputs) -> None:
        super().__init__(config, cache, rope, inputs)
        self._kv: NDArray[np.float32] = cache.pool.tensor.view(-1).numpy()
        self._slots = inputs.pages.numpy(), inputs.offsets.numpy()
        self._cos_sin = self.cos.view(-1, config.head_dim).numpy(), self.sin.view(-1, config.head_dim).numpy()
        most = 0 if inputs.decodes is None else inputs.decodes.pages.shape[1] * cache.block_size
        self._scores = np.empty((config.heads, most), np.float32)

    def rotate_and_store(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Rotate queries and keys in place, store keys and values, and return queries."""
        heads = qkv.view(qkv.shape[0], -1, self.cache.head_dim)
        query_heads = heads.shape[1] - 2 * self.cache.kv_heads
        _rotate_and_store(
            heads.numpy(), *self._cos_sin, self._kv, *self._slots, query_heads, layer, self.cache.layers,
            self.cache.block_size,
        )  # fmt: skip
        return heads[:, :query_heads]

    def decode(self, layer: int, q: torch.Tensor, decodes: Decodes) -> torch.Tensor:
        """Attend with one query per request."""
        out = torch.empty(q.shape)
        cache = self.cache
        _attend(
            q.numpy(), self._kv, decodes.pages.numpy(), decodes.context.numpy(), layer, cache.layers,
            cache.block_size, cache.kv_heads, np.float32(cache.head_dim**-0.5), self._scores, out.numpy(),
        )  # fmt: skip
        return out.view(q.shape[0], -1)


@fast
def _rotate_and_store(
    heads: NDArray[np.float32],
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    kv: NDArray[np.float32],
    pages: NDArray[np.int64],
    offsets: NDArray[np.int64],
    query_heads: int,
    layer: int,
    layers: int,
    block_size: int,
) -> None:
    """Rotate queries and keys by their positions, and store keys and values in pages."""
    tokens, all_heads, dim = heads.shape
    kv_heads = (all_heads - query_heads) // 2
    half = dim // 2
    for token in range(tokens):
        c, s = cos[token], sin[token]
        for head in range(query_heads + kv_heads):
            low, high = heads[token, head, :half], heads[token, head, half:]
            for j in range(half):
                a, b = low[j], high[j]
                low[j] = a * c[j] + b * s[j]
                high[j] = b * c[half + j] + a * s[half + j]
        first = ((pages[token] * layers + layer) * 2 * block_size + offsets[token]) * kv_heads * dim
        for head in range(kv_heads):
            for side in range(2):
                at = first + (side * block_size * kv_heads + head) * dim
                kv[at : at + dim] = heads[token, query_heads + side * kv_heads + head]


@fast
def _attend(
    q: NDArray[np.float32],
    kv: NDArray[np.float32],
    tables: NDArray[np.int64],
    context: NDArray[np.int64],
    layer: int,
    layers: int,
    block_size: int,
    kv_heads: int,
    scale: Any,
    scores: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Fill `out` with the attention of queries, shape (requests, heads, head_dim), over each request's pages.

    All heads of a token lie side by side and are read together, so a page is read once from end to end.
    `scores` is a buffer, shape (heads, longest context).
    """
    requests, heads, dim = q.shape
    group = heads // kv_heads
    page_elements = block_size * kv_heads * dim
    for request in range(requests):
        length = context[request]
        for t in range(length):
            page = tables[request, t // block_size] * layers + layer
            at = page * 2 * page_elements + t % block_size * kv_heads * dim
            for kv_head in range(kv_heads):
                key = kv[at + kv_head * dim : at + kv_head * dim + dim]
                for head in range(kv_head * group, kv_head * group + group):
                    query = q[request, head]
                    total = np.float32(0.0)
                    for d in range(dim):
                        total += query[d] * key[d]
                    scores[head, t] = total * scale
        for head in range(heads):
            _softmax(scores[head, :length])
            result = out[request, head]
            for d in range(dim):
                result[d] = np.float32(0.0)
        for t in range(length):
            page = tables[request, t // block_size] * layers + layer
            at = (page * 2 + 1) * page_elements + t % block_size * kv_heads * dim
            for kv_head in range(kv_heads):
                value = kv[at + kv_head * dim : at + kv_head * dim + dim]
                for head in range(kv_head * group, kv_head * group + group):
                    result = out[request, head]
                    share = scores[head, t]
                    for d in range(dim):
                        result[d] += share * value[d]


@fast
def _softmax(row: NDArray[np.float32]) -> None:
    """Replace scores by their softmax.

    e^x is 2^i 2^f: a polynomial in f below 1 (relative error 2e-7), i into the exponent's bits.
    """
    highest = row[0]
    for t in range(row.size):
        highest = max(highest, row[t])
    weight = np.float32(0.0)
    for t in range(row.size):
        x = max((row[t] - highest) * np.float32(1.44269504), np.float32(-126.0))
        whole = np.floor(x)
        f = x - whole
        p = np.float32(1.535336188e-4)
        p = p * f + np.float32(1.339887440e-3)
        p = p * f + np.float32(9.618437357e-3)
        p = p * f + np.float32(5.550332471e-2)
        p = p * f + np.float32(2.402264791e-1)
        p = p * f + np.float32(6.931472028e-1)
        p = p * f + np.float32(1.0)
        bits = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23))
        row[t] = p * bits.view(np.float32)
        weight += row[t]
    for t in range(row.size):
        row[t] /= weight


GEMM_FROM: Final = 24
"""Tokens of one adapter from which a matrix product is used.

Measured at hidden size 384 and rank 16: with 8 tokens of each adapter the kernel takes half as long as
products by PyTorch, with 32 a little longer.
"""


class CompiledLoRA(LoRALayers):
    """MBGMV, token by token at true ranks, for adapters with few tokens; matrix products for the others."""

    def __init__(
        self,
        layout: AdapterLayout,
        tables: RowTables,
        weights: torch.Tensor,
        segments: Sequence[Segment],
        tokens: int,
        views: Views,
    ) -> None:
        self._layout = layout
        self._rows = tables.rows.numpy()
        self._ranks = tables.ranks.numpy()
        self._weights = weights.numpy()
        self._low = np.empty(tables.max_rank, np.float32)
        self._numbers = np.full(tokens, -1, np.int64)
        many = [s for s in segments if s.adapter and s.end - s.start >= GEMM_FROM]
        few = [s for s in segments if s.adapter and s.end - s.start < GEMM_FROM]
        for segment in few:
            self._numbers[segment.start : segment.end] = tables.number_of[segment.adapter]
        self._few = bool(few)
        self._grouped = GroupedLoRA(many, views) if many else None

    def add(self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the low-rank product of each token of `x` to `out`."""
        if self._grouped is not None:
            self._grouped.add(layer, site, x, out)
        if self._few:
            first, outputs = SITES[site][0], self._layout.site_outputs[site]
            _add_token_by_token(
                x.numpy(), out.numpy(), self._weights, self._rows, self._ranks, self._numbers, layer, first,
                GROUPS.index((first, A)), GROUPS.index((first, B)), *outputs, self._low,
            )  # fmt: skip


@fast
def _add_token_by_token(
    x: NDArray[np.float32],
    out: NDArray[np.float32],
    weights: NDArray[np.float32],
    rows: NDArray[np.int64],
    ranks: NDArray[np.int32],
    numbers: NDArray[np.int64],
    layer: int,
    first_module: int,
    group_a: int,
    group_b: int,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    low: NDArray[np.float32],
) -> None:
    """Add ``B (A x)`` to the columns of each module; `low` is a buffer for the largest rank."""
    width = x.shape[1]
    for token in range(x.shape[0]):
        number = numbers[token]
        if number < 0:
            continue
        value = x[token]
        for i in range(sizes.size):
            rank = ranks[number, layer, first_module + i]
            for r in range(rank):
                at = rows[number, layer, group_a + i, r]
                a = weights[at : at + width]
                total = np.float32(0.0)
                for j in range(width):
                    total += a[j] * value[j]
                low[r] = total
            result = out[token, starts[i] : starts[i] + sizes[i]]
            row_of = rows[number, layer, group_b + i]
            size = sizes[i]
            r = 0
            while r + 4 <= rank:  # four rows at a time: the result is read and written less often
                b0 = weights[row_of[r] : row_of[r] + size]
                b1 = weights[row_of[r + 1] : row_of[r + 1] + size]
                b2 = weights[row_of[r + 2] : row_of[r + 2] + size]
                b3 = weights[row_of[r + 3] : row_of[r + 3] + size]
                l0, l1, l2, l3 = low[r], low[r + 1], low[r + 2], low[r + 3]
                for j in range(size):
                    result[j] += l0 * b0[j] + l1 * b1[j] + l2 * b2[j] + l3 * b3[j]
                r += 4
            while r < rank:
                b = weights[row_of[r] : row_of[r] + size]
                share = low[r]
                for j in range(size):
                    result[j] += share * b[j]
                r += 1


class CompiledPointwise(Pointwise):
    """Compiled RMS norms, together with the addition before them; the activation is PyTorch's."""

    def __init__(self, eps: float) -> None:
        super().__init__(eps)
        self._eps = np.float32(eps)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the norm of `x`."""
        out = torch.empty_like(x)
        _norm(x.numpy(), weight.numpy(), self._eps, out.numpy())
        return out

    def add_norm(self, x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Add `more` to `x` in place and return the norm of the sum."""
        out = torch.empty_like(x)
        _add_norm(x.numpy(), more.numpy(), weight.numpy(), self._eps, out.numpy())
        return out


@fast
def _norm(
    x: NDArray[np.float32], weight: NDArray[np.float32], eps: np.float32, out: NDArray[np.float32]
) -> None:
    for i in range(x.shape[0]):
        row, result = x[i], out[i]
        total = np.float32(0.0)
        for j in range(row.size):
            total += row[j] * row[j]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(row.size) + eps)
        for j in range(row.size):
            result[j] = row[j] * factor * weight[j]


@fast
def _add_norm(
    x: NDArray[np.float32],
    more: NDArray[np.float32],
    weight: NDArray[np.float32],
    eps: np.float32,
    out: NDArray[np.float32],
) -> None:
    for i in range(x.shape[0]):
        row, other, result = x[i], more[i], out[i]
        total = np.float32(0.0)
        for j in range(row.size):
            row[j] += other[j]
            total += row[j] * row[j]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(row.size) + eps)
        for j in range(row.size):
            result[j] = row[j] * factor * weight[j]
