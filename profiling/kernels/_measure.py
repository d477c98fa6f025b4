"""Timing of kernels on batches, on a CPU or a GPU, resumable in a folder.

Points are measured in rounds in a random order, so that disturbances meet all points alike. Copies on a
device and from pinned host memory give the bandwidth to which kernels and loads are compared.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import re
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import torch

from capplan.engine import Segment, device_name
from capplan.engine.kernels import GroupedLoRA, PaddedLoRA
from capplan.engine.lora import GROUPS, A, AdapterLayout, B, Expand, RowTables, Shrink, SiteViews
from capplan.engine.models import ModelConfig, builtin_models
from capplan.errors import InputError
from capplan.models import COLUMNS, read_kernel_table
from capplan.profiling._machine import describe, last_cache_bytes
from capplan.profiling._tables import PROVENANCE, OnProgress, require_same
from capplan.spec import read_text, write_bytes_atomic, write_text_atomic

if TYPE_CHECKING:
    from capplan.engine.kernels import Kind

PAPER_BATCHES: Final = (4, 8, 12, 16, 20, 24, 28, 32)
"""Toppings, section 5 and figure 11: batches of 4 to 32 ..."""
PAPER_RANKS: Final = (8, 16, 32, 64)
"""... of adapters of ranks 8 to 64."""
WIDE_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDE_RANKS: Final = (8, 16, 32, 64, 128)
PREFILL_BATCHES: Final = (1, 2, 4, 8)
PREFILL_TOKENS: Final = (16, 64, 256)
CROSSOVER_ADAPTERS: Final = (1, 4, 16)
CROSSOVER_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of each adapter, between decode and prefill."""
CROSSOVER_RANKS: Final = (8, 16, 64)
SHARED_BY: Final = 4
"""Requests per shared adapter."""
HALVES: Final = ("shrink", "expand")
MIN_PASSES: Final = 5
_SIGMAS_PER_MAD: Final = 1.4826
_SPREAD_OF_MEDIAN: Final = 1.2533  # standard error of a median over that of a mean, for normal samples


@dataclass(frozen=True)
class Case:
    """Batch of requests with adapters."""

    grid: str
    """First grid of the case; wider grids include its cases."""
    phase: str
    """``decode``, ``prefill``, or ``crossover``: a few tokens of each adapter."""
    mix: str
    """Mix of ranks, part of the configuration, whose draws (`seed`) share a fold."""
    seed: int
    ranks: tuple[int, ...]
    """Rank of each adapter; the requests of an adapter are adjacent."""
    requests_each: int = 1
    """Requests of each adapter."""
    tokens_each: int = 1
    """Tokens of each request."""

    @property
    def requests(self) -> int:
        return len(self.ranks) * self.requests_each

    @property
    def tokens(self) -> int:
        return self.requests * self.tokens_each

    @property
    def configuration(self) -> str:
        """Key that cross-validation keeps in one fold."""
        return f"{self.phase}/{self.requests}x{self.tokens_each}/{self.mix}"

    @property
    def name(self) -> str:
        return f"{self.configuration}/{self.seed}"


def _paper(seed: int) -> Iterator[Case]:
    for requests in PAPER_BATCHES:
        yield from _mixes("paper", "decode", requests, 1, PAPER_RANKS, 2, seed)


