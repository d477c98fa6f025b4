"""Kernel calls on a batch and their timing, on a CPU or a GPU."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from capplan.engine.input_batch import Segment
from capplan.engine.kernels.torch_lora import GroupedLoRA, PaddedLoRA
from capplan.engine.lora.adapter import GROUPS, A, AdapterLayout, B
from capplan.engine.lora.memory import Expand, RowTables, Shrink, SiteViews
from capplan.engine.models.config import ModelConfig
from capplan.profiling.kernels.cases import Case, KernelTiming

if TYPE_CHECKING:
    from capplan.engine.kernels.triton_lora import Kind

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
        """See `KernelClock`."""
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
        """Return the offset of the next matrix.

        Raises
        ------
        ValueError
            If it is larger than the pool.
        """
        size = rows * width
        if size > self.numbers.numel():
            raise ValueError(f"a matrix of {size} numbers from a pool of {self.numbers.numel()}")
        if self._next + size > self.numbers.numel():
            self._next = 0
        at = self._next
        self._next += size
        return at

    def matrix(self, rows: int, width: int) -> torch.Tensor:
        """Return the next matrix."""
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


class TritonCalls:
    """Maker of the calls of one Triton kernel."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def __call__(self, case: Case, width: int, pool: WeightPool, number: int) -> KernelCalls:
        """See `MakeCalls`."""
        from capplan.engine.kernels.triton_lora import TritonLoRA  # CPU-only machines lack Triton

        layout = AdapterLayout(_square_model(width, number))
        tables = RowTables(layout, len(case.ranks), max(case.ranks), pool.numbers.device)
        padded = self._kind == "bgmv"
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
        adapters = TritonLoRA(layout, tables, pool.numbers, segments_of(case), case.tokens, self._kind)
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
    {"padded": padded_calls, "grouped": grouped_calls, **{kind: TritonCalls(kind) for kind in CUDA_KERNELS}}
)
