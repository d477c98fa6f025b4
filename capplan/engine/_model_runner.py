"""Model runner: kernel selection, forward pass of a step, CUDA graphs for decode steps.

A CUDA graph replays kernels on the memory that it was captured with. The inputs of a decode step are copied
into static tensors, padded to one of a few numbers of requests; padding reads and writes the dump page.
Kernels that depend on more than the contents of these tensors cannot be captured: tiles of tokens of an
adapter are found on the GPU, within the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine._input_batch import Decodes, ModelInputs, StepInputs
from capplan.engine._pool import KvCache
from capplan.engine._settings import EngineOptions
from capplan.engine.assist._lora import Assistance
from capplan.engine.kernels._cpu import CompiledAttention, CompiledLoRA, CompiledPointwise
from capplan.engine.kernels._torch_lora import GroupedLoRA, PaddedLoRA
from capplan.engine.lora._manager import LoRAManager
from capplan.engine.lora._memory import RowTables
from capplan.engine.models._config import ModelConfig
from capplan.engine.models._decoder import LoRALayers, Pointwise, RopeTable, TorchAttention, forward
from capplan.engine.models._weights import Weights
from capplan.engine.parallel._group import Collectives
from capplan.serving import Limits

if TYPE_CHECKING:
    from capplan.engine.kernels import Kind

GraphForward = Callable[[ModelInputs, torch.Tensor, "Kind | None"], torch.Tensor]
"""Hidden states of a batch of decodes, of each token's row in the adapter tables, and of the kind of LoRA
kernels, None without adapters.
"""
Replay = Callable[[], torch.Tensor]

_GRAPH_SIZES: Final = (1, 2, 4, *range(8, 64, 8), *range(64, 512, 16))
"""Padded numbers of requests, as in vLLM with a finer grid in the middle."""


class Runner(Protocol):
    """Runs the steps of an engine."""

    def run(self, step: StepInputs) -> torch.Tensor:
        """Store the KV of all tokens; return the logits of `step.sampled`, shape (requests, vocabulary)."""
        ...

    def logits(self, at: NDArray[np.int64]) -> torch.Tensor:
        """Return the logits of some tokens of the last step, shape (tokens, vocabulary)."""
        ...

    def capture_graphs(self) -> None:
        """Capture all graphs before serving."""
        ...


class ModelRunner:
    """A model, or one rank's part of it, with its KV cache and kernels.

    Parameters
    ----------
    attention, adapters
        Factories of the kernels of one step.

    Attributes
    ----------
    adapters
        Factory of the kernels of adapters on the device.
    graphs
        CUDA graphs of decode steps; None: decode steps run eagerly.
    assistance
        CPU cores that compute for adapters being copied; None: there are none.
    """

    def __init__(
        self,
        weights: Weights,
        cache: KvCache,
        attention: Callable[[ModelInputs], TorchAttention],
        adapters: Callable[[ModelInputs], LoRALayers],
        pointwise: Pointwise,
        collectives: Collectives,
    ) -> None:
        self._weights = weights
        self._pool = cache.pool
        self._attention = attention
        self.adapters = adapters
        self._pointwise = pointwise
        self._collectives = collectives
        self._device = cache.pool.tensor.device
        self._hidden: torch.Tensor | None = None
        self.graphs: DecodeGraphs | None = None
        self.assistance: Assistance | None = None

    @torch.inference_mode()
    def run(self, step: StepInputs) -> torch.Tensor:
        """Store the KV of all tokens; return the logits of `step.sampled`, shape (requests, vocabulary)."""
        with self._on_device():
            inputs = step.on(self._device)
            if inputs.new_pages.numel():
                self._pool.clear(inputs.new_pages)
            if self.graphs is not None and self.graphs.can_run(inputs):
                hidden = self.graphs.run(inputs)
            elif self.assistance is not None and self.assistance.is_needed(inputs):
                with self.assistance.adapters(inputs) as adapters:
                    hidden = self.hidden(inputs, adapters)
            else:
                uses_adapters = any(segment.adapter for segment in inputs.segments)
                hidden = self.hidden(inputs, self.adapters(inputs) if uses_adapters else None)
            self._hidden = hidden
            return self._logits(hidden[inputs.sampled])

    @torch.inference_mode()
    def logits(self, at: NDArray[np.int64]) -> torch.Tensor:
        """Return the logits of some tokens of the last step, shape (tokens, vocabulary)."""
        if self._hidden is None:
            raise RuntimeError("no step has run")
        with self._on_device():
            return self._logits(self._hidden[torch.from_numpy(at).to(self._device)])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._collectives.all_gather(self._weights.head(hidden))
        return logits[:, : self._weights.vocab_size]

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture all graphs before serving."""
        if self.graphs is not None:
            with self._on_device():
                self.graphs.capture_all()

    @torch.inference_mode()
    def graph_bytes(self, held: Callable[[Callable[[], object]], int]) -> int:
        """Return the memory of all graphs, estimated from the largest ones, which are captured.

        Parameters
        ----------
        held
            Runs a function and returns the bytes that it leaves allocated.
        """
        if self.graphs is None:
            return 0
        with self._on_device():
            return self.graphs.measure(held)

    def _on_device(self) -> AbstractContextManager[object]:
        """Make the model's GPU the current one of this thread, as Triton and CUDA graphs require."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def hidden(self, inputs: ModelInputs, adapters: LoRALayers | None) -> torch.Tensor:
        """Return the last hidden state of every token."""
        attention = self._attention(inputs)
        return forward(self._weights, inputs.tokens, attention, adapters, self._pointwise, self._collectives)


class _StaticInputs(NamedTuple):
    inputs: ModelInputs
    decodes: Decodes
    numbers: torch.Tensor
    """Row of each token in the adapter tables, -1 without one."""
    host_numbers: torch.Tensor
    """In pinned memory; not overwritten before the step's logits are back."""
    replay: Replay


