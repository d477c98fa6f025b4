"""Times of the cores and of the device, measured on this machine, and the groups of layers that follow.

Source: Toppings, sections 4.1 and 4.2 (profiling-guided parallelization).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.assist._board import Task
from capplan.engine.assist._crew import Crew
from capplan.engine.lora._adapter import SITES, AdapterLayout
from capplan.engine.models import Weights
from capplan.serving.pooled import LayerTimes, layer_groups

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
