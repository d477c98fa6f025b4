"""Kernel calls on a batch and their timing, on a CPU or a GPU."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

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
HALVES: Final = ("shrink", "expand")
_OUT_SITE: Final = 1
_O_PROJ: Final = 3  # alone in its place, from the width of all heads to the hidden size: both `width` here


class KernelClock(Protocol):
    """Timer of equal calls."""

    def time(self, calls: Sequence[Callable[[], object]]) -> KernelTiming:
        """Run all calls and return the median time of all but the first, which warms up."""
        ...


class CpuClock:
    """Timer of single calls; interrupted calls do not count.

    A call is interrupted if the process left a core (``ru_nivcsw``). If all calls of a pass were, their time
    on the core replaces it: with one thread, the undisturbed time except for cache effects.
    """

    def time(self, calls: Sequence[Callable[[], object]]) -> KernelTiming:
        """See `KernelClock`."""
        calls[0]()
        whole, on_core = [], []
        for call in calls[1:]:
            switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            start_on_core, start = time.thread_time_ns(), time.perf_counter_ns()
            call()
            taken_ns, core_ns = time.perf_counter_ns() - start, time.thread_time_ns() - start_on_core
            if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == switches:
                whole.append(taken_ns)
            elif torch.get_num_threads() == 1:
                on_core.append(core_ns)
            else:
                on_core.append(taken_ns)
        return KernelTiming(float(np.median(whole or on_core)) / 1000.0, not whole)


class CudaClock:
    """Timer with CUDA events around each call; the L2 cache is overwritten between calls.

    The host issues the call during the overwriting, so that launch latency is not measured.
    """

    def __init__(self, device: torch.device) -> None:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._dirt = torch.empty(
            max(_FLUSHES * l2_bytes, _LEAST_FLUSH_BYTES), dtype=torch.int8, device=device
        )

    def time(self, calls: Sequence[Callable[[], object]]) -> KernelTiming:
        """See `KernelClock`."""
        calls[0]()
        marks = []
        for call in calls[1:]:
            self._dirt.zero_()
            begin, end = _event(), _event()
            begin.record()
            call()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize(self._dirt.device)
        return KernelTiming(
            float(np.median([begin.elapsed_time(end) for begin, end in marks])) * 1000.0, False
        )


def _event() -> Any:
    make: Any = torch.cuda.Event
    return make(enable_timing=True)


class WeightPool:
    """Circular pool of weights, much larger than the caches.

    Weights of a call come from memory, as those of a model's next layer do. A batch larger than the pool
    reads some of it twice.
    """

    def __init__(self, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        # Neither zeros, which some memories compress, nor many different numbers, whose making takes long.
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


class MakeCalls(Protocol):
    """Makes calls of a kernel on a case."""

    def __call__(self, case: Case, width: int, pool: WeightPool, number: int) -> KernelCalls:
        """Return `number` calls of each half for adapters on a linear map from `width` to `width`."""
        ...


def segments_of(case: Case) -> list[Segment]:
    """Return the tokens of each adapter; adapters count from 1."""
    each = case.requests_each * case.tokens_each
    return [Segment(at + 1, at * each, (at + 1) * each) for at in range(len(case.ranks))]


def activations(case: Case, width: int, pool: WeightPool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and the output that the adapters add to; both stay in the caches, as they do in a step."""
    like = pool.numbers
    ramp = torch.linspace(-1.0, 1.0, case.tokens * width, device=like.device).to(like.dtype)
    return ramp.view(case.tokens, width), like.new_zeros(case.tokens, width)


def grouped_calls(case: Case, width: int, pool: WeightPool, number: int) -> KernelCalls:
    """PyTorch, one product per adapter at its true rank."""
    views = _views(case, width, pool, number)
    return _torch_calls(GroupedLoRA(segments_of(case), views.__getitem__), case, width, pool, number)


def padded_calls(case: Case, width: int, pool: WeightPool, number: int) -> KernelCalls:
    """PyTorch, batched products padded to the largest rank.

    Adapters lie as in slots of that rank, where the rows beyond their own are there and hold zeros. So the
    kernel reads as much for a small one as for the largest, which is what BGMV does.
    """
    views = _views(replace(case, ranks=(max(case.ranks),) * len(case.ranks)), width, pool, number)
    adapters = PaddedLoRA(segments_of(case), views.__getitem__, pool.numbers.device)
    return _torch_calls(adapters, case, width, pool, number)


def _torch_calls(
    adapters: GroupedLoRA | PaddedLoRA, case: Case, width: int, pool: WeightPool, number: int
) -> KernelCalls:
    x, out = activations(case, width, pool)
    h = adapters.shrink(0, SITE, x)
    # What is called is chosen above once: both kinds take back what their own shrink returned.
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
        for number, (rank, shrink, expand) in enumerate(
            zip(case.ranks, shrinks, expands, strict=True), start=1
        ):
            views[number].append([SiteViews(rank, (shrink,), (expand,))])
    return views


class TritonCalls:
    """Makes calls of one Triton kernel."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def __call__(self, case: Case, width: int, pool: WeightPool, number: int) -> KernelCalls:
        """See `MakeCalls`."""
        from capplan.engine.kernels.triton_lora import (
            TritonLoRA,  # needs Triton, which CPU-only machines lack
        )

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
    return ModelConfig(
        name="square",
        layers=layers,
        hidden_size=width,
        heads=1,
        kv_heads=1,
        head_dim=width,
        intermediate_size=1,
        vocab_size=1,
        max_positions=1,
    )
