"""LoRA adapters on the host: row layout, packed rows, random adapters.

An adapter of rank r on a linear map from `in` to `out` dimensions has r rows of length `in` (A) and r rows of
length `out` (B, transposed). Rows are ordered by layer. Within a layer they are ordered by site (q, k and v;
o; gate and up; down), each with the A rows of all its modules before their B rows: the A rows of q, k and v
form one matrix.

Adapters in PEFT folders: matrices that fit the model, read into host memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.models._config import WHOLE, ModelConfig, ModelShard
from capplan.errors import InputError
from capplan.spec import (
    LORA_MODULES,
    MatrixPair,
    PeftFiles,
    Place,
    SafetensorsFile,
    TensorEntry,
    module_sizes,
    require_fit,
)

_TYPES: Final = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }
)


class PeftFolder(PeftFiles):
    """PEFT folder as the source of an adapter."""

    def ranks(self, layout: AdapterLayout) -> NDArray[np.int64]:
        """Return the rank on each module, shape (layers, modules), from the file's header.

        Raises
        ------
        InputError
            If the adapter cannot be read, or does not fit the model.
        """
        with self._fitting(layout) as (_, _, ranks):
            return ranks

    def read(self, layout: AdapterLayout, dtype: torch.dtype, pin: bool, max_rank: int) -> HostAdapter:
        """Return the adapter, in pinned memory if `pin`.

        B is multiplied by alpha / rank, or alpha / sqrt(rank) with rsLoRA.

        Raises
        ------
        InputError
            As `ranks`; if a rank exceeds `max_rank`, before weights are read; or if a weight is not finite.
        """
        with self._fitting(layout) as (file, pairs, ranks):
            require_rank(ranks, max_rank, self.name)
            tensors = read_tensors(file, (each for pair in pairs.values() for each in (pair.a, pair.b)))
        matrices = {
            place: (tensors[a.name].float(), tensors[b.name].float() * scale)
            for place, (a, b, scale) in pairs.items()
        }
        return pack(layout, matrices, dtype, pin, self.name)

    @contextmanager
    def _fitting(
        self, layout: AdapterLayout
    ) -> Iterator[tuple[SafetensorsFile, dict[Place, MatrixPair], NDArray[np.int64]]]:
        """Open the weights; yield them with A, B and scale of every (layer, module), and the ranks."""
        with self.opened() as (file, pairs):
            shapes = {place: (pair.a.shape, pair.b.shape) for place, pair in pairs.items()}
            yield file, pairs, ranks_of(layout, shapes, self.name)


def read_tensors(file: SafetensorsFile, entries: Iterable[TensorEntry]) -> dict[str, torch.Tensor]:
    """Return tensors of a file by name."""
    return {
        entry.name: torch.frombuffer(data, dtype=_TYPES[entry.dtype]).reshape(entry.shape)
        for entry, data in file.read(entries)
    }


MODULES: Final = LORA_MODULES

SITES: Final = ((0, 1, 2), (3,), (4, 5), (6,))
"""Modules of each site, in the order of `capplan.engine.models._decoder`."""

A, B = 0, 1

GROUPS: Final = tuple((module, side) for site in SITES for side in (A, B) for module in site)
"""(module, side) groups of rows of one layer, in order: A of a site's modules, then their B."""

_MOST_ALIGNMENT: Final = 16
"""Elements; what Triton's compiler uses at most."""


