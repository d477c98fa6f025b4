"""Adapters of a batch of prompts in which an adapter is still being copied to the device.

Of these, the cores compute the layers that are not there. Before each linear map of the base model its
activations go to the board; the device computes the map meanwhile, and adds the cores' results to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from capplan.engine._input_batch import ModelInputs, Segment
from capplan.engine.assist._board import Task
from capplan.engine.assist._crew import CoreTimes, Crew
from capplan.engine.kernels._torch_lora import GroupedLoRA
from capplan.engine.lora._adapter import SITES, A, B, group_number
from capplan.engine.lora._manager import LoRAManager
from capplan.engine.models._decoder import LoRALayers


class _Posted(NamedTuple):
    """A round that is not collected yet."""

    number: int
    site: int
    segments: list[Segment]
    cores: list[int]


class AssistedLoRA(LoRALayers):
    """Adapters of one batch; call `begin` before and `add` after each linear map of the base model.

    `others` are the kernels of the adapters that are on the device, None: there are none; `cold` the tokens
    of the rest. `cores` can have tasks, of at most `tokens_per_task` tokens.
    """

    def __init__(
        self,
        others: LoRALayers | None,
        cold: Sequence[Segment],
        lora: LoRAManager,
        crew: Crew,
        cores: Sequence[int],
        tokens_per_task: int,
    ) -> None:
        self._others = others
        self._cold = cold
        self._lora = lora
        self._crew = crew
        self._cores = list(cores)
        self._tokens_per_task = tokens_per_task
        shared = {segment.adapter for segment in cold if lora.is_shared(segment.adapter)}
        self._starts = {adapter: lora.shared_starts(adapter) for adapter in shared}
        self._posted: _Posted | None = None
        self._layer = -1
        self._on_cpu: list[Segment] = []
        self._on_device: list[Segment] = []

    def begin(self, layer: int, site: int, x: torch.Tensor) -> None:
        """Give the tokens whose layer is not on the device to the cores."""
        if layer != self._layer:
            self._choose(layer)
        self._posted = None
        if self._on_cpu:
            self._posted = self._post(layer, site, x)

    def add(self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the low-rank product of each token of `x` to `out`."""
        if self._others is not None:
            self._others.add(layer, site, x, out)
        on_device = list(self._on_device)
        if self._posted is not None:
            on_device += self._collect(layer, self._posted, out)
        if on_device:
            GroupedLoRA(on_device, self._lora.views).add(layer, site, x, out)

    def _choose(self, layer: int) -> None:
        """Decide where a layer is computed: on the device if it has been copied."""
        self._layer = layer
        self._on_cpu, self._on_device = [], []
        for segment in self._cold:
            copied = self._lora.is_copied(segment.adapter, layer)
            if not copied and (not self._cores or segment.adapter not in self._starts):
                self._lora.wait_for_layer(segment.adapter, layer)
                copied = True
            (self._on_device if copied else self._on_cpu).append(segment)

    def _post(self, layer: int, site: int, x: torch.Tensor) -> _Posted | None:
        tasks: list[Task] = []
        first = 0
        for segment in self._on_cpu:
            rows = segment.end - segment.start
            tasks += self._tasks_of(segment.adapter, layer, site, first, rows, len(tasks))
            first += rows
        if not tasks:
            return None
        activations = [x[segment.start : segment.end] for segment in self._on_cpu]
        if x.device.type == "cuda":
            number = self._crew.post_from(activations, tasks)
        else:
            torch.cat(activations, out=self._crew.board.x(first, x.shape[1]))
            number = self._crew.post(tasks)
        cores = sorted({task.core for task in tasks})
        return _Posted(number, site, list(self._on_cpu), cores)

    def _tasks_of(
        self, adapter: int, layer: int, site: int, first: int, rows: int, before: int
    ) -> list[Task]:
        """Return the tasks of a prompt: slices of its tokens, by module."""
        tasks: list[Task] = []
        layout, step = self._lora.layout, self._tokens_per_task
        ranks, starts = self._lora.ranks(adapter), self._starts[adapter]
        for module in SITES[site]:
            rank = int(ranks[layer, module])
            if rank == 0:
                continue
            a, b = (int(starts[group_number(layer, module, side)]) for side in (A, B))
            inputs, outputs = layout.sizes[module]
            for at in range(0, rows, step):
                core = self._cores[(before + len(tasks)) % len(self._cores)]
                size, column = min(step, rows - at), layout.out_starts[module]
                tasks.append(Task(core, first + at, size, inputs, a, b, rank, outputs, column))
        return tasks

    def _collect(self, layer: int, posted: _Posted, out: torch.Tensor) -> list[Segment]:
        """Add the cores' results to `out`; return the tokens that the device must compute instead."""
        late = self._crew.finish(posted.number, posted.cores)
        if late:
            self._cores = [core for core in self._cores if core not in late]
            for segment in posted.segments:
                self._lora.wait_for_layer(segment.adapter, layer)
            self._choose(layer)
            return posted.segments
        board = self._crew.board
        rows = sum(segment.end - segment.start for segment in posted.segments)
        results, at = board.out(rows, board.shape.outputs), 0
        for segment in posted.segments:
            size = segment.end - segment.start
            for columns in self._columns_of(segment.adapter, layer, posted.site):
                # The cores write the next results after the stream has copied these: it begins their round.
                own = results[at : at + size, columns].to(out.device, non_blocking=True)
                out[segment.start : segment.end, columns] += own
            at += size
        return []

    def _columns_of(self, adapter: int, layer: int, site: int) -> list[slice]:
        """Return the columns of the modules that an adapter changes."""
        layout, ranks = self._lora.layout, self._lora.ranks(adapter)
        starts = layout.out_starts
        return [
            slice(starts[module], starts[module] + layout.sizes[module][B])
            for module in SITES[site]
            if ranks[layer, module]
        ]


class Assistance:
    """Adapters of steps that begin before all of them are copied.

    Parameters
    ----------
    plain
        Factory of the kernels of adapters that are on the device.
    times
        With the size of tasks.
    """

    def __init__(
        self, plain: Callable[[ModelInputs], LoRALayers], lora: LoRAManager, crew: Crew, times: CoreTimes
    ) -> None:
        self.crew = crew
        self.times = times
        self._plain = plain
        self._lora = lora

    def is_needed(self, inputs: ModelInputs) -> bool:
        """Return whether an adapter of a step is being copied."""
        return any(self._lora.is_copying(segment.adapter) for segment in inputs.segments)

    @contextmanager
    def adapters(self, inputs: ModelInputs) -> Iterator[LoRALayers]:
        """Yield the adapters of a step, while the cores poll for tasks."""
        cold = [segment for segment in inputs.segments if self._lora.is_copying(segment.adapter)]
        warm = tuple(
            segment._replace(adapter=0) if segment in cold else segment for segment in inputs.segments
        )
        has_others = any(segment.adapter for segment in warm)
        others = self._plain(inputs._replace(segments=warm)) if has_others else None
        with self.crew.working() as cores:
            yield AssistedLoRA(others, cold, self._lora, self.crew, cores, self.times.tokens_per_task)
