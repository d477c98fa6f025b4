"""Batches of prompts whose adapters are still being copied: CPU cores compute the layers that are missing.

Progress is by layer: a layer takes its time on the GPU, or that of its tasks on the CPU cores if it is
longer, and the signals between the two.

Source: Toppings, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import by_reference, inner
from capplan.errors import InputError
from capplan.serving import State
from capplan.serving.pooled import LayerTimes, copied_before, first_group
from capplan.serving.state import LOADING
from capplan.spec import LORA_MODULES, Cache, Profile


@by_reference
class CpuAssist(NamedTuple):
    """CPU cores and the tasks of each adapter; `layers` is 0 without assistance."""

    layers: int
    workers: int
    tokens_per_task: int
    base_ns: int
    """Of a task beside its products."""
    signal_ns: int
    """Of a layer with tasks."""
    token_ns: NDArray[np.float64]
    """Products of one token in the longest task of a layer, by adapter, shape (adapters + 1,)."""
    modules: NDArray[np.int64]
    """Adapted projections of a layer, same shape."""


NO_ASSIST = CpuAssist(0, 0, 1, 0, 0, np.zeros(0), np.zeros(0, np.int64))


def cpu_assist(
    profile: Profile, cache: Cache | None, adapters: Sequence[tuple[int, Sequence[str] | None]]
) -> CpuAssist:
    """Return the cores that assist loading of adapters, given by rank and linear layers (None: the engine's).

    It has no layers unless the cache says so (None: it does not). Raise `InputError` for assisted loading by
    a profile that does not know the CPU.
    """
    if cache is None or cache.loading != "assisted":
        return NO_ASSIST
    cores = profile.cpu_lora
    if cores is None:
        rule = f"needs cpu_lora in profile {profile.name}: `capplan profile cpu-lora` measures it"
        raise InputError(rule, cache.loading, "cache.loading")
    every = profile.engine.target_modules or LORA_MODULES
    # Cores take part in the layers alone.
    widths = zip(LORA_MODULES, profile.model.module_sizes[: len(LORA_MODULES)], strict=True)
    sizes = {name: ins + outs / profile.tp for name, (ins, outs) in widths}
    shapes = [(rank, modules or every) for rank, modules in adapters]
    macs = [rank * max(sizes[name] for name in modules) for rank, modules in shapes]
    return CpuAssist(
        layers=profile.model.layers,
        workers=cache.cpu_workers or cores.workers,
        tokens_per_task=cores.tokens_per_task,
        base_ns=round(cores.task_base_ms * 1e6),
        signal_ns=round(cores.signal_ms * 1e6),
        token_ns=np.array([0.0, *macs]) * cores.ms_per_mmac,  # 1e6 ns per ms, and multiplications per million
        modules=np.array([0, *(len(modules) for _, modules in shapes)], np.int64),
    )


@inner
def layers_on_cpu(assist: CpuAssist, adapter: int, tokens: int, load_ns: int, step_ns: int) -> int:
    """Return the layers of a prompt's adapter that the CPU is to compute, which are copied last."""
    return first_group(assist.layers, _times(assist, adapter, tokens, load_ns, step_ns))


@inner
def assisted_ns(
    state: State,
    assist: CpuAssist,
    load_ns: NDArray[np.int64],
    ready_ns: NDArray[np.int64],
    on_cpu: NDArray[np.int64],
    begin_ns: int,
    step_ns: int,
) -> int:
    """Return the duration of a batch of prompts that begins before its adapters are copied.

    `load_ns`, `ready_ns` and `on_cpu`, shape (adapters + 1,), are duration and end of the copy of each
    adapter, and its `layers_on_cpu`. The batch begins at `begin_ns`, and takes `step_ns` with all adapters on
    the GPU.
    """
    layers, now_ns = assist.layers, begin_ns
    for layer in range(layers):
        layer_ns = step_ns * (layer + 1) // layers - step_ns * layer // layers
        tasks = longest_ns = 0
        for i in range(state.counters.n_partial):
            row = state.lists.partial[i]
            adapter, tokens = state.rows.adapter[row], state.rows.tokens[row]
            if tokens == 0 or state.adapters.claim[adapter] != LOADING:
                continue
            times = _times(assist, adapter, tokens, load_ns[adapter], step_ns)
            copied = copied_before(layers, on_cpu[adapter], times, layer)
            if ready_ns[adapter] - load_ns[adapter] + load_ns[adapter] * copied // layers > now_ns:
                tasks += _tasks(assist, adapter, tokens)
                longest_ns = max(longest_ns, _task_ns(assist, adapter, tokens))
        if tasks > 0:
            layer_ns = max(layer_ns, _rounds(assist, tasks) * longest_ns) + assist.signal_ns
        now_ns += layer_ns
    return int(now_ns - begin_ns)


@inner
def _tasks(assist: CpuAssist, adapter: int, tokens: int) -> int:
    """Return the tasks of a prompt in one layer."""
    return int(assist.modules[adapter] * -(-tokens // assist.tokens_per_task))


@inner
def _task_ns(assist: CpuAssist, adapter: int, tokens: int) -> int:
    """Return the duration of the longest task of a prompt."""
    return int(assist.base_ns + round(min(tokens, assist.tokens_per_task) * assist.token_ns[adapter]))


@inner
def _rounds(assist: CpuAssist, tasks: int) -> int:
    """Return how many tasks the busiest core has."""
    return int(-(-tasks // assist.workers))


@inner
def _times(assist: CpuAssist, adapter: int, tokens: int, load_ns: int, step_ns: int) -> LayerTimes:
    """Return the times of a layer for a prompt that has the cores to itself."""
    gpu_ns = step_ns // assist.layers
    tasks_ns = _rounds(assist, _tasks(assist, adapter, tokens)) * _task_ns(assist, adapter, tokens)
    return LayerTimes(max(gpu_ns, tasks_ns) + assist.signal_ns, gpu_ns, load_ns // assist.layers)
