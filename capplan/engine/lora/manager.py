"""LoRA manager: adapter registry, host and device copies, loads requested by the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.lora.adapter import AdapterLayout, AdapterSource, HostAdapter
from capplan.engine.lora.loader import Job, Loader, LoadResult
from capplan.engine.lora.memory import AdapterMemory, AdapterPlacement, SiteViews
from capplan.engine.scheduler_output import forget_adapter
from capplan.engine.timing import EngineClock, PhaseTimer
from capplan.errors import InputError
from capplan.serving import Limits, State, adapter_loaded
from capplan.serving import state as s
from capplan.serving.state import N_LOADS, SLORA


class AdapterRegistry:
    """Names and numbers of adapters; numbers of removed ones are given out again.

    Parameters
    ----------
    capacity
        Most adapters at a time, which is the highest number.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._numbers: dict[str, int] = {}
        self._entries = [0] * (capacity + 1)
        self._last_entry = 0

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of their numbers."""
        return tuple(sorted(self._numbers, key=self._numbers.__getitem__))

    def number(self, name: str | None) -> int:
        """Return the number of an adapter; None is the base model.

        Raises
        ------
        InputError
            When there is none of that name.
        """
        if name is None:
            return 0
        if name not in self._numbers:
            raise InputError(f"must be one of {', '.join(self.names) or 'no adapters'}", name, "adapters")
        return self._numbers[name]

    def entry(self, number: int) -> int:
        """Return what tells the adapter that has a number now from those that had it before or will."""
        return self._entries[number]

    def add(self, name: str) -> int:
        """Enter an adapter and return its number, the lowest that is free.

        Raises
        ------
        InputError
            When the name is taken, empty, or no number is free.
        """
        if not name or name in self._numbers:
            raise InputError("must be a name that no adapter has", name, "adapter")
        if len(self._numbers) >= self.capacity:
            raise InputError(f"must not be more than max_adapters, {self.capacity}", name, "adapter")
        taken = set(self._numbers.values())
        number = next(number for number in range(1, self.capacity + 1) if number not in taken)
        self._numbers[name] = number
        self._last_entry += 1
        self._entries[number] = self._last_entry
        return number

    def remove(self, name: str) -> None:
        """Take an adapter out."""
        self._entries[self._numbers.pop(name)] = 0


Wait = Callable[[int], object]
"""Waits until the copy of an adapter that is under way, if any, is done."""


class KernelTables(Protocol):
    """What kernels are told of the adapters in memory."""

    max_rank: int

    def add(self, adapter: int, placement: AdapterPlacement, padding: NDArray[np.int64]) -> None:
        """Enter an adapter; rows beyond its rank may be read at `padding`."""
        ...

    def remove(self, adapter: int) -> None:
        """Take an adapter out."""
        ...


class LoRAManager:
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
        self._placements: dict[int, AdapterPlacement] = {}
        self._views: dict[int, list[list[SiteViews]]] = {}
        self._tables: KernelTables | None = None
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

    def keep_tables(self, tables: KernelTables) -> None:
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


class AdapterLoads:
    """The adapters of one engine instance: what the scheduler says of them, carried out and reported back."""

    def __init__(
        self, state: State, limits: Limits, residency: LoRAManager, loader: Loader, clock: EngineClock
    ) -> None:
        self.residency = residency
        self.loader = loader
        self._state = state
        self._clock = clock
        self._slora = limits.policy == SLORA
        self._beside = bool(limits.load_beside)

    def add(self, number: int, source: AdapterSource, max_rank: int) -> None:
        """Take an adapter in; the first request of it loads it."""
        self.residency.enter(number, source, max_rank)
        self.tell_pages(number)

    def tell_pages(self, number: int) -> None:
        """Tell the scheduler how many pages a new adapter takes, if it counts them."""
        if self._slora:
            self._state.adapters.pages[number] = self.residency.pages(number)

    def remove(self, number: int) -> None:
        """Drop an adapter, which no request in flight may have."""
        if self._state.adapters.claim[number] == s.LOADING:  # for a request that is gone
            self.loader.recall(number)
            adapter_loaded(self._state, number)
        self.loader.wait(number)
        forget_adapter(self._state, number)
        self.residency.leave(number)
        self._state.adapters.pages[number] = 0

    def forget(self, number: int) -> None:
        """Have an adapter that could not be loaded loaded anew when it is asked for again."""
        forget_adapter(self._state, number)
        self.residency.drop(number)

    def arrived(self) -> list[LoadResult]:
        """Return the loads beside the batch that have ended; the scheduler is to be told with `accept`."""
        return self.loader.arrived()

    def accept(self, arrival: LoadResult) -> None:
        """Tell the scheduler of a load that has ended; if it went wrong, no request may want it any more."""
        adapter_loaded(self._state, arrival.adapter)
        if arrival.error is not None:
            self.forget(arrival.adapter)

    def run(self, watch: PhaseTimer) -> dict[int, str]:
        """Begin the loads of this step, do those that it has to wait for, and return what went wrong."""
        state = self._state
        errors: dict[int, str | None] = {}
        if self._slora or state.counters[s.N_LOADS] > 0:
            for adapter, job in self.residency.follow(state, self.loader.wait):
                if self._beside or self._slora:
                    watch.lap("load")
                    self.loader.begin(adapter, job, announce=self._beside)
                    watch.skip()
                else:
                    errors[adapter] = job()
        watch.lap("load")
        if self._slora:  # a batch of prompts waits until all of its adapters are there
            admitted = state.lists.admitted[: state.counters[s.N_ADMITTED]]
            for adapter in set(state.rows.adapter[admitted].tolist()) - {0}:
                ready_ns = self.loader.ready_ns(adapter)
                errors[adapter] = self.loader.wait(adapter)
                watch.lap("load")
                watch.until("load", ready_ns - self._clock.now_ns())
        return {adapter: error for adapter, error in errors.items() if error is not None}
