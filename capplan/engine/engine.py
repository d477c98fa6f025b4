"""Python interface of the engine: a model, its adapters, and `generate`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.engine_core import StepOutput
from capplan.engine.lora.adapter import AdapterSource, PeftFolder, RandomAdapter
from capplan.engine.lora.manager import AdapterRegistry
from capplan.engine.models import ModelConfig
from capplan.engine.request import Completion, FinishReason, Request, SamplingParams, Timing
from capplan.engine.scheduler_output import check_core
from capplan.engine.settings import EngineSettings
from capplan.engine.setup import build_core, load_model
from capplan.engine.timing import StepRecord, write_records
from capplan.engine.tokenizer import Tokenizer, load_tokenizer
from capplan.errors import InputError
from capplan.spec.validation import unknown_key


class Engine:
    """A model that serves many LoRA adapters.

    Parameters
    ----------
    model
        A Hugging Face folder (``config.json`` and safetensors); or, with random weights, a ``config.json``,
        the name of a built-in model, or a `ModelConfig`.
    adapters
        Name to a folder that PEFT wrote, or to the rank of a random adapter.
    virtual_time
        Time by which requests arrive passes in steps only; see `capplan.engine.timing`.
    settings
        The fields of `EngineSettings`, such as ``a_max``, ``s_max``, ``dtype``, ``device`` and ``rules``.

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
        **settings: Any,
    ) -> None:
        self.settings = engine_settings(settings)
        loaded = load_model(model, self.settings)
        self.config = loaded.config
        self.folder = loaded.folder
        self.tokenizer: Tokenizer = load_tokenizer(loaded.folder, loaded.config.vocab_size)
        self._registry = AdapterRegistry(self.settings.adapter_capacity(len(adapters or {})))
        sources = [
            adapter_source(value, self.settings.seed + self._registry.add(name))
            for name, value in (adapters or {}).items()
        ]
        self.loop, self.sizes = build_core(loaded, sources, self.settings, virtual_time)
        self.records: list[StepRecord] = []
        self._prefixes = PrefixIds(self.settings.shared_prefix_tokens)
        self._submitted = 0

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that requests may ask for."""
        return self._registry.names

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread that loads adapters."""
        self.loop.loader.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        adapters: str | Sequence[str | None] | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Answer prompts and return the answers in their order.

        Parameters
        ----------
        prompts
            Texts or lists of token ids; a single one counts as a list of one.
        adapters
            The adapter of each prompt, or one for all; None is the base model.
        sampling
            The fields of `SamplingParams`, such as ``max_tokens``, ``temperature``, ``seed``, ``logprobs``.

        Raises
        ------
        InputError
            For an unknown adapter or setting, or a prompt that is empty, too long, or not of the vocabulary.
        """
        params = sampling_params(sampling)
        texts = as_list(prompts)
        names = [adapters] * len(texts) if adapters is None or isinstance(adapters, str) else list(adapters)
        if len(names) != len(texts):
            raise InputError(f"must be one per prompt, {len(texts)}", len(names), "adapters")
        requests = [self.new_request(text, name, params) for text, name in zip(texts, names, strict=True)]
        for request in requests:
            if not self.loop.ever_runs(request):
                rule = f"must fit beside its adapter into {self.sizes.num_blocks} pages, and into one step"
                raise InputError(rule, request.prompt.size, "prompt tokens")
        self._run(requests)
        return [self.completion(request) for request in requests]

    def new_request(
        self, prompt: Prompt, adapter: str | None, params: SamplingParams, arrival_ns: int | None = None
    ) -> Request:
        """Return a checked request, not yet submitted."""
        number = self._registry.number(adapter)
        self._submitted += 1
        seed = [self.settings.seed, self._submitted] if params.seed is None else params.seed
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.config.eos_token_ids))
        return Request(
            number=self._submitted,
            adapter=number,
            adapter_name=adapter,
            adapter_entry=self._registry.entry(number),
            prompt=self._tokens(prompt),
            params=params,
            stop_ids=frozenset(stops),
            arrival_ns=self.loop.clock.now_ns() if arrival_ns is None else arrival_ns,
            rng=np.random.default_rng(seed) if params.temperature > 0 else None,
        )

    def submit(self, request: Request) -> bool:
        """Queue a request; False when the engine is full, or can never run it.

        Raises
        ------
        InputError
            When its adapter has been removed since the request was made.
        """
        if self._registry.entry(request.adapter) != request.adapter_entry:
            raise InputError("must not have been removed", request.adapter_name, "adapter")
        prefix, shared = self._prefixes.of(request.prompt, request.adapter)
        return self.loop.submit(request, prefix, shared)

    def abort(self, request: Request, reason: FinishReason = "abort") -> None:
        """End a request that runs or waits, and free at once what it holds; nothing if it is over."""
        self.loop.abort(request.number, reason)

    def step(self) -> StepOutput | None:
        """Run one step; None when there is nothing to run now."""
        step = self.loop.step()
        if step is not None:
            for request in step.finished:
                if request.finish_reason == "error":
                    self._prefixes.renew(request.adapter)
            if step.record is not None:
                self.records.append(step.record)
        return step

    def add_adapter(self, name: str, source: str | Path | int) -> None:
        """Make an adapter known: a folder that PEFT wrote, or the rank of a random one.

        Only shapes and ranks are read now; the first request of it loads the adapter.

        Raises
        ------
        InputError
            When the name is taken, there are `max_adapters` already, or the adapter cannot be read, does not
            go with the model, or has a rank above S_max. The engine goes on as if nothing had been asked.
        """
        number = self._registry.add(name)
        try:
            seed = self.settings.seed + self._registry.entry(number)
            self.loop.loads.add(number, adapter_source(source, seed), self.sizes.s_max)
        except InputError:
            self._registry.remove(name)
            raise

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter and free what it holds.

        Raises
        ------
        InputError
            When there is none of that name, or requests in flight still use it.
        """
        number = self._registry.number(name)
        users = sum(request.adapter == number for request in self.loop.requests.values())
        if users:
            rule = f"must not be in use: {users} requests of it are in flight"
            raise InputError(rule, name, "adapter")
        self.loop.loads.remove(number)
        self._registry.remove(name)
        self._prefixes.renew(number)

    def check_integrity(self) -> None:
        """Recount requests, pages and slots between two steps; see `scheduler_output.check_core`."""
        check_core(self.loop)

    def write_records(self, path: str | Path) -> None:
        """Write what every step did as Parquet."""
        write_records(path, self.records)

    def completion(self, request: Request) -> Completion:
        """Return the answer to a request that has finished."""
        tokens = tuple(request.output)
        ends = request.finish_reason == "stop" and tokens[-1] in request.stop_ids
        times = [ns * 1e-9 for ns in request.token_ns] or [self.loop.clock.now_ns() * 1e-9]
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
            logits=torch.stack(request.logits) if request.logits else None,
        )

    def _run(self, requests: Sequence[Request]) -> None:
        """Submit requests as there is room, and step until all of them have finished."""
        upcoming = 0
        while upcoming < len(requests) or any(request.finish_reason is None for request in requests):
            while upcoming < len(requests) and self.loop.has_room:
                self.submit(requests[upcoming])
                upcoming += 1
            if self.step() is None and not self.wait_for_adapter():
                raise RuntimeError("requests wait, but nothing can run")

    def wait_for_adapter(self) -> bool:
        """Wait for an adapter that is loaded beside the batch; False when none is."""
        ready_ns = self.loop.loader.next_ns(timeout_s=60.0)
        if ready_ns is None:
            return False
        self.loop.clock.sleep_until(ready_ns)
        return True

    def _tokens(self, prompt: Prompt) -> NDArray[np.int32]:
        ids = np.asarray(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise InputError("must be text or token ids, not empty", prompt, "prompt")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise InputError(f"must be token ids below {self.config.vocab_size}", int(ids.max()), "prompt")
        if ids.size >= self.sizes.max_model_len:
            raise InputError(
                f"must be below max_model_len, {self.sizes.max_model_len}", ids.size, "prompt tokens"
            )
        return ids.astype(np.int32)


Prompt = str | Sequence[int]


def engine_settings(fields: Mapping[str, Any]) -> EngineSettings:
    """Return settings from keyword arguments."""
    _require_fields(EngineSettings, fields)
    return EngineSettings(**fields)


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters from keyword arguments."""
    _require_fields(SamplingParams, fields)
    return SamplingParams(**fields)


def _require_fields(kind: type[EngineSettings] | type[SamplingParams], fields: Mapping[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(kind)]
    for name in fields:
        if name not in names:
            raise InputError(unknown_key(name, names), location=name)


def adapter_source(value: str | Path | int, seed: int) -> AdapterSource:
    """Return where an adapter comes from: a folder that PEFT wrote, or random numbers of a given rank."""
    if isinstance(value, int):
        if isinstance(value, bool) or not 1 <= value <= 512:
            raise InputError("must be a rank from 1 to 512, or a folder", value, "adapters")
        return RandomAdapter(value, seed)
    return PeftFolder(Path(value))


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return several prompts; a single one counts as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]  # one prompt of token ids
    return list(prompts)  # type: ignore[arg-type]


_MOST_NAMES = 2**20


class PrefixIds:
    """Numbers of the prefixes of one length seen lately."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next = 0
        self._renewals: dict[int, int] = {}

    def of(self, prompt: NDArray[np.int32], adapter: int) -> tuple[int, int]:
        """Return (number, shared tokens) of a prompt; shared tokens are 0 where it shares nothing.

        A prompt that is nothing but prefix keeps its last token to itself: what follows such a prompt would
        count as the same for all who ask it, which sampling does not promise.
        """
        if self._tokens == 0 or prompt.size < self._tokens:
            return 0, 0
        digest = hashlib.blake2b(prompt[: self._tokens].tobytes(), digest_size=16)
        digest.update(b"%d %d" % (adapter, self._renewals.get(adapter, 0)))
        return self._number(digest.digest()), min(self._tokens, prompt.size - 1)

    def _number(self, name: bytes) -> int:
        """Return a name's number; one that was not asked for in a long time gets a new one."""
        number = self._numbers.get(name)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._numbers[name] = number
            if len(self._numbers) > _MOST_NAMES:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(name)
        return number

    def renew(self, adapter: int) -> None:
        """Give new numbers from now on: what is cached under this adapter's number is of no use any more."""
        self._renewals[adapter] = self._renewals.get(adapter, 0) + 1


_LONGEST_WAIT_S = 60.0


class TimedRequest(NamedTuple):
    """A request and when it arrives, in nanoseconds after the replay begins."""

    arrival_ns: int
    prompt: Prompt
    adapter: str | None
    params: SamplingParams


def replay(engine: Engine, arrivals: Sequence[TimedRequest]) -> list[Completion | None]:
    """Serve requests in the order of their arrival and return the answers; None where the engine was full.

    With `Engine(virtual_time=True)` idle time takes no time, and the same measured durations of steps lead to
    the same decisions again.
    """
    start_ns = engine.loop.clock.now_ns()
    requests: list[Request | None] = []
    while True:
        now_ns = engine.loop.clock.now_ns() - start_ns
        while len(requests) < len(arrivals) and arrivals[len(requests)].arrival_ns <= now_ns:
            requests.append(_submitted(engine, arrivals[len(requests)], start_ns))
        if engine.step() is not None:
            continue
        upcoming = [start_ns + arrivals[len(requests)].arrival_ns] if len(requests) < len(arrivals) else []
        waits_s = (upcoming[0] - engine.loop.clock.now_ns()) * 1e-9 if upcoming else _LONGEST_WAIT_S
        loaded_ns = engine.loop.loader.next_ns(timeout_s=max(0.0, waits_s))
        if loaded_ns is not None:
            upcoming.append(loaded_ns)
        if not upcoming:
            return [None if request is None else engine.completion(request) for request in requests]
        engine.loop.clock.sleep_until(min(upcoming))


def _submitted(engine: Engine, arrival: TimedRequest, start_ns: int) -> Request | None:
    at_ns = start_ns + arrival.arrival_ns
    request = engine.new_request(arrival.prompt, arrival.adapter, arrival.params, at_ns)
    return request if engine.submit(request) else None
