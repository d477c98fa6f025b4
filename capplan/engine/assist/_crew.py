"""The cores that assist an engine: their processes, the adapters that they share, rounds of tasks, times.

A core that ends, or does not finish its tasks in time, is killed before the board is used again, so that it
can write nothing late; its tasks fail, and the caller waits for the copy instead. It is started again, and
has tasks again once it is ready.

The times of the cores and of the device are measured on this machine, and the groups of layers follow from
them. Source: Toppings, sections 4.1 and 4.2 (profiling-guided parallelization).
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine._affinity import allowed_cpus
from capplan.engine.assist._board import ORDERED_STORES, Board, BoardShape, SharedMemory, Task
from capplan.engine.lora._adapter import SITES, AdapterLayout
from capplan.engine.models import Weights
from capplan.errors import InputError
from capplan.processes import without_interrupts
from capplan.serving.pooled import LayerTimes, layer_groups

START_TIMEOUT_S: Final = 60.0
"""For the cores to be ready when an engine starts."""
ROUND_TIMEOUT_S: Final = 0.5
"""For the tasks of one layer, which take milliseconds: a core that takes longer is stopped or starved."""
_RESTART_S: Final = 1.0
"""Least time between two starts of a core."""
_COMMAND: Final = (sys.executable, "-m", "capplan.engine.assist._board")
_CHECK_EVERY: Final = 256
"""Polls of a core's counter between two looks at the clock and its process."""