def _wide(seed: int) -> Iterator[Case]:
    known = {case.name for case in _paper(seed)}
    for requests in WIDE_BATCHES:
        mixes = _mixes("wide", "decode", requests, 1, WIDE_RANKS, 1, seed)
        yield from (case for case in mixes if case.name not in known)
        if requests > SHARED_BY:
            for rank in WIDE_RANKS[::2]:
                ranks = (rank,) * (requests // SHARED_BY)
                yield Case("wide", "decode", f"shared-{rank}", 0, ranks, requests_each=SHARED_BY)


def _prefill(seed: int) -> Iterator[Case]:
    for requests in PREFILL_BATCHES:
        for tokens in PREFILL_TOKENS:
            yield from _mixes("prefill", "prefill", requests, tokens, PAPER_RANKS, 1, seed)


def _crossover(seed: int) -> Iterator[Case]:
    del seed  # nothing is drawn
    sizes = itertools.product(CROSSOVER_ADAPTERS, CROSSOVER_TOKENS, CROSSOVER_RANKS)
    for adapters, tokens, rank in sizes:
        yield Case("crossover", "crossover", f"all-{rank}", 0, (rank,) * adapters, tokens_each=tokens)


def _tiny(seed: int) -> Iterator[Case]:
    for requests in (1, 2, 4, 6):
        yield from _mixes("tiny", "decode", requests, 1, (4, 8), 1, seed)
    yield from _mixes("tiny", "prefill", 2, 3, (4, 8), 1, seed)
    for tokens in (1, 4, 16):
        yield Case("tiny", "crossover", "all-4", 0, (4, 4), tokens_each=tokens)


def _mixes(
    grid: str, phase: str, requests: int, tokens: int, ranks: tuple[int, ...], draws: int, seed: int
) -> Iterator[Case]:
    """Yield batches of one rank, half and half, one large among small, and random ranks."""
    low, high = ranks[0], ranks[-1]
    mixes = [(f"all-{rank}", 0, (rank,) * requests) for rank in ranks]
    if requests > 1:
        half = (high,) * (requests // 2) + (low,) * (requests - requests // 2)
        mixes.append((f"half-{low}-{high}", 0, half))
        mixes.append((f"one-{high}-rest-{low}", 0, (high,) + (low,) * (requests - 1)))
        for draw in range(draws):
            rng = np.random.default_rng((seed, requests, len(ranks), draw))
            drawn = rng.choice(np.array(ranks), size=requests).tolist()
            mixes.append((f"drawn-{low}-{high}", draw, tuple(drawn)))
    for mix, draw, chosen in mixes:
        yield Case(grid, phase, mix, draw, chosen, tokens_each=tokens)


GRIDS: Final = MappingProxyType(
    {
        "paper": (_paper,),
        "wide": (_paper, _wide, _prefill),
        "prefill": (_prefill,),
        "crossover": (_crossover,),
        "tiny": (_tiny,),
    }
)


def cases(grid: str, seed: int = 0) -> tuple[Case, ...]:
    """Return the cases of a grid, one of `GRIDS`; ``wide`` includes ``paper``."""
    if grid not in GRIDS:
        raise InputError(f"must be one of {', '.join(GRIDS)}", grid, "grid")
    return tuple(case for part in GRIDS[grid] for case in part(seed))


class KernelTiming(NamedTuple):
    """Median of the calls of one pass."""

    median_us: float
    disturbed: bool
    """Whether every call was interrupted by another process on its core."""


@dataclass
class KernelPoint:
    """One kernel on one case at one width, with the medians of its passes."""

    kernel: str
    width: int
    case: Case
    times_us: dict[str, list[float]] = field(default_factory=lambda: {half: [] for half in HALVES})
    """By half, in microseconds."""
    disturbed: int = 0
    """Passes of which every call was interrupted."""

    @property
    def key(self) -> tuple[str, int, str]:
        """Identity across restarts."""
        return self.kernel, self.width, self.case.name

    @property
    def passes(self) -> int:
        return len(self.times_us[HALVES[0]])

    def add(self, *timings: KernelTiming) -> None:
        """Add a pass: shrink, expand."""
        for half, timing in zip(HALVES, timings, strict=True):
            self.times_us[half].append(timing.median_us)
        self.disturbed += any(timing.disturbed for timing in timings)

    def is_converged(self, limits: SamplingLimits) -> bool:
        """Return whether the medians have converged or the passes are used up."""
        if self.passes >= limits.max_passes:
            return True
        return self.passes >= MIN_PASSES and all(
            relative_error(times) <= limits.tolerance for times in self.times_us.values()
        )


@dataclass(frozen=True)
class SamplingLimits:
    """Limits on sampling."""

    budget_s: float = 600.0
    """Time for all points."""
    tolerance: float = 0.02
    """Relative standard error of a converged median."""
    max_passes: int = 60
    """Passes after which a point counts as converged."""
    calls: int = 4
    """Timed calls of each half per pass."""


def relative_error(times: Sequence[float]) -> float:
    """Return the relative standard error of the median, from the median absolute deviation."""
    values = np.asarray(times)
    middle = float(np.median(values))
    spread = _SIGMAS_PER_MAD * float(np.median(np.abs(values - middle)))
    return _SPREAD_OF_MEDIAN * spread / math.sqrt(values.size) / middle


def timing_row(
    case: Case, kernel: str, half: str, width: int, times_us: Sequence[float], disturbed: int
) -> dict[str, Any]:
    """Return the row of the kernel table for the medians of a case's passes."""
    rank_sum = sum(case.ranks)
    return {
        "kernel": kernel,
        "half": half,
        "width": width,
        "case": case.name,
        "configuration": case.configuration,
        "grid": case.grid,
        "phase": case.phase,
        "requests": case.requests,
        "tokens": case.tokens,
        "adapters": len(case.ranks),
        "max_rank": max(case.ranks),
        "rank_sum": rank_sum * case.requests_each,
        "adapter_rank_sum": rank_sum,
        "rank_tokens": rank_sum * case.requests_each * case.tokens_each,
        "median_us": float(np.median(times_us)),
        "relative_error": relative_error(times_us) if len(times_us) > 1 else float("nan"),
        "visits": len(times_us),
        "disturbed": disturbed,
        "visits_us": [float(each) for each in times_us],
    }


def rounds(
    points: Sequence[KernelPoint],
    limits: SamplingLimits,
    seed: int,
    now_s: Callable[[], float] = time.monotonic,
) -> Iterator[KernelPoint]:
    """Yield the next point until all have converged or the budget is spent."""
    rng = np.random.default_rng(seed)
    until = now_s() + limits.budget_s
    while open_points := [point for point in points if not point.is_converged(limits)]:
        for at in rng.permutation(len(open_points)):
            if now_s() >= until:
                return
            yield open_points[at]


_COPIES: Final = 21
_BYTES: Final = {"cuda": 2**30, "cpu": 2**26}


def copy_rows(device: str) -> list[dict[str, Any]]:
    """Measure copies; return the rows of the copy table.

    A copy on the device counts twice its bytes, which are read and written. On a CPU the host's memory is
    the device's.
    """
    place = torch.device(device)
    size_bytes = _BYTES[place.type]
    target = torch.zeros(size_bytes, dtype=torch.uint8, device=place)
    host = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=place.type == "cuda")
    sources = (("device", target.clone(), 2 * size_bytes), ("host", host, size_bytes))
    return [
        {
            "source": name,
            "bytes": size_bytes,
            "bytes_per_s": moved / _median_s(place, partial(target.copy_, source, non_blocking=True)),
        }
        for name, source, moved in sources
    ]


def _median_s(device: torch.device, run: Callable[[], object]) -> float:
    """Return the median time of a copy after a first one."""
    times_s: list[float] = []
    new_event: Any = partial(torch.cuda.Event, enable_timing=True)
    for _ in range(_COPIES + 1):
        if device.type == "cuda":
            begin, end = new_event(), new_event()
            begin.record()
            run()
            end.record()
            end.synchronize()
            times_s.append(begin.elapsed_time(end) * 1e-3)
        else:
            start_s = time.perf_counter()
            run()
            times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[1:])


