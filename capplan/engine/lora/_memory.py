"""Adapter memory on the device: static slots, or pages of the KV pool.

Rows that are contiguous in memory are copied and multiplied together: a whole site of a layer in a static
slot, and the rows of one page in unified memory. A matrix that a page boundary cuts is multiplied in parts.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine._pool import PagePool
from capplan.engine.lora._adapter import (
    GROUPS,
    MODULES,
    SITES,
    A,
    AdapterLayout,
    B,
    HostAdapter,
    group_number,
)
from capplan.errors import InputError

_RANK_PATTERNS: Final = 8
"""Placements kept, per slot if there are slots. Most adapters have one of a few ranks on the same modules."""


class Shrink(NamedTuple):
    """Contiguous rows of A: columns [start, end) of the low-rank activations are ``x @ rows.T``."""

    start: int
    end: int
    rows: torch.Tensor


class Expand(NamedTuple):
    """Contiguous rows of B, which add ``h[:, start:end] @ rows`` to columns [out_start, out_end)."""

    start: int
    end: int
    out_start: int
    out_end: int
    rows: torch.Tensor


class SiteViews(NamedTuple):
    """Matrices of an adapter at one site of a layer; `rank` is the sum over its modules."""

    rank: int
    shrinks: tuple[Shrink, ...]
    expands: tuple[Expand, ...]


@dataclass(frozen=True)
class AdapterPlacement:
    """An adapter in memory; `offsets` are the elements of `memory` at which its rows begin."""

    layout: AdapterLayout
    memory: torch.Tensor
    ranks: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def copy_from(self, adapter: HostAdapter) -> None:
        """Copy all rows, contiguous ones together."""
        for target, source in self._copies:
            self.memory[target].copy_(adapter.flat[source], non_blocking=True)

    def copy_layers(self, adapter: HostAdapter, layers: range) -> None:
        """Copy the rows of some layers."""
        rows = self.layout.first_rows(self.ranks)
        first, end = rows[layers.start * len(GROUPS)], rows[layers.stop * len(GROUPS)]
        for target, source in self._copies_of(int(first), int(end)):
            self.memory[target].copy_(adapter.flat[source], non_blocking=True)

    @cached_property
    def _copies(self) -> list[tuple[slice, slice]]:
        """Elements of `memory` and of the adapter for each run of contiguous rows."""
        return self._copies_of(0, self.offsets.size)

    def _copies_of(self, begin: int, stop: int) -> list[tuple[slice, slice]]:
        lengths = self.layout.row_lengths(self.ranks)
        starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        copies = []
        for first, end in _runs(self.offsets[begin:stop], lengths[begin:stop]):
            at, size = int(self.offsets[begin + first]), starts[begin + end] - starts[begin + first]
            copies.append((slice(at, at + size), slice(starts[begin + first], starts[begin + end])))
        return copies

    @cached_property
    def views(self) -> list[list[SiteViews]]:
        """Matrices of every layer and site."""
        first_rows = self.layout.first_rows(self.ranks)
        return [
            [self._site(layer, site, first_rows) for site in SITES] for layer in range(self.layout.layers)
        ]

    def _site(self, layer: int, site: tuple[int, ...], first_rows: NDArray[np.int64]) -> SiteViews:
        begin = int(first_rows[group_number(layer, site[0], A)])
        end = int(first_rows[group_number(layer, site[-1], A) + 1])
        shrinks = [
            Shrink(first - begin, last - begin, rows)
            for first, last, rows in self._matrices(begin, end, self.layout.sizes[site[0]][A])
        ]
        expands = []
        column = 0
        for module in site:
            rank = int(self.ranks[layer, module])
            size = self.layout.sizes[module][B]
            begin_b = int(first_rows[group_number(layer, module, B)])
            out = self.layout.out_starts[module]
            for first, last, rows in self._matrices(begin_b, begin_b + rank, size):
                at = column - begin_b
                expands.append(Expand(first + at, last + at, out, out + size, rows))
            column += rank
        return SiteViews(end - begin, tuple(shrinks), tuple(expands))

    def _matrices(self, begin: int, end: int, length: int) -> list[tuple[int, int, torch.Tensor]]:
        """Return rows [begin, end), all of one length, as (first, end, matrix)."""
        offsets = self.offsets[begin:end]
        matrices = []
        for first, last in _runs(offsets, np.full(offsets.size, length)):
            at = int(offsets[first])
            matrix = self.memory[at : at + (last - first) * length].view(-1, length)
            matrices.append((begin + first, begin + last, matrix))
        return matrices


def _runs(offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the (first, end) of contiguous rows."""
    if offsets.size == 0:
        return []
    breaks = 1 + np.flatnonzero(offsets[:-1] + lengths[:-1] != offsets[1:])
    edges = [0, *breaks.tolist(), offsets.size]
    return list(pairwise(edges))


