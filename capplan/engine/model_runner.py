"""Model runner: kernel selection, forward pass of a step, CUDA graphs for decode steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple

import numpy as np
import torch

from capplan.engine.input_batch import Decodes, ModelInputs
from capplan.engine.kernels.cpu import CompiledAttention, CompiledLoRA, CompiledNorms
from capplan.engine.kernels.torch_lora import GroupedLoRA, PaddedLoRA
from capplan.engine.lora.adapter import AdapterLayout
from capplan.engine.lora.manager import LoRAManager
from capplan.engine.lora.memory import RowTables
from capplan.engine.models.config import ModelConfig
from capplan.engine.models.decoder import (
    Attention,
    KvCache,
    LoRALayers,
    Norms,
    RopeTable,
    TorchAttention,
    TorchNorms,
    forward,
)
from capplan.engine.models.weights import Weights
from capplan.engine.settings import EngineSettings
from capplan.serving import Limits


class ModelRunner:
    """A model with its KV cache.

    Parameters
    ----------
    attention, adapters, norms
        The choice of kernels; the first two are made for every step.

    Attributes
    ----------
    graphs
        Runs decode steps, where there is such.
    """

    def __init__(
        self,
        weights: Weights,
        cache: KvCache,
        attention: Callable[[ModelInputs], Attention],
        adapters: Callable[[ModelInputs], LoRALayers],
        norms: Norms,
    ) -> None:
        self._weights = weights
        self._cache = cache
        self._attention = attention
        self._adapters = adapters
        self._norms = norms
        self.graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def run(self, batch: ModelInputs) -> torch.Tensor:
        """Return the logits of the tokens `batch.sampled`, shape (requests, vocabulary).

        Keys and values of all tokens of the batch are in the cache afterwards.
        """
        with self._on_device():
            if batch.new_pages.numel():
                self._cache.pool.clear(batch.new_pages)
            if self.graphs is not None and self.graphs.take(batch):
                hidden = self.graphs.run(batch)
            else:
                uses_adapters = any(segment.adapter for segment in batch.segments)
                hidden = self.hidden(batch, self._adapters(batch) if uses_adapters else None)
            return self._weights.head(hidden[batch.sampled])

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture all graphs there are to be, rather than in the middle of serving."""
        if self.graphs is not None:
            with self._on_device():
                self.graphs.prepare()

    def _on_device(self) -> AbstractContextManager[object]:
        """Make the model's GPU the current one of this thread, which Triton and graphs go by."""
        device = self._cache.pool.tensor.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def hidden(self, batch: ModelInputs, adapters: LoRALayers | None) -> torch.Tensor:
        """Return the last hidden state of every token."""
        return forward(self._weights, batch.tokens, self._attention(batch), adapters, self._norms)


Forward = Callable[[ModelInputs, torch.Tensor | None], torch.Tensor]
"""Returns the hidden state of every token of a batch of decodes; these have adapters by number, if any."""

Replay = Callable[[], torch.Tensor]

_SIZES: Final = (1, 2, 4, *range(8, 64, 8), *range(64, 512, 16))
"""Numbers of requests that steps are padded to, as in vLLM with a finer grid in the middle."""


class _Static(NamedTuple):
    """The memory of one size, and what runs the model on it."""

    batch: ModelInputs
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

    def take(self, batch: ModelInputs) -> bool:
        """Tell whether a batch can be run here: decodes only."""
        return not batch.prefills and batch.tokens.shape[0] <= self._sizes[-1]

    def prepare(self) -> None:
        """Capture every graph now, the largest first: the others share its memory."""
        for size in reversed(self._sizes):
            for with_adapters in (True, False):
                self._known(size, with_adapters)

    def run(self, batch: ModelInputs) -> torch.Tensor:
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
        batch = ModelInputs(
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

    def _fill(self, static: _Static, batch: ModelInputs, requests: int) -> None:
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


def attention_factory(
    settings: EngineSettings, config: ModelConfig, cache: KvCache, rope: RopeTable
) -> Callable[[ModelInputs], Attention]:
    """Return what makes the attention of a step."""
    kernel = settings.chosen_attention(cache.pool.tensor.dtype)
    if kernel == "torch":
        return lambda batch: TorchAttention(config, cache, rope, batch)
    if kernel == "compiled":
        return lambda batch: CompiledAttention(config, cache, rope, batch)
    from capplan.engine.kernels.triton_attention import TritonAttention

    return lambda batch: TritonAttention(config, cache, rope, batch)


def norms_for(settings: EngineSettings, config: ModelConfig, dtype: torch.dtype) -> Norms:
    """Return the norms; they go with the kernel of attention."""
    compiled = settings.chosen_attention(dtype) == "compiled"
    return CompiledNorms(config.rms_eps) if compiled else TorchNorms(config.rms_eps)


def lora_factory(
    settings: EngineSettings, layout: AdapterLayout, residency: LoRAManager, tables: RowTables
) -> Callable[[ModelInputs], LoRALayers]:
    """Return what makes the adapters of a step; `tables` are what compiled kernels are told of adapters."""
    weights, views = residency.memory.storage, residency.views
    kernel = settings.chosen_lora_kernel(weights.dtype)
    if kernel == "grouped":
        return lambda batch: GroupedLoRA(batch.segments, views)
    if kernel == "padded":
        return lambda batch: PaddedLoRA(batch.segments, views, batch.tokens.shape[0], batch.tokens.device)
    residency.keep_tables(tables)
    if kernel == "compiled":
        return lambda batch: CompiledLoRA(
            layout, tables, weights, batch.segments, batch.tokens.shape[0], views
        )
    from capplan.engine.kernels.triton_lora import TritonLoRA

    kind = None if kernel == "triton" else kernel
    return lambda batch: TritonLoRA(layout, tables, weights, batch.segments, batch.tokens.shape[0], kind)


def decode_graphs(
    settings: EngineSettings,
    limits: Limits,
    layout: AdapterLayout,
    tables: RowTables,
    weights: torch.Tensor,
    cache: KvCache,
    runner: ModelRunner,
) -> DecodeGraphs | None:
    """Return what runs decode steps as graphs, where they are to."""
    if not settings.chosen_graphs(weights.dtype):
        return None
    from capplan.engine.kernels.triton_lora import TokenLoRA

    def forward(batch: ModelInputs, numbers: torch.Tensor | None) -> torch.Tensor:
        adapters = None
        if numbers is not None:
            adapters = TokenLoRA(layout, tables, weights, numbers, tables.max_rank)
        return runner.hidden(batch, adapters)

    return DecodeGraphs(
        forward,
        CudaCapture() if weights.device.type == "cuda" else lambda run: run,
        tables.number_of,
        limits.max_num_seqs,
        -(-limits.max_model_len // limits.block_size),
        cache.pool.dump_page,
        weights.device,
    )
