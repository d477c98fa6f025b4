"""Decode steps as CUDA graphs: one launch instead of hundreds, which cost the host more than the GPU.

A graph replays kernels on the very memory that it was captured with. So a step's batch is copied into tensors
that stay in place, padded to one of a few numbers of requests; what pads it reads and writes a page that
nobody else reads. Kernels that depend on more than those tensors' contents cannot be captured: adapters run
token by token at true ranks, whichever are in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np
import torch

from capplan.engine.batch import Batch, Decodes

Forward = Callable[[Batch, torch.Tensor | None], torch.Tensor]
"""Returns the hidden state of every token of a batch of decodes; these have adapters by number, if any."""
Replay = Callable[[], torch.Tensor]

_SIZES: Final = (1, 2, 4, *range(8, 64, 8), *range(64, 512, 16))
"""Numbers of requests that steps are padded to, as in vLLM with a finer grid in the middle."""


class _Static(NamedTuple):
    """The memory of one size, and what runs the model on it."""

    batch: Batch
    decodes: Decodes
    numbers: torch.Tensor | None
    replay: Replay


class DecodeGraphs:
    """Graphs by number of requests, captured by `prepare` or when first needed.

    Parameters
    ----------
    forward
        The model.
    capture
        Makes a graph of a function, or returns it as it is where there are none.
    number_of
        Adapter to its number in the tables of the kernels; kept up to date by others.
    most_requests, most_blocks
        Of one step, and of one request.
    dump_page
        The page that padding reads and writes.
    device
        Where the model is.
    """

    def __init__(
        self,
        forward: Forward,
        capture: Callable[[Replay], Replay],
        number_of: Mapping[int, int],
        most_requests: int,
        most_blocks: int,
        dump_page: int,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._capture = capture
        self._number_of = number_of
        self._sizes = [size for size in _SIZES if size < most_requests] + [most_requests]
        self._most_blocks = most_blocks
        self._dump_page = dump_page
        self._device = device
        self._static: dict[tuple[int, bool], _Static] = {}

    def take(self, batch: Batch) -> bool:
        """Tell whether a batch can be run here: decodes only."""
        return not batch.prefills and batch.tokens.shape[0] <= self._sizes[-1]

    def prepare(self) -> None:
        """Capture every graph now, the largest first: the others share its memory."""
        for size in reversed(self._sizes):
            for with_adapters in (True, False):
                self._known(size, with_adapters)

    def run(self, batch: Batch) -> torch.Tensor:
        """Return the hidden state of every token; valid until the next run."""
        requests = batch.tokens.shape[0]
        size = next(size for size in self._sizes if size >= requests)
        static = self._known(size, any(segment.adapter for segment in batch.segments))
        self._fill(static, batch, requests)
        return static.replay()[:requests]

    def _known(self, size: int, with_adapters: bool) -> _Static:
        key = size, with_adapters
        if key not in self._static:
            self._static[key] = self._new(*key)
        return self._static[key]

    def _new(self, size: int, with_adapters: bool) -> _Static:
        def filled(value: int, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=self._device)

        decodes = Decodes(
            at=torch.arange(size, device=self._device),
            context=filled(1, size),
            pages=filled(self._dump_page, size, self._most_blocks),
        )
        nothing = np.zeros(0, np.int64)
        batch = Batch(
            tokens=filled(0, size),
            positions=filled(0, size),
            pages=filled(self._dump_page, size),
            places=filled(0, size),
            new_pages=filled(0, 0),
            decodes=decodes,
            prefills=(),
            segments=(),
            sampled=decodes.at,
            rows=nothing,
            next_positions=nothing,
        )
        numbers = torch.full((size,), -1, dtype=torch.int32, device=self._device) if with_adapters else None
        return _Static(batch, decodes, numbers, self._capture(lambda: self._forward(batch, numbers)))

    def _fill(self, static: _Static, batch: Batch, requests: int) -> None:
        if batch.decodes is None:
            raise RuntimeError("a step without decodes")
        for own, value, padding in (
            (static.batch.tokens, batch.tokens, 0),
            (static.batch.positions, batch.positions, 0),
            (static.batch.pages, batch.pages, self._dump_page),
            (static.batch.places, batch.places, 0),
            (static.decodes.context, batch.decodes.context, 1),
        ):
            own[:requests].copy_(value)
            own[requests:].fill_(padding)
        blocks = batch.decodes.pages.shape[1]
        static.decodes.pages[:requests, :blocks].copy_(batch.decodes.pages)
        static.decodes.pages[requests:, 0] = self._dump_page
        if static.numbers is not None:
            numbers = np.full(static.numbers.shape[0], -1, np.int32)
            for segment in batch.segments:
                numbers[segment.start : segment.end] = self._number_of.get(segment.adapter, -1)
            static.numbers.copy_(torch.from_numpy(numbers))


class CudaCapture:
    """Captures functions as CUDA graphs, which share the memory for what lies between: one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Replay) -> Replay:
        """Return what replays a function."""
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            for _ in range(2):  # kernels are compiled and libraries set up before anything is recorded
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Adapters are copied by another thread meanwhile, which is none of this graph's business.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
