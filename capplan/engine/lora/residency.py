"""Which adapters are where: the scheduler's decisions about host and memory, carried out.

Who is evicted and who is loaded is decided in `capplan.serving` (two nested least-recently-used lists, as in
vLLM); here the bytes follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.lora.adapter import HostAdapter
from capplan.engine.lora.layout import AdapterLayout
from capplan.engine.lora.loader import Job
from capplan.engine.lora.memory import AdapterMemory
from capplan.engine.lora.placement import Placement, SiteViews
from capplan.engine.lora.sources import AdapterSource
from capplan.errors import InputError
from capplan.serving import State
from capplan.serving.state import N_LOADS

Wait = Callable[[int], object]
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
    """The adapters of one engine by number, at most `capacity`.

    Attributes
    ----------
    rank_of
        The largest rank of each adapter, shape (capacity + 1,); 0 for the base model.
    """

    def __init__(self, capacity: int, layout: AdapterLayout, dtype: torch.dtype, pin: bool) -> None:
        self._sources: dict[int, AdapterSource] = {}
        self._ranks: dict[int, NDArray[np.int64]] = {}
        self._layout = layout
        self._dtype = dtype
        self._pin = pin
        self._host: dict[int, HostAdapter] = {}
        self._placements: dict[int, Placement] = {}
        self._views: dict[int, list[list[SiteViews]]] = {}
        self._tables: Tables | None = None
        self._memory: AdapterMemory | None = None
        self.rank_of = np.zeros(capacity + 1, np.int64)

    @property
    def memory(self) -> AdapterMemory:
        """Where adapters go."""
        if self._memory is None:
            raise RuntimeError("attach a memory first")
        return self._memory

    @property
    def in_memory(self) -> Set[int]:
        """The adapters that have room there."""
        return self._placements.keys()

    def enter(self, number: int, source: AdapterSource, max_rank: int | None) -> None:
        """Take an adapter in, of which only the shapes are read.

        Raises
        ------
        InputError
            When it cannot be read, does not go with the model, or its rank is above `max_rank`.
        """
        ranks = source.ranks(self._layout)
        rank = int(ranks.max(initial=0))
        if max_rank is not None and rank > max_rank:
            raise InputError(f"must be at most s_max, {max_rank}", rank, f"{source}: rank")
        self._sources[number], self._ranks[number], self.rank_of[number] = source, ranks, rank

    def read(self, number: int) -> None:
        """Bring an adapter to the host."""
        adapter = self._sources[number].read(self._layout, self._dtype, self._pin)
        if not np.array_equal(adapter.ranks, self._ranks[number]):
            raise InputError("must not change while the engine runs", location=str(self._sources[number]))
        self._host[number] = adapter

    def pages(self, number: int) -> int:
        """Return the pages that an adapter takes where it shares them with the KV cache."""
        return self.memory.pages(self._ranks[number])

    def views(self, adapter: int) -> list[list[SiteViews]]:
        """Return the matrices of an adapter in memory, by layer and place."""
        if adapter not in self._views:
            self._views[adapter] = self._placements[adapter].views()
        return self._views[adapter]

    def attach(self, memory: AdapterMemory) -> None:
        """Say where adapters go."""
        self._memory = memory

    def keep_tables(self, tables: Tables) -> None:
        """Keep the tables of kernels up to date from now on."""
        self._tables = tables

    def follow(self, state: State, wait: Wait) -> list[tuple[int, Job]]:
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
        # A copy: the loader's thread may bring another adapter to the host right now.
        for number in [n for n in tuple(self._host) if n in from_disk or not on_host[n]]:
            wait(number)
            self._host.pop(number, None)
        return [self._load(number) for number in loads]

    def drop(self, number: int) -> None:
        """Take an adapter out of memory and host; no copy of it may be under way."""
        if number in self._placements:
            self._remove(number)
        self._host.pop(number, None)

    def leave(self, number: int) -> None:
        """Drop an adapter for good."""
        self.drop(number)
        del self._sources[number], self._ranks[number]
        self.rank_of[number] = 0

    def _remove(self, number: int) -> None:
        del self._placements[number]
        self._views.pop(number, None)
        self.memory.remove(number)
        if self._tables is not None:
            self._tables.remove(number)

    def _load(self, number: int) -> tuple[int, Job]:
        memory = self.memory
        placement = self._placements[number] = memory.place(number, self._ranks[number])
        if self._tables is not None:
            self._tables.add(number, placement, memory.padding(number, self._tables.max_rank))

        def run() -> str | None:
            try:
                if number not in self._host:
                    self.read(number)
                with _copy_stream(memory.storage.device):
                    memory.clear(number)
                    placement.copy_from(self._host[number])
            except (InputError, RuntimeError, MemoryError) as error:  # no memory is this adapter's error, too
                return str(error)
            return None

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
