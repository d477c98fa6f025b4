"""Two ways to keep adapters beside the model: static slots, and pages of the pool that holds the KV cache."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.lora.layout import GROUPS, AdapterLayout
from capplan.engine.lora.placement import Placement
from capplan.engine.pages import PagePool
from capplan.errors import InputError


class AdapterMemory(Protocol):
    """Room for adapters. Who comes and goes is the scheduler's business."""

    @property
    def storage(self) -> torch.Tensor:
        """All of it, as one flat tensor into which offsets point."""
        ...

    def place(self, adapter: int, ranks: NDArray[np.int64]) -> Placement:
        """Find room for an adapter; its rows are still to be copied."""
        ...

    def clear(self, adapter: int) -> None:
        """Make rows that padded kernels read beyond the adapter's rank zero, before it is copied."""
        ...

    def remove(self, adapter: int) -> None:
        """Give an adapter's room back."""
        ...

    def pages(self, ranks: NDArray[np.int64]) -> int:
        """Return the pages of the shared pool that an adapter takes."""
        ...

    def holders(self) -> Set[int]:
        """Return the adapters that have room; two never have the same."""
        ...

    def owned(self) -> NDArray[np.int64]:
        """Return the pages taken out of the shared pool."""
        ...

    def padding(self, adapter: int, rows: int) -> NDArray[np.int64]:
        """Return where so many rows of each group of an adapter may be read, shape (layers * groups, rows).

        Those beyond its rank hold zeros; those up to it may stand elsewhere.
        """
        ...


class StaticSlots:
    """A_max slots, each with room for S_max rows on every module, whatever its adapter needs: vLLM's way.

    Sizes as in `capplan.serving.slot_bytes` without embeddings.
    """

    def __init__(
        self, layout: AdapterLayout, slots: int, slot_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layout = layout
        self._slot_rank = slot_rank
        self._slot_elements = layout.elements(layout.ranks(slot_rank))
        self._memory = torch.zeros(slots * self._slot_elements, dtype=dtype, device=device)
        self._free = list(range(slots - 1, -1, -1))
        self._slot_of: dict[int, int] = {}

    @property
    def storage(self) -> torch.Tensor:
        """See `AdapterMemory`."""
        return self._memory

    def place(self, adapter: int, ranks: NDArray[np.int64]) -> Placement:
        """Take a free slot."""
        slot = self._slot_of[adapter] = self._free.pop()
        offsets = slot * self._slot_elements + self._layout.padded_offsets(ranks, self._slot_rank)
        return Placement(self._layout, self._memory, ranks, offsets)

    def clear(self, adapter: int) -> None:
        """Fill the slot with zeros."""
        start = self._slot_of[adapter] * self._slot_elements
        self._memory[start : start + self._slot_elements].zero_()

    def remove(self, adapter: int) -> None:
        """Free the adapter's slot."""
        self._free.append(self._slot_of.pop(adapter))

    def pages(self, ranks: NDArray[np.int64]) -> int:
        """Slots lie beside the pool."""
        return 0

    def holders(self) -> Set[int]:
        """Return who has a slot."""
        slots = sorted([*self._slot_of.values(), *self._free])
        if slots != list(range(len(slots))):
            raise RuntimeError(f"slots taken and free are {slots}")
        return self._slot_of.keys()

    def owned(self) -> NDArray[np.int64]:
        """Slots lie beside the pool."""
        return np.zeros(0, np.int64)

    def padding(self, adapter: int, rows: int) -> NDArray[np.int64]:
        """Return the rows of the slot itself."""
        full = self._layout.padded_offsets(self._layout.ranks(self._slot_rank), self._slot_rank)
        start = self._slot_of[adapter] * self._slot_elements
        return start + full.reshape(-1, self._slot_rank)[:, :rows]


class UnifiedPages:
    """Adapters at their true ranks in pages of the KV pool, in any free ones: S-LoRA's way, in bytes.

    No row is cut by the end of a page, so that a kernel needs one address per row; what is lost by that is
    less than one row per page.
    """

    def __init__(self, layout: AdapterLayout, pool: PagePool) -> None:
        self._layout = layout
        self._pool = pool
        self._page_elements = pool.tensor.shape[1]
        if self._page_elements < layout.longest_row:
            rule = f"must make pages of at least {layout.longest_row} numbers, the longest row of an adapter"
            raise InputError(rule, self._page_elements, "block_size")
        self._pages_of: dict[int, NDArray[np.int64]] = {}

    @property
    def storage(self) -> torch.Tensor:
        """See `AdapterMemory`."""
        return self._pool.tensor.view(-1)

    def place(self, adapter: int, ranks: NDArray[np.int64]) -> Placement:
        """Take as many pages as the adapter needs."""
        page, within = self._fill(ranks)
        pages = self._pages_of[adapter] = self._pool.take(int(page[-1]) + 1 if page.size else 0)
        return Placement(self._layout, self.storage, ranks, pages[page] * self._page_elements + within)

    def clear(self, adapter: int) -> None:
        """Pages hold no padding."""

    def remove(self, adapter: int) -> None:
        """Hand the adapter's pages back."""
        self._pool.give(self._pages_of.pop(adapter))

    def pages(self, ranks: NDArray[np.int64]) -> int:
        """Return the pages that an adapter takes."""
        page, _ = self._fill(ranks)
        return int(page[-1]) + 1 if page.size else 0

    def holders(self) -> Set[int]:
        """Return who has pages."""
        return self._pages_of.keys()

    def owned(self) -> NDArray[np.int64]:
        """Return all adapters' pages."""
        return np.concatenate([np.zeros(0, np.int64), *self._pages_of.values()])

    def padding(self, adapter: int, rows: int) -> NDArray[np.int64]:
        """Return the beginning of the null page, every time."""
        return np.zeros((self._layout.layers * len(GROUPS), rows), np.int64)

    def _fill(self, ranks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each row in which of its pages it stands, and where in it."""
        ends = np.cumsum(self._layout.row_lengths(ranks))
        starts = ends - self._layout.row_lengths(ranks)
        page = np.zeros(ends.size, np.int64)
        within = np.zeros(ends.size, np.int64)
        first = number = 0
        while first < ends.size:
            end = int(np.searchsorted(ends, starts[first] + self._page_elements, side="right"))
            page[first:end] = number
            within[first:end] = starts[first:end] - starts[first]
            first, number = end, number + 1
        return page, within
