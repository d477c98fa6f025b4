"""Worker: model weights, adapters, KV pages and kernels of one rank, and the memory that a step takes.

The memory of the largest step is measured before KV pages are allocated, as by vLLM's ``profile_run``.
"""

from __future__ import annotations

import gc
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from capplan.engine._input_batch import Segment, StepInputs
from capplan.engine._model_runner import ModelRunner, Runner, attention_kernels, lora_factory, step_graphs
from capplan.engine._pool import NULL_PAGE, KvCache, PagePool, kv_page_elements
from capplan.engine._request import Request, SamplingParams
from capplan.engine._sampler import sample
from capplan.engine._settings import EngineOptions
from capplan.engine.assist._crew import board_shape, crew_cpus, measured_times, start_crew
from capplan.engine.assist._lora import Assistance
from capplan.engine.lora._adapter import AdapterLayout
from capplan.engine.lora._loader import copy_stream
from capplan.engine.lora._manager import LoRAManager
from capplan.engine.lora._memory import RowTables, StaticSlots, UnifiedPages
from capplan.engine.models import ModelConfig, Weights, load_weights, model_config, packed, random_weights
from capplan.engine.models._config import WHOLE, ModelShard, require_shardable
from capplan.engine.models._decoder import RopeTable
from capplan.engine.parallel._group import Collectives
from capplan.errors import InfeasibleError, InputError
from capplan.serving import weight_bytes
from capplan.spec import EngineArgs


class LoadedModel(NamedTuple):
    """A model, one rank's weights of it, and its folder if it has one."""

    config: ModelConfig
    """Of the whole model."""
    weights: Weights
    folder: Path | None


class Sizes(NamedTuple):
    """Complete settings of an engine and sizes of its allocations."""

    args: EngineArgs
    num_blocks: int
    """Blocks of the scheduler. Under S-LoRA's rules adapters take their share of them."""
    pool_pages: int
    slot_bytes: int
    """Bytes of one static slot; 0 in unified memory."""


class MeasuredMemory(NamedTuple):
    """Memory of one rank before its pages are allocated, as measured."""

    step_bytes: int
    """Peak of the largest step, beyond what is in use before it."""
    graph_bytes: int
    """Of all CUDA graphs."""
    free_bytes: int
    """Share of the GPU for this engine, less everything in use: weights, adapter slots, libraries, other
    processes. 0 on a CPU."""

    @property
    def room_bytes(self) -> int:
        """For pages."""
        return self.free_bytes - self.step_bytes - self.graph_bytes


def load_model(model: str | Path | ModelConfig, options: EngineOptions, shard: ModelShard) -> LoadedModel:
    """Return a model from its folder, or with random weights from a ``config.json``, a name or a config."""
    device = torch.device(options.device)
    if isinstance(model, ModelConfig):
        config, folder = model, None
    else:
        config, folder = model_config(model), Path(model) if Path(model).is_dir() else None
    require_shardable(config, shard.size)
    dtype = options.torch_dtype(config)
    _require_memory(config, dtype, device, shard)
    free_unused(device)  # of earlier engines of this process
    if folder is None:
        weights = random_weights(config, dtype, device, options.seed, shard)
    else:
        weights = load_weights(config, folder, dtype, device, shard)
    return LoadedModel(config, packed(weights), folder)


def _require_memory(config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: ModelShard) -> None:
    """Check that the weights of a rank are not larger than all memory of the device."""
    need = weight_bytes(config.arch(dtype.itemsize), shard.size)
    if device.type == "cuda":
        most = torch.cuda.mem_get_info(device)[1]
    else:
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > most:
        rule = f"must have weights of at most {most / 2**30:,.1f} GiB, the memory of {device}"
        raise InputError(rule, f"{need / 2**30:,.1f} GiB", f"{config.name}: weights")


