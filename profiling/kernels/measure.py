"""Resumable measurement of kernels into a folder."""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import torch

from capplan.engine.models import builtin_models
from capplan.errors import InputError
from capplan.models.kernel_fits import COLUMNS, read_kernel_table
from capplan.profiling.kernels.cases import KernelPoint, SamplingLimits, cases, relative_error, rounds
from capplan.profiling.kernels.timing import (
    HALVES,
    CpuClock,
    CudaClock,
    KernelCalls,
    KernelClock,
    MakeCalls,
    WeightPool,
    grouped_calls,
    padded_calls,
)
from capplan.profiling.machine import describe, device_name, last_cache_bytes
from capplan.spec import read_text, write_text_atomic
from capplan.spec.files import write_bytes_atomic

TABLE: Final = "kernels.parquet"
PROVENANCE: Final = "provenance.json"
_FIXED: Final = ("device_name", "dtype", "threads", "seed")
"""Settings that must stay the same when a measurement is resumed."""
OnProgress = Callable[[str, int, int], None]
CPU_KERNELS: Final = ("padded", "grouped")
CUDA_KERNELS: Final = ("bgmv", "mbgmv", "sgmv")
DTYPES: Final = ("float32", "bfloat16", "float16")
_POOL_CACHES: Final = 8
_LEAST_POOL_BYTES: Final = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}
_WRITE_EVERY_S: Final = 20.0


class KernelTable:
    """Table of kernel timings in a folder, and its provenance."""

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        self._folder = Path(folder)
        self._settings = dict(settings)
        self._sessions: list[dict[str, Any]] = []
        known = self._folder / PROVENANCE
        if known.exists():
            self._sessions = _sessions(known, self._settings)

    @property
    def table(self) -> Path:
        """Path of the table."""
        return self._folder / TABLE

    def restore(self, points: Iterable[KernelPoint]) -> int:
        """Restore the passes of earlier measurements; return the number of points that have any."""
        if not self.table.exists():
            return 0
        frame = read_kernel_table(self.table)
        known = {
            key: rows.set_index("half")
            for key, rows in frame.groupby(["kernel", "width", "case"], sort=False)
        }
        found = 0
        for point in points:
            rows = known.get(point.key)
            if rows is None:
                continue
            point.shrink_us, point.expand_us = (list(rows["visits_us"][half]) for half in HALVES)
            point.disturbed = int(rows["disturbed"]["shrink"])
            found += 1
        return found

    def write(self, points: Iterable[KernelPoint], session: Mapping[str, Any]) -> None:
        """Write the passes of these points; rows of other points stay."""
        self._folder.mkdir(parents=True, exist_ok=True)
        points = [point for point in points if point.passes]
        frame = pd.DataFrame([_row(point, half) for point in points for half in HALVES], columns=COLUMNS)
        if self.table.exists():
            before = read_kernel_table(self.table)
            ours = {point.key for point in points}
            keys = zip(before["kernel"], before["width"], before["case"], strict=True)
            others = before[[key not in ours for key in keys]]
            frame = pd.concat([others, frame], ignore_index=True) if len(others) else frame
        write_bytes_atomic(self.table, frame.to_parquet(index=False))
        record = {"settings": self._settings, "sessions": [*self._sessions, dict(session)]}
        write_text_atomic(self._folder / PROVENANCE, json.dumps(record, indent=2) + "\n")


