"""LoRA products of a step in Triton: launches of shrink and expand, token by token or in tiles.

The expand of q, k and v also rotates and stores, that of gate and up multiplies them.

A shrink has few programs in a small batch. Its width is therefore split until the programs fill the GPU.
Token by token the expand sums the parts; of a tile the last program of the shrink does, since many programs
of the expand read them.

Launch of a Triton kernel: one definition for running it and for compiling it ahead of time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal, NamedTuple

import torch
import triton

from capplan.engine._input_batch import Segment
from capplan.engine._pool import KvCache
from capplan.engine.kernels._triton_lora_kernels import (
    expand_pairs_tiles,
    expand_pairs_tokens,
    expand_tiles,
    expand_tokens,
    find_tiles,
    must_upcast,
    shrink_tiles,
    shrink_tokens,
)
from capplan.engine.lora._adapter import GROUPS, SITES, A, AdapterLayout, B
from capplan.engine.lora._memory import RowTables
from capplan.engine.models._decoder import GATE_UP, QKV, LoRALayers, Pointwise, TorchAttention

_DEFAULT_MULTIPROCESSORS: Final = 132
"""Of an H100 (SXM), for devices that are no GPU."""


class Launch(NamedTuple):
    """Kernel, grid, arguments and configuration.

    Arguments on the ``meta`` device describe a launch that is only compiled.
    """

    kernel: Any
    """Function under `triton.jit`."""
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    config: Mapping[str, Any]
    """Constants of the kernel, ``num_warps`` and ``num_stages``."""

    def run(self) -> None:
        """Launch the kernel on the current stream."""
        self.kernel[self.grid](*self.arguments, **self.config)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a GPU."""
    if device.type != "cuda":
        return _DEFAULT_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


Kind = Literal["bgmv", "mbgmv", "sgmv"]

TILE_TOKENS: Final = 64
"""Most tokens of one tile of SGMV: a row of A or B is read once for them."""
THIN_TOKENS: Final = 16
"""Tokens up to which a tile is computed as one of so many: the fewest that tensor cores take."""

SGMV_FROM_TOKENS: Final = 2
"""Mean tokens per adapter from which tiles are used if no measurement is given: by bytes, since two tokens
of an adapter read its rows once.
"""

_MOST_SPLITS: Final = 8
"""Most parts of a shrink; each adds 4 bytes per rank to what a program of the expand reads, or, of a tile,
8 bytes per token and rank.
"""
_LEAST_PART: Final = 256
"""Least columns of a part: one iteration."""
_PROGRAMS_PER_MULTIPROCESSOR: Final = 2
_EXPANDS_PER_MULTIPROCESSOR: Final = 8
"""Programs of an expand of tiles: twice as many as fit, so that none waits long for the last ones."""
_PAIRS: Final = 128
"""Pairs of columns that a program of an expand finishes: token by token, more spill registers at rank 8."""