class Worker:
    """One rank of an engine, for up to `capacity` adapters.

    `config` is the architecture of this rank's part of the model. `allocate` sets the pages, `pool`, and the
    runner of steps on this rank, `runner`.
    """

    pool: PagePool
    runner: ModelRunner

    def __init__(
        self,
        model: str | Path | ModelConfig,
        options: EngineOptions,
        capacity: int,
        shard: ModelShard = WHOLE,
    ) -> None:
        self.options = options
        self._shard = shard
        self.model = load_model(model, options, shard)
        self.config = shard.config(self.model.config)
        self.dtype = self.model.weights.embed.dtype
        self.device = self.model.weights.embed.device
        self.collectives = Collectives()
        self.lora = self._new_lora(capacity, AdapterLayout(self.model.config, shard))

    def allocate(self, sizes: Sizes) -> None:
        """Allocate KV pages and adapter slots, and set up the kernels."""
        self._allocate(sizes)

    def all_ranks(self) -> Runner:
        """Return the runner of steps on all ranks."""
        return self.runner

    def start_assistance(self, sizes: Sizes, workers: int | None, beside: Sequence[int]) -> None:
        """Start CPU cores that compute for adapters while they are copied; after `allocate`.

        `workers` is the number of cores, None: one on each CPU; `beside` are the CPUs beside those of the
        engine, none: not known.
        """
        lora, layout, args = self.lora, self.lora.layout, sizes.args
        cpus = crew_cpus(workers, beside)
        tokens = args.max_num_batched_tokens
        shape = board_shape(layout, len(cpus), tokens, self.dtype, args.max_num_seqs)
        largest = layout.elements(layout.ranks(args.max_lora_rank))
        capacity, pin = lora.rank_of.size - 1, self.device.type == "cuda"
        crew = start_crew(shape, cpus, capacity, largest, self.dtype, pin=pin)
        lora.share(crew.adapters)
        copy_gb_per_s = self.options.copy_gb_per_s
        times = measured_times(crew, layout, self.model.weights, args.max_lora_rank, tokens, copy_gb_per_s)
        lora.groups_for = partial(times.groups, layout, self.dtype.itemsize)
        self.runner.assistance = Assistance(self.runner.adapters, lora, crew, times)

    def measure(self, args: EngineArgs) -> MeasuredMemory:
        """Run the largest step with few pages, capture the largest graphs, and return what they take.

        Raises `InfeasibleError` if the step does not fit.
        """
        try:
            self._allocate(self._few_pages(args))
            step_bytes = peak_bytes(self.device, self._largest_run(args))
            free_bytes = self._free_bytes(args)
            graph_bytes = self.runner.graph_bytes(partial(held_bytes, self.device))
        except torch.OutOfMemoryError:
            message = f"a step of {args.max_num_batched_tokens} tokens does not fit beside weights and slots"
            raise InfeasibleError(f"memory: {message}", "memory") from None
        return MeasuredMemory(step_bytes, graph_bytes, free_bytes)

    def _free_bytes(self, args: EngineArgs) -> int:
        if self.device.type != "cuda":
            return 0
        _, total = torch.cuda.mem_get_info(self.device)
        return int(total * args.gpu_memory_utilization) - used_bytes(self.device)

    def _few_pages(self, args: EngineArgs) -> Sizes:
        """Return the pages of one adapter, beside all slots."""
        elements = self.lora.layout.elements(self.lora.layout.ranks(args.max_lora_rank))
        page_elements = kv_page_elements(self.config, self.options.block_size)
        # Rows do not cross pages, which are at least half full.
        return Sizes(args, num_blocks=1, pool_pages=1 + 2 * elements // page_elements, slot_bytes=0)

    def _largest_run(self, args: EngineArgs) -> Callable[[], None]:
        """Return the largest step, all of whose tokens have an adapter if there is LoRA."""
        adapter = self.lora.rank_of.size if args.max_loras else 0  # a number without an adapter
        if adapter:
            self.lora.place(adapter, self.lora.layout.ranks(args.max_lora_rank))
        step = largest_step(args, self.options.block_size, self.pool.dump_page, adapter)

        def run() -> None:
            logits = self.runner.run(step)
            if self._shard.rank == 0:
                sample_largest(logits)

        return run

    def _allocate(self, sizes: Sizes) -> None:
        if hasattr(self, "pool"):  # of a measurement
            del self.pool, self.runner
            self.lora.clear()
            gc.collect()  # a runner and its graphs refer to each other
        page_elements = kv_page_elements(self.config, self.options.block_size)
        self.pool = PagePool(sizes.pool_pages, page_elements, self.dtype, self.device)
        layout, args = self.lora.layout, sizes.args
        self.lora.memory = (
            UnifiedPages(layout, self.pool)
            if self.options.chosen_memory() == "unified"
            else StaticSlots(layout, args.max_loras, args.max_lora_rank, self.dtype, self.device)
        )
        self.runner = self._new_runner(sizes)

    def close(self) -> None:
        """End the cores that assist loading."""
        runner = getattr(self, "runner", None)
        if runner is not None and runner.assistance is not None:
            runner.assistance.crew.close()
            runner.assistance = None

    def check(self) -> None:
        """Raise an error if another rank has ended."""

    def watched(self) -> Sequence[socket.socket]:
        """Return the sockets that are readable once another rank has ended."""
        return ()

    def _new_lora(self, capacity: int, layout: AdapterLayout) -> LoRAManager:
        pin = self.device.type == "cuda"
        copies = copy_stream(self.device, self.options.copy_gb_per_s)
        return LoRAManager(capacity, layout, self.dtype, pin, copies)

    def _new_runner(self, sizes: Sizes) -> ModelRunner:
        options, args, config, device = self.options, sizes.args, self.config, self.device
        limits = options.limits(args, self.lora.rank_of.size - 1, sizes.num_blocks)
        cache = KvCache(config, self.pool, options.block_size)
        rope = RopeTable(config, limits.max_model_len, self.dtype, device)
        tables = RowTables(self.lora.layout, limits.max_loras, args.max_lora_rank, device)
        attention, pointwise = attention_kernels(options, self.dtype)
        runner = ModelRunner(
            self.model.weights,
            cache,
            lambda inputs: attention(config, cache, rope, inputs),
            lora_factory(options, self.lora, tables),
            pointwise(config.rms_eps),
            self.collectives,
        )
        group = config.heads // config.kv_heads
        runner.graphs = step_graphs(options, limits, self.lora, tables, cache, runner, group)
        return runner


_LOGPROBS: Final = 5


def largest_step(args: EngineArgs, block_size: int, dump_page: int, adapter: int) -> StepInputs:
    """Return the step with the most tokens, requests and context, all of one adapter; 0: the base model.

    One prompt takes what decodes leave of `max_num_batched_tokens`; several do if it is longer than
    `max_model_len`. All contexts have that length. They are read from the null page and written to the dump
    page, so the step needs no KV of its own.
    """
    longest = args.max_model_len
    tokens = max(args.max_num_batched_tokens, args.max_num_seqs)
    prompts = min(args.max_num_seqs, -(-tokens // longest))
    decodes = args.max_num_seqs - prompts
    prompt_tokens = min(tokens - decodes, prompts * longest)
    ends = decodes + np.arange(1, prompts + 1) * prompt_tokens // prompts
    spans = list(zip([decodes, *ends.tolist()], ends.tolist(), strict=False))
    total = decodes + prompt_tokens
    columns = np.zeros((4, total), np.int64)
    columns[1] = longest - 1
    columns[2] = dump_page
    blocks = -(-longest // block_size)
    at = np.arange(decodes)
    return StepInputs(
        columns=columns,
        new_pages=np.zeros(0, np.int64),
        decodes=np.stack([at, np.full(decodes, longest)]),
        tables=np.full((decodes, blocks), NULL_PAGE),
        prefills=tuple((start, end, longest, np.full(blocks, NULL_PAGE)) for start, end in spans),
        segments=(Segment(adapter, 0, total),),
        sampled=np.concatenate([at, ends - 1]),
    )


def sample_largest(logits: torch.Tensor) -> None:
    """Sample a token per row, every one with a temperature, top-p and log-probabilities."""
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, logprobs=_LOGPROBS)
    prompt, rng = np.zeros(1, np.int32), np.random.default_rng(0)
    request = Request(0, 0, None, 0, prompt, params, frozenset(), arrival_ns=0, rng=rng)
    requests = [request] * logits.shape[0]
    sample(logits, requests, np.ones(len(requests), np.int64))


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors that PyTorch's operators allocate on a CPU, which does not count them.

    `live_bytes` are those of storages that were allocated within the mode and are still referenced,
    `peak_bytes` the most of them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            self._known.add(storage)  # of a tensor that is older than the mode
        result = func(*args, **kwargs)
        for storage in _storages(result):
            if storage not in self._known:
                self._known.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, more_bytes: int) -> None:
        self.live_bytes += more_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _storages(tree: Any) -> Iterator[Any]:
    return (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Return the most bytes that a function holds at once on a device, beyond those held before it."""
    if device.type != "cuda":
        counted = LiveBytes()
        with counted:
            run()
        return counted.peak_bytes
    free_unused(device)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before_bytes


def held_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Return the bytes that a function leaves allocated on a device."""
    if device.type != "cuda":
        counted = LiveBytes()
        with counted:
            run()
        return counted.live_bytes
    before_bytes = used_bytes(device)
    run()
    return used_bytes(device) - before_bytes


def used_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that are in use: by this process, its libraries, and others."""
    free_unused(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def free_unused(device: torch.device) -> None:
    """Return the memory of unreferenced tensors to a GPU; parts of a closed engine refer to each other."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