_FLUSHES: Final = 2
"""L2 cache sizes written between two calls; one leaves parts of the old contents under some replacement
policies.
"""
_LEAST_FLUSH_BYTES: Final = 256 * 2**20
SITE: Final = 0
CPU_KERNELS: Final = ("padded", "grouped")
CUDA_KERNELS: Final = ("bgmv", "mbgmv", "sgmv")
PHASES: Final = MappingProxyType(
    {
        "decode": ("padded", "grouped", "bgmv", "mbgmv"),
        "prefill": ("padded", "grouped", *CUDA_KERNELS),
        "crossover": ("mbgmv", "sgmv"),
    }
)
"""Kernels that are timed in each phase."""
_OUT_SITE: Final = 1
_O_PROJ: Final = 3  # the only module of its site; both of its sizes are `width` here


KernelClock: TypeAlias = Callable[[Sequence[Callable[[], object]]], KernelTiming]
"""Runs equal calls and returns the median time of all but the first, which warms up."""


def cpu_timing(calls: Sequence[Callable[[], object]]) -> KernelTiming:
    """Return the median time of single calls on a CPU; interrupted calls do not count.

    A call is interrupted if the process left a core (``ru_nivcsw``). If all calls of a pass were, their time
    on the core replaces it: with one thread, the undisturbed time except for cache effects.
    """
    calls[0]()
    whole, on_core = [], []
    for call in calls[1:]:
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        start_on_core, start = time.thread_time_ns(), time.perf_counter_ns()
        call()
        taken_ns, core_ns = time.perf_counter_ns() - start, time.thread_time_ns() - start_on_core
        if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == switches:
            whole.append(taken_ns)
        else:
            on_core.append(core_ns if torch.get_num_threads() == 1 else taken_ns)
    return KernelTiming(float(np.median(whole or on_core)) / 1000.0, not whole)


