"""Resumable measurement of kernels into a folder."""

from __future__ import annotations

import gc
import itertools
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pandas as pd
import torch

from capplan.engine.affinity import device_name
from capplan.engine.models import builtin_models
from capplan.errors import InputError
from capplan.models.kernel_fits import COLUMNS, read_kernel_table
from capplan.profiling.kernels.cases import HALVES, KernelPoint, SamplingLimits, cases, rounds, timing_row
from capplan.profiling.kernels.timing import (
    CPU_KERNELS,
    CUDA_KERNELS,
    MAKERS,
    PHASES,
    CudaClock,
    KernelClock,
    WeightPool,
    cpu_timing,
)
from capplan.profiling.machine import describe, last_cache_bytes
from capplan.profiling.tables import PROVENANCE, OnProgress, require_same
from capplan.spec import read_text, write_bytes_atomic, write_text_atomic

TABLE: Final = "kernels.parquet"
_FIXED: Final = ("device_name", "dtype", "threads", "seed")
"""Settings that must stay the same when a measurement is resumed."""
_KEY: Final = ["kernel", "width", "case"]
"""Columns that identify a point; each has a row per half."""
DTYPES: Final = ("float32", "bfloat16", "float16")
_POOL_CACHES: Final = 8
_LEAST_POOL_BYTES: Final = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}
_WRITE_EVERY_S: Final = 20.0