def _sessions(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        record = json.loads(read_text(path))
        known, sessions = record["settings"], record["sessions"]
    except (ValueError, KeyError, TypeError):
        raise InputError("must be a record that this command wrote", location=str(path)) from None
    for name in _FIXED:
        if known.get(name) != settings[name]:
            rule = f"must be {known.get(name)!r} to go on with what is there; choose another folder"
            raise InputError(rule, settings[name], f"{path}: {name}")
    return list(sessions)


def _row(point: KernelPoint, half: str) -> dict[str, Any]:
    case, times = point.case, point.shrink_us if half == "shrink" else point.expand_us
    ranks = np.array(case.ranks)
    return {
        "kernel": point.kernel,
        "half": half,
        "width": point.width,
        "case": case.name,
        "configuration": case.configuration,
        "grid": case.grid,
        "phase": case.phase,
        "requests": case.requests,
        "tokens": case.tokens,
        "adapters": ranks.size,
        "max_rank": int(ranks.max()),
        "rank_sum": int(ranks.sum()) * case.requests_each,
        "adapter_rank_sum": int(ranks.sum()),
        "rank_tokens": int(ranks.sum()) * case.requests_each * case.tokens_each,
        "median_us": float(np.median(times)),
        "relative_error": relative_error(times) if len(times) > 1 else None,
        "visits": len(times),
        "disturbed": point.disturbed,
        "visits_us": [float(each) for each in times],
    }


@dataclass(frozen=True)
class KernelProfilingOptions:
    """Kernels, batches and sampling of a measurement.

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
        Kernels; None: all of the device.
    dtype
        Type of weights and activations; None: float32 on a CPU, bfloat16 on a GPU.
    threads
        Threads of PyTorch on a CPU. With more than one, PyTorch changes the number used within the grid.
    limits
        Limits on sampling.
    seed
        Seed of drawn ranks and of the order of points.
    """

    device: str = "cpu"
    grids: tuple[str, ...] = ("wide",)
    phases: tuple[str, ...] = ("decode", "prefill")
    widths: tuple[int, ...] | None = None
    kernels: tuple[str, ...] | None = None
    dtype: str | None = None
    threads: int = 1
    limits: SamplingLimits = field(default_factory=SamplingLimits)
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
    store = KernelTable(folder, settings)
    points = list(_points(options))
    restored = store.restore(points)
    session = describe(options.device, None if options.on_gpu else options.threads)
    with _quiet(options.threads):
        pool, clock = _bench(options, _dtype(settings["dtype"]))
        makers = _makers(options.chosen_kernels())
        converged = {point.key for point in points if point.is_converged(options.limits)}
        written = time.monotonic()
        try:
            for point in rounds(points, options.limits, options.seed + sum(point.passes for point in points)):
                _measure_pass(point, makers[point.kernel], pool, clock, options.limits.calls)
                if point.is_converged(options.limits):
                    converged.add(point.key)
                on_progress("kernels", len(converged), len(points))
                if time.monotonic() - written > _WRITE_EVERY_S:
                    store.write(points, session)
                    written = time.monotonic()
        finally:  # also when it is interrupted
            store.write(points, session)
    visits = sum(point.passes for point in points)
    share = sum(point.disturbed for point in points) / max(1, visits)
    return KernelProfilingResult(len(points), len(converged), restored, share, store.table)


def _points(options: KernelProfilingOptions) -> Iterator[KernelPoint]:
    seen: set[tuple[str, int, str]] = set()
    for grid in options.grids:
        for width in options.chosen_widths():
            for kernel in options.chosen_kernels():
                for case in cases(grid, options.seed):
                    point = KernelPoint(kernel, width, case)
                    if case.phase in options.phases and point.key not in seen and _suits(point):
                        seen.add(point.key)
                        yield point


def _suits(point: KernelPoint) -> bool:
    return point.kernel != "sgmv" or point.case.phase == "prefill"


def _measure_pass(
    point: KernelPoint, make: MakeCalls, pool: WeightPool, clock: KernelClock, number: int
) -> None:
    calls: KernelCalls = make(point.case, point.width, pool, number + 1)
    point.add(clock.time(calls.shrink), clock.time(calls.expand))


def _makers(kernels: Sequence[str]) -> Mapping[str, MakeCalls]:
    makers: dict[str, MakeCalls] = {"padded": padded_calls, "grouped": grouped_calls}
    for kind in CUDA_KERNELS:
        if kind in kernels:
            from capplan.profiling.kernels.timing import TritonCalls

            makers[kind] = TritonCalls(kind)
    return makers


def _bench(options: KernelProfilingOptions, dtype: torch.dtype) -> tuple[WeightPool, KernelClock]:
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