class CudaClock:
    """Timer with CUDA events around each call; the L2 cache is overwritten between calls.

    The host issues the call during the overwriting, so that launch latency is not measured.
    """

    def __init__(self, device: torch.device) -> None:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        size = max(_FLUSHES * l2_bytes, _LEAST_FLUSH_BYTES)
        self._dirt = torch.empty(size, dtype=torch.int8, device=device)

    def __call__(self, calls: Sequence[Callable[[], object]]) -> KernelTiming:
        calls[0]()
        make_event: Any = partial(torch.cuda.Event, enable_timing=True)
        marks = []
        for call in calls[1:]:
            self._dirt.zero_()
            begin, end = make_event(), make_event()
            begin.record()
            call()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize(self._dirt.device)
        median_ms = float(np.median([begin.elapsed_time(end) for begin, end in marks]))
        return KernelTiming(1000.0 * median_ms, False)


class WeightPool:
    """Circular pool of weights, much larger than the caches.

    Weights of a call come from memory, as those of a model's next layer do. A batch larger than the pool
    reads some of it twice.
    """

    def __init__(self, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        # Not zeros, which some memories compress; few different numbers, which are quick to generate.
        self.numbers = torch.linspace(-1.0, 1.0, 1 << 12, device=device).to(dtype).repeat(-(-numbers >> 12))
        self._next = 0

    def take(self, rows: int, width: int) -> int:
        """Return the offset of the next matrix, which is at most as large as the pool."""
        size = rows * width
        if size > self.numbers.numel():
            raise ValueError(f"a matrix of {size} numbers from a pool of {self.numbers.numel()}")
        if self._next + size > self.numbers.numel():
            self._next = 0
        at = self._next
        self._next += size
        return at

    def matrix(self, rows: int, width: int) -> torch.Tensor:
        at = self.take(rows, width)
        return self.numbers[at : at + rows * width].view(rows, width)


class KernelCalls(NamedTuple):
    """Calls of one half each; the first of each is for warming up."""

    shrink: list[Callable[[], object]]
    expand: list[Callable[[], object]]


MakeCalls: TypeAlias = Callable[[Case, int, WeightPool, int], KernelCalls]
"""Returns calls of both halves: from the case, the width, the pool of weights, and the number of calls."""


def segments_of(case: Case) -> list[Segment]:
    """Return the tokens of each adapter; adapters count from 1."""
    each = case.requests_each * case.tokens_each
    return [Segment(at + 1, at * each, (at + 1) * each) for at in range(len(case.ranks))]


def activations(case: Case, width: int, pool: WeightPool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input and the output of the adapters; both stay in the caches, as in a step."""
    like = pool.numbers
    ramp = torch.linspace(-1.0, 1.0, case.tokens * width, device=like.device).to(like.dtype)
    return ramp.view(case.tokens, width), like.new_zeros(case.tokens, width)


def grouped_calls(case: Case, width: int, pool: WeightPool, number: int) -> KernelCalls:
    """PyTorch, one product per adapter at its true rank."""
    views = _views(case, width, pool, number)
    return _torch_calls(GroupedLoRA(segments_of(case), views.__getitem__), case, width, pool, number)


def padded_calls(case: Case, width: int, pool: WeightPool, number: int) -> KernelCalls:
    """PyTorch, batched products padded to the largest rank.

    Adapters are stored as in slots of that rank, so the kernel reads as much for a small adapter as for the
    largest, as BGMV does.
    """
    views = _views(replace(case, ranks=(max(case.ranks),) * len(case.ranks)), width, pool, number)
    adapters = PaddedLoRA(segments_of(case), views.__getitem__, pool.numbers.device)
    return _torch_calls(adapters, case, width, pool, number)


def _torch_calls(
    adapters: GroupedLoRA | PaddedLoRA, case: Case, width: int, pool: WeightPool, number: int
) -> KernelCalls:
    x, out = activations(case, width, pool)
    h = adapters.shrink(0, SITE, x)
    # Each kind takes what its own shrink returned.
    expand: Callable[..., None] = adapters.expand
    return KernelCalls(
        [partial(adapters.shrink, layer, SITE, x) for layer in range(number)],
        [partial(expand, layer, SITE, h, out) for layer in range(number)],
    )


def _views(case: Case, width: int, pool: WeightPool, layers: int) -> dict[int, list[list[SiteViews]]]:
    """Return each adapter's matrices by layer; those of one layer follow each other in memory, A before B."""
    views: dict[int, list[list[SiteViews]]] = {number: [] for number in range(1, len(case.ranks) + 1)}
    for _ in range(layers):
        shrinks = [Shrink(0, rank, pool.matrix(rank, width)) for rank in case.ranks]
        expands = [Expand(0, rank, 0, width, pool.matrix(rank, width)) for rank in case.ranks]
        for number, (shrink, expand) in enumerate(zip(shrinks, expands, strict=True)):
            views[number + 1].append([SiteViews(case.ranks[number], (shrink,), (expand,))])
    return views


def triton_calls(kind: Kind, case: Case, width: int, pool: WeightPool, number: int) -> KernelCalls:
    """One Triton kernel."""
    from capplan.engine.kernels import TritonLoRA

    layout = AdapterLayout(_square_model(width, number))
    tables = RowTables(layout, len(case.ranks), max(case.ranks), pool.numbers.device)
    padded = kind == "bgmv"
    for index, rank in enumerate(case.ranks):
        tables.number_of[index + 1] = index
        tables.max_rank_of[index] = rank
        tables.ranks[index, :, _O_PROJ] = rank
        for layer in range(number):
            for side in (A, B):
                rows = tables.rows[index, layer, GROUPS.index((_O_PROJ, side))]
                # A padded kernel reads rows beyond the rank, too, and each adapter has its own.
                held = rows.numel() if padded else rank
                first = pool.take(held, width)
                rows[:held] = first + width * torch.arange(held, device=rows.device)
    adapters = TritonLoRA(layout, tables, pool.numbers, segments_of(case), case.tokens, kind)
    x, out = activations(case, width, pool)
    return KernelCalls(
        [partial(adapters.shrink, layer, _OUT_SITE, x) for layer in range(number)],
        [partial(adapters.expand, layer, _OUT_SITE, out) for layer in range(number)],
    )


def _square_model(width: int, layers: int) -> ModelConfig:
    # Rows of all modules have one length, and so one alignment.
    sizes: dict[str, Any] = dict.fromkeys(("hidden_size", "head_dim", "intermediate_size"), width)
    sizes |= dict.fromkeys(("heads", "kv_heads", "vocab_size", "max_positions"), 1)
    return ModelConfig(name="square", layers=layers, **sizes)


MAKERS: Final[Mapping[str, MakeCalls]] = MappingProxyType(
    {
        "padded": padded_calls,
        "grouped": grouped_calls,
        **{kind: partial(triton_calls, kind) for kind in CUDA_KERNELS},
    }
)


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
    """Names of `capplan.profiling.kernels._measure.cases`."""
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