class DecodeGraphs:
    """CUDA graphs of decode steps by number of requests, captured on first use or by `capture_all`.

    Parameters
    ----------
    forward
        The model.
    capture
        Captures a graph of a function; on the CPU it returns the function itself.
    kind_of
        Kind of LoRA kernels by tokens with an adapter, and adapters.
    number_of
        Adapter to its row in the adapter tables.
    max_requests, max_blocks
        Of one step, and of one request.
    dump_page
        Page that padding reads and writes.
    """

    def __init__(
        self,
        forward: GraphForward,
        capture: Callable[[Replay], Replay],
        kind_of: Callable[[int, int], Kind],
        number_of: Mapping[int, int],
        max_requests: int,
        max_blocks: int,
        dump_page: int,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._capture = capture
        self._kind_of = kind_of
        self._number_of = number_of
        self._sizes = [size for size in _GRAPH_SIZES if size < max_requests] + [max_requests]
        self._max_blocks = max_blocks
        self._dump_page = dump_page
        self._device = device
        self._static: dict[tuple[int, Kind | None], _StaticInputs] = {}

    def can_run(self, inputs: ModelInputs) -> bool:
        """Return whether a step has decodes only."""
        return not inputs.prefills and inputs.tokens.shape[0] <= self._sizes[-1]

    def capture_all(self) -> None:
        """Capture every graph, the largest first: the others share its memory."""
        for key in self._keys():
            self._captured(*key)

    def measure(self, held: Callable[[Callable[[], object]], int]) -> int:
        """Return the bytes of all graphs: of the largest one, and of the others as much as of the second.

        Graphs share the memory of their tensors, which the largest one needs most of.
        """
        first, second, *others = self._keys()
        first_bytes = held(lambda: self._captured(*first))
        return first_bytes + (1 + len(others)) * held(lambda: self._captured(*second))

    def _keys(self) -> list[tuple[int, Kind | None]]:
        """Return sizes and kinds of all graphs: with tokens of one adapter, of one each, and of none."""
        return [
            (size, kind)
            for size in reversed(self._sizes)
            for kind in dict.fromkeys((self._kind_of(size, 1), self._kind_of(size, size), None))
        ]

    def run(self, inputs: ModelInputs) -> torch.Tensor:
        """Return the hidden state of every token, valid until the next run."""
        requests = inputs.tokens.shape[0]
        size = next(size for size in self._sizes if size >= requests)
        tokens = [segment.end - segment.start for segment in inputs.segments if segment.adapter]
        static = self._captured(size, self._kind_of(sum(tokens), len(tokens)) if tokens else None)
        self._fill(static, inputs, requests)
        return static.replay()[:requests]

    def _captured(self, size: int, kind: Kind | None) -> _StaticInputs:
        key = size, kind
        if key not in self._static:
            self._static[key] = self._new(*key)
        return self._static[key]

    def _new(self, size: int, kind: Kind | None) -> _StaticInputs:
        def filled(value: int, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=self._device)

        decodes = Decodes(
            at=torch.arange(size, device=self._device),
            context=filled(1, size),
            pages=filled(self._dump_page, size, self._max_blocks),
        )
        inputs = ModelInputs(
            tokens=filled(0, size),
            positions=filled(0, size),
            pages=filled(self._dump_page, size),
            offsets=filled(0, size),
            new_pages=filled(0, 0),
            decodes=decodes,
            prefills=(),
            segments=(),
            sampled=decodes.at,
        )
        numbers = torch.full((size,), -1, dtype=torch.int32, device=self._device)
        host_numbers = torch.empty(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        replay = self._capture(lambda: self._forward(inputs, numbers, kind))
        return _StaticInputs(inputs, decodes, numbers, host_numbers, replay)

    def _fill(self, static: _StaticInputs, inputs: ModelInputs, requests: int) -> None:
        if inputs.decodes is None:
            raise RuntimeError("a step without decodes")
        for own, value, padding in (
            (static.inputs.tokens, inputs.tokens, 0),
            (static.inputs.positions, inputs.positions, 0),
            (static.inputs.pages, inputs.pages, self._dump_page),
            (static.inputs.offsets, inputs.offsets, 0),
            (static.decodes.context, inputs.decodes.context, 1),
        ):
            own[:requests].copy_(value)
            own[requests:].fill_(padding)
        blocks = inputs.decodes.pages.shape[1]
        static.decodes.pages[:requests, :blocks].copy_(inputs.decodes.pages)
        static.decodes.pages[requests:, 0] = self._dump_page
        if any(segment.adapter for segment in inputs.segments):
            numbers = static.host_numbers.numpy()
            numbers[:] = -1
            for segment in inputs.segments:
                numbers[segment.start : segment.end] = self._number_of.get(segment.adapter, -1)
            static.numbers.copy_(static.host_numbers, non_blocking=True)


class CudaCapture:
    """Captures functions as CUDA graphs that share one memory pool; one replays at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Replay) -> Replay:
        """Return the replay of a function."""
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            for _ in range(2):  # compile kernels and initialise libraries before the capture
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Thread-local: another thread copies adapters meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


def attention_factory(
    options: EngineOptions, config: ModelConfig, cache: KvCache, rope: RopeTable
) -> Callable[[ModelInputs], TorchAttention]:
    """Return the attention backend factory."""
    kernel = options.chosen_attention(cache.pool.tensor.dtype)
    if kernel == "torch":
        return lambda inputs: TorchAttention(config, cache, rope, inputs)
    if kernel == "compiled":
        return lambda inputs: CompiledAttention(config, cache, rope, inputs)
    from capplan.engine.kernels._triton_attention import TritonAttention

    return lambda inputs: TritonAttention(config, cache, rope, inputs)


def pointwise_for(options: EngineOptions, config: ModelConfig, dtype: torch.dtype) -> Pointwise:
    """Return the norms and the activation of the attention backend."""
    kernel = options.chosen_attention(dtype)
    if kernel == "torch":
        return Pointwise(config.rms_eps)
    if kernel == "compiled":
        return CompiledPointwise(config.rms_eps)
    from capplan.engine.kernels._triton_layers import TritonPointwise

    return TritonPointwise(config.rms_eps)


def lora_factory(
    options: EngineOptions, lora: LoRAManager, tables: RowTables
) -> Callable[[ModelInputs], LoRALayers]:
    """Return the LoRA backend factory; `tables` are the adapter tables of compiled kernels."""
    layout, weights, views = lora.layout, lora.memory.storage, lora.views
    kernel = options.chosen_lora_kernel(weights.dtype)
    if kernel == "grouped":
        return lambda inputs: GroupedLoRA(inputs.segments, views)
    if kernel == "padded":
        return lambda inputs: PaddedLoRA(inputs.segments, views, inputs.tokens.device)
    lora.set_tables(tables)
    if kernel == "compiled":
        return lambda inputs: CompiledLoRA(
            layout, tables, weights, inputs.segments, inputs.tokens.shape[0], views
        )
    from capplan.engine.kernels._triton_lora import TritonLoRA

    kind = None if kernel == "triton" else kernel
    least = options.sgmv_from_tokens
    return lambda inputs: TritonLoRA(
        layout, tables, weights, inputs.segments, inputs.tokens.shape[0], kind, least
    )


def decode_graphs(
    options: EngineOptions,
    limits: Limits,
    lora: LoRAManager,
    tables: RowTables,
    cache: KvCache,
    runner: ModelRunner,
) -> DecodeGraphs | None:
    """Return the decode graphs of a runner; None if the options disable them."""
    layout, weights = lora.layout, lora.memory.storage
    if not options.chosen_graphs(weights.dtype):
        return None
    from capplan.engine.kernels._triton_lora import StepLoRA, chosen_kind

    kernel = options.chosen_lora_kernel(weights.dtype)

    def hidden(inputs: ModelInputs, numbers: torch.Tensor, kind: Kind | None) -> torch.Tensor:
        if kind is None:
            return runner.hidden(inputs, None)
        adapters = StepLoRA(layout, tables, weights, numbers, kind, tables.max_rank)
        if kind == "sgmv":
            adapters.tiles_launch().run()
        return runner.hidden(inputs, adapters)

    def kind_of(tokens: int, adapters: int) -> Kind:
        fixed: Kind | None = None if kernel == "triton" else cast("Kind", kernel)
        return fixed or chosen_kind(tokens, adapters, options.sgmv_from_tokens)

    return DecodeGraphs(
        hidden,
        CudaCapture() if weights.device.type == "cuda" else lambda run: run,
        kind_of,
        tables.number_of,
        limits.max_num_seqs,
        -(-limits.max_model_len // limits.block_size),
        cache.pool.dump_page,
        weights.device,
    )