class AdapterLayout:
    """Row lengths of a model's adapters.

    Under tensor parallelism a rank holds what its part of the base model takes, as in vLLM without
    ``fully_sharded_loras``: its outputs of B where the base model is cut by output, its inputs of A where it
    is cut by input.

    Attributes
    ----------
    model_sizes
        (in, out) of each module of the whole model.
    sizes
        (in, out) of each module on this rank.
    out_starts
        First column of each module's output within the output of its site.
    site_outputs
        First columns and widths of the modules of each site.
    row_alignment
        Largest power of 2 up to 16 that divides the length of every row, in elements. Rows begin at multiples
        of it, in slots and in pages.
    """

    def __init__(self, config: ModelConfig, shard: ModelShard = WHOLE) -> None:
        self.layers = config.layers
        self.model_sizes = _module_sizes(config)
        self.sizes = _module_sizes(shard.config(config))
        (_, query), (_, kv), *_, (_, inner), _ = self.sizes
        self.out_starts = (0, query, query + kv, 0, 0, inner, 0)
        self.site_outputs = tuple(
            (np.array([self.out_starts[m] for m in site]), np.array([self.sizes[m][B] for m in site]))
            for site in SITES
        )
        parts, everything = shard.parts(config), slice(None)
        self._cuts = (
            (everything, parts.query),
            (everything, parts.kv),
            (everything, parts.kv),
            (parts.query, everything),
            (everything, parts.inner),
            (everything, parts.inner),
            (parts.inner, everything),
        )
        lengths = [self.sizes[module][side] for module, side in GROUPS]
        self.longest_row = max(lengths)
        self.row_alignment = math.gcd(_MOST_ALIGNMENT, *lengths)
        self._group_lengths = np.tile(np.array(lengths, np.int64), self.layers)  # shape (layers * groups,)

    def cut(self, module: int, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's parts of A, shape (rank, in), and B, shape (out, rank), of the whole model."""
        inputs, outputs = self._cuts[module]
        return a[:, inputs], b[outputs]

    def ranks(self, rank: int) -> NDArray[np.int64]:
        """Return the ranks of an adapter of one rank on all modules, shape (layers, modules)."""
        return np.full((self.layers, len(MODULES)), rank, np.int64)

    def group_rows(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of each group, shape (layers * groups,)."""
        return np.concatenate([ranks[:, [module]] for module, _ in GROUPS], axis=1).ravel()

    def row_lengths(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the length of each row of an adapter."""
        lengths: NDArray[np.int64] = np.repeat(self._group_lengths, self.group_rows(ranks))
        return lengths

    def elements(self, ranks: NDArray[np.int64]) -> int:
        """Return the number of elements of an adapter."""
        return int(self._group_lengths @ self.group_rows(ranks))

    def group_starts(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first element of each group of rows of an adapter, shape (layers * groups,)."""
        sizes = self._group_lengths * self.group_rows(ranks)
        starts: NDArray[np.int64] = np.cumsum(sizes) - sizes
        return starts

    def first_rows(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first row of each group and the end of the last one, shape (layers * groups + 1,)."""
        return np.concatenate([[0], np.cumsum(self.group_rows(ranks))])

    def padded_offsets(self, ranks: NDArray[np.int64], slot_rank: int) -> NDArray[np.int64]:
        """Return the offset of each row in a slot of `slot_rank` rows per group."""
        lengths, rows = self._group_lengths, self.group_rows(ranks)
        starts = np.concatenate([[0], np.cumsum(lengths * slot_rank)[:-1]])
        within = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        offsets: NDArray[np.int64] = np.repeat(starts, rows) + within * np.repeat(lengths, rows)
        return offsets


def _module_sizes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Return (in, out) of each module."""
    return module_sizes(config.hidden_size, config.intermediate_size, config.query_size, config.kv_size)


def group_number(layer: int, module: int, side: int) -> int:
    """Return the index of a group of rows among all layers."""
    return layer * len(GROUPS) + GROUPS.index((module, side))


Matrices = Mapping[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]
"""(layer, module) to A, shape (rank, in), and B, shape (out, rank), with the scale multiplied in."""

Shapes = Mapping[tuple[int, int], tuple[Sequence[int], Sequence[int]]]
"""(layer, module) to the shapes of A and B."""


@dataclass(frozen=True)
class HostAdapter:
    """An adapter in host memory.

    Attributes
    ----------
    ranks
        Rank on each module, 0 if it has none, shape (layers, modules).
    flat
        All rows of this rank in the order of `AdapterLayout`, in the dtype of the model.
    is_shared
        Whether other processes can read it.
    """

    ranks: NDArray[np.int64]
    flat: torch.Tensor
    is_shared: bool = False


def pack(
    layout: AdapterLayout, matrices: Matrices, dtype: torch.dtype, pin: bool, location: str
) -> HostAdapter:
    """Pack the matrices of an adapter of the whole model into one flat tensor, or this rank's parts of them.

    Raises `InputError` if a shape does not fit the model, or a number is not finite.
    """
    shapes = {place: (a.shape, b.shape) for place, (a, b) in matrices.items()}
    ranks = ranks_of(layout, shapes, location)
    parts: list[torch.Tensor] = []
    for layer in range(layout.layers):
        for site in SITES:
            here = [
                layout.cut(module, *matrices[layer, module]) for module in site if (layer, module) in matrices
            ]
            parts += [a.reshape(-1) for a, _ in here]
            parts += [b.t().reshape(-1) for _, b in here]
    flat = torch.cat([part.to(dtype) for part in parts]) if parts else torch.zeros(0, dtype=dtype)
    # A finite sum has finite terms and is forty times faster to find; an infinite one may have them, too.
    if not bool(flat.sum().isfinite()) and not bool(flat.isfinite().all()):
        # Zero times infinity is NaN, which padded kernels would add to the tokens of other adapters.
        raise InputError("must hold finite numbers only", location=location)
    return HostAdapter(ranks=ranks, flat=flat.pin_memory() if pin else flat)


def ranks_of(layout: AdapterLayout, shapes: Shapes, location: str) -> NDArray[np.int64]:
    """Return the rank on each module, shape (layers, modules); raise `InputError` if a shape does not fit."""
    ranks = np.zeros((layout.layers, len(MODULES)), np.int64)
    for (layer, module), (a, b) in shapes.items():
        require_fit({(layer, module): (a[1], b[0])}, layout.layers, layout.model_sizes, location)
        ranks[layer, module] = a[0]
    return ranks


def require_rank(ranks: NDArray[np.int64], max_rank: int, location: str) -> None:
    """Raise `InputError` if the largest rank of an adapter exceeds `max_rank`."""
    rank = int(ranks.max(initial=0))
    if rank > max_rank:
        raise InputError(f"must be at most max_lora_rank, {max_rank}", rank, f"{location}: rank")


@dataclass(frozen=True)
class RandomAdapter:
    """Random adapter of one rank on all modules. A is drawn as in PEFT; B is not zero, as after training.

    Each matrix is a random part of one drawn sequence: drawing every number of an adapter of rank 64 for a
    model of 8 billion parameters takes a second.
    """

    rank: int
    seed: int

    def __str__(self) -> str:
        return f"random adapter of rank {self.rank}"

    def ranks(self, layout: AdapterLayout) -> NDArray[np.int64]:
        """Return the rank on each module."""
        return layout.ranks(self.rank)

    def read(self, layout: AdapterLayout, dtype: torch.dtype, pin: bool, max_rank: int) -> HostAdapter:
        """Return the adapter; the same for the same seed."""
        generator = torch.Generator().manual_seed(self.seed)
        largest = self.rank * max(size for sizes in layout.model_sizes for size in sizes)
        uniform = torch.rand(2 * largest, generator=generator) * 2 - 1
        normal = torch.randn(2 * largest, generator=generator) / self.rank
        starts = torch.randint(largest, (layout.layers, len(MODULES)), generator=generator).tolist()
        matrices = {}
        for layer, module in itertools.product(range(layout.layers), range(len(MODULES))):
            start, (size_in, size_out) = starts[layer][module], layout.model_sizes[module]
            a = uniform[start:][: self.rank * size_in].view(self.rank, size_in) / size_in**0.5
            b = normal[start:][: self.rank * size_out].view(self.rank, size_out).t()
            matrices[layer, module] = a, b
        return pack(layout, matrices, dtype, pin, str(self))


AdapterSource = PeftFolder | RandomAdapter
"""Source of an adapter, read whenever the host has no copy. Messages show it by `str`."""
