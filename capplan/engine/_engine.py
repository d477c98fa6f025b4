"""Python interface of the engine: a model, its adapters, and `generate`.

Predicted output lengths, request by request, as they arrive.

An engine knows the declared length of an output, `max_tokens`, and not where it will stop: the declared
length takes the place of the output for the predictors ``oracle`` and ``classes``.

Engine construction: memory sizes, adapters, scheduler state and core.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine._engine_core import EngineCore, StateReport, StepOutput, state_report
from capplan.engine._pool import BlockTables, CountedBlocks, NamedBlocks, kv_page_elements
from capplan.engine._request import Completion, FinishReason, Request, SamplingParams, Timing
from capplan.engine._scheduler_output import with_host_adapters
from capplan.engine._settings import EngineOptions
from capplan.engine._timing import EngineClock, StepRecord, VirtualClock, WallClock
from capplan.engine._tokenizer import Tokenizer, load_tokenizer
from capplan.engine._worker import Sizes, Worker
from capplan.engine.lora._adapter import AdapterSource, PeftFolder, RandomAdapter
from capplan.engine.lora._loader import AdapterLoader, ThreadLoader, VirtualLoader
from capplan.engine.lora._manager import AdapterLoads, AdapterNumbers, measured_load_times
from capplan.engine.models import ModelConfig
from capplan.engine.parallel._ranks import start_worker
from capplan.errors import InfeasibleError, InputError
from capplan.serving import new_state
from capplan.serving.pooled import GDSF, set_up_policies
from capplan.serving.state import POOLED
from capplan.spec import EngineArgs, Predictor, allowed_lora_rank
from capplan.workload import LengthClasses, length_classes, read_predictor

_CPU_KV_BYTES: Final = 256 * 2**20
_INDEX_BYTES: Final = 8


def build_core(
    worker: Worker,
    sources: Sequence[AdapterSource],
    options: EngineOptions,
    virtual_time: bool,
    beside_cpus: Sequence[int],
) -> tuple[EngineCore, Sizes]:
    """Allocate an engine and return its core and sizes; `worker` is the first rank, with its model."""
    lora, config, dtype = worker.lora, worker.config, worker.dtype
    capacity = lora.rank_of.size - 1
    host_slots = options.args.get("max_cpu_loras", capacity)
    for number, source in enumerate(sources, start=1):
        lora.register(number, source, options.args.get("max_lora_rank"))
        lora.read(number)  # each is read once, so that a broken one fails here; the host keeps the last ones
        lora.drop(number - host_slots)
    sizes = choose_sizes(worker, options)
    _require_memory(sizes, kv_page_elements(config, options.block_size) * dtype.itemsize, options)
    worker.allocate(sizes)
    if options.loading == "assisted" and not virtual_time and options.scheduling is not None:
        worker.start_assistance(sizes, options.scheduling[1].cpu_workers, beside_cpus)
    args, pool = sizes.args, worker.pool
    limits = options.limits(args, capacity, sizes.num_blocks)
    state = new_state(options.max_in_flight, capacity, sizes.num_blocks, limits)
    if limits.policy != POOLED:  # where the host keeps every adapter
        state = with_host_adapters(state, max(1, len(sources) - host_slots + 1), len(sources) + 1)
    scheduler = None
    if limits.policy == POOLED and options.scheduling is not None:
        scheduler, cache = options.scheduling
        shares_charge = options.adapter_charge == "shared"
        set_up_policies(state, limits, cache.score_weights, options.queues, shares_charge)
    blocks: BlockTables
    if limits.prefix_caching:
        blocks = NamedBlocks(state, pool, sizes.num_blocks)
    else:
        blocks_per_request = -(-args.max_model_len // options.block_size)
        blocks = CountedBlocks(pool, options.max_in_flight, blocks_per_request, options.block_size)
    clock: EngineClock = VirtualClock() if virtual_time else WallClock()
    loader: AdapterLoader = VirtualLoader(clock) if virtual_time else ThreadLoader(clock)
    token_bytes = kv_page_elements(config, 1) * dtype.itemsize if options.adapter_charge != "none" else 0
    if limits.policy == POOLED and limits.cache == GDSF:
        lora.load_times = options.load_times or measured_load_times(lora, range(1, len(sources) + 1))
    loads = AdapterLoads(state, limits, lora, loader, clock, token_bytes)
    for number in range(1, len(sources) + 1):
        loads.set_sizes(number)
    core = EngineCore(state, limits, worker.all_ranks(), blocks, loads, clock, worker.device, scheduler)
    # Other ranks do not have the tokens of a step that is not completed.
    if limits.async_scheduling and worker.device.type == "cuda" and options.tensor_parallel_size == 1:
        core.depth = 2
    return core, sizes


def choose_sizes(worker: Worker, options: EngineOptions) -> Sizes:
    """Return the sizes of an engine, of each rank, chosen where the options leave them open.

    In unified memory under rules that count slots, the pool has pages for A_max adapters of rank S_max beside
    the KV blocks, because those rules guarantee every slot. Under S-LoRA's rules one count covers both.
    Raises `InfeasibleError` if no request of `max_model_len` fits.
    """
    config, lora, dtype, layout = worker.config, worker.lora, worker.dtype, worker.lora.layout
    adapters = lora.rank_of.size - 1
    chosen = {"max_loras": max(1, min(adapters, 8)), "max_model_len": config.max_positions}
    if adapters == 0 and not {"max_loras", "max_lora_rank"} & options.args.keys():
        chosen |= {"max_loras": 0, "max_lora_rank": 0}  # an engine without LoRA
    elif "max_lora_rank" not in options.args:
        chosen["max_lora_rank"] = _slot_rank(int(lora.rank_of.max()))
    args = options.engine_args(**chosen)
    if args.max_model_len > config.max_positions:
        rule = f"must be at most the model's {config.max_positions}"
        raise InputError(rule, args.max_model_len, "max_model_len")
    slotless = options.serving_rules().unified_memory
    _check_host_slots(args, adapters, slotless)
    page_bytes = kv_page_elements(config, options.block_size) * dtype.itemsize
    slot_bytes = layout.elements(layout.ranks(args.max_lora_rank)) * dtype.itemsize
    unified = options.chosen_memory() == "unified"
    slots_bytes = 0 if slotless else args.max_loras * slot_bytes
    resident_pages = 0
    if options.loading in ("resident", "cached"):
        resident_pages = lora.pages_of_all(page_bytes // dtype.itemsize, args.max_lora_rank)
    num_blocks = options.num_kv_blocks or _blocks_that_fit(
        worker, args, page_bytes, (slots_bytes if unified else 0) + resident_pages * page_bytes
    )
    if options.loading == "resident":
        num_blocks = _beside_adapters(num_blocks, resident_pages)
    most = num_blocks * options.block_size
    if num_blocks >= 1 and "max_model_len" not in options.args:
        args = args.replace(max_model_len=min(config.max_positions, most))
    if args.max_model_len > most:
        message = (
            f"a request of max_model_len {args.max_model_len} needs more KV than the {most} tokens there are"
        )
        raise InfeasibleError(message, "memory")
    adapter_pages = resident_pages
    if unified and slots_bytes:
        # Rows do not cross page boundaries: less than a row is lost in each page.
        usable = page_bytes - layout.longest_row * dtype.itemsize + dtype.itemsize
        adapter_pages = args.max_loras * -(-slot_bytes // max(1, usable))
    return Sizes(args, num_blocks, num_blocks + adapter_pages, 0 if unified else slot_bytes)


def _beside_adapters(num_blocks: int, resident_pages: int) -> int:
    """Return the KV blocks that all adapters leave; raise `InfeasibleError` if they leave none."""
    if resident_pages >= num_blocks:
        message = f"all adapters take {resident_pages} of {num_blocks} blocks, which leaves none for KV"
        raise InfeasibleError(f"memory: {message}", "memory")
    return num_blocks - resident_pages


def _check_host_slots(args: EngineArgs, adapters: int, slotless: bool) -> None:
    needed = adapters if slotless else min(args.max_loras, adapters)
    if args.max_cpu_loras is not None and args.max_cpu_loras < needed:
        least = f"the {adapters} adapters" if slotless else f"max_loras, {args.max_loras}"
        raise InputError(f"must be at least {least}", args.max_cpu_loras, "max_cpu_loras")


def _require_memory(sizes: Sizes, page_bytes: int, options: EngineOptions) -> None:
    """Check that this machine has the memory of pool, slots and block tables.

    Without the check the operating system would end the process as it fills them.
    """
    blocks_per_request = -(-sizes.args.max_model_len // options.block_size)
    tables_bytes = options.max_in_flight * blocks_per_request * _INDEX_BYTES
    pool_bytes = sizes.pool_pages * page_bytes + sizes.args.max_loras * sizes.slot_bytes
    needed_bytes = tables_bytes + (pool_bytes if options.device == "cpu" else 0)
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed_bytes > machine_bytes:
        message = (
            f"KV blocks, adapter slots and block tables take {needed_bytes / 2**30:.3g} GiB, "
            f"and this machine has {machine_bytes / 2**30:.3g} GiB"
        )
        raise InfeasibleError(f"memory: {message}", "memory")


def _blocks_that_fit(worker: Worker, args: EngineArgs, page_bytes: int, adapters_bytes: int) -> int:
    """Return the KV blocks that fit: on a GPU as measured, beside adapters that are in pages."""
    if worker.device.type != "cuda":
        return max(1, _CPU_KV_BYTES // page_bytes)
    return (worker.measure(args).room_bytes - adapters_bytes) // page_bytes


def _slot_rank(largest: int) -> int:
    """Return the default rank of slots for adapters of up to this rank."""
    try:
        return allowed_lora_rank(max(1, largest))
    except ValueError:
        raise InputError(
            "must be given for an adapter of so large a rank", largest, "max_lora_rank"
        ) from None


_REMEMBERED: Final = 1000
_REFIT_EVERY: Final = 50
"""Requests between two fits of the length classes to the declared lengths remembered."""
_S_PER_HOUR: Final = 3600
_HOURS: Final = 24


class OutputPredictor:
    """Predictor of the output lengths of one engine.

    ``classes`` are those of the last requests' declared lengths; `seed` is that of the wrong ones. `time_s`
    is the clock of the hour of day: seconds since 1970, UTC.
    """

    def __init__(self, predictor: Predictor, seed: int, time_s: Callable[[], float] = time.time) -> None:
        self._time_s = time_s
        self._kind = predictor.kind
        self._accuracy = predictor.accuracy
        self._rng = np.random.default_rng(seed)
        self._declared: deque[int] = deque(maxlen=_REMEMBERED)
        self._since_fit = 0
        self._classes: LengthClasses | None = None
        self._model = read_predictor(str(predictor.file)) if predictor.kind == "learned" else None

    def predict(self, prompt_tokens: int, adapter: str | None, declared: int) -> int:
        """Return the predicted output tokens of a request, at most the declared ones; 0: those."""
        predicted = 0
        if self._model is not None:
            hour = self._time_s() // _S_PER_HOUR % _HOURS
            number = self._model.adapters.get(adapter, math.nan)
            predicted = int(self._model.predict(np.array([[prompt_tokens, number, hour]], np.float32))[0])
        elif self._kind == "classes":
            predicted = self._drawn(declared)
        return min(predicted, declared)

    def _drawn(self, declared: int) -> int:
        """Return the mean of the right class with the set accuracy, otherwise of another one."""
        self._declared.append(declared)
        self._since_fit += 1
        if self._since_fit >= _REFIT_EVERY:
            self._classes, self._since_fit = length_classes(np.array(self._declared)), 0
        if self._classes is None:
            return 0
        chosen = int(self._classes.classify(np.array([declared]))[0])
        others = self._classes.tokens.size - 1
        if others and self._rng.random() >= self._accuracy:
            other = int(self._rng.integers(others))
            chosen = other + (other >= chosen)
        return int(self._classes.tokens[chosen])


Prompt = str | Sequence[int]
_LOAD_TIMEOUT_S: Final = 60.0
_MAX_PREFIXES: Final = 2**20


class Engine:
    """A model that serves many LoRA adapters.

    Parameters
    ----------
    model
        Hugging Face folder (``config.json`` and safetensors); or, with random weights, a ``config.json``, the
        name of a built-in model, or a `ModelConfig`.
    adapters
        Name to a PEFT folder, or to the rank of a random adapter.
    virtual_time
        Run on a virtual clock; see `capplan.engine._timing`. Loads take no real time then, and are not
        assisted.
    beside_cpus
        CPUs beside those that the engine computes on, for cores that assist loading; none: not known.
    settings
        Fields of `EngineArgs` and `EngineOptions`, such as ``max_loras``, ``max_num_seqs``, ``dtype``,
        ``device`` and ``rules``.

    Attributes
    ----------
    options
        Given settings.
    args
        Complete settings; those that were left open fit the model and its adapters.
    predictor
        Predictor of output lengths.
    worker
        Model, adapters and KV pages of the first rank.

    Examples
    --------
    >>> from capplan.engine import Engine
    >>> engine = Engine("tiny-llama", adapters={"support": 8, "legal": 16}, num_kv_blocks=64)
    >>> [len(c.token_ids) for c in engine.generate(["Hello", "Dear"], adapters=["legal", None], max_tokens=4)]
    [4, 4]
    """

    def __init__(
        self,
        model: str | Path | ModelConfig,
        adapters: Mapping[str, str | Path | int] | None = None,
        *,
        virtual_time: bool = False,
        beside_cpus: Sequence[int] = (),
        **settings: Any,
    ) -> None:
        self.options = EngineOptions.parse(settings)
        capacity = self.options.adapter_capacity(len(adapters or {}))
        self._numbers = AdapterNumbers(capacity)
        with ExitStack() as stack:
            self.worker = stack.enter_context(start_worker(model, self.options, capacity))
            self.config, _, self.folder = self.worker.model
            self.tokenizer: Tokenizer = load_tokenizer(self.folder, self.config.vocab_size)
            sources = [
                _adapter_source(value, self.options.seed + self._numbers.add(name))
                for name, value in (adapters or {}).items()
            ]
            stack.callback(self.worker.close)
            self.core, self.sizes = build_core(self.worker, sources, self.options, virtual_time, beside_cpus)
            stack.callback(self.core.loader.close)
            self._resources = stack.pop_all()
        self.args = self.sizes.args
        self.records: list[StepRecord] = []
        self.predictor = OutputPredictor(self.options.predictor, self.options.seed)
        self._prefix_ids = PrefixIds(self.options.shared_prefix_tokens)
        self._submitted = 0

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of all adapters."""
        return self._numbers.names

    @property
    def max_adapters(self) -> int:
        """Number of adapters that it can have at a time."""
        return self._numbers.capacity

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the adapter loader and the processes of other ranks."""
        self._resources.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        adapters: str | Sequence[str | None] | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Complete prompts.

        Parameters
        ----------
        prompts
            Texts or lists of token ids, or a single one.
        adapters
            Adapter of each prompt, or one for all; None is the base model.
        sampling
            Fields of `SamplingParams`, such as ``max_tokens``, ``temperature``, ``seed``, ``logprobs``.

        Raises
        ------
        InputError
            If an adapter or setting is unknown, or a prompt is empty, too long, or outside the vocabulary.
        """
        params = SamplingParams(**sampling)
        texts = _as_list(prompts)
        names = [adapters] * len(texts) if adapters is None or isinstance(adapters, str) else list(adapters)
        if len(names) != len(texts):
            raise InputError(f"must be one per prompt, {len(texts)}", len(names), "adapters")
        requests = [self.new_request(text, name, params) for text, name in zip(texts, names, strict=True)]
        for request in requests:
            if not self.core.can_run(request):
                rule = f"must fit beside its adapter into {self.sizes.num_blocks} pages, and into one step"
                raise InputError(rule, request.prompt.size, "prompt tokens")
        self._run(requests)
        return [self.completion(request) for request in requests]

    def new_request(
        self,
        prompt: Prompt | NDArray[np.int32],
        adapter: str | None,
        params: SamplingParams,
        arrival_ns: int | None = None,
    ) -> Request:
        """Return a checked request, not yet submitted."""
        number = self._numbers.number(adapter)
        tokens = self._tokens(prompt)
        arrival_ns = self.core.clock.now_ns() if arrival_ns is None else arrival_ns
        self._submitted += 1
        seed = [self.options.seed, self._submitted] if params.seed is None else params.seed
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.config.eos_token_ids))
        return Request(
            number=self._submitted,
            adapter=number,
            adapter_name=adapter,
            adapter_entry=self._numbers.entry(number),
            prompt=tokens,
            params=params,
            stop_ids=frozenset(stops),
            arrival_ns=arrival_ns,
            predicted_tokens=self.predictor.predict(tokens.size, adapter, params.max_tokens),
            rng=np.random.default_rng(seed) if params.temperature > 0 else None,
        )

    def submit(self, request: Request) -> bool:
        """Queue a request; return False if the engine is full, or can never run it.

        Raises
        ------
        InputError
            If its adapter was removed after the request was made.
        """
        if self._numbers.entry(request.adapter) != request.adapter_entry:
            raise InputError("must not have been removed", request.adapter_name, "adapter")
        # The logits of a cached prefix are not known.
        is_scored = request.params.prompt_logprobs
        prefix, shared = (0, 0) if is_scored else self._prefix_ids.of(request.prompt, request.adapter)
        return self.core.submit(request, prefix, shared)

    def abort(self, request: Request, reason: FinishReason = "abort") -> None:
        """Cancel a request in flight and free what it holds."""
        self.core.abort(request.number, reason)

    def step(self) -> StepOutput | None:
        """Run one step; return None if nothing can run."""
        step = self.core.step()
        if step is not None:
            for request in step.finished:
                if request.finish_reason == "error":
                    self._prefix_ids.renew(request.adapter)
            if step.record is not None:
                self.records.append(step.record)
        return step

    def add_adapter(self, name: str, source: str | Path | int | PeftFolder) -> None:
        """Register an adapter: a PEFT folder, or the rank of a random one.

        Only shapes are read; the first request loads the adapter.

        Raises
        ------
        InputError
            If the name is taken, there are `max_adapters` already, or the adapter cannot be read, does not
            fit the model, or has a rank above S_max.
        """
        number = self._numbers.add(name)
        try:
            seed = self.options.seed + self._numbers.entry(number)
            self.core.loads.register(number, _adapter_source(source, seed), self.args.max_lora_rank)
        except InputError:
            self._numbers.remove(name)
            raise

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter and its copies.

        Raises
        ------
        InputError
            If it does not exist, or requests in flight use it.
        """
        number = self._numbers.number(name)
        users = sum(request.adapter == number for request in self.core.requests.values())
        if users:
            rule = f"must not be in use: {users} requests of it are in flight"
            raise InputError(rule, name, "adapter")
        self.core.loads.unregister(number)
        self._numbers.remove(name)
        self._prefix_ids.renew(number)

    def replace_adapter(self, name: str, source: str | Path | int | PeftFolder) -> bool:
        """Remove an adapter, and register another one under its name.

        Returns
        -------
        bool
            False: requests in flight use the former one, which stays.

        Raises
        ------
        InputError
            As `add_adapter`; the former one is removed then.
        """
        if name in self.adapters:
            number = self._numbers.number(name)
            if any(request.adapter == number for request in self.core.requests.values()):
                return False
            self.remove_adapter(name)
        self.add_adapter(name, source)
        return True

    def state_report(self) -> StateReport:
        """Return the state that routers read."""
        return state_report(self.core, self._numbers.name_of)

    def completion(self, request: Request) -> Completion:
        """Return the completion of a finished request."""
        tokens = tuple(request.output)
        ends = request.finish_reason == "stop" and tokens[-1] in request.stop_ids
        times = [ns * 1e-9 for ns in request.token_ns] or [self.core.clock.now_ns() * 1e-9]
        return Completion(
            prompt_token_ids=tuple(request.prompt.tolist()),
            token_ids=tokens,
            text=self.tokenizer.decode(tokens[:-1] if ends else tokens),
            adapter=request.adapter_name,
            finish_reason=request.finish_reason or "abort",
            timing=Timing(
                arrival_s=request.arrival_ns * 1e-9,
                admitted_s=(request.admitted_ns or request.arrival_ns) * 1e-9,
                first_token_s=times[0],
                finish_s=times[-1],
                token_s=tuple(times),
            ),
            preemptions=request.preemptions,
            error=request.error,
            logprobs=tuple(request.logprobs) if request.params.logprobs is not None else None,
            prompt_logprobs=tuple(request.prompt_logprobs),
            logits=torch.stack(request.logits) if request.logits else None,
        )

    def _run(self, requests: Sequence[Request]) -> None:
        """Submit requests while there is room, and step until all have finished."""
        upcoming = 0
        while upcoming < len(requests) or any(request.finish_reason is None for request in requests):
            while upcoming < len(requests) and self.core.has_room:
                self.submit(requests[upcoming])
                upcoming += 1
            if self.step() is None and not self.wait_for_adapter():
                raise RuntimeError("requests wait, but nothing can run")

    def wait_for_adapter(self) -> bool:
        """Wait for a concurrent adapter load; return False if there is none."""
        ready_ns = self.core.loader.next_ns(_LOAD_TIMEOUT_S)
        if ready_ns is None:
            return False
        self.core.clock.sleep_until(ready_ns)
        return True

    def _tokens(self, prompt: Prompt | NDArray[np.int32]) -> NDArray[np.int32]:
        ids = np.asarray(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise InputError("must be text or token ids, not empty", prompt, "prompt")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise InputError(f"must be token ids below {self.config.vocab_size}", int(ids.max()), "prompt")
        if ids.size >= self.args.max_model_len:
            rule = f"must be below max_model_len, {self.args.max_model_len}"
            raise InputError(rule, ids.size, "prompt tokens")
        return ids.astype(np.int32)


def _adapter_source(value: str | Path | int | PeftFolder, seed: int) -> AdapterSource:
    """Return a PEFT folder, or a random adapter of a given rank."""
    if isinstance(value, PeftFolder):
        return value
    if isinstance(value, int):
        if isinstance(value, bool) or not 1 <= value <= 512:
            raise InputError("must be a rank from 1 to 512, or a folder", value, "adapters")
        return RandomAdapter(value, seed)
    return PeftFolder.of(Path(value))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]  # one prompt of token ids
    return list(prompts)  # type: ignore[arg-type]


class PrefixIds:
    """Ids of recent prompt prefixes of one length, for the scheduler's prefix cache.

    The scheduler does not see tokens. Equal ids mean equal prefix tokens of one adapter.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._ids: OrderedDict[bytes, int] = OrderedDict()
        self._next = 0
        self._renewals: dict[int, int] = {}

    def of(self, prompt: NDArray[np.int32], adapter: int) -> tuple[int, int]:
        """Return (prefix id, shared tokens) of a prompt; (0, 0) if it has no prefix.

        The last token of a prompt is never shared: its successor is sampled per request.
        """
        if self._tokens == 0 or prompt.size < self._tokens:
            return 0, 0
        digest = hashlib.blake2b(prompt[: self._tokens].tobytes(), digest_size=16)
        digest.update(b"%d %d" % (adapter, self._renewals.get(adapter, 0)))
        return self._id(digest.digest()), min(self._tokens, prompt.size - 1)

    def _id(self, digest: bytes) -> int:
        prefix = self._ids.get(digest)
        if prefix is None:
            prefix, self._next = self._next, self._next + 1
            self._ids[digest] = prefix
            if len(self._ids) > _MAX_PREFIXES:
                self._ids.popitem(last=False)
        else:
            self._ids.move_to_end(digest)
        return prefix

    def renew(self, adapter: int) -> None:
        """Invalidate the prefixes of an adapter."""
        self._renewals[adapter] = self._renewals.get(adapter, 0) + 1