class StaticSlots:
    """A_max slots of S_max rows on every module, as in vLLM, in one flat tensor, `storage`.

    Slots have the size of `capplan.serving.slot_bytes` without embeddings. Adapters of the same ranks have
    the same placement in a slot, which is computed once: a load delays the step that starts it.
    """

    def __init__(
        self, layout: AdapterLayout, slots: int, slot_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layout = layout
        self._slot_elements = layout.elements(layout.ranks(slot_rank))
        self.storage = torch.zeros(slots * self._slot_elements, dtype=dtype, device=device)
        rows = layout.padded_offsets(layout.ranks(slot_rank), slot_rank)
        self._rows = rows.reshape(layout.layers * len(GROUPS), slot_rank)
        self._free = list(range(slots - 1, -1, -1))
        self._slot_of: dict[int, int] = {}
        # Bound to the tensor instead of a method: a reference cycle would delay freeing the slots.
        new_placement = partial(_slot_placement, layout, self.storage, slot_rank)
        self._placement = lru_cache(maxsize=_RANK_PATTERNS * slots)(new_placement)

    def place(
        self, adapter: int, ranks: NDArray[np.int64], at: NDArray[np.int64] | None = None
    ) -> AdapterPlacement:
        """Place an adapter in a free slot, or in the slot `at`; its rows are not copied yet."""
        slot = self._slot_of[adapter] = self._free.pop() if at is None else int(at[0])
        return self._placement(slot, ranks.tobytes())

    def location(self, adapter: int) -> NDArray[np.int64]:
        """Return the slot of an adapter, shape (1,)."""
        return np.array([self._slot_of[adapter]])

    def clear(self, adapter: int) -> None:
        """Fill the slot with zeros: padded kernels read rows beyond the adapter's rank."""
        start = self._slot_of[adapter] * self._slot_elements
        self.storage[start : start + self._slot_elements].zero_()

    def forget(self, adapter: int) -> NDArray[np.int64]:
        """Remove an adapter and return its slot, which is not free yet."""
        return np.array([self._slot_of.pop(adapter)])

    def release(self, at: NDArray[np.int64]) -> None:
        """Free a slot."""
        self._free.append(int(at[0]))

    def pages(self, ranks: NDArray[np.int64]) -> int:
        """Return 0: slots are not in the KV pool."""
        return 0

    def holders(self) -> Set[int]:
        """Return the adapters with a slot."""
        slots = sorted([*self._slot_of.values(), *self._free])
        if slots != list(range(len(slots))):
            raise RuntimeError(f"slots taken and free are {slots}")
        return self._slot_of.keys()

    def owned(self) -> NDArray[np.int64]:
        """Return the pages taken out of the KV pool: none."""
        return np.zeros(0, np.int64)

    def padding(self, adapter: int, rows: int) -> NDArray[np.int64]:
        """Return offsets of `rows` rows of each group, shape (layers * groups, rows).

        Rows beyond the adapter's rank hold zeros.
        """
        return self._slot_of[adapter] * self._slot_elements + self._rows[:, :rows]


def _slot_placement(
    layout: AdapterLayout, storage: torch.Tensor, slot_rank: int, slot: int, rank_bytes: bytes
) -> AdapterPlacement:
    """Return an adapter in a slot; `rank_bytes` are its ranks as bytes."""
    ranks = _ranks_of(layout, rank_bytes)
    slot_elements = layout.elements(layout.ranks(slot_rank))
    offsets = slot * slot_elements + layout.padded_offsets(ranks, slot_rank)
    return AdapterPlacement(layout, storage, ranks, offsets)


class UnifiedPages:
    """Adapters at their ranks in free pages of the KV pool, as in S-LoRA.

    Rows do not cross page boundaries: a kernel needs one address per row, and less than a row is lost per
    page. Where the rows of given ranks lie within their pages is computed once: a load delays the step that
    starts it.
    """

    def __init__(self, layout: AdapterLayout, pool: PagePool) -> None:
        self._layout = layout
        self._pool = pool
        self._page_elements = pool.tensor.shape[1]
        if self._page_elements < layout.longest_row:
            rule = f"must make pages of at least {layout.longest_row} numbers, the longest row of an adapter"
            raise InputError(rule, self._page_elements, "block_size")
        self._pages_of: dict[int, NDArray[np.int64]] = {}
        fill = partial(_filled_pages, layout, self._page_elements)
        self._fill = lru_cache(maxsize=_RANK_PATTERNS)(fill)

    @property
    def storage(self) -> torch.Tensor:
        """Flat tensor of all pages."""
        return self._pool.tensor.view(-1)

    def place(
        self, adapter: int, ranks: NDArray[np.int64], at: NDArray[np.int64] | None = None
    ) -> AdapterPlacement:
        """Place an adapter in free pages, or in the pages `at`; its rows are not copied yet."""
        page, within = self._fill(ranks.tobytes())
        if at is None:
            at = self._pool.allocate(self.pages(ranks))
        pages = self._pages_of[adapter] = at
        return AdapterPlacement(self._layout, self.storage, ranks, pages[page] * self._page_elements + within)

    def location(self, adapter: int) -> NDArray[np.int64]:
        """Return the pages of an adapter."""
        return self._pages_of[adapter]

    def clear(self, adapter: int) -> None:
        """Do nothing: pages hold no padding."""

    def forget(self, adapter: int) -> NDArray[np.int64]:
        """Remove an adapter and return its pages, which are not free yet."""
        return self._pages_of.pop(adapter)

    def release(self, at: NDArray[np.int64]) -> None:
        """Return pages to the pool."""
        self._pool.release(at)

    def pages(self, ranks: NDArray[np.int64]) -> int:
        """Return the number of pages of an adapter."""
        page, _ = self._fill(ranks.tobytes())
        return int(page[-1]) + 1 if page.size else 0

    def holders(self) -> Set[int]:
        """Return the adapters with pages."""
        return self._pages_of.keys()

    def owned(self) -> NDArray[np.int64]:
        """Return the pages of all adapters."""
        return np.concatenate([np.zeros(0, np.int64), *self._pages_of.values()])

    def padding(self, adapter: int, rows: int) -> NDArray[np.int64]:
        """Return offsets of rows of zeros, shape (layers * groups, rows): the null page."""
        return np.zeros((self._layout.layers * len(GROUPS), rows), np.int64)


def _filled_pages(
    layout: AdapterLayout, page_elements: int, rank_bytes: bytes
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the page of each row, counted from the adapter's first, and its element there."""
    lengths = layout.row_lengths(_ranks_of(layout, rank_bytes))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    page = np.zeros(ends.size, np.int64)
    within = np.zeros(ends.size, np.int64)
    first = number = 0
    while first < ends.size:
        end = int(np.searchsorted(ends, starts[first] + page_elements, side="right"))
        page[first:end] = number
        within[first:end] = starts[first:end] - starts[first]
        first, number = end, number + 1
    return page, within


def pages_of(layout: AdapterLayout, page_elements: int, ranks: NDArray[np.int64]) -> int:
    """Return the pages of an adapter at its ranks."""
    page, _ = _filled_pages(layout, page_elements, ranks.tobytes())
    return int(page[-1]) + 1 if page.size else 0


def _ranks_of(layout: AdapterLayout, rank_bytes: bytes) -> NDArray[np.int64]:
    """Return ranks, shape (layers, modules), from their bytes."""
    return np.frombuffer(rank_bytes, np.int64).reshape(layout.layers, len(MODULES))


AdapterMemory = StaticSlots | UnifiedPages


class RowTables:
    """Addresses and ranks of the adapters in memory, for kernels. Slots and pages look the same to a kernel.

    Attributes
    ----------
    rows
        First element of each row, shape (adapters, layers, groups, largest rank). Rows beyond an adapter's
        rank hold zeros.
    ranks
        Shape (adapters, layers, modules).
    number_of
        Adapter to its index in the tables.
    max_rank_of
        Index in the tables to the largest rank.
    outputs
        First column and width of each module's output, one tensor per site of a layer.
    """

    def __init__(self, layout: AdapterLayout, adapters: int, max_rank: int, device: torch.device) -> None:
        shape = (adapters, layout.layers, len(GROUPS), max_rank)
        self.rows = torch.zeros(shape, dtype=torch.int64, device=device)
        self.ranks = torch.zeros((adapters, layout.layers, len(MODULES)), dtype=torch.int32, device=device)
        self.outputs = [
            torch.from_numpy(np.stack(outputs, axis=1).astype(np.int32)).to(device)
            for outputs in layout.site_outputs
        ]
        self.number_of: dict[int, int] = {}
        self.max_rank_of: dict[int, int] = {}
        self.max_rank = max_rank
        self._layout = layout
        self._free = list(range(adapters - 1, -1, -1))

    def add(self, adapter: int, placement: AdapterPlacement, padding: NDArray[np.int64]) -> None:
        """Add an adapter; `padding` are offsets of rows beyond its rank, shape (layers * groups, rank)."""
        number = self.number_of[adapter] = self._free.pop()
        rows = padding.copy()
        counts = self._layout.group_rows(placement.ranks)
        rows[np.arange(self.max_rank) < counts[:, None]] = placement.offsets
        self.rows[number].copy_(torch.from_numpy(rows).view(self.rows.shape[1:]))
        self.max_rank_of[number] = int(placement.ranks.max(initial=0))
        self.ranks[number].copy_(torch.from_numpy(placement.ranks.astype(np.int32)))

    def remove(self, adapter: int) -> None:
        """Remove an adapter."""
        self._free.append(self.number_of.pop(adapter))
