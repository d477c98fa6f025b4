"""CPU cores that assist the loading of adapters: time of their tasks, signals, and the size of a task.

The cores, the board and the tasks are those of the reference engine; the base model's layer has random
weights. The invocation of a core through shared memory is compared with one through a Unix domain socket.

Source: Toppings, sections 4.2 and 7.3.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from capplan.engine import ModelConfig, bound_to, other_cpus
from capplan.engine.assist import CoreTimes, Crew, Task, board_shape, crew_cpus, measured_times, start_crew
from capplan.engine.lora import MODULES, SITES, AdapterLayout
from capplan.engine.models import random_weights
from capplan.profiling._machine import describe
from capplan.spec import CpuLora, Profile, Provenance, ProvenanceKind

MOST_TOKENS: Final = 256
RECEIVED_TOKENS: Final = 16
"""Per core in the comparison of invocations (Toppings, Fig. 12)."""
_REPEATS: Final = 30


@dataclass(frozen=True)
class Invocation:
    """Milliseconds of a call of so many cores beyond their computing, medians."""

    receivers: int
    shared_memory_ms: float
    socket_ms: float


@dataclass(frozen=True)
class CpuLoraMeasurement:
    """Times of one machine."""

    times: CoreTimes
    invocations: tuple[Invocation, ...]
    modules: tuple[str, ...]
    """Linear maps that adapters change, which decide how often a layer signals."""
    machine: dict[str, Any]

    @property
    def signals(self) -> int:
        """Return the signals of a layer: one for each site with an adapted module."""
        return sum(any(MODULES[module] in self.modules for module in site) for site in SITES)

    def section(self, command: str) -> CpuLora:
        """Return the section of a profile."""
        times = self.times
        return CpuLora(
            workers=times.cores,
            tokens_per_task=times.tokens_per_task,
            task_base_ms=times.task_base_ms,
            ms_per_mmac=times.ms_per_mmac,
            signal_ms=times.signal_ms * self.signals,
            provenance=Provenance(
                kind=ProvenanceKind.MEASURED,
                source=f"{self.machine['cpu']['model']}, {times.cores} cores, {self.machine['date']}",
                command=command,
            ),
        )

    def document(self) -> dict[str, Any]:
        """Return all figures as JSON data."""
        return {
            "times": asdict(self.times),
            "invocations": [asdict(each) for each in self.invocations],
            "machine": self.machine,
        }


def measure_cpu_lora(
    profile: Profile, rank: int, workers: int | None = None, dtype: str = "float32", device: str = "cpu"
) -> CpuLoraMeasurement:
    """Measure the cores of this machine for a profile's model.

    Parameters
    ----------
    profile
        With the model and the linear maps that adapters change.
    rank
        Of the largest adapter.
    workers
        Cores; None: one on each CPU but the first.
    dtype
        Of activations and adapters.
    device
        Whose layers a task is compared with.

    Raises
    ------
    InputError
        If the cores cannot share memory here.
    """
    arch = profile.model
    config = ModelConfig(
        **{name: getattr(arch, name) for name in ("hidden_size", "heads", "kv_heads", "head_dim")},
        name=arch.name,
        intermediate_size=arch.intermediate_size,
        layers=1,
        vocab_size=8,
        max_positions=MOST_TOKENS,
    )
    kind: torch.dtype = getattr(torch, dtype)
    layout = AdapterLayout(config)
    cpus = crew_cpus(workers)
    shape = board_shape(layout, len(cpus), max(MOST_TOKENS, RECEIVED_TOKENS * len(cpus)), kind)
    with ExitStack() as stack:
        own = other_cpus(cpus)
        stack.enter_context(bound_to(own))  # as an engine core, which has other CPUs than its cores
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(max(1, len(own)))
        crew = start_crew(shape, cpus, 1, layout.elements(layout.ranks(rank)), kind)
        stack.callback(crew.close)
        weights = random_weights(config, kind, torch.device(device), 0)
        times = measured_times(crew, layout, weights, rank, MOST_TOKENS, None)
        width = layout.sizes[0][0]
        counts = sorted({1, *(2**i for i in range(1, 12) if 2**i < len(cpus)), len(cpus)} - {0})
        invocations = tuple(_invocation(crew, cpus[:count], width, kind) for count in counts if cpus)
    modules = profile.engine.target_modules or MODULES
    return CpuLoraMeasurement(times, invocations, tuple(modules), describe(device))


def _invocation(crew: Crew, cpus: Sequence[int], width: int, dtype: torch.dtype) -> Invocation:
    """Compare both ways to give the cores on some CPUs a few tokens and to get their results back."""
    receivers = len(cpus)
    x = torch.rand(RECEIVED_TOKENS * receivers, width).to(dtype)
    tasks = [
        Task(core, RECEIVED_TOKENS * core, RECEIVED_TOKENS, width, 0, width, 1, width, 0)
        for core in range(receivers)
    ]
    with crew.working() as cores:

        def call() -> int:
            crew.board.x(x.shape[0], width).copy_(x)
            crew.finish(crew.post(tasks), cores[:receivers])
            crew.board.out(x.shape[0], crew.board.shape.outputs)[:, :width].clone()
            return max(crew.board.computed_ns(core) for core in range(receivers))

        shared_ms = _beyond_ms(call)
    return Invocation(receivers, shared_ms, _socket_ms(x, cpus))


def _socket_ms(x: torch.Tensor, cpus: Sequence[int]) -> float:
    """Return the milliseconds of the same through sockets, each to a process of its own."""
    context = multiprocessing.get_context("spawn")
    parts = [part.contiguous().view(torch.uint8).numpy().tobytes() for part in x.chunk(len(cpus))]
    ends, processes = [], []
    try:
        for cpu in cpus:
            own, theirs = context.Pipe()
            process = context.Process(target=_receive, args=(theirs, cpu), daemon=True)
            process.start()
            theirs.close()
            ends.append(own)
            processes.append(process)

        def call() -> int:
            for end, part in zip(ends, parts, strict=True):
                end.send_bytes(part)
            for end in ends:
                np.frombuffer(end.recv_bytes(), np.uint8).copy()
            return 0

        call()  # once all have started
        return _beyond_ms(call)
    finally:
        for end in ends:
            end.close()
        for process in processes:
            process.join()


def _receive(connection: Connection, cpu: int) -> None:
    """Send back whatever comes: without computing, all of the time is that of the invocation."""
    os.sched_setaffinity(0, {cpu})
    try:
        while True:
            connection.send_bytes(connection.recv_bytes())
    except (EOFError, OSError):
        return


def _beyond_ms(call: Callable[[], int]) -> float:
    """Return the milliseconds of a call beyond those that it returns as nanoseconds of computing."""
    times_ms = []
    for _ in range(_REPEATS):
        began_ns = time.perf_counter_ns()
        computed_ns = call()
        times_ms.append((time.perf_counter_ns() - began_ns - computed_ns) / 1e6)
    return median(times_ms)