class StepLoRA(LoRALayers):
    """LoRA products of one step. Launches depend on shapes, not on the adapters, as CUDA graphs require.

    The tables point into `weights`, a flat tensor. `numbers` are the index of each token's adapter in the
    tables, -1 for the base model; tokens of an adapter follow each other. For `kind` see `TritonLoRA`; before
    the products of ``sgmv`` the launch `tiles_launch` must run. `limit` is the largest rank.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        tables: RowTables,
        weights: torch.Tensor,
        numbers: torch.Tensor,
        kind: Kind,
        limit: int,
    ) -> None:
        device = weights.device
        self._layout = layout
        self._tables = tables
        self._weights = weights
        self._numbers = numbers
        self._tokens = numbers.shape[0]
        self._limit = limit
        self._kind = kind
        self._outputs = tables.outputs
        self._programs = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device)
        if kind == "sgmv":
            adapters = min(tables.ranks.shape[0], self._tokens)
            self._most_tiles = adapters + (self._tokens - adapters) // TILE_TOKENS
            self._tiles = torch.empty(1 + self._most_tiles, dtype=torch.int32, device=device)
            widest, blocks = map(max, zip(*map(self._rank_blocks, SITES), strict=True))
            self._arrived = torch.zeros(self._most_tiles * blocks, dtype=torch.int32, device=device)
            part = (self._programs, TILE_TOKENS, widest)
            self._parts = torch.empty(part, dtype=torch.float32, device=device)
            self._splits = [1] * len(SITES)
        else:
            self._splits = [
                splits_of(self._tokens * len(site), layout.sizes[site[0]][A], device) for site in SITES
            ]
        # Float32 between the products of single tokens. Elements beyond a rank are neither written nor read.
        dtype = weights.dtype if kind == "sgmv" else torch.float32
        shape = (self._tokens, max(map(len, SITES)), max(self._splits), limit)
        self._h = torch.empty(shape, dtype=dtype, device=device)

    def add(self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the low-rank product of each token of `x` to `out`."""
        self.shrink(layer, site, x)
        self.expand(layer, site, out)

    def add_and_rotate(
        self, layer: int, x: torch.Tensor, qkv: torch.Tensor, attention: TorchAttention
    ) -> torch.Tensor:
        """Add to queries, keys and values, rotate and store them, and return queries."""
        self.shrink(layer, QKV, x)
        cache, angles = attention.cache, (attention.cos, attention.sin)
        self.rotate_launch(layer, qkv, cache, angles, attention.slots).run()
        return qkv.view(self._tokens, -1, cache.head_dim)[:, : -2 * cache.kv_heads]

    def add_and_gate(
        self, layer: int, x: torch.Tensor, gates: torch.Tensor, pointwise: Pointwise
    ) -> torch.Tensor:
        """Add to gate and up, and return silu of gate times up."""
        self.shrink(layer, GATE_UP, x)
        out = gates.new_empty(self._tokens, gates.shape[1] // 2)
        self.gate_launch(layer, gates, out).run()
        return out

    def shrink(self, layer: int, site: int, x: torch.Tensor) -> None:
        """Compute the low-rank activations: the first half of `add`."""
        self.shrink_launch(layer, site, x).run()

    def expand(self, layer: int, site: int, out: torch.Tensor) -> None:
        """Add the product of the activations and B to `out`: the second half of `add`."""
        self.expand_launch(layer, site, out).run()

    def shrink_launch(self, layer: int, site: int, x: torch.Tensor) -> Launch:
        """Return the launch of `shrink`."""
        modules, h = SITES[site], self._h
        rows, ranks = self._rows(layer, modules[0], A)
        strides = (x.stride(0), *self._strides(), *h.stride()[:2])
        alignment = {"ALIGNMENT": self._layout.row_alignment}
        if self._kind == "sgmv":
            rank, blocks = self._rank_blocks(modules)
            config = tiles_config(rank, 64, rank, x.dtype, len(modules)) | alignment
            config |= {"BLOCKS": blocks, "PARTS": self._programs, "MOST_SPLITS": most_splits(x.shape[1])}
            read = (x, self._weights, rows, ranks, self._numbers, self._tiles)
            arguments = (*read, h, self._parts, self._arrived, x.shape[1], self._tokens, *strides)
            programs = max(self._programs, self._most_tiles * blocks)
            return Launch(shrink_tiles, (programs,), arguments, config)
        splits = self._splits[site]
        config = tokens_config(self._limit, splits, self._kind == "bgmv") | alignment | {"STAGES": 3}
        grid = (self._tokens, len(modules), splits * triton.cdiv(self._limit, config["BLOCK_RANK"]))
        sizes = (x.shape[1], self._limit, *strides, h.stride(2))
        return Launch(shrink_tokens, grid, (x, self._weights, rows, ranks, self._numbers, h, *sizes), config)

    def expand_launch(self, layer: int, site: int, out: torch.Tensor) -> Launch:
        """Return the launch of `expand`."""
        modules, h, outputs = SITES[site], self._h, self._outputs[site]
        rows, ranks = self._rows(layer, modules[0], B)
        strides = (*self._strides(), *h.stride()[:2])
        alignment = {"ALIGNMENT": self._layout.row_alignment}
        widths = [self._layout.sizes[module][B] for module in modules]
        if self._kind == "sgmv":
            config = tiles_config(16, 128, 128, out.dtype, len(modules)) | alignment
            blocks = sum(triton.cdiv(width, config["BLOCK_WIDTH"]) for width in widths)
            programs = _EXPANDS_PER_MULTIPROCESSOR * multiprocessors(out.device)
            read = (h, self._weights, rows, ranks, self._numbers, self._tiles)
            arguments = (*read, out, outputs, self._tokens, blocks, *strides, out.stride(0))
            return Launch(expand_tiles, (min(self._most_tiles * blocks, programs),), arguments, config)
        config = tokens_config(self._limit, self._splits[site], self._kind == "bgmv") | alignment
        grid = (self._tokens, len(modules), triton.cdiv(max(widths), config["BLOCK_WIDTH"]))
        tensors = (h, self._weights, rows, ranks, self._numbers, out, outputs)
        sizes = (self._limit, *strides, h.stride(2), out.stride(0))
        return Launch(expand_tokens, grid, (*tensors, *sizes), config)

    def rotate_launch(
        self,
        layer: int,
        qkv: torch.Tensor,
        cache: KvCache,
        angles: tuple[torch.Tensor, torch.Tensor],
        slots: tuple[torch.Tensor, torch.Tensor],
    ) -> Launch:
        """Return the launch of `expand` for q, k and v, and of their rotation, see `TorchAttention`."""
        keys = cache.pages[:, layer]
        strides = keys.stride()[:3]
        return self._pairs_launch(layer, QKV, qkv, (keys, *angles, *slots), strides, cache.head_dim // 2)

    def gate_launch(self, layer: int, gates: torch.Tensor, out: torch.Tensor) -> Launch:
        """Return the launch of `expand` for gate and up, and of silu of gate times up, which fills `out`."""
        targets = (out, None, None, None, None)
        return self._pairs_launch(layer, GATE_UP, gates, targets, (out.stride(0), 0, 0), 0)

    def _pairs_launch(
        self,
        layer: int,
        site: int,
        out: torch.Tensor,
        targets: tuple[torch.Tensor | None, ...],
        target_strides: tuple[int, ...],
        half: int,
    ) -> Launch:
        """Return the launch for pairs of columns, `half` columns apart or of two modules."""
        modules, h = SITES[site], self._h
        rows, ranks = self._rows(layer, modules[0], B)
        widths = [self._layout.sizes[module][B] for module in modules]
        pairs = [width // 2 for width in widths] if half else widths[:1]
        read = (h, self._weights, rows, ranks, self._numbers)
        written = (out, self._outputs[site], *targets)
        strides = (*self._strides(), *h.stride()[:2])
        following = (out.stride(0), *target_strides)
        shared = {"ALIGNMENT": self._layout.row_alignment, "HALF": half}
        if self._kind == "sgmv":
            config = tiles_config(16, _PAIRS, 2 * _PAIRS, out.dtype, len(pairs)) | shared
            blocks = sum(triton.cdiv(number, config["BLOCK_WIDTH"]) for number in pairs)
            tiles = self._most_tiles + triton.cdiv(self._tokens, TILE_TOKENS)
            programs = min(tiles * blocks, _EXPANDS_PER_MULTIPROCESSOR * multiprocessors(out.device))
            arguments = (*read, self._tiles, *written, self._tokens, blocks, *strides, *following)
            return Launch(expand_pairs_tiles, (programs,), arguments, config)
        config = tokens_config(self._limit, self._splits[site], self._kind == "bgmv") | shared
        config["BLOCK_WIDTH"] = _PAIRS
        grid = (self._tokens, len(pairs), triton.cdiv(max(pairs), config["BLOCK_WIDTH"]))
        arguments = (*read, *written, self._limit, *strides, h.stride(2), *following)
        return Launch(expand_pairs_tokens, grid, arguments, config)

    def tiles_launch(self) -> Launch:
        """Return the launch that finds the tiles of a step."""
        arguments = (self._numbers, self._tiles, self._tokens)
        config = {"TILE_TOKENS": TILE_TOKENS, "BLOCK": 1024, "num_warps": 4}
        return Launch(find_tiles, (1,), arguments, config)

    def _rank_blocks(self, modules: Sequence[int]) -> tuple[int, int]:
        """Return the rows in a block of A's rows of all modules of a site, and the most blocks."""
        rows = len(modules) * self._limit
        block = _block(rows, least=16, most=64)
        return block, triton.cdiv(rows, block)

    def _rows(self, layer: int, module: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the table of a module's rows of A or B, and of its ranks."""
        rows = self._tables.rows[0, layer][GROUPS.index((module, side))]
        return rows, self._tables.ranks[0, layer, module:]

    def _strides(self) -> tuple[int, int, int]:
        return self._tables.rows.stride(0), self._tables.rows.stride(2), self._tables.ranks.stride(0)


class TritonLoRA(StepLoRA):
    """LoRA products of one step, of the adapters that it has.

    Parameters
    ----------
    kind
        ``bgmv``: padded to the largest rank in the batch; ``mbgmv``: true ranks, token by token; ``sgmv``:
        true ranks, in tiles of tokens of one adapter. None: see `chosen_kind`.
    sgmv_from_tokens
        See `chosen_kind`.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        tables: RowTables,
        weights: torch.Tensor,
        segments: Sequence[Segment],
        tokens: int,
        kind: Kind | None = None,
        sgmv_from_tokens: float | None = None,
    ) -> None:
        used = [(tables.number_of[s.adapter], s.start, s.end) for s in segments if s.adapter != 0]
        numbers = torch.full((tokens,), -1, dtype=torch.int32)
        for number, start, end in used:
            numbers[start:end] = number
        limit = max(tables.max_rank_of[number] for number, _, _ in used)
        lora_tokens = sum(end - start for _, start, end in used)
        kind = kind or chosen_kind(lora_tokens, len(used), sgmv_from_tokens)
        on_device = numbers.to(weights.device, non_blocking=True)
        super().__init__(layout, tables, weights, on_device, kind, limit)
        if kind == "sgmv":
            self.tiles_launch().run()


def chosen_kind(tokens: int, adapters: int, sgmv_from_tokens: float | None) -> Kind:
    """Return ``sgmv`` from so many tokens per adapter on average, and ``mbgmv`` below.

    `tokens` are those of all adapters; `sgmv_from_tokens` is as measured, None: `SGMV_FROM_TOKENS`.
    """
    least = SGMV_FROM_TOKENS if sgmv_from_tokens is None else sgmv_from_tokens
    return "sgmv" if tokens >= least * adapters else "mbgmv"


def splits_of(programs: int, width: int, device: torch.device) -> int:
    """Return the parts, a power of 2, of a shrink over `width` columns; whole, it has `programs` programs."""
    wanted = triton.cdiv(_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device), programs)
    return int(min(most_splits(width), triton.next_power_of_2(wanted)))


def most_splits(width: int) -> int:
    """Return the most parts, a power of 2, of a shrink over `width` columns."""
    return int(min(_MOST_SPLITS, 1 << (triton.cdiv(width, _LEAST_PART).bit_length() - 1)))


def tokens_config(limit: int, splits: int, padded: bool) -> dict[str, Any]:
    """Return the launch configuration of `expand_tokens`, which `shrink_tokens` adds its stages to.

    A shrink reads 8 KiB of 16-bit weights per iteration.
    """
    block = _block(limit, least=8, most=16)
    return {
        "PADDED": padded,
        "SPLITS": splits,
        "BLOCK_RANK": block,
        "BLOCK_WIDTH": 4096 // block,
        "num_warps": 4,
    }


def tiles_config(rank: int, width: int, results: int, dtype: torch.dtype, modules: int) -> dict[str, Any]:
    """Return the launch configuration of `shrink_tiles` and `expand_tiles`, with `results` per token."""
    return {
        "UPCAST": must_upcast(dtype),
        "MODULES": modules,
        "TILE_TOKENS": TILE_TOKENS,
        "THIN_TOKENS": THIN_TOKENS,
        "BLOCK_RANK": rank,
        "BLOCK_WIDTH": width,
        "num_warps": 4 if results < TILE_TOKENS else max(8, results // 16),
        "num_stages": 3,
    }


def _block(rank: int, least: int, most: int) -> int:
    """Return a tile of ranks, a power of 2: at least what tensor cores take, at most what registers hold."""
    return min(most, max(least, int(triton.next_power_of_2(rank))))
