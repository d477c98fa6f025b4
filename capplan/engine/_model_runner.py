"""Model runner: kernel selection, forward pass of a step, CUDA graphs.

A CUDA graph replays kernels on the memory that it was captured with. The inputs of a step are copied into
static tensors, padded to one of a few numbers of tokens; padding reads and writes the dump page. A graph of
a step with prompts has room for decodes and for tiles of a few prompts, whose programs return at once if
there are fewer.
Kernels that depend on more than the contents of these tensors cannot be captured: tiles of tokens of an
adapter are found on the GPU, within the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine._input_batch import Decodes, ModelInputs, Prefill, StepInputs
from capplan.engine._pool import KvCache
from capplan.engine._settings import EngineOptions
from capplan.engine.assist._lora import Assistance
from capplan.engine.kernels._cpu import CompiledAttention, CompiledLoRA, CompiledPointwise
from capplan.engine.kernels._torch_lora import GroupedLoRA, PaddedLoRA
from capplan.engine.lora._manager import LoRAManager
from capplan.engine.lora._memory import RowTables
from capplan.engine.models._decoder import LoRALayers, Pointwise, TorchAttention, forward
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
_PROMPT_SIZES: Final = (64, 128, 192, 256, 384, 512, 640, 768, 1024)
"""Padded numbers of tokens of steps with prompts. In larger steps the products should outlast the
launches, which is to be measured.
"""
_MOST_PROMPTS: Final = 8
"""Of a step that runs as a graph."""


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

    `attention` and `adapters` are factories of the kernels of one step. Without CUDA graphs, `graphs`, steps
    run eagerly. `assistance` are CPU cores that compute for adapters being copied, if there are any.
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
        self.graphs: StepGraphs | None = None
        self.assistance: Assistance | None = None

    @torch.inference_mode()
    def run(self, step: StepInputs) -> torch.Tensor:
        """Store the KV of all tokens; return the logits of `step.sampled`, shape (requests, vocabulary)."""
        with self._on_device():
            inputs = step.on(self._device)
            if inputs.new_pages.numel():
                self._pool.clear(inputs.new_pages)
            if self.assistance is not None and self.assistance.is_needed(inputs):
                with self.assistance.adapters(inputs) as adapters:
                    hidden = self.hidden(inputs, adapters)
            elif self.graphs is not None and self.graphs.can_run(inputs):
                hidden = self.graphs.run(inputs)
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

        `held` runs a function and returns the bytes that it leaves allocated.
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


class GraphKey(NamedTuple):
    """What a graph is captured for."""

    size: int
    """Tokens."""
    kind: Kind | None
    """Of LoRA kernels; None: no adapters."""
    has_prompts: bool


class _StaticInputs(NamedTuple):
    inputs: ModelInputs
    decodes: Decodes
    numbers: torch.Tensor
    """Row of each token in the adapter tables, -1 without one."""
    replay: Replay


class StepGraphs:
    """CUDA graphs of steps by number of tokens, captured on first use or by `capture_all`.

    `capture` captures a graph of a function; on the CPU it returns the function itself. `kind_of` is the kind
    of LoRA kernels by tokens with an adapter, and adapters. `tiles_of` are the tiles of the attention of
    prompts, on the host, each of at most `tile_tokens`. Padding reads and writes `dump_page`.
    """

    def __init__(
        self,
        forward: GraphForward,
        capture: Callable[[Replay], Replay],
        kind_of: Callable[[int, int], Kind],
        tables: RowTables,
        tiles_of: Callable[[Sequence[Prefill]], torch.Tensor],
        tile_tokens: int,
        limits: Limits,
        dump_page: int,
    ) -> None:
        self._forward = forward
        self._capture = capture
        self._kind_of = kind_of
        self._number_of = tables.number_of
        self._tiles_of = tiles_of
        self._tile_tokens = tile_tokens
        self._requests = int(limits.max_num_seqs)
        decodes = [size for size in _GRAPH_SIZES if size < self._requests] + [self._requests]
        prompts = [size for size in _PROMPT_SIZES if size <= limits.max_num_batched_tokens]
        self._sizes = {False: decodes, True: prompts}
        self._max_blocks = int(-(-limits.max_model_len // limits.block_size))
        self._dump_page = dump_page
        self._device = tables.ranks.device
        self.captured: dict[GraphKey, _StaticInputs] = {}

    def can_run(self, inputs: ModelInputs) -> bool:
        """Return whether there is a graph for a step."""
        return len(inputs.prefills) <= _MOST_PROMPTS and self._size(inputs) is not None

    def _size(self, inputs: ModelInputs) -> int | None:
        """Return the padded number of tokens; with prompts there is padding, which spare decodes write to."""
        has_prompts = bool(inputs.prefills)
        least = inputs.tokens.shape[0] + has_prompts
        return next((size for size in self._sizes[has_prompts] if size >= least), None)

    def capture_all(self) -> None:
        """Capture every graph, the largest first: the others share its memory."""
        for key in self._keys():
            self._captured(key)

    def measure(self, held: Callable[[Callable[[], object]], int]) -> int:
        """Return the bytes of all graphs: of the largest one, and of the others as much as of the second.

        Graphs share the memory of their tensors, which the largest one needs most of.
        """
        first, second, *others = self._keys()
        first_bytes = held(lambda: self._captured(first))
        return first_bytes + (1 + len(others)) * held(lambda: self._captured(second))

    def _keys(self) -> list[GraphKey]:
        """Return the keys of all graphs: with tokens of one adapter, of one each, and of none."""
        sizes = sorted(((size, has) for has, sizes in self._sizes.items() for size in sizes), reverse=True)
        return [
            GraphKey(size, kind, has_prompts)
            for size, has_prompts in sizes
            for kind in dict.fromkeys((self._kind_of(size, 1), self._kind_of(size, size), None))
        ]

    def run(self, inputs: ModelInputs) -> torch.Tensor:
        """Return the hidden state of every token, valid until the next run."""
        size = self._size(inputs)
        if size is None:
            raise RuntimeError("a step without a graph")
        tokens = [segment.end - segment.start for segment in inputs.segments if segment.adapter]
        kind = self._kind_of(sum(tokens), len(tokens)) if tokens else None
        static = self._captured(GraphKey(size, kind, bool(inputs.prefills)))
        self._fill(static, inputs)
        return static.replay()[: inputs.tokens.shape[0]]

    def _captured(self, key: GraphKey) -> _StaticInputs:
        if key not in self.captured:
            self.captured[key] = self._new(key)
        return self.captured[key]

    def _new(self, key: GraphKey) -> _StaticInputs:
        def filled(value: int, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=self._device)

        size = key.size
        prompts = None
        requests = size
        if key.has_prompts:
            requests = min(size, self._requests)
            tiles = filled(0, _MOST_PROMPTS + size // self._tile_tokens, 4).int()
            prompts = filled(self._dump_page, _MOST_PROMPTS * self._max_blocks), tiles
        decodes = Decodes(
            at=torch.arange(size - requests, size, device=self._device),
            context=filled(1, requests),
            pages=filled(self._dump_page, requests, self._max_blocks),
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
            prompts=prompts,
        )
        numbers = torch.full((size,), -1, dtype=torch.int32, device=self._device)
        replay = self._capture(lambda: self._forward(inputs, numbers, key.kind))
        return _StaticInputs(inputs, decodes, numbers, replay)

    def _fill(self, static: _StaticInputs, inputs: ModelInputs) -> None:
        for own, value, padding in (
            (static.inputs.tokens, inputs.tokens, 0),
            (static.inputs.positions, inputs.positions, 0),
            (static.inputs.pages, inputs.pages, self._dump_page),
            (static.inputs.offsets, inputs.offsets, 0),
        ):
            own[: value.shape[0]].copy_(value)
            own[value.shape[0] :].fill_(padding)
        self._fill_decodes(static, inputs.decodes)
        if static.inputs.prompts is not None:
            pages, tiles = static.inputs.prompts
            held, found = torch.cat([each.pages for each in inputs.prefills]), self._tiles_of(inputs.prefills)
            pages[: held.shape[0]].copy_(held)
            tiles[: found.shape[0]].copy_(found, non_blocking=True)
            tiles[found.shape[0] :].zero_()
        if any(segment.adapter for segment in inputs.segments):
            numbers = torch.full(static.numbers.shape, -1, dtype=torch.int32)
            for segment in inputs.segments:
                numbers[segment.start : segment.end] = self._number_of.get(segment.adapter, -1)
            static.numbers.copy_(numbers, non_blocking=True)

    def _fill_decodes(self, static: _StaticInputs, decodes: Decodes | None) -> None:
        own, requests = static.decodes, 0
        if decodes is not None:
            requests, blocks = decodes.pages.shape
            own.context[:requests].copy_(decodes.context)
            own.pages[:requests, :blocks].copy_(decodes.pages)
            if static.inputs.prompts is not None:
                own.at[:requests].copy_(decodes.at)
        own.context[requests:].fill_(1)
        own.pages[requests:, 0] = self._dump_page
        if static.inputs.prompts is not None:
            own.at[requests:].fill_(static.inputs.tokens.shape[0] - 1)


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


def attention_kernels(
    options: EngineOptions, dtype: torch.dtype
) -> tuple[type[TorchAttention], type[Pointwise]]:
    """Return the attention of the chosen backend, and its norms and activation."""
    kernel = options.chosen_attention(dtype)
    if kernel == "torch":
        return TorchAttention, Pointwise
    if kernel == "compiled":
        return CompiledAttention, CompiledPointwise
    from capplan.engine.kernels._triton_attention import TritonAttention
    from capplan.engine.kernels._triton_layers import TritonPointwise

    return TritonAttention, TritonPointwise


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


def step_graphs(
    options: EngineOptions,
    limits: Limits,
    lora: LoRAManager,
    tables: RowTables,
    cache: KvCache,
    runner: ModelRunner,
    group: int,
) -> StepGraphs | None:
    """Return the CUDA graphs of a runner; None if the options disable them."""
    layout, weights = lora.layout, lora.memory.storage
    if not options.chosen_graphs(weights.dtype):
        return None
    from capplan.engine.kernels._triton_attention import prompt_rows, prompt_tiles
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

    return StepGraphs(
        hidden,
        CudaCapture() if weights.device.type == "cuda" else lambda run: run,
        kind_of,
        tables,
        lambda prefills: prompt_tiles(prefills, group),
        prompt_rows(group) // group,
        limits,
        cache.pool.dump_page,
    )