class SharedAdapters:
    """Adapters in host memory that all cores read: one place of equal size for each number.

    Numbers go up to `capacity`, and the largest adapter has `elements`. `pin`: a GPU copies from them by
    itself.
    """

    def __init__(self, capacity: int, elements: int, dtype: torch.dtype, *, pin: bool = False) -> None:
        self._pinned: set[int] | None = set() if pin else None
        page = os.sysconf("SC_PAGE_SIZE")
        self._place_bytes = -(-elements * dtype.itemsize // page) * page
        self._dtype = dtype
        self.memory = SharedMemory.new((capacity + 1) * self._place_bytes)

    def first(self, number: int) -> int:
        """Return the element at which an adapter begins."""
        return number * self._place_bytes // self._dtype.itemsize

    def store(self, number: int, flat: torch.Tensor) -> torch.Tensor | None:
        """Copy an adapter to its place and return it there; None if there is no memory for it."""
        start_bytes, size_bytes = number * self._place_bytes, flat.numel() * flat.itemsize
        if not size_bytes or not self.memory.reserve(start_bytes, size_bytes):
            return None
        shared = self.memory.tensor(start_bytes, flat.numel(), self._dtype)
        if self._pinned is not None and number not in self._pinned:
            self.memory.pin(start_bytes, size_bytes)
            self._pinned.add(number)
        return shared.copy_(flat)

    def drop(self, number: int) -> None:
        """Return the memory of an adapter, whose tensor is not used any more."""
        if self._pinned is not None and number in self._pinned:
            self.memory.unpin(number * self._place_bytes)
            self._pinned.remove(number)
        self.memory.release(number * self._place_bytes, self._place_bytes)


class _Process:
    """One core's process."""

    def __init__(self, arguments: Sequence[str], fds: Sequence[int]) -> None:
        self._own, inherited = socket.socketpair()
        self._own.setblocking(False)
        self.is_ready = False
        self.began_s = time.monotonic()
        command = [*_COMMAND, str(inherited.fileno()), *arguments]
        with inherited, without_interrupts():
            self.process = subprocess.Popen(command, pass_fds=[inherited.fileno(), *fds])  # noqa: S603

    def has_ended(self) -> bool:
        """Return whether the process has ended; note whether it is ready."""
        if not self.is_ready:
            with suppress(OSError):  # nothing to read yet, or it has ended
                self.is_ready = bool(self._own.recv(1))
        return self.process.poll() is not None

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process, which gets ready no more."""
        try:
            status = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in ("T", "t")

    def wake(self) -> None:
        """Let it poll the board."""
        with suppress(OSError):  # it has ended, or has not read earlier calls
            self._own.send(b"\0")

    def end(self) -> None:
        """Kill it and wait for its end."""
        self.process.kill()
        self.process.wait()
        self._own.close()


class Crew:
    """Cores that compute rounds of tasks.

    Parameters
    ----------
    shape
        Sizes of the board, with the number of cores.
    cpus
        CPU of each core.
    adapters
        What they read.
    pin
        Let a GPU write to the board.

    Attributes
    ----------
    restarts
        Cores that were started again.
    failed_rounds
        Rounds that a core did not finish.
    """

    def __init__(
        self,
        shape: BoardShape,
        cpus: Sequence[int],
        adapters: SharedAdapters,
        dtype: torch.dtype,
        *,
        pin: bool = False,
    ) -> None:
        self.adapters = adapters
        self.restarts = self.failed_rounds = 0
        self._memory = SharedMemory.new(shape.starts_bytes()[-1])
        self._is_pinned = pin
        if pin:
            self._memory.pin(0, shape.starts_bytes()[-1])
        self._arrived: torch.Tensor | None = None
        self.board = Board(self._memory, shape, dtype)
        name = str(dtype).removeprefix("torch.")
        fds = (self._memory.descriptor, adapters.memory.descriptor)

        def start(number: int) -> _Process:
            given = [*map(str, fds), str(os.getpid()), str(number), str(cpus[number]), shape.text(), name]
            return _Process(given, fds)

        self._start = start
        self._processes = [start(number) for number in range(len(cpus))]

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def pids(self) -> tuple[int, ...]:
        """Numbers of the processes."""
        return tuple(each.process.pid for each in self._processes)

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for all cores; one that ends meanwhile is left out."""
        until_s = time.monotonic() + timeout_s
        for each in self._processes:
            while not each.has_ended() and not each.is_ready and time.monotonic() < until_s:
                time.sleep(0.01)

    def ready(self) -> list[int]:
        """Return the cores that can have tasks; start those again that have ended."""
        found = []
        for number, each in enumerate(self._processes):
            if each.has_ended():
                if time.monotonic() > each.began_s + _RESTART_S:
                    each.end()
                    self._processes[number] = self._start(number)
                    self.restarts += 1
            elif each.is_ready:
                found.append(number)
            elif each.is_stopped():
                each.end()
        return found

    @contextmanager
    def working(self) -> Iterator[list[int]]:
        """Let the ready cores poll for rounds, and yield their numbers; then they sleep."""
        cores = self.ready()
        self.board.set_active(is_active=True)
        for number in cores:
            self._processes[number].wake()
        try:
            yield cores
        finally:
            self.board.set_active(is_active=False)

    def post(self, tasks: Sequence[Task]) -> int:
        """Begin a round, whose activations are on the board, and return its number."""
        number = self.board.write(np.array(tasks, np.int64))
        self.board.begin(number)
        return number

    def post_from(self, activations: Sequence[torch.Tensor], tasks: Sequence[Task]) -> int:
        """Begin a round as soon as a GPU has written its activations, and return its number.

        Nothing waits: the cores begin when the stream is there.
        """
        from capplan.engine.kernels._triton_layers import share_launch

        if self._arrived is None:
            self._arrived = torch.zeros(1, dtype=torch.int32, device=activations[0].device)
        board, number, first = self.board, self.board.write(np.array(tasks, np.int64)), 0
        for left, x in zip(range(len(activations) - 1, -1, -1), activations, strict=True):
            shared = board.x(first + x.shape[0], x.shape[1])[first:]
            share_launch(x.contiguous(), shared, self._arrived, board.rounds, 0 if left else number).run()
            first += x.shape[0]
        return number

    def finish(self, number: int, cores: Sequence[int], timeout_s: float = ROUND_TIMEOUT_S) -> list[int]:
        """Wait for the end of a round and return the cores that did not finish it, which are killed."""
        until_s = time.monotonic() + timeout_s
        late = []
        for core in cores:
            polls = 0
            while not self.board.is_done(core, number):
                polls += 1
                if polls % _CHECK_EVERY:
                    continue
                os.sched_yield()
                if self._processes[core].has_ended() or time.monotonic() > until_s:
                    self._processes[core].end()
                    late.append(core)
                    break
        self.failed_rounds += bool(late)
        return late

    def close(self) -> None:
        """End all processes and release the memory."""
        for each in self._processes:
            each.end()
        self._processes = []
        del self.board
        if self._is_pinned:
            self._memory.unpin(0)
        self._memory.close()
        self.adapters.memory.close()


def crew_cpus(count: int | None, beside: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the CPU of each of so many cores; None: one on each.

    `beside` are the CPUs beside the engine's; without any, all but the first.
    """
    free = tuple(beside) or allowed_cpus()[1:]
    wanted = len(free) if count is None else count
    return tuple(free[i % len(free)] for i in range(wanted)) if free else ()


def board_shape(
    layout: AdapterLayout, cores: int, tokens: int, dtype: torch.dtype, requests: int = 0
) -> BoardShape:
    """Return the sizes of a board for batches of so many tokens.

    `requests` is the most requests of a batch, each of which adds a task of fewer tokens than the others.
    """
    return BoardShape(
        cores=cores,
        tasks=max(len(starts) for starts, _ in layout.site_outputs) * (tokens + requests),
        tokens=tokens,
        inputs=max(size for size, _ in layout.sizes),
        outputs=max(int(sizes.sum()) for _, sizes in layout.site_outputs),
        itemsize=dtype.itemsize,
    )


def start_crew(
    shape: BoardShape,
    cpus: Sequence[int],
    capacity: int,
    elements: int,
    dtype: torch.dtype,
    *,
    pin: bool = False,
) -> Crew:
    """Return ready cores for so many adapters of at most so many elements; `pin`: for a GPU.

    Raises
    ------
    InputError
        If the processor does not keep the order of stores, or there is no shared memory.
    """
    if platform.machine() not in ORDERED_STORES:
        raise InputError("must not be assisted on this processor: use on-demand", "assisted", "cache.loading")
    crew = Crew(shape, cpus, SharedAdapters(capacity, elements, dtype, pin=pin), dtype, pin=pin)
    crew.wait_until_ready()
    return crew


_REPEATS: Final = 9
_TOKENS: Final = (1, 4, 16, 64, 256)
_COPIED_BYTES: Final = 2**24


@dataclass(frozen=True)
class CoreTimes:
    """What decides where a layer of an adapter is computed."""

    cores: int
    tokens_per_task: int
    """Most tokens whose task takes no longer than the base model's layer for them."""
    task_base_ms: float
    ms_per_mmac: float
    signal_ms: float
    """Of one site of a layer."""
    layer_base_ms: float
    layer_ms_per_token: float
    copy_gb_per_s: float

    def groups(
        self, layout: AdapterLayout, itemsize: int, ranks: NDArray[np.int64], tokens: int
    ) -> tuple[range, ...]:
        """Return the groups in which an adapter is copied for a prompt."""
        if not self.cores:
            return (range(layout.layers),)
        gpu_ms = self.layer_base_ms + self.layer_ms_per_token * tokens
        slices = -(-tokens // self.tokens_per_task)
        cpu_ms = 0.0
        for site in SITES:
            macs = [int(ranks[0, module]) * sum(layout.sizes[module]) for module in site]
            tasks = slices * sum(each > 0 for each in macs)
            if tasks:
                longest = min(tokens, self.tokens_per_task) * max(macs) / 1e6
                task_ms = self.task_base_ms + self.ms_per_mmac * longest
                cpu_ms += -(-tasks // self.cores) * task_ms + self.signal_ms
        copy_ms = layout.elements(ranks) * itemsize / self.copy_gb_per_s / 1e6 / layout.layers
        times = LayerTimes(*(round(1e6 * each) for each in (max(gpu_ms, cpu_ms), gpu_ms, copy_ms)))
        return layer_groups(layout.layers, times)


def measured_times(
    crew: Crew,
    layout: AdapterLayout,
    weights: Weights,
    rank: int,
    most_tokens: int,
    copy_gb_per_s: float | None,
) -> CoreTimes:
    """Measure one core, the signals, the base model's linear maps of a layer, and a copy.

    Parameters
    ----------
    crew
        Ready cores.
    weights
        Of the base model.
    rank
        Of the largest adapter.
    most_tokens
        Of a batch of prompts.
    copy_gb_per_s
        Bandwidth that copies are held to; None: it is measured.
    """
    counts = [tokens for tokens in _TOKENS if tokens <= most_tokens]
    layer_ms = [_median_ms(_layer(layout, weights, tokens)) for tokens in counts]
    layer_slope, layer_base = _line(counts, layer_ms)
    copy = copy_gb_per_s or _copy_gb_per_s(weights.embed.device)
    cores = crew.ready()
    if not cores:
        return CoreTimes(0, max(counts), 0.0, 0.0, 0.0, layer_base, layer_slope, copy)
    inputs, outputs = layout.sizes[SITES[0][0]]
    found = [_task_ms(crew, tokens, inputs, outputs, rank) for tokens in counts]
    mmacs = [tokens * rank * (inputs + outputs) / 1e6 for tokens in counts]
    slope, base = _line(mmacs, [computed for computed, _ in found])
    fits = [n for n, (task, _), layer in zip(counts, found, layer_ms, strict=True) if task <= layer]
    return CoreTimes(
        cores=len(cores),
        tokens_per_task=max(fits, default=counts[0]),
        task_base_ms=base,
        ms_per_mmac=slope,
        signal_ms=median(signal for _, signal in found),
        layer_base_ms=layer_base,
        layer_ms_per_token=layer_slope,
        copy_gb_per_s=copy,
    )


def _task_ms(crew: Crew, tokens: int, inputs: int, outputs: int, rank: int) -> tuple[float, float]:
    """Return the milliseconds of a task on one core, and those that its round takes beyond it."""
    x = torch.rand(tokens, inputs).to(crew.board.x(1, 1).dtype)
    computed, beyond = [], []
    with crew.working() as cores:
        core = cores[0]
        # The adapter's place of number 0, the base model's, is never written: it holds zeros.
        task = Task(core, 0, tokens, inputs, 0, rank * inputs, rank, outputs, 0)
        for _ in range(_REPEATS):
            began_ns = time.perf_counter_ns()
            crew.board.x(tokens, inputs).copy_(x)
            if crew.finish(crew.post([task]), [core]):
                break
            passed_ns = time.perf_counter_ns() - began_ns
            computed.append(crew.board.computed_ns(core) / 1e6)
            beyond.append(passed_ns / 1e6 - computed[-1])
    return median(computed), median(beyond)


def _layer(layout: AdapterLayout, weights: Weights, tokens: int) -> Callable[[], object]:
    """Return a function that computes the linear maps of a layer."""
    layer, device = weights.layers[0], weights.embed.device
    maps = (layer.qkv, layer.o, layer.gate_up, layer.down)
    widths = [layout.sizes[site[0]][0] for site in SITES]
    inputs = [torch.rand(tokens, width, device=device).to(weights.embed.dtype) for width in widths]

    def run() -> None:
        for each, x in zip(maps, inputs, strict=True):
            each(x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _median_ms(run: Callable[[], object]) -> float:
    times_ms = []
    run()
    for _ in range(_REPEATS):
        began_ns = time.perf_counter_ns()
        run()
        times_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
    return median(times_ms)


def _line(x: list[int] | list[float], y: list[float]) -> tuple[float, float]:
    """Return slope and constant of least squares, neither below 0."""
    if len(x) == 1:
        return 0.0, y[0]
    slope, base = np.polyfit(x, y, 1).tolist()
    if base < 0.0:
        return float(np.dot(x, y) / np.dot(x, x)), 0.0
    return (slope, base) if slope >= 0.0 else (0.0, float(np.mean(y)))


def _copy_gb_per_s(device: torch.device) -> float:
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)

    def run() -> None:
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return _COPIED_BYTES / _median_ms(run) / 1e6
