"""Measures kernels into a folder, as far as the time allows; called again, it goes on where it was."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from capplan.engine.models import BUILTIN
from capplan.errors import InputError
from capplan.profiling.kernels.calls import Calls, MakeCalls, grouped_calls, padded_calls
from capplan.profiling.kernels.cases import cases
from capplan.profiling.kernels.clocks import Clock, CpuClock, CudaClock
from capplan.profiling.kernels.pool import WeightPool
from capplan.profiling.kernels.sampling import Limits, Spot, rounds
from capplan.profiling.kernels.store import Store
from capplan.profiling.machine import describe, device_name, last_cache_bytes

OnProgress = Callable[[str, int, int], None]

CPU_KERNELS: Final = ("padded", "grouped")
CUDA_KERNELS: Final = ("bgmv", "mbgmv", "sgmv")
DTYPES: Final = ("float32", "bfloat16", "float16")

_POOL_CACHES: Final = 8
_LEAST_POOL_BYTES: Final = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}
_WRITE_EVERY_S: Final = 20.0


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes
    ----------
    device
        ``cpu`` or a CUDA device. On a CPU the kernels are PyTorch's, on a GPU Triton's.
    grids
        Names of `capplan.profiling.kernels.cases.cases`.
    phases
        ``decode``, ``prefill`` or both.
    widths
        Hidden sizes; None: those of the built-in models.
    kernels
        None: all that the device has.
    dtype
        Of weights and activations; None: float32 on a CPU, bfloat16 on a GPU.
    threads
        Threads of PyTorch on a CPU. One by default: with more, it changes to several somewhere within the
        grid, and a batch on one side of that cannot be compared with one on the other.
    limits
        When to stop.
    seed
        Of drawn ranks and of the order of visits.
    """

    device: str = "cpu"
    grids: tuple[str, ...] = ("wide",)
    phases: tuple[str, ...] = ("decode", "prefill")
    widths: tuple[int, ...] | None = None
    kernels: tuple[str, ...] | None = None
    dtype: str | None = None
    threads: int = 1
    limits: Limits = field(default_factory=Limits)
    seed: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch("cpu|cuda(:[0-9]+)?", self.device):
            raise InputError("must be cpu, cuda, or cuda:1 and so on", self.device, "device")
        if self.on_gpu and not torch.cuda.is_available():
            raise InputError("must be cpu: this PyTorch sees no CUDA device", self.device, "device")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InputError(f"must be one of {', '.join(DTYPES)}", self.dtype, "dtype")
        for width in self.widths or ():
            if width < 2 or width % 2:
                raise InputError("must be even numbers from 2 on", width, "widths")
        for kernel in self.kernels or ():
            if kernel not in (*CPU_KERNELS, *CUDA_KERNELS):
                rule = f"must be one of {', '.join((*CPU_KERNELS, *CUDA_KERNELS))}"
                raise InputError(rule, kernel, "kernels")

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU is measured."""
        return self.device != "cpu"

    def settings(self) -> dict[str, Any]:
        """Return what the record says was asked for, defaults filled in."""
        return {
            "device_name": device_name(self.device),
            "dtype": self.dtype or ("bfloat16" if self.on_gpu else "float32"),
            "threads": None if self.on_gpu else self.threads,
            "seed": self.seed,
            "grids": list(self.grids),
            "phases": list(self.phases),
            "widths": list(self.chosen_widths()),
            "kernels": list(self.chosen_kernels()),
            "tolerance": self.limits.tolerance,
        }

    def chosen_widths(self) -> tuple[int, ...]:
        """Return the hidden sizes."""
        return self.widths or tuple(sorted({config.hidden_size for config in BUILTIN.values()}))

    def chosen_kernels(self) -> tuple[str, ...]:
        """Return the kernels."""
        return self.kernels or (CUDA_KERNELS if self.on_gpu else CPU_KERNELS)


@dataclass(frozen=True)
class Outcome:
    """How far a stretch of measuring got."""

    spots: int
    settled: int
    restored: int
    """Spots that an earlier stretch had visited."""
    disturbed_share: float
    """Visits whose every call was interrupted, over all visits."""
    table: Path

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to measure."""
        return self.settled == self.spots


def measure(folder: str | Path, options: Options, on_progress: OnProgress = lambda *_: None) -> Outcome:
    """Measure into a folder until every spot is settled or the budget is spent; Ctrl-C leaves a whole table.

    Raises
    ------
    InputError
        When the folder holds measurements of another device or with other settings.
    """
    settings = options.settings()
    store = Store(folder, settings)
    spots = list(_spots(options))
    restored = store.restore(spots)
    session = describe(options.device, None if options.on_gpu else options.threads)
    with _quiet(options.threads):
        pool, clock = _bench(options, _dtype(settings["dtype"]))
        makers = _makers(options.chosen_kernels())
        settled = {spot.key for spot in spots if spot.is_settled(options.limits)}
        written = time.monotonic()
        try:
            for spot in rounds(spots, options.limits, options.seed + sum(spot.visits for spot in spots)):
                _visit(spot, makers[spot.kernel], pool, clock, options.limits.calls)
                if spot.is_settled(options.limits):
                    settled.add(spot.key)
                on_progress("kernels", len(settled), len(spots))
                if time.monotonic() - written > _WRITE_EVERY_S:
                    store.write(spots, session)
                    written = time.monotonic()
        finally:  # also when it is interrupted
            store.write(spots, session)
    visits = sum(spot.visits for spot in spots)
    share = sum(spot.disturbed for spot in spots) / max(1, visits)
    return Outcome(len(spots), len(settled), restored, share, store.table)


def _spots(options: Options) -> Iterator[Spot]:
    seen: set[tuple[str, int, str]] = set()
    for grid in options.grids:
        for width in options.chosen_widths():
            for kernel in options.chosen_kernels():
                for case in cases(grid, options.seed):
                    spot = Spot(kernel, width, case)
                    if case.phase in options.phases and spot.key not in seen and _suits(spot):
                        seen.add(spot.key)
                        yield spot


def _suits(spot: Spot) -> bool:
    """Tell whether a kernel is for such a case."""
    return spot.kernel != "sgmv" or spot.case.phase == "prefill"


def _visit(spot: Spot, make: MakeCalls, pool: WeightPool, clock: Clock, number: int) -> None:
    calls: Calls = make(spot.case, spot.width, pool, number + 1)
    spot.add(clock.time(calls.shrink), clock.time(calls.expand))


def _makers(kernels: Sequence[str]) -> Mapping[str, MakeCalls]:
    makers: dict[str, MakeCalls] = {"padded": padded_calls, "grouped": grouped_calls}
    for kind in CUDA_KERNELS:
        if kind in kernels:
            from capplan.profiling.kernels.triton_calls import TritonCalls

            makers[kind] = TritonCalls(kind)
    return makers


def _bench(options: Options, dtype: torch.dtype) -> tuple[WeightPool, Clock]:
    device = torch.device(options.device)
    least = _LEAST_POOL_BYTES[device.type]
    if device.type == "cuda":
        return WeightPool(least // dtype.itemsize, dtype, device), CudaClock(device)
    numbers = max(least, _POOL_CACHES * last_cache_bytes()) // dtype.itemsize
    return WeightPool(numbers, dtype, device), CpuClock()


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@contextmanager
def _quiet(threads: int) -> Iterator[None]:
    """Fix the threads, and keep gradients and the garbage collector out."""
    before, collects = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(threads)
    gc.collect()
    gc.disable()
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)
        if collects:
            gc.enable()
