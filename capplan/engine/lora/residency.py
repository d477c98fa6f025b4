"""Which adapters are where: the scheduler's decisions about host and memory, carried out.

Who is evicted and who is loaded is decided in `capplan.serving` (two nested least-recently-used lists, as in
vLLM); here the bytes follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.lora.adapter import HostAdapter
from capplan.engine.lora.layout import AdapterLayout
from capplan.engine.lora.memory import AdapterMemory
from capplan.engine.lora.placement import Placement, SiteViews
from capplan.engine.lora.sources import AdapterSource
from capplan.errors import InputError
from capplan.serving import State
from capplan.serving.state import N_LOADS

Wait = Callable[[int], None]
"""Waits until the copy of an adapter that is under way, if any, is done."""


class Tables(Protocol):
    """What kernels are told of the adapters in memory."""

    max_rank: int

    def add(self, adapter: int, placement: Placement, padding: NDArray[np.int64]) -> None:
        """Enter an adapter; rows beyond its rank may be read at `padding`."""
        ...

    def remove(self, adapter: int) -> None:
        """Take an adapter out."""
        ...


class Residency:
    """The adapters of one engine, numbered from 1.

    Attributes
    ----------
    rank_of
        The largest rank of each adapter, shape (adapters + 1,); 0 for the base model.
    """

    def __init__(
        self,
        sources: Sequence[AdapterSource],
        layout: AdapterLayout,
        dtype: torch.dtype,
        pin: bool,
        max_rank: int | None,
        host_slots: int,
    ) -> None:
        self._sources = sources
        self._layout = layout
        self._dtype = dtype
        self._pin = pin
        self._max_rank = max_rank
        self._host: dict[int, HostAdapter] = {}
        self._ranks: list[NDArray[np.int64]] = []
        self._placements: dict[int, Placement] = {}
        self._views: dict[int, list[list[SiteViews]]] = {}
        self._tables: Tables | None = None
        self._memory: AdapterMemory | None = None
        for number in range(1, len(sources) + 1):
            self._host[number] = self._read(number)
            self._ranks.append(self._host[number].ranks)
            # All are read once, so that a broken one is noticed now; the host keeps the last ones.
            self._host.pop(number - host_slots, None)
        self.rank_of = np.array([0, *(ranks.max(initial=0) for ranks in self._ranks)], np.int64)

    @property
    def memory(self) -> AdapterMemory:
        """Where adapters go."""
        if self._memory is None:
            raise RuntimeError("attach a memory first")
        return self._memory

    def views(self, adapter: int) -> list[list[SiteViews]]:
        """Return the matrices of an adapter in memory, by layer and place."""
        if adapter not in self._views:
            self._views[adapter] = self._placements[adapter].views()
        return self._views[adapter]

    def attach(self, memory: AdapterMemory, counts_pages: State | None) -> None:
        """Say where adapters go; a scheduler that counts their pages is told how many each takes there."""
        self._memory = memory
        if counts_pages is not None:
            for number, ranks in enumerate(self._ranks, start=1):
                counts_pages.adapters.pages[number] = memory.pages(ranks)

    def keep_tables(self, tables: Tables) -> None:
        """Keep the tables of kernels up to date from now on."""
        self._tables = tables

    def follow(self, state: State, wait: Wait) -> list[tuple[int, Callable[[], None]]]:
        """Drop what the scheduler has evicted, find room for what it loads, and return the loads to run.

        A load may run beside the batch: it touches nothing that a batch without its adapter reads.
        """
        resident, on_host = state.adapters.resident, state.adapters.on_host
        n = state.counters[N_LOADS]
        loads: list[int] = state.adapters.loads[:n].tolist()
        from_disk = {loads[at] for at in np.flatnonzero(state.adapters.load_from_disk[:n])}
        # One that was evicted and loaded again within the step is in the list, too.
        for number in [number for number in self._placements if number in loads or not resident[number]]:
            wait(number)
            self._remove(number)
        for number in [number for number in self._host if number in from_disk or not on_host[number]]:
            wait(number)
            self._host.pop(number, None)
        return [self._load(number) for number in loads]

    def _read(self, number: int) -> HostAdapter:
        adapter = self._sources[number - 1].read(self._layout, self._dtype, self._pin)
        if self._max_rank is not None and adapter.max_rank > self._max_rank:
            rule = f"must be at most s_max, {self._max_rank}"
            raise InputError(rule, adapter.max_rank, f"rank of adapter {number}")
        return adapter

    def _remove(self, number: int) -> None:
        del self._placements[number]
        self._views.pop(number, None)
        self.memory.remove(number)
        if self._tables is not None:
            self._tables.remove(number)

    def _load(self, number: int) -> tuple[int, Callable[[], None]]:
        memory = self.memory
        placement = self._placements[number] = memory.place(number, self._ranks[number - 1])
        if self._tables is not None:
            self._tables.add(number, placement, memory.padding(number, self._tables.max_rank))

        def run() -> None:
            adapter = self._host.get(number)
            if adapter is None:
                adapter = self._read(number)
                if not np.array_equal(adapter.ranks, self._ranks[number - 1]):
                    raise InputError("must not change while the engine runs", location=f"adapter {number}")
                self._host[number] = adapter
            with _copy_stream(memory.storage.device):
                memory.clear(number)
                placement.copy_from(adapter)

        return number, run


@contextmanager
def _copy_stream(device: torch.device) -> Iterator[None]:
    """Copy beside what a GPU computes: on a stream of its own, and return when the copies are done."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