class KernelTable:
    """Table of kernel timings in a folder, and its provenance."""

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        self.path = Path(folder) / TABLE
        self._provenance = self.path.with_name(PROVENANCE)
        self._settings = dict(settings)
        self._sessions: list[dict[str, Any]] = []
        if self._provenance.exists():
            try:
                record = json.loads(read_text(self._provenance))
                known, self._sessions = record["settings"], list(record["sessions"])
            except (ValueError, KeyError, TypeError):
                rule = "must be a record that this command wrote"
                raise InputError(rule, location=str(self._provenance)) from None
            require_same(known, self._settings, _FIXED, str(self._provenance))

    def restore(self, points: Iterable[KernelPoint]) -> int:
        """Restore the passes of earlier measurements; return the number of points that have any."""
        if not self.path.exists():
            return 0
        frame = read_kernel_table(self.path).set_index([*_KEY, "half"])
        rows = dict(zip(frame.index, frame.to_dict("records"), strict=True))
        found = 0
        for point in points:
            if (*point.key, HALVES[0]) in rows:
                halves = {half: rows[*point.key, half] for half in HALVES}
                point.times_us = {half: list(row["visits_us"]) for half, row in halves.items()}
                point.disturbed = int(halves[HALVES[0]]["disturbed"])
                found += 1
        return found

    def write(self, points: Iterable[KernelPoint], session: Mapping[str, Any]) -> None:
        """Write the passes of these points; rows of other points stay."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        points = [point for point in points if point.passes]
        rows = [
            timing_row(point.case, point.kernel, half, point.width, times, point.disturbed)
            for point in points
            for half, times in point.times_us.items()
        ]
        frame = pd.DataFrame(rows, columns=COLUMNS)
        if self.path.exists():
            before = read_kernel_table(self.path)
            ours = pd.MultiIndex.from_tuples([point.key for point in points], names=_KEY)
            others = before[~pd.MultiIndex.from_frame(before[_KEY]).isin(ours)]
            frame = pd.concat([others, frame], ignore_index=True) if len(others) else frame
        write_bytes_atomic(self.path, frame.to_parquet(index=False))
        record = {"settings": self._settings, "sessions": [*self._sessions, dict(session)]}
        write_text_atomic(self._provenance, json.dumps(record, indent=2) + "\n")


@dataclass(frozen=True)
class KernelProfilingOptions:
    """Kernels, batches and sampling of a measurement."""

    device: str = "cpu"
    """``cpu`` or a CUDA device. On a CPU the kernels are PyTorch's, on a GPU Triton's."""
    grids: tuple[str, ...] = ("wide",)
    """Names of `capplan.profiling.kernels.cases.cases`."""
    phases: tuple[str, ...] = tuple(PHASES)
    widths: tuple[int, ...] | None = None
    """Hidden sizes; None: those of the built-in models."""
    kernels: tuple[str, ...] | None = None
    """None: all of the device."""
    dtype: str | None = None
    """Type of weights and activations; None: float32 on a CPU, bfloat16 on a GPU."""
    threads: int = 1
    """Threads of PyTorch on a CPU. With more than one, PyTorch changes the number used within the grid."""
    limits: SamplingLimits = field(default_factory=SamplingLimits)
    seed: int = 0
    """Seed of drawn ranks and of the order of points."""

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
            if kernel not in MAKERS:
                raise InputError(f"must be one of {', '.join(MAKERS)}", kernel, "kernels")

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device != "cpu"

    def settings(self) -> dict[str, Any]:
        """Return the settings with defaults filled in, for the record."""
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
        return self.widths or tuple(sorted({config.hidden_size for config in builtin_models().values()}))

    def chosen_kernels(self) -> tuple[str, ...]:
        """Return the kernels."""
        return self.kernels or (CUDA_KERNELS if self.on_gpu else CPU_KERNELS)


@dataclass(frozen=True)
class KernelProfilingResult:
    """Progress of a measurement."""

    points: int
    converged: int
    restored: int
    """Points with passes of an earlier measurement."""
    disturbed_share: float
    """Share of passes of which every call was interrupted."""
    table: Path

    @property
    def is_complete(self) -> bool:
        """Whether all medians have converged."""
        return self.converged == self.points


def measure(
    folder: str | Path, options: KernelProfilingOptions, on_progress: OnProgress = lambda *_: None
) -> KernelProfilingResult:
    """Measure into a folder until all medians have converged or the budget is spent.

    An interrupt leaves a whole table.

    Raises
    ------
    InputError
        If the folder holds measurements of another device or with other settings.
    """
    settings = options.settings()
    table = KernelTable(folder, settings)
    points = list(_points(options))
    if not points:
        rule = f"must include kernels of the phases {', '.join(options.phases)} of the grids"
        raise InputError(rule, ", ".join(options.chosen_kernels()), "kernels")
    restored = table.restore(points)
    session = describe(options.device, None if options.on_gpu else options.threads)
    with _quiet(options.threads):
        pool, clock = _pool_and_clock(torch.device(options.device), getattr(torch, settings["dtype"]))
        converged = {point.key for point in points if point.is_converged(options.limits)}
        written = time.monotonic()
        try:
            for point in rounds(points, options.limits, options.seed + sum(point.passes for point in points)):
                calls = MAKERS[point.kernel](point.case, point.width, pool, options.limits.calls + 1)
                point.add(clock(calls.shrink), clock(calls.expand))
                if point.is_converged(options.limits):
                    converged.add(point.key)
                on_progress("kernels", len(converged), len(points))
                if time.monotonic() - written > _WRITE_EVERY_S:
                    table.write(points, session)
                    written = time.monotonic()
        finally:  # also when it is interrupted
            table.write(points, session)
    passes = sum(point.passes for point in points)
    share = sum(point.disturbed for point in points) / max(1, passes)
    return KernelProfilingResult(len(points), len(converged), restored, share, table.path)


def _points(options: KernelProfilingOptions) -> Iterator[KernelPoint]:
    seen: set[tuple[str, int, str]] = set()
    grids = [cases(grid, options.seed) for grid in options.grids]
    for grid, width, kernel in itertools.product(grids, options.chosen_widths(), options.chosen_kernels()):
        for case in grid:
            point = KernelPoint(kernel, width, case)
            suits = case.phase in options.phases and kernel in PHASES[case.phase]
            if suits and point.key not in seen:
                seen.add(point.key)
                yield point


def _pool_and_clock(device: torch.device, dtype: torch.dtype) -> tuple[WeightPool, KernelClock]:
    least = _LEAST_POOL_BYTES[device.type]
    if device.type == "cuda":
        return WeightPool(least // dtype.itemsize, dtype, device), CudaClock(device)
    numbers = max(least, _POOL_CACHES * last_cache_bytes()) // dtype.itemsize
    return WeightPool(numbers, dtype, device), cpu_timing


@contextmanager
def _quiet(threads: int) -> Iterator[None]:
    """Fix the number of threads; disable gradients and garbage collection."""
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
