"""LoRA manager: adapter numbers, host and device copies, loads requested by the scheduler.

Loads and evictions are decided in `capplan.serving` (two nested least-recently-used lists, as in vLLM). The
manager copies the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine._scheduler_output import describe_adapter, evict_unused
from capplan.engine._timing import EngineClock, PhaseTimer
from capplan.engine.lora._adapter import AdapterLayout, AdapterSource, HostAdapter, require_rank
from capplan.engine.lora._load_times import LoadTimes
from capplan.engine.lora._loader import AdapterLoader, CopyStream, LayerProgress, LoadJob, LoadResult
from capplan.engine.lora._memory import AdapterMemory, AdapterPlacement, RowTables, SiteViews, pages_of
from capplan.errors import InputError
from capplan.serving import Limits, State, adapter_loaded
from capplan.serving.pooled import ASSISTED, ON_DEMAND, RESIDENT, make_resident
from capplan.serving.state import LOADING, POOLED, SLORA

if TYPE_CHECKING:
    from capplan.engine.assist._crew import SharedAdapters

_NS_PER_MS: Final = 1e6


class AdapterNumbers:
    """Names of adapters and their numbers, from 1 to `capacity`; 0 is the base model."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._numbers: dict[str, int] = {}
        self._entries = [0] * (capacity + 1)
        self._last_entry = 0

    @property
    def names(self) -> tuple[str, ...]:
        """All names, ordered by number."""
        return tuple(sorted(self._numbers, key=self._numbers.__getitem__))

    @property
    def name_of(self) -> dict[int, str]:
        """Names by number."""
        return {number: name for name, number in self._numbers.items()}

    def number(self, name: str | None) -> int:
        """Return the number of a registered adapter, or raise `InputError`; None is the base model."""
        if name is None:
            return 0
        if name not in self._numbers:
            raise InputError(f"must be one of {', '.join(self.names) or 'no adapters'}", name, "adapters")
        return self._numbers[name]

    def entry(self, number: int) -> int:
        """Return the id of the current registration of a number; numbers are reused, ids are not."""
        return self._entries[number]

    def add(self, name: str) -> int:
        """Register a name under the lowest free number and return it.

        Raises `InputError` if the name is taken or empty, or no number is free.
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
        """Unregister a name."""
        self._entries[self._numbers.pop(name)] = 0


class LoRAManager:
    """Host and device copies of the adapters of one engine, by number.

    `rank_of` is the largest rank of each adapter, shape (capacity + 1,); 0 for the base model. `copies` is
    the stream of copies to the device.
    """

    memory: AdapterMemory
    """On the device, set before the first load."""
    load_times: LoadTimes | None = None
    """None: in proportion to the bytes."""
    groups_for: Callable[[NDArray[np.int64], int], Sequence[range]] | None = None
    """Groups of layers in which an adapter of these ranks is copied, for a prompt of so many tokens.
    The first group is copied last. None: all layers at once."""
    shared: SharedAdapters | None = None
    """Host memory that other processes read."""

    def __init__(
        self, capacity: int, layout: AdapterLayout, dtype: torch.dtype, pin: bool, copies: CopyStream
    ) -> None:
        self.layout = layout
        self.copies = copies
        self.rank_of = np.zeros(capacity + 1, np.int64)
        self._dtype = dtype
        self._pin = pin
        self._sources: dict[int, AdapterSource] = {}
        self._ranks: dict[int, NDArray[np.int64]] = {}
        self._host: dict[int, HostAdapter] = {}
        self._placements: dict[int, AdapterPlacement] = {}
        self._progress: dict[int, LayerProgress] = {}
        self._tables: RowTables | None = None

    @property
    def in_memory(self) -> Set[int]:
        """Adapters with device memory."""
        return self._placements.keys()

    def register(self, number: int, source: AdapterSource, max_rank: int | None) -> None:
        """Register an adapter; only its shapes are read.

        Raises `InputError` if it cannot be read, does not fit the model, or its rank exceeds `max_rank`.
        """
        ranks = source.ranks(self.layout)
        if max_rank is not None:
            require_rank(ranks, max_rank, str(source))
        self._sources[number], self._ranks[number] = source, ranks
        self.rank_of[number] = ranks.max(initial=0)

    def unregister(self, number: int) -> None:
        """Remove an adapter and all its copies."""
        self.discard(number)
        del self._sources[number], self._ranks[number]
        self.rank_of[number] = 0

    def read(self, number: int) -> None:
        """Read an adapter into host memory.

        Raises `InputError` if it cannot be read, is not finite, or has changed since it was registered.
        """
        self._read(number)

    def _read(self, number: int) -> None:
        max_rank = int(self.rank_of[number])
        adapter = self._sources[number].read(self.layout, self._dtype, self._pin, max_rank)
        if not np.array_equal(adapter.ranks, self._ranks[number]):
            raise InputError("must not change while the engine runs", location=str(self._sources[number]))
        self._host[number] = adapter if self.shared is None else self._shared_copy(number, adapter)

    def share(self, shared: SharedAdapters) -> None:
        """Keep the adapters on the host where other processes read them, from now on."""
        self.shared = shared
        for number, adapter in self._host.items():
            self._host[number] = self._shared_copy(number, adapter)

    def _shared_copy(self, number: int, adapter: HostAdapter) -> HostAdapter:
        """Return an adapter in shared memory; itself if that is full."""
        flat = None if self.shared is None else self.shared.store(number, adapter.flat)
        return adapter if flat is None else HostAdapter(adapter.ranks, flat, is_shared=True)

    def is_shared(self, number: int) -> bool:
        """Return whether other processes can read an adapter."""
        return number in self._host and self._host[number].is_shared

    def shared_starts(self, number: int) -> NDArray[np.int64]:
        """Return the element of shared memory at which each group of rows of an adapter begins."""
        if self.shared is None:
            raise RuntimeError("no memory is shared")
        return self.shared.first(number) + self.layout.group_starts(self._ranks[number])

    def ranks(self, number: int) -> NDArray[np.int64]:
        """Return the rank of an adapter on each module, shape (layers, modules)."""
        return self._ranks[number]

    def is_copying(self, number: int) -> bool:
        """Return whether an adapter is being copied layer by layer."""
        return number in self._progress and not self._progress[number].has_ended

    def is_copied(self, number: int, layer: int) -> bool:
        """Return whether a layer of an adapter is on the device."""
        return number not in self._progress or self._progress[number].has(layer)

    def wait_for_layer(self, number: int, layer: int) -> None:
        """Wait until a layer is on the device, or the load has failed."""
        if number in self._progress:
            self._progress[number].wait_for(layer)

    def pages_of_all(self, page_elements: int, max_rank: int) -> int:
        """Return the pages of all adapters, of those to come at the largest rank."""
        known = sum(pages_of(self.layout, page_elements, ranks) for ranks in self._ranks.values())
        others = self.rank_of.size - 1 - len(self._ranks)
        return known + others * pages_of(self.layout, page_elements, self.layout.ranks(max_rank))

    def pages(self, number: int) -> int:
        """Return the pages of an adapter in the KV pool."""
        return self.memory.pages(self._ranks[number])

    def bytes(self, number: int) -> int:
        """Return the bytes of an adapter's weights."""
        return self.layout.elements(self._ranks[number]) * self._dtype.itemsize

    def load_ns(self, number: int) -> int:
        """Return the nanoseconds of a load by `load_times`."""
        if self.load_times is None:
            return self.bytes(number)
        rank = int(self.rank_of[number])
        is_padded = rank < int(self.rank_of.max())
        return round(_NS_PER_MS * self.load_times.load_ms(rank, is_padded, *self.shares(number)))

    def shares(self, number: int) -> tuple[float, float]:
        """Return the shares of an adapter in the matrices and in the elements of its rank on all layers."""
        ranks = self._ranks[number]
        whole = self.layout.elements(self.layout.ranks(max(1, int(self.rank_of[number]))))
        return np.count_nonzero(ranks) / ranks.size, self.layout.elements(ranks) / whole

    def views(self, adapter: int) -> list[list[SiteViews]]:
        """Return the matrices of an adapter on the device, by layer and site."""
        return self._placements[adapter].views

    def clear(self) -> None:
        """Release the memory with all adapters in it; it must be set before the next use."""
        self._placements.clear()
        self._tables = None
        del self.memory

    def set_tables(self, tables: RowTables) -> None:
        """Keep adapter tables up to date from now on."""
        self._tables = tables

    def place(self, number: int, ranks: NDArray[np.int64], at: NDArray[np.int64] | None = None) -> None:
        """Place an adapter in free memory, or in the slot or pages `at`, without its weights."""
        placement = self._placements[number] = self.memory.place(number, ranks, at)
        if self._tables is not None:
            self._tables.add(number, placement, self.memory.padding(number, self._tables.max_rank))

    def apply(
        self, state: State, wait: Callable[[int], object], prompts: Mapping[int, int]
    ) -> list[tuple[int, LoadJob]]:
        """Apply the scheduler's evictions, allocate memory for its loads, and return the load jobs.

        A job may run concurrently with a batch without its adapter: they share no memory. `wait` waits for a
        load of an adapter that is in progress; `prompts` are the tokens of the first prompt that needs each
        adapter.
        """
        resident, on_host = state.adapters.resident, state.adapters.on_host
        n = state.counters.n_loads
        loads: list[int] = state.adapters.loads[:n].tolist()
        from_disk = {loads[at] for at in np.flatnonzero(state.adapters.load_from_disk[:n])}
        # An adapter evicted and loaded again within the step is in the list, too.
        for number in [number for number in self._placements if number in loads or not resident[number]]:
            wait(number)
            self.memory.release(self.evict(number))
        # A copy: the loader's thread may add another adapter to the host.
        for number in [n for n in tuple(self._host) if n in from_disk or not on_host[n]]:
            wait(number)
            self.drop(number)
        return [(number, self.new_load(number, None, prompts.get(number, 1))) for number in loads]

    def discard(self, number: int) -> None:
        """Remove all copies of an adapter; none of its loads may be in progress."""
        if number in self._placements:
            self.memory.release(self.evict(number))
        self.drop(number)

    def evict(self, number: int) -> NDArray[np.int64]:
        """Remove an adapter from the device and return its slot or pages, which are not free yet."""
        del self._placements[number]
        if self._tables is not None:
            self._tables.remove(number)
        return self.memory.forget(number)

    def drop(self, number: int) -> None:
        """Remove the copy of an adapter on the host, if there is one."""
        adapter = self._host.pop(number, None)
        if adapter is not None and adapter.is_shared and self.shared is not None:
            del adapter
            self.shared.drop(number)

    def new_load(self, number: int, at: NDArray[np.int64] | None = None, prompt_tokens: int = 1) -> LoadJob:
        """Place an adapter in free memory, or in the slot or pages `at`; return the job that copies it.

        `prompt_tokens` are those of the prompt that waits for it.
        """
        ranks = self._ranks[number]
        self.place(number, ranks, at)
        groups: Sequence[range] = (range(self.layout.layers),)
        if self.groups_for is not None:
            groups = self.groups_for(ranks, prompt_tokens)
            self._progress[number] = LayerProgress(self.layout.layers)
        # Steps so far may read what the memory held before.
        return partial(self._load, number, self._placements[number], self.copies.fence(), groups)

    def _load(
        self, number: int, placement: AdapterPlacement, after: Any, groups: Sequence[range]
    ) -> str | None:
        """Copy an adapter to the device, from the host or its source; return an error message, or None."""
        progress = self._progress.get(number)
        try:
            if number not in self._host:
                self._read(number)
            adapter = self._host[number]
            self._copy(number, placement, adapter, after, groups, progress)
        except InputError as error:
            return str(InputError(error.rule, error.value, error.location.rpartition("/")[2]))
        except (RuntimeError, MemoryError) as error:
            return str(error)
        finally:
            if progress is not None:
                progress.has_ended = True
        return None

    def _copy(
        self,
        number: int,
        placement: AdapterPlacement,
        adapter: HostAdapter,
        after: Any,
        groups: Sequence[range],
        progress: LayerProgress | None,
    ) -> None:
        """Copy an adapter to the device, all at once or group by group, the first group last."""
        size_bytes = adapter.flat.numel() * adapter.flat.itemsize
        if progress is None:
            with self.copies.copying(after, size_bytes):
                self.memory.clear(number)
                placement.copy_from(adapter)
            return
        first, *others = groups
        for group in (*others, first):
            with self.copies.copying(after, size_bytes * len(group) // self.layout.layers):
                placement.copy_layers(adapter, group)
            progress.note(group)


class AdapterLoads:
    """Loads and removals of adapters, between the scheduler's state and the LoRA manager.

    A request pays for `token_bytes` of its adapter as for one token of KV; 0: adapters are not charged.
    """

    def __init__(
        self,
        state: State,
        limits: Limits,
        lora: LoRAManager,
        loader: AdapterLoader,
        clock: EngineClock,
        token_bytes: int,
    ) -> None:
        self.lora = lora
        self.loader = loader
        self._state = state
        self._clock = clock
        self._slora = limits.policy == SLORA
        self._pooled = limits.policy == POOLED
        self._beside = bool(limits.load_beside)
        self._loading = limits.loading
        self._token_bytes = token_bytes

    def register(self, number: int, source: AdapterSource, max_rank: int) -> None:
        """Register an adapter; its first request loads it."""
        self.lora.register(number, source, max_rank)
        try:
            self.set_sizes(number)
        except InputError:
            self.lora.unregister(number)
            raise

    def set_sizes(self, number: int) -> None:
        """Set the sizes of a new adapter in the scheduler's state, under rules that use them.

        One that is to stay on the device is loaded now.
        """
        if self._slora or self._pooled:
            self._state.adapters.pages[number] = self.lora.pages(number)
        if self._pooled:
            size_bytes = self.lora.bytes(number)
            tokens = -(-size_bytes // self._token_bytes) if self._token_bytes else 0
            describe_adapter(self._state, number, size_bytes, tokens, self.lora.load_ns(number))
        if self._loading == RESIDENT:
            error = self.lora.new_load(number)()
            if error is not None:
                self.lora.discard(number)
                raise InputError(error, location="adapter")
            make_resident(self._state, number)

    def unregister(self, number: int) -> None:
        """Remove an adapter without requests in flight."""
        if self._state.adapters.claim[number] == LOADING:  # the request of this load was cancelled
            self.loader.discard(number)
            adapter_loaded(self._state, number)
        self.loader.wait(number)
        evict_unused(self._state, number)
        self.lora.unregister(number)
        self._state.adapters.pages[number] = 0
        if self._pooled:
            describe_adapter(self._state, number, 0, 0, 0)

    def discard(self, number: int) -> None:
        """Remove all copies of an adapter that failed to load; its next request loads it again."""
        evict_unused(self._state, number)
        self.lora.discard(number)

    def failed_meanwhile(self, rows: NDArray[np.int64]) -> dict[int, str]:
        """Return the errors of loads that ended during a step of these rows, by adapter."""
        if self._loading != ASSISTED:
            return {}
        adapters = set(self._state.rows.adapter[rows].tolist()) - {0}
        found = {adapter: self._error_of(adapter) for adapter in adapters if self.loader.has_ended(adapter)}
        return {adapter: error for adapter, error in found.items() if error is not None}

    def _error_of(self, adapter: int) -> str | None:
        """Return the error of a load that has ended or is waited for; one with an error is not reported."""
        error = self.loader.wait(adapter)
        if error is not None and self._state.adapters.claim[adapter] == LOADING:
            self.loader.discard(adapter)
            adapter_loaded(self._state, adapter)
        return error

    def _awaited(self, rows: NDArray[np.int64]) -> set[int]:
        """Return the adapters that a step of these rows waits for."""
        state = self._state
        is_decode = state.counters.step_decodes > 0
        if self._slora:  # a batch of prompts waits for all of its adapters
            rows = state.lists.admitted[: state.counters.n_admitted]
        elif not (self._loading == ASSISTED if is_decode else self._loading == ON_DEMAND):
            return set()
        return set(state.rows.adapter[rows].tolist()) - {0}

    def accept(self, load: LoadResult) -> None:
        """Report a finished load to the scheduler; after a failed one, no request of it may be in flight."""
        adapter_loaded(self._state, load.adapter)
        if load.error is not None:
            self.discard(load.adapter)

    def run(self, timer: PhaseTimer, rows: NDArray[np.int64]) -> dict[int, str]:
        """Start the loads of a step, wait for those that its rows require, and return errors by adapter."""
        state = self._state
        errors: dict[int, str | None] = {}
        # Every resident adapter has memory after the loads of the step: others with memory are evicted.
        if state.counters.n_loads > 0 or len(self.lora.in_memory) > state.counters.n_resident:
            for adapter, job in self.lora.apply(state, self.loader.wait, self._prompts()):
                if self._beside or self._slora:
                    timer.lap("load")
                    self.loader.start(adapter, job, report=self._beside)
                    timer.skip()
                else:
                    errors[adapter] = job()
        timer.lap("load")
        for adapter in self._awaited(rows):
            ready_ns = self.loader.ready_ns(adapter)
            errors[adapter] = self._error_of(adapter)
            timer.lap("load")
            timer.extend_to("load", ready_ns - self._clock.now_ns())
        return {adapter: error for adapter, error in errors.items() if error is not None}

    def _prompts(self) -> dict[int, int]:
        """Return the prompt tokens of the first admitted request of each adapter."""
        rows = self._state.lists.admitted[: self._state.counters.n_admitted][::-1]
        adapters, tokens = self._state.rows.adapter[rows], self._state.rows.prompt[rows]
        return dict(zip(adapters.tolist(), tokens.tolist(), strict=True))


_REPEATS: Final = 5


def measured_load_times(lora: LoRAManager, numbers: Sequence[int]) -> LoadTimes | None:
    """Return the times by loads of the smallest and the largest of some adapters; None without any.

    A single size gives the time by rank alone.
    """
    if not numbers:
        return None
    ends = (min(numbers, key=lora.bytes), max(numbers, key=lora.bytes))
    times_ms = [median(_load_ms(lora, number) for _ in range(_REPEATS)) for number in ends]
    parts = [_parts(lora, number) for number in ends]
    (low_fixed, low), (high_fixed, high) = parts
    if low_fixed * high > high_fixed * low:
        base_ms, ms_per_rank = np.linalg.solve(np.array(parts), np.array(times_ms)).tolist()
        if base_ms >= 0.0 and ms_per_rank >= 0.0:
            return LoadTimes(base_ms=base_ms, ms_per_rank=ms_per_rank)
    return LoadTimes(base_ms=0.0, ms_per_rank=sum(times_ms) / max(1.0, low + high))


def _parts(lora: LoRAManager, number: int) -> tuple[float, float]:
    """Return the multiples of the fixed time and of the time per rank in the load of an adapter."""
    matrices, elements = lora.shares(number)
    return matrices, elements * int(lora.rank_of[number])


def _load_ms(lora: LoRAManager, number: int) -> float:
    """Return the time of a load into memory that no adapter uses yet; the adapter is removed again."""
    load = lora.new_load(number)
    began_s = time.perf_counter()
    load()
    passed_ms = 1e3 * (time.perf_counter() - began_s)
    lora.memory.release(lora.evict(number))
    return passed_ms
